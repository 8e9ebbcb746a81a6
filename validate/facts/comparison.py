"""Finished checkpoints of one model, next to each other: what each stores, how far its weights are
from the release's, and which vLLM loads it.

In: what headers say, and a sample of weights. Out: a `Comparison`, which the terminal, `--json` and
the page show.

Easy to get wrong: an error that was not measured is not 0, it is not there.
"""

from collections.abc import Mapping

from ...checkpoints.fact import Count, Fact, Figure
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


class WeightError(Fact):
    """How far the weights of a group are from the release's: the norm of the difference by the
    norm of the release's weights, over all that were compared together.

    Attributes:
        value: of all of them.
        worst: the matrix that is farthest off, and the error of that.
        num_read: bytes of both checkpoints.
    """

    value: Figure
    worst: str
    worst_value: Figure
    num_read: Count


class ComparedCheckpoint(Fact):
    """One checkpoint.

    Attributes:
        producer: what wrote it, as its files say; "" where they do not.
        kv_cache: its form, and how many scales there are.
        stored: group -> scheme, form or dtype -> bytes. Scales are counted with their weights, and
            `rest` is all that has no group.
        errors: by group, where one could be measured.
        not_finite: group -> the matrix with infinity or NaN, for which it has no error.
        verdicts: a vLLM -> the first error of the static check or of its dry load, "" for none.
        report: what was measured on it; None where nothing was, or `unreported` says why.
    """

    path: str
    facts: CheckpointFacts
    producer: str
    kv_cache: str
    stored: Mapping[str, Mapping[str, Count]]
    errors: Mapping[str, WeightError]
    not_finite: Mapping[str, str]
    verdicts: Mapping[str, str]
    report: FullReport | None
    unreported: str


class Comparison(Fact):
    """All of them, in the order in which they were named.

    Attributes:
        source: the release; None where weights were compared with none.
    """

    source: str | None
    checkpoints: tuple[ComparedCheckpoint, ...]
