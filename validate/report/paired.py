"""Two models that answered the same questions: the difference of their scores, and how sure it is.

In: for each question, whether source and checkpoint were right. Out: a `PairedFact`, or one-sided bounds for a gate.

Easy to get wrong: a question that both get right, or both wrong, says nothing about a difference, and a quantized model
differs from its source on few questions. Where they never differ, the usual standard error is zero, so twenty questions
would seem to be proof. So `difference` is the plain one, but `stderr`, `low` and `high` are Agresti and Min's: half a
question is added to each of the four cells first, which also moves the middle of the interval towards zero, by 2 in
n + 2.
(A. Agresti, Y. Min, "Simple improved confidence intervals for comparing matched proportions", Statistics in Medicine 24
(2005), 729-740, "adjusted Wald".)
"""

from collections.abc import Sequence
from math import sqrt
from statistics import NormalDist

from ..evaluation.evaluated import PairedFact
from .binomial import difference_limits

_ADDED = 0.5
"""Questions added to each of the four cells."""


def paired(name: str, source: Sequence[bool], checkpoint: Sequence[bool], *, confidence: float = 0.95) -> PairedFact:
    """Compare two models' answers to the same questions.

    Args:
        name: the filter that read the answers.
        source, checkpoint: right or not, a value for each question, in one order.
        confidence: of the two-sided interval.
    Returns: `difference` as it was seen; `stderr`, `low` and `high` of the adjusted counts, within -1 and 1.
    Raises: ValueError if the sequences differ in length or are empty.
    """
    pairs = [(bool(before), bool(after)) for before, after in zip(source, checkpoint, strict=True)]
    if not pairs:
        raise ValueError("paired: there must be a question to compare")
    only_source, only_checkpoint = pairs.count((True, False)), pairs.count((False, True))
    middle, stderr = _adjusted(len(pairs), only_source, only_checkpoint)
    reach = _z(1 - (1 - confidence) / 2) * stderr
    return PairedFact(
        filter=name,
        difference=(only_checkpoint - only_source) / len(pairs),
        stderr=stderr,
        low=max(-1.0, middle - reach),
        high=min(1.0, middle + reach),
        confidence=confidence,
        both=pairs.count((True, True)),
        only_source=only_source,
        only_checkpoint=only_checkpoint,
        neither=pairs.count((False, False)),
    )


def one_sided(fact: PairedFact, confidence: float, *, times: float = 1) -> tuple[float, float]:
    """(lower, upper) bound of the difference; with `confidence` it is above the first, and likewise below the second.

    From the exact limits of both discordant shares, not from `low` and `high` of the fact: with a normal approximation
    a loss at the limit goes through too often where every question on which the models part is a loss.
    `times`: as if so many times as many questions had been asked, with the same shares.
    """
    num = fact.both + fact.only_source + fact.only_checkpoint + fact.neither
    return difference_limits(times * fact.only_checkpoint, times * fact.only_source, times * num, confidence)


def _adjusted(num: int, only_source: int, only_checkpoint: int) -> tuple[float, float]:
    """Middle and standard error of the difference, with half a question more in each cell."""
    total = num + 4 * _ADDED
    gained, lost = only_checkpoint + _ADDED, only_source + _ADDED
    middle = (gained - lost) / total
    return middle, sqrt((gained + lost) / total - middle**2) / sqrt(total)


def _z(share: float) -> float:
    return NormalDist().inv_cdf(share)
