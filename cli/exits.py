"""How the command ends: the exit status, and one sentence on standard error where something went
wrong.

In: the command as a function, and the sentence that says how to go on. Out: the process ends with
one of these:

    0    good                                    3     too little was measured to tell
    1    findings, or a gate is red              70    a defect of keepmtp, with a traceback
    2    a refusal: bad input, or this machine   129, 130, 143    stopped by SIGHUP, Ctrl-C, SIGTERM
    141  the reader of standard output went away

Easy to get wrong: a library's error is a refusal only if a person can do something about it, such
as a full disk or a Hub that does not answer. Every other exception is a defect, and its traceback
is what finds it.
"""

import errno
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any, NoReturn

from .. import __version__
from ..checkpoints.files import DEAD
from ..recipes.errors import GateError, KeepMTPError, printable

FINDINGS = 1
REFUSAL = 2
TOO_LITTLE = 3
DEFECT = 70
OF_VERDICT: Mapping[str, int] = {"pass": 0, "regression": FINDINGS, "infeasible": TOO_LITTLE}
NO_READER = 128 + signal.SIGPIPE
STOPPED: Mapping[int, str] = {
    128 + signal.SIGHUP: "SIGHUP",
    128 + signal.SIGINT: "Ctrl-C",
    128 + signal.SIGTERM: "SIGTERM",
}
STARTS_AGAIN = "The same command starts again"
GOES_ON = "The same command goes on where this one stopped"
_AGAIN = "run the same command again"
_MOMENT_SECONDS = 2
# Names of the system's errors, the rule, and the cure.
_OF_SYSTEM = (
    ("ENOENT", "must be there", "Check the path"),
    ("EACCES EPERM", "must be yours to read and to write", "Check its permissions"),
    ("ENOSPC EDQUOT", "its disk must have room", f"Free some, and {_AGAIN}"),
    ("EIO ESTALE ENODEV", "its disk must answer", f"{DEAD}, and {_AGAIN}"),
    (
        "EEXIST ENOTDIR EISDIR ENAMETOOLONG ELOOP EROFS",
        "must be a path that the system can use",
        "Name another path",
    ),
    (
        "EMFILE",
        "more files must be open than the system allows",
        f"Raise `ulimit -n`, and {_AGAIN}",
    ),
)


def run(command: Callable[[], object], *, how_to_go_on: str) -> None:
    """Run the command, and end the process.

    Args:
        command: ends with SystemExit, as typer's commands do.
        how_to_go_on: a sentence without its full stop, for a command that is stopped from outside.
    """

    def dropped(lost: "sys.UnraisableHookArgs") -> None:
        """Python drops what is raised in a finalizer, such as the one that ends an import: where a
        signal came there, end at once, as a killed run does.
        """
        status: Any = getattr(lost.exc_value, "code", None)
        if lost.exc_type is KeyboardInterrupt:
            status = 128 + signal.SIGINT
        if status in STOPPED:
            _say_stopped(status, how_to_go_on)
            os._exit(status)
        sys.__unraisablehook__(lost)

    sys.excepthook = _defect
    sys.unraisablehook = dropped
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:  # `nohup` ignores SIGHUP, and means it
            signal.signal(number, _stop)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace")  # pyright: ignore[reportAttributeAccessIssue]
    try:
        try:
            command()
        finally:
            sys.stdout.flush()
    except KeepMTPError as error:
        _refuse(error)
    except BrokenPipeError:
        _leave_quietly()
    except SystemExit as end:
        if isinstance(end.__context__, BrokenPipeError):
            _leave_quietly()
        if isinstance(end.code, int) and end.code in STOPPED:
            _say_stopped(end.code, how_to_go_on)
        raise
    except foreseen() as error:
        _refuse(refusal_of(error))
    finally:
        # From here on a signal ends at once: while Python and its libraries leave, it would be an
        # exception in their code, with a traceback.
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, signal.SIG_DFL)


