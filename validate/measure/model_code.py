"""Programs that a model wrote, run and judged in processes of their own: in the place of Hugging
Face's `code_eval`.

In: a program and its test. Out: whether it passes, in the form that lm-eval's humaneval asks for.

Easy to get wrong: bubblewrap (bwrap) alone keeps a program away from the machine; without it a
program may do what the user may, and docs/tasks.md says so.
"""

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace

from ...quantize.run.child import Child
from ...recipes.errors import RecipeError
from ...recipes.frozen import Json

WALL_SECONDS = 20.0
# For the user, where `fence` is empty.
OPEN = (
    "The model's programs run with your rights, files and network, because bubblewrap (bwrap) is "
    "not installed or may not run here. Install it, or run the evaluation in a container that "
    "holds nothing else: docker run --network none (docs/tasks.md)."
)
_FLAG = "--run-model-code"
_CHILD = Path(__file__).with_name("model_code_child.py")
_FENCE = (
    "--unshare-all",
    "--cap-drop",
    "ALL",
    "--die-with-parent",
    "--new-session",
    "--chdir",
    "/",
)
_READ = ("/usr", "/lib", "/lib64", "/etc/ld.so.cache", sys.base_prefix, sys.prefix)


def load(name: str) -> SimpleNamespace:
    """For `evaluate.load("code_eval")`, of which lm-eval's humaneval uses `compute` alone."""
    # That fetches the module that runs the code from the Hub, and there the program itself could
    # say that it passed. Here one process runs the program and another one its test.

    def compute(
        references: Sequence[str], predictions: Sequence[Sequence[str]], k: Sequence[int]
    ) -> tuple[dict[str, float], None]:
        """The share of programs that pass their test; lm-eval gives one of each."""
        is_passed = passes(predictions[0][0], references[0], fence())
        return {"pass@1": float(is_passed)}, None

    return SimpleNamespace(compute=compute)


@cache
def fence() -> tuple[str, ...]:
    """bubblewrap's words, where it works on this machine; else none."""
    bwrap = shutil.which("bwrap")
    if not bwrap:
        return ()
    words = [bwrap, *_FENCE]
    for path in _READ:
        words += ("--ro-bind-try", path, path)
    words += ("--remount-ro", "/")
    with suppress(RecipeError):
        if passes("def f(): return 1", "assert f() == 1", words):
            return tuple(words)
    return ()


def passes(program: str, test: str, fence: Sequence[str]) -> bool:
    """Whether a test comes to its end with what a program's functions answer.

    Args:
        program, test: Python.
        fence: words in front of both processes' own.

    Raises:
        RecipeError: no process could be started, and nothing was judged.
    """
    words = [*fence, sys.executable, "-I", "-c", _CHILD.read_text(encoding="utf-8")]
    ours, theirs = socket.socketpair()
    with ours, theirs, TemporaryDirectory() as home:
        kept = {"PATH": "", "HOME": home, "OPENBLAS_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
        kept["LD_LIBRARY_PATH"] = os.environ.get(
            "LD_LIBRARY_PATH", ""
        )  # some Pythons do not start without
        given: Json = {"environment": kept, "cwd": home, "stderr": subprocess.DEVNULL}
        with Child([*words, "0"], stdin=theirs, stdout=subprocess.DEVNULL, **given):
            theirs.close()  # the test's process then sees where the program's ends
            if not ours.recv(1):
                raise RecipeError(
                    _FLAG,
                    "a process must start for each program",
                    got="one that ended before its program began",
                    cure="Run the command again: the answers are kept",
                )
            with suppress(BrokenPipeError):
                ours.sendall(f"{program!a}\n".encode())
            with Child(
                [*words, "1"], stdin=subprocess.PIPE, stdout=ours, text=True, **given
            ) as judge:
                with suppress(subprocess.TimeoutExpired):
                    judge.process.communicate(ascii(test), timeout=WALL_SECONDS)
                return judge.process.returncode == 0
