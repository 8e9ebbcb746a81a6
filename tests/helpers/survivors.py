"""Finds processes by a mark in their environment, which every descendant of a marked process inherits."""

import time
from pathlib import Path

MARK = "KEEPMTP_TEST_MARK"


def marked(word: str) -> list[int]:
    """Processes that were started with this mark; one that has ended and is only in the process table has none."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if f"{MARK}={word}".encode() in (folder / "environ").read_bytes():
                found.append(int(folder.name))
        except OSError:
            continue  # it has ended since
    return found


def none_left(word: str, seconds: float = 60.0) -> None:
    """Wait until there is none; a process that was killed takes a moment to be gone."""
    deadline = time.monotonic() + seconds
    while left := marked(word):
        words = [Path(f"/proc/{pid}/cmdline").read_bytes()[:200] for pid in left if Path(f"/proc/{pid}").exists()]
        assert time.monotonic() < deadline, f"{left} are left: {words}"
        time.sleep(0.05)
