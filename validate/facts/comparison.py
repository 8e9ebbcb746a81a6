"""Finished checkpoints of one model, next to each other: what each stores, which vLLM loads it, and
what was measured of it.

In: what headers and reports say. Out: a `Comparison`, which the terminal and `--json` show.

Easy to get wrong: a checkpoint without a report is not a worse one.
"""

from collections.abc import Mapping

from ...checkpoints.fact import Count, Fact
from ...recipes.family import QUANTIZABLE_ROLES, TABLE_ROLES
from ...recipes.family_view import Place
from .findings import CheckpointFacts
from .schema import FullReport

_MTP = "MTP block"
_REST = "rest"
GROUPS = (*QUANTIZABLE_ROLES, *TABLE_ROLES, _MTP, "vision", _REST)
"""In the order in which they are shown."""


def group_of(place: Place | None) -> str:
    """The group of a tensor; None is the place of one that the family does not know."""
    if place is None:
        return _REST
    if place.part == "mtp":
        return _MTP
    return place.role if place.role in GROUPS else _REST


class ComparedCheckpoint(Fact):
    """One checkpoint.

    Attributes:
        producer: what wrote it, as its files say; "" where they do not.
        kv_cache: its form, and how many scales there are.
        stored: group -> scheme, form or dtype -> bytes. Scales are counted with their weights, and
            `rest` is all that has no group.
        verdicts: a vLLM -> the first error of the static check or of its dry load, "" for none.
        report: what was measured on it; None where nothing was, or `unreported` says why.
    """

    path: str
    facts: CheckpointFacts
    producer: str
    kv_cache: str
    stored: Mapping[str, Mapping[str, Count]]
    verdicts: Mapping[str, str]
    report: FullReport | None
    unreported: str


class Comparison(Fact):
    """All of them, in the order in which they were named."""

    checkpoints: tuple[ComparedCheckpoint, ...]
