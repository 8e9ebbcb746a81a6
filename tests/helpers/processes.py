"""Processes that tests start: a function in one of its own, forked from this one, and whether any is left.

Easy to get wrong: a process that has done its work can still hang at its end, where Python waits for threads. So a
forked child waits for them like any Python, and only then it exits. Others are found by a mark in their environment,
which every descendant of a marked process inherits.
"""

import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from subprocess import Popen

import pytest

MARK = "KEEPMTP_TEST_MARK"
outright = pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])


def marked(word: str) -> dict[int, str]:
    """Process id -> command line of what was started with this mark and has not ended."""
    mark = f"{MARK}={word}".encode()
    places = list[Path]()
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended since
            if mark in (folder / "environ").read_bytes():
                places.append(folder)
    found = {}
    while places:
        folder = places.pop()
        with suppress(OSError):
            line = (folder / "cmdline").read_bytes().replace(b"\0", b" ")
            found[int(folder.name)] = line.decode(errors="replace")
            # vLLM's engine, a fork, writes its name over its environment.
            for children in folder.glob("task/*/children"):
                places += [Path("/proc", child) for child in children.read_text().split()]
    return found


def says(mark: str, words: str) -> bool:
    """Whether one of them has these words on its command line."""
    return any(words in said for said in marked(mark).values())


def none_left(word: str) -> None:
    """Wait until there is none; a process that was killed takes a moment to be gone."""
    until(lambda: not marked(word))


def until(
    happens: Callable[[], object],
    *,
    seconds: float = 60.0,
    pause: float = 0.02,
    by: Popen[str] | None = None,
) -> None:
    """Wait for something, so long at most; the process that does it must run until then."""
    deadline = time.monotonic() + seconds
    while not happens():
        assert time.monotonic() < deadline
        assert by is None or by.poll() is None, by.communicate()
        time.sleep(pause)


def only_child(process: int) -> int:
    """The one process that this one has started."""
    (child,) = Path(f"/proc/{process}/task/{process}/children").read_text().split()
    return int(child)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a child ended.

    Attributes:
        code: its exit status, -N after signal N.
        hung: it was killed, because its time was over.
    """

    code: int
    out: str
    err: str
    hung: bool
    seconds: float


def forked(
    call: Callable[[], object], *, seconds: float, watch: Callable[[int], object] = lambda pid: None
) -> Ended:
    """Run `call` in a child; `watch` gets its process id at once."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        start = time.monotonic()
        pid = os.fork()
        if not pid:
            _child(call, out.fileno(), err.fileno())
        watch(pid)
        status, hung = _wait(pid, start + seconds)
        took = time.monotonic() - start
        out.seek(0), err.seek(0)
        told, said = out.read().decode(errors="replace"), err.read().decode(errors="replace")
    return Ended(
        code=os.waitstatus_to_exitcode(status), out=told, err=said, hung=hung, seconds=took
    )


def _wait(pid: int, until: float) -> tuple[int, bool]:
    hung = False
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return status, hung
        if time.monotonic() > until and not hung:
            hung = True
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.005)


def _child(call: Callable[[], object], out: int, err: int) -> None:
    code = 70
    try:
        os.dup2(out, 1), os.dup2(err, 2), os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        sys.stdin, sys.stdout, sys.stderr = os.fdopen(0), os.fdopen(1, "w"), os.fdopen(2, "w")
        signal.signal(signal.SIGINT, signal.default_int_handler)
        sys.unraisablehook = sys.__unraisablehook__  # pytest's own keeps what it is told to itself
        call()
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except KeyboardInterrupt:
        code = 130
    except BaseException:  # noqa: BLE001 # any defect is what the parent looks for
        traceback.print_exc()
    finally:
        threading._shutdown()  # type: ignore[attr-defined]
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(code)
