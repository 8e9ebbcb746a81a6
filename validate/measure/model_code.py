"""Programs that a model wrote, each run with its test in a child: in the place of Hugging Face's `code_eval`.

In: a program and its test. Out: whether it passes, in the form that lm-eval's humaneval asks for.

Easy to get wrong: `evaluate.load("code_eval")` fetches the module that runs the code from the Hub. Here a child without
a secret runs it, with limits of its own. A program that ends the process early has not passed: the child says a word
that is made for it, once the test has come to its end. bubblewrap (bwrap) alone keeps a program away from the machine;
without it a program may do what the user may, and docs/tasks.md says so.
"""

import json
import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from tempfile import TemporaryDirectory
from types import SimpleNamespace

from ...recipes.errors import RecipeError
from ..facts.child import Child

WALL_SECONDS = 20.0
OPEN = (
    "The model's programs run with your rights, files and network, because bubblewrap (bwrap) is not installed or may "
    "not run here. Install it, or run the evaluation in a container that holds nothing else: docker run --network "
    "none (docs/tasks.md)."
)
"""For the user, where `fence` is empty."""
_FLAG = "--run-model-code"
# Limits first; "!" says that it has started; the word, that the test has come to its end.
_CHILD = """
import json, os, resource, sys
for name, most in {"CORE": 0, "CPU": 3, "AS": 4 << 30, "FSIZE": 0, "NPROC": 0}.items():
    resource.setrlimit(getattr(resource, "RLIMIT_" + name), (most, most))
program, test, word = json.loads(sys.stdin.readline())
said = os.dup(1)
os.write(said, b"!")
os.dup2(2, 1)
names = {}
exec(program, names)
exec(test, names)
os.write(said, word.encode())
"""
_FENCE = ("--unshare-all", "--cap-drop", "ALL", "--die-with-parent", "--new-session", "--chdir", "/")
_READ = ("/usr", "/lib", "/lib64", "/etc/ld.so.cache", sys.base_prefix, sys.prefix)


def load(name: str) -> SimpleNamespace:
    """For `evaluate.load("code_eval")`, of which lm-eval's humaneval uses `compute` alone."""
    return SimpleNamespace(compute=_compute)


def _compute(
    references: Sequence[str], predictions: Sequence[Sequence[str]], k: Sequence[int]
) -> tuple[dict[str, float], None]:
    """The share of programs that pass their test; lm-eval gives one of each."""
    (test,), ((program,),) = references, predictions
    return {"pass@1": float(passes(program, test, fence()))}, None


@cache
def fence() -> tuple[str, ...]:
    """bubblewrap's words, where it works on this machine; else none.

    Raises:
        RecipeError: no program can be run at all.
    """
    bwrap = shutil.which("bwrap")
    binds = [word for path in _READ for word in ("--ro-bind-try", path, path)]
    for words in ((bwrap, *_FENCE, *binds, "--remount-ro", "/"), ()) if bwrap else ((),):
        if _run("def f(): return 1", "assert f() == 1", words) == "passed":
            return words
    cure = "Use another Python, or leave the task out"
    raise RecipeError(_FLAG, "this Python must be able to run a program", got=f"{sys.executable} cannot", cure=cure)


def passes(program: str, test: str, fence: Sequence[str]) -> bool:
    """Whether a test comes to its end after a program.

    Args:
        program, test: Python.
        fence: words in front of the process's own.

    Raises:
        RecipeError: no process could be started, and nothing was judged.
    """
    found = _run(program, test, fence)
    if not found:
        rule, cure = "a process must start for each program", "Run the command again: the answers are kept"
        raise RecipeError(_FLAG, rule, got="one that ended before its program began", cure=cure)
    return found == "passed"


def _run(program: str, test: str, fence: Sequence[str]) -> str:
    """ "passed" or "failed"; "" where no process has started."""
    word = secrets.token_hex(16)
    with TemporaryDirectory() as home:
        kept = {"PATH": "", "HOME": home, "OPENBLAS_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
        kept["LD_LIBRARY_PATH"] = os.environ.get("LD_LIBRARY_PATH", "")  # some Pythons do not start without
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
        with Child([*fence, sys.executable, "-I", "-c", _CHILD], environment=kept, cwd=home, **pipes) as child:
            try:
                said, _ = child.process.communicate(json.dumps([program, test, word]), timeout=WALL_SECONDS)
            except subprocess.TimeoutExpired:
                return "failed"
    if not said:
        return ""
    return "passed" if said == f"!{word}" else "failed"
