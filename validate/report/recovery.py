"""Recovery: a checkpoint's score as a share of its source's, for each task and as the mean over
tasks.

In: the pairs of a task's answers. Out: a `Recovery`, for pages, cards, terminals and gates alike.

Easy to get wrong: a recovery has an error, and it is that of the paired difference, not that of two
scores: both models answered the same questions. It is divided by the source's score as it was seen.
Tasks have other questions, so their errors are independent, and the error of a mean is smaller than
each. A task that the source never gets right has none.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from math import sqrt
from statistics import NormalDist, fmean

from ..facts.evaluated import TaskFact


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """A share of the source's score; 1 loses nothing.

    Attributes:
        value: as it was seen.
        middle, stderr: of the adjusted counts (Agresti and Min, as in `paired.py`).
        confidence: of the two-sided interval.
    """

    value: float
    middle: float
    stderr: float
    confidence: float

    @property
    def low(self) -> float:
        """The interval's lower end."""
        return max(0.0, self.one_sided(1 - (1 - self.confidence) / 2)[0])

    @property
    def high(self) -> float:
        """The interval's upper end."""
        return self.one_sided(1 - (1 - self.confidence) / 2)[1]

    def one_sided(self, confidence: float, *, times: float = 1) -> tuple[float, float]:
        """(lower, upper) bound, each at this confidence, as if so many times as many questions had
        been asked.
        """
        reach = NormalDist().inv_cdf(confidence) * self.stderr / sqrt(times)
        return self.middle - reach, self.middle + reach


def recovery(task: TaskFact, wanted: str) -> Recovery | None:
    """Of the score that counts; None without a source, or where it gets nothing right.

    Args:
        task: what it gave.
        wanted: the recipe's filter.
    """
    pair, name = task.pair(wanted), task.judged_filter(wanted)
    if task.source is None or pair is None or not (before := task.source.score(name).value):
        return None
    num = pair.both + pair.only_source + pair.only_checkpoint + pair.neither
    return Recovery(
        value=task.checkpoint.score(name).value / before,
        middle=1 + pair.difference * num / (num + 2) / before,
        stderr=pair.stderr / before,
        confidence=pair.confidence,
    )


def mean_recovery(tasks: Iterable[TaskFact], wanted: str) -> Recovery | None:
    """The mean of the tasks' recoveries, each as heavy as the others; None where one has none."""
    found = [recovery(task, wanted) for task in tasks]
    known = [one for one in found if one is not None]
    if not known or len(known) < len(found):
        return None
    return Recovery(
        value=fmean(one.value for one in known),
        middle=fmean(one.middle for one in known),
        stderr=sqrt(sum(one.stderr**2 for one in known)) / len(known),
        confidence=known[0].confidence,
    )
