"""What every fact is: one frozen pydantic model, from the place that measures it to report.json,
the page and the card.

In: values that a station measured, or a file that holds them. Out: the same value, checked.

Easy to get wrong: a computed figure (a `computed_field`) is written to a file and never read from
one. It is computed again from the counts, so a file cannot hold a figure that its counts do not
give.
"""

from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, model_validator

from ..recipes.frozen import without

# Files may be anybody's: a number that nobody could have measured is refused.
Share = Annotated[float, Field(ge=0, le=1)]
Figure = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=0, lt=2**63)]
NumDrafts = Annotated[int, Field(ge=0, le=1024)]
"""Tokens that are drafted in a step."""


class Fact(BaseModel):
    """A value that does not change and has no field that keepmtp does not know.

    Attributes:
        dropped: fields of older files that nobody reads any more.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
    dropped: ClassVar[frozenset[str]] = frozenset()

    @model_validator(mode="before")
    @classmethod
    def _without_computed_figures(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        return without(values, *cls.dropped, *cls.model_computed_fields)
