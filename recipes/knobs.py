"""What every part of a recipe is, and the knob of a calibration algorithm.

In: a part of a recipe, such as the block `autoround` of its calibration. Out: frozen values. All
other settings of an algorithm are llm-compressor's defaults.

Source: llm-compressor 0.14.0.1 modifiers/autoround/base.py.
"""

from collections.abc import Iterable
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from .errors import RecipeError

Positive = Annotated[int, Field(gt=0, lt=2**31, strict=True)]
Fraction = Annotated[float, Field(gt=0, lt=1)]
"""More than nothing, and less than all."""
Contradiction = tuple[str, object, str]
"""A rule that values break together, what is there instead, and what to do."""


class Frozen(BaseModel):
    """A part of a recipe, which has no other keys than these."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    def contradictions(self) -> Iterable[Contradiction]:
        """What is wrong with values that each may have alone; the first is the refusal."""
        return ()

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        for rule, got, cure in self.contradictions():
            raise RecipeError("", rule, got=got, cure=cure)
        return self


class AutoRoundKnobs(Frozen):
    """How AutoRound learns the rounding of a layer."""

    # Steps for each layer.
    iters: Positive = 200
