"""The base of every fact that a report holds.

In: values, or JSON. Out: a frozen model.

Easy to get wrong: a field that a fact does not know is refused, so that no page leaves out what it does not know.
"""

from pydantic import BaseModel, ConfigDict


class Fact(BaseModel):
    """A frozen model without unknown fields."""

    model_config = ConfigDict(frozen=True, extra="forbid")
