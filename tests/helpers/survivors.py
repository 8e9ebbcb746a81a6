"""Finds processes by a mark in their environment, which every descendant of a marked process
inherits.
"""

import signal
import time
from collections.abc import Callable
from pathlib import Path
from subprocess import Popen

import pytest

MARK = "KEEPMTP_TEST_MARK"
outright = pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])


def marked(word: str) -> dict[int, str]:
    """Process id -> command line of what was started with this mark and has not ended."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if f"{MARK}={word}".encode() in (folder / "environ").read_bytes():
                found[int(folder.name)] = (
                    (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                )
        except OSError:
            continue  # it has ended since
    return found


def says(mark: str, words: str) -> bool:
    """Whether one of them has these words on its command line."""
    return any(words in said for said in marked(mark).values())


def none_left(word: str, seconds: float = 60.0) -> None:
    """Wait until there is none; a process that was killed takes a moment to be gone."""
    until(lambda: not marked(word), seconds=seconds)


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
