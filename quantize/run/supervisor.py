"""The first process of every child of keepmtp: it starts the child, and ends all of its descendants
with keepmtp.

In: the number of a pipe's reading end, then the child's words. Out: the child's exit status, once
no descendant is left. keepmtp holds the writing end. It closes when keepmtp ends, even by SIGKILL;
all descendants are then killed.

Easy to get wrong: a descendant may lead a session of its own (torchrun's workers do), so to end the
process group is not enough. This process is a subreaper: orphans become its children, and none of
them can leave its tree. It runs as a file, by any Python, and imports nothing of keepmtp. It has
one thread: the child dies with the thread that started it.
"""

import ctypes
import os
import resource
import select
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import FrameType

# linux/prctl.h
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_PROC = Path("/proc")
# A process in an uninterruptible wait cannot be killed, and nobody waits for it for ever.
_KILL_SECONDS = 30.0


def main() -> None:
    """Start the child and wait for its end or keepmtp's."""
    lifeline = int(sys.argv[1])
    words = sys.argv[2:]
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    # It waits while there is a fork of this program that is not the child yet, and would lose it.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    signal.signal(signal.SIGTERM, _pass_on)
    own = os.getpid()
    child = os.fork()
    if not child:
        _become(words, own, lifeline)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    status: int | None = None
    while status is None:
        ready, _, _ = select.select([lifeline, woken], [], [])
        if lifeline in ready and not os.read(lifeline, 1):
            break
        if woken in ready:
            os.read(woken, 4096)
        status = _reaped().get(child)
    _end_all()
    if status is None:
        status = -signal.SIGKILL
    if status < 0:  # end as the child did, so that a waiting parent sees the same
        with suppress(OSError):  # SIGKILL has no handler
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(abs(status))


def _become(words: list[str], parent: int, lifeline: int) -> None:
    """Turn this fork into the child, which dies if the supervisor does."""
    os.close(lifeline)
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    try:
        os.execvp(words[0], words)  # noqa: S606 - no shell is wanted
    except OSError as error:
        sys.stderr.write(f"{words[0]}: {error.strerror}\n")
        sys.stderr.flush()
        os._exit(127)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _pass_on(number: int, _: FrameType | None) -> None:
    """SIGTERM goes on to the child and all of its process group, once."""
    signal.signal(number, signal.SIG_IGN)
    os.killpg(0, number)


def _reaped() -> dict[int, int]:
    """Exit status of each process that has ended, as in `subprocess`: negative for a signal."""
    ended = {}
    with suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                break
            ended[pid] = os.waitstatus_to_exitcode(status)
    return ended


def _end_all() -> None:
    """Kill descendants until there are none: while they are killed, they may start others."""
    if not _PROC.is_dir():
        os.killpg(0, signal.SIGKILL)
    deadline = time.monotonic() + _KILL_SECONDS
    while time.monotonic() < deadline:
        left = _descendants()
        if not left:
            return
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        _reaped()
        time.sleep(0.01)


def _descendants() -> list[int]:
    children = {}
    for folder in _PROC.glob("[0-9]*"):
        with suppress(OSError):  # it has ended since
            _, _, rest = (folder / "stat").read_text(errors="replace").rpartition(")")
            children.setdefault(int(rest.split()[1]), []).append(int(folder.name))
    descendants = []
    waiting = [os.getpid()]
    while waiting:
        own = children.get(waiting.pop(), [])
        descendants += own
        waiting += own
    return descendants


if __name__ == "__main__":
    main()
