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
from collections import Counter
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
_NOTHING = ("", "")
T = TypeVar("T")


class MatchClock:
    """State: what is matched now, and how many ticks each expression has had."""

    def __init__(self, refusal: Callable[[str, str], KeepMTPError]) -> None:
        """`refusal` makes the error of the slowest expression, and of what was found: the time, and
        the last name.
        """
        self._refusal = refusal
        self._now = _NOTHING
        self._ticks: Counter[str] = Counter()
        self._is_on = False

    @contextmanager
    def limit(self) -> Iterator[None]:
        """Limit the time that matching takes in all; inside of another limit that one holds."""
        if self._is_on or threading.current_thread() is not threading.main_thread():
            yield
            return
        self._is_on = True
        self._now, self._ticks = _NOTHING, Counter()
        before = signal.signal(signal.SIGVTALRM, self._on_tick)
        signal.setitimer(signal.ITIMER_VIRTUAL, _TICK, _TICK)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
            signal.signal(signal.SIGVTALRM, before)
            self._is_on = False

    def timed(self, work: Callable[[str], T], expression: str, name: str) -> T:
        """What `work` says of a name; the time counts for this expression. Outside of a limit it
        has one of its own.
        """
        if not self._is_on:
            with self.limit():
                return self._counted(work, expression, name)
        return self._counted(work, expression, name)

    def _counted(self, work: Callable[[str], T], expression: str, name: str) -> T:
        self._now = (expression, name)
        try:
            return work(name)
        finally:
            self._now = _NOTHING

    def _on_tick(self, *_: object) -> None:
        expression, name = self._now
        if not expression:
            return
        self._ticks[expression] += 1
        if self._ticks.total() * _TICK > MATCHING_SECONDS:
            self._now = _NOTHING
            slowest = self._ticks.most_common(1)[0][0]
            raise self._refusal(slowest, f"more than {MATCHING_SECONDS:g} s, at last for {name}")
