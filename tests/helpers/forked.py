"""A function in a process of its own, forked from this one: quick, since everything is imported
already.

In: a function, and how long it may take. Out: how it ended, what it printed, and whether it had to
be killed.

Easy to get wrong: a process that has done its work can still hang at its end, where Python waits
for threads. So the child waits for them like any Python, and only then it exits.
"""

import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass


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
