"""Exact one-sided limits of a share, those of a ratio and of a difference of two shares, and
Student's quantile.

In: how many of how many. Out: limits that hold with a confidence, by Clopper and Pearson
(Biometrika 26 (1934), 404-413): the share for which what was seen, or more of it, has the
probability one less confidence. Counts may be
fractions: a draft of which two of three tokens were accepted is two thirds of a success. A value
between 0 and 1 never varies more than a coin of the same mean, so the limit is then on the safe
side.

Easy to get wrong: a ratio has no exact limit of its own. The tests count out how often the limits
are wrong.
"""

import math
from functools import cache
from importlib.util import find_spec
from typing import Any

from ...recipes.errors import RecipeError
from ...recipes.extras import install_command


def limits(successes: float, trials: float, confidence: float) -> tuple[float, float]:
    """(lower, upper) limit of a share: with `confidence` it is above the first, and likewise below
    the second.
    """
    failures = trials - successes
    inverse = _special().betaincinv
    lower = 0.0
    upper = 1.0
    if successes > 0:
        lower = float(inverse(successes, failures + 1, 1 - confidence))
    if failures > 0:
        upper = float(inverse(successes + 1, failures, confidence))
    return lower, upper


def ratio_limits(
    successes: float, trials: float, of_successes: float, of_trials: float, confidence: float
) -> tuple[float, float]:
    """One-sided limits of the first share divided by the second, which is above 0."""
    # The limits of both shares are combined by the method of variance estimates recovery (A.
    # Donner, G. Y. Zou, "Closed-form confidence intervals for functions of the normal mean and
    # standard deviation", Statistical Methods in Medical Research 21 (2012), 347-359). Where the
    # other share is 1, and its upper limit too, that is the exact limit of the one.
    one = successes / trials
    other = of_successes / of_trials
    low, high = limits(successes, trials, confidence)
    other_low, other_high = limits(of_successes, of_trials, confidence)
    width = other_high * (2 * other - other_high)
    lower = low / other_high
    # Where the second share may be twice what was seen, only the worst of both is left.
    if width > 0:
        root = _root_of((one * other) ** 2 - low * (2 * one - low) * width)
        lower = (one * other - root) / width
    width = other_low * (2 * other - other_low)
    upper = (one * other + _root_of((one * other) ** 2 - high * (2 * one - high) * width)) / width
    return lower, upper


def difference_limits(
    gained: float, lost: float, trials: float, confidence: float
) -> tuple[float, float]:
    """One-sided limits of the share gained less the share lost, both of the same trials."""
    won = gained / trials
    gone = lost / trials
    won_low, won_high = limits(gained, trials, confidence)
    gone_low, gone_high = limits(lost, trials, confidence)
    others = (1 - won) * (1 - gone)
    # What one of them takes, the other cannot have.
    together = -1.0
    if others:
        together = -math.sqrt(won * gone / others)

    def reach(one: float, other: float) -> float:
        return _root_of(one**2 + other**2 - 2 * together * one * other)

    return (
        max(-1.0, won - gone - reach(won - won_low, gone_high - gone)),
        min(1.0, won - gone + reach(won_high - won, gone - gone_low)),
    )


def sign_test(one: int, other: int) -> float:
    """How often a fair coin, thrown so many times, falls at least as unevenly: exact and two-sided.

    On the questions that only one of two servers gets right, it is McNemar's test in its exact
    form.
    """
    fewer, more = sorted((one, other))
    if not more:
        return 1.0
    return min(1.0, 2 * float(_special().betainc(more, fewer + 1, 0.5)))


def student(confidence: float, freedom: int) -> float:
    """The value that Student's t with so many degrees of freedom stays below with `confidence`,
    above one half.
    """
    return float(_special().stdtrit(freedom, confidence))


def refuse_without_scipy() -> None:
    """Refuse where no limit can be computed.

    Raises:
        RecipeError: says how scipy is installed.
    """
    if find_spec("scipy") is None:
        raise RecipeError(
            "the limits of a measured share",
            "need scipy",
            got="no scipy",
            cure=f"Run {install_command('report')}",
        )


@cache
def _special() -> Any:
    """scipy's functions that its distributions use: `scipy.stats` itself takes a second to
    import.
    """
    refuse_without_scipy()
    from scipy import special

    return special


def _root_of(square: float) -> float:
    """A square root; rounding may have taken a zero below zero."""
    return math.sqrt(max(0.0, square))
