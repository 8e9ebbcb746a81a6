"""The one rule of every gate: an estimate and its bounds against a limit, and how many samples
would tell.

In: a figure that was measured, with a way to its bounds, and the recipe's limit. Out: a `Settled`.

Easy to get wrong: an estimate on the right side of a limit is no pass, and one on the wrong side is
no regression. A gate judges a bound of the estimate, at the recipe's confidence, one-sided.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ..facts.schema import JudgementWord, ReasonFact
from .numbers import down, up

WORST_FIRST: tuple[JudgementWord, ...] = ("regression", "infeasible", "pass")
_ON_THE_LIMIT = 1e-9
"""An estimate nearer to its limit than this is equal to it: no number of samples tells."""
_MOST_TIMES = 1_000_000
"""So many times as many samples nobody takes: where they would not settle it either, no number is
named.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A figure from samples.

    Attributes:
        value: as it was seen.
        bounds: its (lower, upper) bound, one-sided, as if so many times as many samples had been
            taken.
        samples: that it is from.
        unit: what they are, for people.
    """

    value: float
    bounds: Callable[[float], tuple[float, float]]
    samples: int
    unit: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Settled:
    """What an estimate comes to against its limit.

    Attributes:
        bound: of the estimate, the one that was judged.
        side: `at least` where that is the lower one, else `at most`.
        needed: samples of the same shares that would settle it; None where no number would, or it
            is settled.
        too_few: with infeasible, how many samples would tell; the sentence's end is left open.
    """

    verdict: JudgementWord
    bound: float
    side: str
    needed: int | None = None
    too_few: str = ""

    @property
    def rounded(self) -> float:
        """The bound as `percent` shows it, rounded to the safe side."""
        return down(self.bound) if self.side == "at least" else up(self.bound)

    def reason(self, gate: str, says: str, also: str = "") -> ReasonFact:
        """A gate's reason; where it is open, its last sentence says how many samples would settle
        it, and `also`.
        """
        return ReasonFact(
            gate=gate, verdict=self.verdict, says=says + self.open_end(also), needed=self.needed
        )

    def open_end(self, also: str = "") -> str:
        """What the reason says besides its figures; "" where it is settled."""
        if not self.too_few:
            return ""
        return f" {self.too_few}{also if self.needed else ''}."


def at_least(estimate: Estimate, limit: float) -> Settled:
    """Settle whether the figure is at least the limit."""
    return _settled(estimate, limit, sign=1)


def at_most(estimate: Estimate, limit: float) -> Settled:
    """Settle whether the figure is at most the limit."""
    return _settled(estimate, limit, sign=-1)


def worst(verdicts: Iterable[JudgementWord]) -> JudgementWord:
    """Regression before infeasible before pass, which is also that of none."""
    return min((*verdicts, "pass"), key=WORST_FIRST.index)


def unmeasured(gate: str, says: str) -> ReasonFact:
    """The reason of a gate that has nothing to judge."""
    return ReasonFact(gate=gate, verdict="infeasible", says=says)


def _settled(estimate: Estimate, limit: float, *, sign: int) -> Settled:
    def verdict(times: float) -> JudgementWord:
        low, high = sorted(sign * (end - limit) for end in estimate.bounds(times))
        if low >= 0:
            return "pass"
        return "regression" if high < 0 else "infeasible"

    found, (lower, upper) = verdict(1), estimate.bounds(1)
    margin = sign * (estimate.value - limit)
    # Of a figure that must be at least the limit, the lower bound is judged, unless even the upper
    # one fails.
    bound, side = (
        (lower, "at least") if (sign > 0) != (found == "regression") else (upper, "at most")
    )
    if found != "infeasible":
        return Settled(verdict=found, bound=bound, side=side)
    needed, times = None, None
    too_few = "It lies on the limit itself, or so near that no number of samples tells"
    if abs(margin) >= _ON_THE_LIMIT:
        times = _times_to_settle(
            lambda times: verdict(times) == ("pass" if margin > 0 else "regression")
        )
    if times:
        needed = max(estimate.samples + 1, math.ceil(estimate.samples * times))
        would = "pass" if margin > 0 else "fail"
        too_few = (
            f"Too few to tell: at these figures it would {would} with about {needed:,} "
            f"{estimate.unit}"
        )
    return Settled(verdict=found, bound=bound, side=side, needed=needed, too_few=too_few)


def _times_to_settle(settles: Callable[[float], bool]) -> float | None:
    """The least number of times as many samples that settle it, to a thousandth; None where it is
    out of reach.
    """
    high = 2.0
    while not settles(high):
        high *= 2
        if high > _MOST_TIMES:
            return None
    low = high / 2
    while high / low > 1.0005:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if settles(middle) else (middle, high)
    return high
