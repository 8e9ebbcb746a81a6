"""What was measured, a row for each figure: what terminal, card and comparison show of every
station.

In: figures of a fact, which makes its own rows. Out: `Row`, and its words.

Easy to get wrong: a figure without its interval, or without how much was asked, compares with
nothing.
"""

from collections.abc import Mapping
from typing import Any, Literal

from ...recipes.frozen import frozen
from .binomial import limits

Arm = Literal["source", "checkpoint", "plain"]
"""Who is asked. `plain` is the checkpoint once more, with MTP off."""
ARM_TITLES: Mapping[Arm, str] = {
    "source": "source",
    "checkpoint": "checkpoint",
    "plain": "checkpoint, MTP off",
}
CONFIDENCE = 0.95

FigureUnit = Literal["", "%", "nats", "rate", "ms", "times", "perplexity"]
# What is printed of one, in which form a figure and its error, and what comes after.
_FORMS: Mapping[FigureUnit, tuple[int, str, str, str]] = {
    "": (1, ",", "", ""),
    "%": (100, ".2f", ".2f", " %"),
    "nats": (1, ".3g", ".2g", ""),
    "rate": (1, ",.1f", ",.1f", ""),
    "ms": (1, ",.1f", "", ""),
    "times": (1, ".2f", "", ""),
    "perplexity": (1, ".4g", "", ""),
}


@frozen
class Row:
    """One figure of one model.

    Attributes:
        metric: what was measured.
        case: on what, and how much of it.
        of: whose figure it is.
        value: None where its server failed.
        around: the least and the most that it may be; None where that is not known.
        confidence: of that interval; None: one standard error, or half of a spread, to each side.
        n: of how many it is.
        also: what belongs to it, before and after it.
        is_detail: a card has no room for it.
    """

    metric: str
    case: str
    of: Arm
    value: float | None
    unit: FigureUnit = ""
    around: tuple[float, float] | None = None
    confidence: float | None = None
    n: int | None = None
    also: tuple[str, str] = ("", "")
    is_detail: bool = False

    @property
    def title(self) -> str:
        """What the figures of other models are compared by."""
        return f"{self.metric}, {self.case}"

    @property
    def says(self) -> str:
        """The figure in words: `at least 0.01 ± 0.002 nats`, `2.10 % (1.92 to 2.30) of 900`."""
        if self.value is None:
            return "failed"
        scale, form, error_form, after = _FORMS[self.unit]
        words = f"{scale * self.value:{form}}{after}"
        if self.around is not None:
            low, high = [scale * end for end in self.around]
            if self.confidence is None:
                words += f" ± {(high - low) / 2:{error_form}}"
            else:
                words += f" ({low:{form}} to {high:{form}})"
        if self.n is not None:
            words += f" of {self.n:,}"
        before, behind = self.also
        return f"{before}{words}{behind}"


def detail(
    metric: str, case: str, of: Arm, value: float | None, unit: FigureUnit = "", **more: Any
) -> Row:
    """A row that a card has no room for; `more` are further fields."""
    return Row(metric=metric, case=case, of=of, value=value, unit=unit, is_detail=True, **more)


def interval(share: float, trials: float) -> tuple[float, float]:
    """Of a share of so many trials, at `CONFIDENCE`."""
    return limits(share * trials, trials, 1 - (1 - CONFIDENCE) / 2)
