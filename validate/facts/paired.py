"""Two models that answered the same questions: the difference of their scores, and how sure it is.

In: for each question, whether source and checkpoint were right, or the share that they got of it.
Out: a `PairedFact`, or one-sided bounds for a gate.

Easy to get wrong: a question that both get right, or both wrong, says nothing about a difference,
and a quantized model differs from its source on few questions. So `difference` is the plain one,
but `stderr` is Agresti and Min's.
"""

from collections.abc import Sequence
from math import sqrt
from statistics import NormalDist, fmean
from typing import Annotated

from pydantic import Field

from ...checkpoints.fact import Count, Fact, Figure
from .binomial import difference_limits

# Questions added to each of the four cells.
_ADDED = 0.5
# Less is the rounding of a difference that is a number of whole questions.
_WHOLE = 1e-6
Difference = Annotated[float, Field(ge=-1, le=1)]


class PairedFact(Fact):
    """One filter's answers of source and checkpoint, question by question.

    Attributes:
        difference: checkpoint less source, as a share of all questions; negative is a loss.
        stderr: of `difference`, from the pairs.
        num: of questions.
        only_source, only_checkpoint: that one of them alone answers right, or gets more of.
    """

    filter: str
    difference: Difference
    stderr: Figure
    num: Count
    only_source: Count
    only_checkpoint: Count


def paired(
    name: str,
    source: Sequence[float],
    checkpoint: Sequence[float],
    *,
    runs: int = 1,
) -> PairedFact:
    """Compare two models' answers to the same questions.

    Args:
        name: the filter that read the answers.
        source, checkpoint: right or not, or a share from 0 to 1; run after run, each with all
            questions in one order.
        runs: how often each question was asked. Its runs count as one pair, of their means.

    Returns: `difference` as it was seen; `stderr` of the adjusted counts.

    Raises: ValueError if the sequences differ in length.
    """
    pairs = list(zip(_of_questions(source, runs), _of_questions(checkpoint, runs), strict=True))
    only_source, only_checkpoint = parted(*zip(*pairs, strict=True))
    changes = [after - before for before, after in pairs]
    # Where two models never differ, the usual standard error is zero, so twenty questions would
    # seem to be proof. So half a question is added to each of the four cells first (A. Agresti, Y.
    # Min, "Simple improved confidence intervals for comparing matched proportions", Statistics in
    # Medicine 24 (2005), 729-740, "adjusted Wald"). Where an answer can be partly right, or a
    # question is asked in several runs, the pairs are shares, and half a question is added in the
    # same way to the sums of their differences and of the squares. Half a question gained and half
    # a one lost leave the sum of the changes as it is.
    total = len(pairs) + 4 * _ADDED
    middle = sum(changes) / total
    square = sum(change**2 for change in changes)
    stderr = sqrt((square + 2 * _ADDED) / total - middle**2) / sqrt(total)
    return PairedFact(
        filter=name,
        difference=sum(changes) / len(pairs),
        stderr=stderr,
        num=len(pairs),
        only_source=only_source,
        only_checkpoint=only_checkpoint,
    )


def parted(one: Sequence[float], other: Sequence[float]) -> tuple[int, int]:
    """The questions of two that one gets more of, and that the other does."""
    only_one = only_other = 0
    for before, after in zip(one, other, strict=True):
        only_one += before > after
        only_other += before < after
    return only_one, only_other


def one_sided(fact: PairedFact, confidence: float, *, times: float = 1) -> tuple[float, float]:
    """(lower, upper) bound of the difference; with `confidence` it is above the first, and likewise
    below the second.

    From the exact limits of both discordant shares: with a normal approximation a loss at the limit
    goes through too often where every question on which the models part is a loss. Differences of
    shares have no such limits, and get the normal ones.
    `times`: as if so many times as many questions had been asked, with the same shares.
    """
    num = fact.num
    if abs(fact.difference * num - (fact.only_checkpoint - fact.only_source)) > _WHOLE:
        middle = fact.difference * num / (num + 2)
        reach = _z(confidence) * fact.stderr / sqrt(times)
        return max(-1.0, middle - reach), min(1.0, middle + reach)
    return difference_limits(
        times * fact.only_checkpoint, times * fact.only_source, times * num, confidence
    )


def _of_questions(values: Sequence[float], runs: int) -> list[float]:
    """What each question gets, over its runs."""
    num = len(values) // runs
    return [fmean(values[number::num]) for number in range(num)]


def _z(share: float) -> float:
    return NormalDist().inv_cdf(share)
