"""The knobs of calibration algorithms, by the names that llm-compressor gives them.

In: the blocks `gptq`, `awq` and `autoround` of a recipe's calibration. Out: frozen values,
which the algorithm's modifier is built with. Without its block an algorithm runs with the defaults
here. They are those of llm-compressor, but for one: AutoRound does not compile its layers.

Easy to get wrong: `actorder: null` switches the order off; leaving `actorder` out means `static`.

Source: llm-compressor 0.14.0.1 modifiers/gptq/base.py, modifiers/transform/awq/base.py and
modifiers/autoround/base.py.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Literal, Self

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


class GPTQKnobs(Frozen):
    """How GPTQ goes through the columns of a weight. No choice changes which tensors are stored."""

    # No order that needs a g_idx tensor: compressed-tensors 0.19 and vLLM 0.32 have removed them.
    # The order of the columns. `static`, or `weight`, its other name: those with the largest inputs
    # come first, each with the scale of the group that it is stored in. null: as they are stored.
    actorder: Literal["static", "weight"] | None = "static"
    # Of the mean of the Hessian's diagonal, added to the diagonal before it is inverted.
    dampening_frac: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.01
    # Columns whose errors are spread at a time.
    block_size: Positive = 128


class AWQKnobs(Frozen):
    """The grid that AWQ searches for each smoothing."""

    # Scales that are tried.
    n_grid: Positive = 20
    # Whether a scale is made of inputs and weights, or of inputs alone; `both` tries half of each.
    duo_scaling: Annotated[bool, Field(strict=True)] | Literal["both"] = True

    def contradictions(self) -> Iterator[Contradiction]:
        """A grid goes from 0 to 1: with fewer points llm-compressor divides by zero."""
        least = {"both": 4, True: 3, False: 2}[self.duo_scaling]
        if self.n_grid < least:
            is_duo = str(self.duo_scaling).lower()
            rule = f"n_grid must be at least {least} where duo_scaling is {is_duo}"
            yield rule, self.n_grid, "Raise it"


class AutoRoundKnobs(Frozen):
    """How AutoRound learns the rounding of a layer."""

    # Steps for each layer.
    iters: Positive = 200
    # The learning rate of the offsets and of the clipping; null for 1 / iters.
    lr: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    # Sequences in a step. It is not `calibration.batch_size`, which says how many a forward
    # computes.
    batch_size: Positive = 8
    # Compiled layers are faster on a GPU, and have other last bits.
    enable_torch_compile: Annotated[bool, Field(strict=True)] = False


KNOBS: Mapping[str, type[Frozen]] = {
    "gptq": GPTQKnobs,
    "awq": AWQKnobs,
    "autoround": AutoRoundKnobs,
}
"""Algorithm -> its knobs; the key of a calibration block is the algorithm's name."""
