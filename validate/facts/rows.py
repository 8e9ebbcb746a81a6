"""What was measured, a row for each figure: what terminal, card and comparison show of every
station.

In: figures of a fact, which makes its own rows. Out: `Row`.

Easy to get wrong: a figure without its interval, or without how much was asked, compares with
nothing.
"""

from collections.abc import Mapping
from typing import Literal

from ...recipes.frozen import frozen
from .binomial import limits
from .numbers import percent

Arm = Literal["source", "checkpoint", "plain"]
"""Who is asked. `plain` is the checkpoint once more, with MTP off."""
ARM_TITLES: Mapping[Arm, str] = {
    "source": "source",
    "checkpoint": "checkpoint",
    "plain": "checkpoint, MTP off",
}
_CONFIDENCE = 0.95


@frozen
class Row:
    """One figure of one model.

    Attributes:
        metric: what was measured.
        case: on what, and how much of it.
        of: whose figure it is.
        says: the figure in words, with its interval or error.
        is_detail: a card has no room for it.
    """

    metric: str
    case: str
    of: Arm
    says: str
    is_detail: bool = False

    @property
    def title(self) -> str:
        """What the figures of other models are compared by."""
        return f"{self.metric}, {self.case}"


def detail(metric: str, case: str, of: Arm, *, says: str) -> Row:
    """A row that a card has no room for."""
    return Row(metric=metric, case=case, of=of, says=says, is_detail=True)


def share_of(share: float, trials: float) -> str:
    """`2.10 % (1.92 to 2.30)`, with the interval at 95 % confidence."""
    low, high = limits(share * trials, trials, 1 - (1 - _CONFIDENCE) / 2)
    return f"{percent(share)} ({100 * low:.2f} to {100 * high:.2f})"
