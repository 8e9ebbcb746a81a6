"""Rules that need the original release beside the checkpoint: what was kept must still be what it was.

In: the evidence of both. Out: findings. Headers only: that kept bytes are equal bytes is the writer's own test.

Easy to get wrong: a kept tensor may change its form honestly (FP8 dequantized to BF16, a scale renamed), but never its
logical shape, and a float32 tensor never its dtype.
"""

from collections.abc import Iterator

from ...checkpoints.stored import FLOATS, StoredWeight
from ...recipes.family import HFName
from .findings import Objection, objection
from .runtime_view import Evidence


def mtp_is_that_of_the_source(evidence: Evidence, source: Evidence) -> Iterator[Objection]:
    """MTP tensors against the source's: none lost, same shapes, dtypes kept: R13; F24, C3; E4, E8."""
    for module, theirs in source.weights.items():
        place = source.placed.get(module)
        if place is None or place.part != "mtp":
            continue
        ours = evidence.weights.get(module)
        if ours is None:
            yield objection(
                rule="source",
                severity="error",
                where=theirs.weight.name,
                says="is in the source's MTP block and not here: the draft runs without it",
                cure="Quantize again, or graft the source's MTP block",
                cause="lost",
            )
        elif _is_known(ours) and _is_known(theirs) and ours.shape != theirs.shape:
            yield objection(
                rule="source",
                severity="error",
                where=ours.weight.name,
                says=f"has the logical shape {list(ours.shape)}, in the source {list(theirs.shape)}",
                cure="Quantize again",
                cause="shape",
            )
        elif ours.form == theirs.form == "plain":
            yield from _dtype(ours.weight.name, ours.weight.dtype, theirs.weight.dtype)
    for entry in source.others:
        place = source.placed.get(entry.name)
        if place is None or place.part != "mtp" or place.row.stacked:
            continue
        ours = evidence.source.entries.get(HFName(entry.name))
        if ours is None:
            yield objection(
                rule="source",
                severity="error",
                where=entry.name,
                says="is in the source's MTP block and not here: the draft runs without it",
                cure="Quantize again, or graft the source's MTP block",
                cause="lost",
            )
        elif ours.shape != entry.shape:
            yield objection(
                rule="source",
                severity="error",
                where=ours.name,
                says=f"has shape {list(ours.shape)}, in the source {list(entry.shape)}",
                cure="Quantize again",
                cause="shape",
            )
        else:
            yield from _dtype(ours.name, ours.dtype, entry.dtype)


RULES = (mtp_is_that_of_the_source,)


def _is_known(weight: StoredWeight) -> bool:
    """Whether the logical shape is: that of packed integers takes bits and group from the config."""
    return weight.form != "unknown" and (weight.form != "int_packed" or bool(weight.scheme))


def _dtype(name: HFName, ours: str, theirs: str) -> Iterator[Objection]:
    if ours != theirs:
        narrower = FLOATS.index(ours) <= FLOATS.index(theirs) if {ours, theirs} <= set(FLOATS) else True
        yield objection(
            rule="source",
            severity="warning",
            where=name,
            says=f"is {ours}, in the source {theirs}"
            + (
                ": digits are lost that the draft was trained with"
                if narrower
                else ": twice the size for the same numbers"
            ),
            cure="Keep the source's dtype",
            cause=f"{ours} {theirs}",
        )
