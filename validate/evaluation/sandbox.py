"""Programs that a model wrote, run one by one in closed processes: in the place of Hugging Face's `code_eval`.

In: programs and the tests that follow them. Out: the share that passes, in the form that lm-eval's humaneval asks for.

Easy to get wrong: `evaluate.load("code_eval")` fetches the module that runs the code from the Hub, and that module only
takes dangerous functions out of Python's reach, within a process that may do all that its user may. Here the kernel
closes the process first (`sandboxed.py`). The limits are code_eval's where it has some: 3 seconds, here of CPU, so that
a busy machine fails no right answer.
"""

import secrets
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryFile

from ...recipes.errors import RecipeError
from .sandboxed import CANNOT_CLOSE

WALL_SECONDS = 20.0
_CHILD = Path(__file__).with_name("sandboxed.py")


class CodeEval:
    """What lm-eval's humaneval uses of `evaluate`."""

    @staticmethod
    def load(name: str) -> "CodeEval":
        """The one module that is asked for."""
        assert name == "code_eval", name
        return CodeEval()

    @staticmethod
    def refuse_machine(where: str) -> None:
        """Refuse where the kernel cannot close a process.

        Raises:
            RecipeError: says what is missing.
        """
        done = _run("", "")
        if done is None or done.returncode:
            got = (done.stderr if done else "") or "no end of an empty program"
            rule = "runs programs only in a closed process, which needs Landlock and seccomp (Linux 5.13 or newer)"
            raise RecipeError(where, rule, got=got, cure="Score it on another machine, or leave the task out")

    def compute(
        self, references: Sequence[str], predictions: Sequence[Sequence[str]], k: Sequence[int]
    ) -> tuple[dict[str, float], None]:
        """The share of programs that pass the test after them.

        Args:
            references: a test for each question.
            predictions: programs for each question.
            k: (1,).
        """
        assert list(k) == [1], k
        shares = [
            fmean(passes(f"{program}\n{test}") for program in programs)
            for test, programs in zip(references, predictions, strict=True)
        ]
        return {"pass@1": fmean(shares)}, None


def passes(program: str) -> bool:
    """Whether a program comes to its end by itself, in time, and without an error."""
    word = secrets.token_hex()
    done = _run(word, program)
    if done is not None and done.returncode == CANNOT_CLOSE:
        raise OSError(f"the process could not be closed: {done.stderr}")
    return done is not None and done.stdout.strip() == word


def _run(word: str, program: str) -> subprocess.CompletedProcess[str] | None:
    """None where it took too long. It can start no process, so there is no other to end."""
    words = [sys.executable, "-I", str(_CHILD)]
    given = f"{word}\n{program}".encode("utf-8", "replace").decode()
    environment = {"PATH": "", "OPENBLAS_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
    with TemporaryFile("w+", errors="replace") as out:  # a file has a limit of size in the child; a pipe has none
        try:
            done = subprocess.run(  # noqa: S603 - the words are ours
                words,
                input=given,
                stdout=out,
                stderr=subprocess.PIPE,
                text=True,
                env=environment,
                cwd="/",
                timeout=WALL_SECONDS,
            )
        except subprocess.TimeoutExpired:
            return None
        out.seek(0)
        done.stdout = out.read()
        return done
