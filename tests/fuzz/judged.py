"""One call of the command in a forked child, under limits, and what was wrong with it.

In: words and a folder. Out: a `Verdict`: the exit status, what was printed, and the promises that
were broken.

Easy to get wrong: the parent has imported everything and computed nothing, so that a fork takes
milliseconds and no thread is lost in it. Limits are counted from what the parent already has.
"""

import contextlib
import json
import os
import re
import resource
import signal
import stat
import sys
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from damage import UNEDITABLE, regular

SECONDS = 10
MORE_BYTES = 2**30
MOST_PRINTED = 2_000_000
WALL_SECONDS = 30
"""A busy machine may take longer than SECONDS of processor time; a call that waits for ever is
stopped by this.
"""
STATUSES = (0, 1, 2, 3)
# What a terminal obeys: control characters but tab and newline, C1, marks and overrides of writing
# direction.
_RAW = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")
_CRASHED = 99


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """How a call ended; `faults` names each promise that it broke."""

    status: int
    faults: list[str]
    printed: str = ""


def judged(
    words: tuple[str, ...],
    folder: Path,
    *,
    call: Callable[[], None],
    reads_weights: bool = False,
) -> Verdict:
    """Run `call` with these words as its command line, and judge what it did.

    Args:
        words: for sys.argv.
        folder: what it reads, for the question whether safetensors would take it.
        call: the command's entry point.
        reads_weights: whether status 0 says that the folder's files are good.
    """
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        pid = os.fork()
        if not pid:
            _child(words, call, out.fileno(), err.fileno())
        waited = os.waitpid(pid, 0)[1]
        _end_group(pid)
        printed = _text(out.fileno())
        said = _text(err.fileno())
    status = os.waitstatus_to_exitcode(waited)
    faults = [*_of_status(status), *_of_text(printed + said, status)]
    if status == 0 and reads_weights:
        why = refused(folder)
        if why:
            faults.append(f"false pass: {why}")
    return Verdict(status=status, faults=faults, printed=printed[-3000:] + said[-6000:])


def refused(folder: Path) -> str:
    """Why vLLM would not read the files of a checkpoint, or ""; JSON and safetensors' own parser
    decide.
    """
    import safetensors

    try:
        if not isinstance(json.loads(regular(folder / "config.json").read_text("utf-8")), dict):
            return "config.json is no object"
        names = [path.name for path in folder.glob("*.safetensors")]
        index = folder / "model.safetensors.index.json"
        if index.is_file():
            names = {*json.loads(regular(index).read_text("utf-8"))["weight_map"].values()}
        for name in names:
            if not stat.S_ISREG((folder / name).stat().st_mode):
                return f"{name} is no file"
            with safetensors.safe_open(folder / name, "numpy"):
                pass
    except (*UNEDITABLE, safetensors.SafetensorError) as error:
        return repr(error)[:200]
    return ""


def _of_status(status: int) -> list[str]:
    if -status in (signal.SIGXCPU, signal.SIGALRM, signal.SIGKILL):
        return ["hang"]
    if status < 0:
        return [f"killed by {signal.Signals(-status).name}"]
    if status in STATUSES:
        return []
    return [f"status {status}"]


def _of_text(text: str, status: int) -> list[str]:
    faults = []
    if "Traceback (most recent call last)" in text:
        faults.append(_crash(text))
    if found := _RAW.search(text):
        faults.append(f"raw {found[0]!a} on the terminal")
    if len(text) >= MOST_PRINTED:
        faults.append("prints without end")
    if status == 2 and not re.search(r"; got |^Usage: ", text, re.MULTILINE):
        faults.append("status 2 without a sentence")
    return faults


def _crash(text: str) -> str:
    """The error of a traceback, and the last line of keepmtp in it."""
    last = next(
        (line for line in reversed(text.splitlines()) if re.match(r"[a-zA-Z][\w.]*(:|$)", line)), ""
    )
    if last.startswith("MemoryError"):
        return "memory"
    lines = re.findall(
        r'File "[^"]*?((?:recipes|checkpoints|quantize|validate|cure|cli)/[^"]*)", line (\d+)', text
    )
    at = "?"
    if lines:
        at = ":".join(lines[-1])
    return f"traceback: {last[:150]} at {at}"


def _child(words: tuple[str, ...], call: Callable[[], None], out: int, err: int) -> None:
    """The command, in the child; it never returns."""
    try:
        os.setsid()
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(WALL_SECONDS)
        has = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (has + MORE_BYTES, has + MORE_BYTES))
        used = int(sum(resource.getrusage(resource.RUSAGE_SELF)[:2]))
        resource.setrlimit(resource.RLIMIT_CPU, (used + SECONDS, used + SECONDS + 5))
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**33, 2**33))
        for number, file in enumerate((os.open(os.devnull, os.O_RDONLY), out, err)):
            os.dup2(file, number)
        sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
        sys.stderr = open(2, "w", encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
        sys.argv = ["keepmtp", *words]
        call()
    finally:
        os._exit(_status_of(sys.exc_info()[1]))


def _status_of(error: BaseException | None) -> int:
    """The exit status that Python would give, but a crash has one of its own."""
    if isinstance(error, SystemExit):
        code = 1
        if error.code is None:
            code = 0
        elif isinstance(error.code, int):
            code = error.code
    elif error is None:
        code = 0
    else:
        code = _CRASHED
        traceback.print_exception(error)
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    return code & 0xFF


def _end_group(pid: int) -> None:
    """End what the child has started and left."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def _text(file: int) -> str:
    os.lseek(file, 0, os.SEEK_SET)
    return os.read(file, MOST_PRINTED).decode("utf-8", "replace")
