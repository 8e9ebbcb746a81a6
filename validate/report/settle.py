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
        is_lower: whether that is the lower one.
        needed: samples of the same shares that would settle it; None where no number would, or it
            is settled.
        too_few: with infeasible, how many samples would tell; the sentence's end is left open.
    """

    verdict: JudgementWord
    bound: float
    is_lower: bool
    needed: int | None
    too_few: str

    @property
    def side(self) -> str:
        """`at least` or `at most`, for people."""
        return "at least" if self.is_lower else "at most"

    @property
    def rounded(self) -> float:
        """The bound as `percent` shows it, rounded to the safe side."""
        return down(self.bound) if self.is_lower else up(self.bound)

    def open_end(self, also: str = "") -> str:
        """What the reason says besides its figures; "" where it is settled."""
        return f" {self.too_few}{also if self.needed else ''}." if self.too_few else ""


def at_least(estimate: Estimate, limit: float) -> Settled:
    """Settle whether the figure is at least the limit."""
    return _settled(estimate, limit, sign=1)


def at_most(estimate: Estimate, limit: float) -> Settled:
    """Settle whether the figure is at most the limit."""
    return _settled(estimate, limit, sign=-1)


def worst(verdicts: Iterable[JudgementWord]) -> JudgementWord:
    """Regression before infeasible before pass."""
    return min(verdicts, key=WORST_FIRST.index)


def unmeasured(gate: str, says: str) -> ReasonFact:
    """The reason of a gate that has nothing to judge."""
    return ReasonFact(gate=gate, verdict="infeasible", says=says)


def _settled(estimate: Estimate, limit: float, *, sign: int) -> Settled:
    def margins(times: float) -> list[float]:
        return sorted(sign * (end - limit) for end in estimate.bounds(times))

    low, high = margins(1)
    margin = sign * (estimate.value - limit)
    verdict: JudgementWord = "infeasible"
    needed, too_few = None, ""
    if low >= 0:
        verdict = "pass"
    elif high < 0:
        verdict = "regression"
    else:
        too_few = "It lies on the limit itself, or so near that no number of samples tells"
        times = None
        if abs(margin) >= _ON_THE_LIMIT:
            times = _times_to_settle(
                lambda times: margins(times)[0] >= 0 if margin > 0 else margins(times)[1] < 0
            )
        if times:
            needed = max(estimate.samples + 1, math.ceil(estimate.samples * times))
            would = "pass" if margin > 0 else "fail"
            too_few = (
                f"Too few to tell: at these figures it would {would} with about {needed:,} "
                f"{estimate.unit}"
            )
    lower, upper = estimate.bounds(1)
    is_lower = (sign > 0) != (verdict == "regression")
    bound = lower if is_lower else upper
    return Settled(verdict=verdict, bound=bound, is_lower=is_lower, needed=needed, too_few=too_few)


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
