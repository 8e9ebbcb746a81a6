"""A time limit for a stranger's regular expressions.

In: an expression, and the names that it is matched to. Out: the matches, or a refusal that names
the expression.

Easy to get wrong: an expression such as `([a-z0-9._]+)*!` tries every way to cut a name, and never
comes to an end. The limit is of processor time, counted by a timer that interrupts `re` itself:
another regex engine would be quick where vLLM's is not. Only a main thread can be interrupted; in
others there is no limit.
"""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from .errors import KeepMTPError

MATCHING_SECONDS = 2.0
"""For all matches of one check or plan. A usual match takes a microsecond, a checkpoint has some
thousand modules.
"""
SIMPLER = "Write it without repeats inside of repeats, or list the modules' names"
_TICK = 0.02
T = TypeVar("T")
U = TypeVar("U")


class MatchClock:
    """State: what is matched now, and how many ticks of the timer have found something matched."""

    def __init__(self, refusal: Callable[[str, str], KeepMTPError]) -> None:
        """`refusal` makes the error of an expression, and of what was found: the time, and the last
        name.
        """
        self._refusal = refusal
        self._now: tuple[str, object] | None = None
        self._ticks = 0
        self._is_on = False

    @contextmanager
    def limit(self) -> Iterator[None]:
        """Limit the time that matching takes in all; inside of another limit that one holds."""
        if self._is_on or threading.current_thread() is not threading.main_thread():
            yield
            return
        self._is_on = True
        self._ticks = 0
        before = signal.signal(signal.SIGVTALRM, self._on_tick)
        signal.setitimer(signal.ITIMER_VIRTUAL, _TICK, _TICK)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
            signal.signal(signal.SIGVTALRM, before)
            self._is_on = False

    def timed(self, work: Callable[[U], T], expression: str, name: U) -> T:
        """What `work` says of a name. Outside of a limit it has one of its own."""
        self._now = (expression, name)
        try:
            if self._is_on:
                return work(name)
            with self.limit():
                return work(name)
        finally:
            self._now = None

    def _on_tick(self, *_: object) -> None:
        if self._now is None:
            return
        self._ticks += 1
        if self._ticks * _TICK > MATCHING_SECONDS:
            expression, name = self._now
            raise self._refusal(expression, f"more than {MATCHING_SECONDS:g} s, at last for {name}")