@contextmanager
def soon(how_to_go_on: str = STARTS_AGAIN) -> Iterator[None]:
    """Ctrl-C and SIGTERM end what is done here in a moment: Python would wait for threads that send
    a shard to the Hub, which takes minutes.
    """

    def end(status: int) -> None:
        _say_stopped(status, how_to_go_on)
        os._exit(status)

    def stop(number: int, frame: FrameType | None) -> None:
        timer = threading.Timer(_MOMENT_SECONDS, end, [128 + number])
        timer.daemon = True
        timer.start()
        _stop(number, frame)

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, usual in before.items():
            if signal.getsignal(number) is stop:
                signal.signal(number, usual)


def refusal_of(error: BaseException) -> KeepMTPError:
    """The refusal that an error of the system, of the network or of the Hub's client means."""
    got = str(error).strip().partition("\n")[0] or type(error).__name__
    where: Any = ""
    rule = "the network must answer"
    cure = f"Check the network, and {_AGAIN}"
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        rule = "there must be enough memory"
        cure = "Use a machine with more"
    elif type(error).__name__ == "HFValidationError":
        rule = "a checkpoint is a folder that is there, or ORG/NAME on the Hub"
        cure = "Check the name"
    elif isinstance(error, OSError):
        name = errno.errorcode.get(error.errno or 0, "")
        known = [row for row in _OF_SYSTEM if name in row[0].split()]
        if known or error.filename is not None:
            otherwise = (name, "the system must allow it", f"Mend that, and {_AGAIN}")
            _, rule, cure = next(iter(known), otherwise)
            where = os.fsdecode(error.filename or "")
            got = error.strerror or got
    return KeepMTPError(where, rule, got=got, cure=cure)


def say_refusal(error: KeepMTPError) -> None:
    """Print a refusal on standard error. Under torchrun it names the rank."""
    _say("error:", "red", str(error))


def foreseen() -> tuple[type[BaseException], ...]:
    """The errors that a person can act on, which `refusal_of` says in a sentence.

    A library that is not loaded has raised nothing.
    """
    errors = [OSError, MemoryError]
    httpx = sys.modules.get("httpx")
    if httpx:
        errors += [httpx.HTTPError, httpx.InvalidURL]
    hub = sys.modules.get("huggingface_hub.errors")
    if hub:
        errors += [hub.HFValidationError, hub.EntryNotFoundError]
    torch = sys.modules.get("torch")
    if torch:
        errors.append(torch.OutOfMemoryError)
    return tuple(errors)


def _say_stopped(status: int, how_to_go_on: str) -> None:
    _say("stopped", "yellow", f"by {STOPPED[status]}. {how_to_go_on}.", only_first=True)


def _refuse(error: KeepMTPError) -> NoReturn:
    say_refusal(error)
    if isinstance(error, GateError):
        sys.exit(FINDINGS)
    sys.exit(REFUSAL)


def _leave_quietly() -> NoReturn:
    """End as `cat` does when `head` has seen enough. Python would write what is left at exit, and
    complain.
    """
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    sys.exit(NO_READER)


def _stop(number: int, _: FrameType | None) -> None:
    """End through every `finally`, so that servers and locks are gone; a second signal does not
    disturb that.
    """
    signal.signal(number, signal.SIG_IGN)
    sys.exit(128 + number)


def _defect(
    kind: type[BaseException], error: BaseException, traceback: TracebackType | None
) -> None:
    sys.__excepthook__(kind, error, traceback)
    if not issubclass(kind, KeyboardInterrupt):
        sys.stderr.write(
            f"error: a defect of keepmtp {__version__}, not of your input. Report it with the "
            f"lines above. Exit status {DEFECT}.\n"
        )
        sys.exit(DEFECT)


def _say(word: str, colour: str, words: str, *, only_first: bool = False) -> None:
    from rich.console import Console
    from rich.text import Text

    from ..quantize.run.processes import place_of_process
    from .tables import say

    place = place_of_process()
    if place.rank and only_first:
        return
    whose = ""
    if place.size > 1:
        whose = f"rank {place.rank} of {place.size}: "
    say(Console(stderr=True), Text.assemble(whose, (word, colour), f" {printable(words)}"))
