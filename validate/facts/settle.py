"""The one rule of every gate on samples: an estimate and its bounds against a limit, in words, and
how many samples would tell.

In: a figure that was measured, with a way to its bounds, and the recipe's limit. Out: a
`ReasonFact`.

Easy to get wrong: an estimate on the right side of a limit is no pass, and one on the wrong side is
no regression. A gate judges a bound of the estimate, at the recipe's confidence, one-sided.
"""

import math
from collections.abc import Callable, Iterable
from typing import Literal

from pydantic import PositiveInt

from ...checkpoints.fact import Fact
from ...recipes.frozen import frozen
from ...recipes.protocol import Gates
from .numbers import limit

JudgementWord = Literal["pass", "regression", "infeasible"]
# People read what is missing, and not that a verdict is infeasible.
_TITLES = {"infeasible": "not measured"}


class HasVerdict(Fact):
    """What has a verdict."""

    verdict: JudgementWord

    @property
    def title(self) -> str:
        """The verdict for people."""
        return _TITLES.get(self.verdict, self.verdict)


class ReasonFact(HasVerdict):
    """One gate's answer.

    Attributes:
        gate: findings, loads, acceptance, the first task's name, worst task,
            drafting, lossless, speed or closeness.
        says: a sentence with the figures.
        needed: samples (questions or drafted tokens) that would settle it; None where it is not a
            matter of samples.
    """

    gate: str
    says: str
    needed: PositiveInt | None = None


CHANCE = 0.001
"""A split is no chance if two equal servers come to it less often than this: one good checkpoint in
a thousand fails.

Both reports from the field are far beyond it: of 39 questions, 21 that only one server gets right
are 1 in a million.
"""
BOUND = "one-sided, Clopper-Pearson"
# So many times as many samples nobody takes: where they would not settle it either, no number is
# named.
_MOST_TIMES = 1_000_000


@frozen
class Estimate:
    """A figure from samples.

    Attributes:
        value: as it was seen.
        bounds: its (lower, upper) bound, one-sided, as if so many times as many samples had been
            taken.
        samples: that it is from.
        unit: what they are, for people.
        says: what was seen, in words.
        how: the bounds are found.
        shown: a figure of this kind in words.
        also: what else a reader should know, after a space.
    """

    value: float
    bounds: Callable[[float], tuple[float, float]]
    samples: int
    unit: str
    says: str
    how: str
    shown: Callable[[float], str]
    also: str = ""


def settle(
    gate: str, estimate: Estimate, wanted: float, gates: Gates, *, is_floor: bool
) -> ReasonFact:
    """Judge whether a figure is at least the limit `wanted`, or with `is_floor` false at most, at
    the confidence of `gates`.
    """
    verdict = _verdict(estimate, wanted, 1, is_floor=is_floor)
    lower, upper = estimate.bounds(1)
    # Of a figure that must be at least the limit, the lower bound is judged, unless even the upper
    # one fails. What is printed is rounded to the safe side.
    bound = f"at most {estimate.shown(math.ceil(1e4 * upper) / 1e4)}"
    if is_floor != (verdict == "regression"):
        bound = f"at least {estimate.shown(math.floor(1e4 * lower) / 1e4)}"
    word = "at most"
    if is_floor:
        word = "at least"
    says = (
        f"{estimate.says}, {bound} at {limit(gates.confidence)} confidence ({estimate.how}); "
        f"{word} {estimate.shown(wanted)} is asked for."
    )
    needed = None
    if verdict == "infeasible":
        end: JudgementWord = "regression"
        if is_floor == (estimate.value > wanted):
            end = "pass"
        needed = _needed(estimate, wanted, end, is_floor=is_floor)
        if needed is None:
            says += " It is so near the limit that no number of samples tells."
        else:
            says += (
                f" Too few to tell: at these figures it would be a {end} with about {needed:,} "
                f"{estimate.unit}."
            )
    return ReasonFact(gate=gate, verdict=verdict, says=says + estimate.also, needed=needed)


def _verdict(estimate: Estimate, wanted: float, times: float, *, is_floor: bool) -> JudgementWord:
    """With so many times as many samples."""
    low, high = estimate.bounds(times)
    if not is_floor:  # at most a limit: the same question with all signs turned
        wanted = -wanted
        low, high = sorted((-low, -high))
    if low >= wanted:
        return "pass"
    if high < wanted:
        return "regression"
    return "infeasible"


def _needed(estimate: Estimate, wanted: float, end: JudgementWord, *, is_floor: bool) -> int | None:
    """About how many samples would come to this end, by halving the range of their logarithms."""
    low = 1.0
    high = float(_MOST_TIMES)
    if _verdict(estimate, wanted, high, is_floor=is_floor) != end:
        return None
    for _ in range(20):
        middle = math.sqrt(low * high)
        if _verdict(estimate, wanted, middle, is_floor=is_floor) == end:
            high = middle
        else:
            low = middle
    return max(estimate.samples + 1, math.ceil(estimate.samples * high))


def worst(reasons: Iterable[ReasonFact]) -> JudgementWord:
    """Regression before infeasible before pass, which is also that of none."""
    verdicts = {one.verdict for one in reasons}
    if "regression" in verdicts:
        return "regression"
    if "infeasible" in verdicts:
        return "infeasible"
    return "pass"


def reason(gate: str, verdict: JudgementWord, says: str) -> ReasonFact:
    """The answer of a gate that is no matter of samples."""
    return ReasonFact(gate=gate, verdict=verdict, says=says)


def unmeasured(gate: str, says: str) -> ReasonFact:
    """The reason of a gate that has nothing to judge."""
    return reason(gate, "infeasible", says)


def not_its_own(as_served: str) -> str:
    """A warning where other bytes than the checkpoint's were served."""
    if as_served == "native":
        return ""
    return (
        " Served was a BF16 copy of the same weights: packed kernels and quantized activations "
        "were not tried."
    )
