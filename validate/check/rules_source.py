"""Rules that compare the checkpoint with the original release: what was kept must still be what it was.

In: the runtime view of both. Out: objections. They read headers only; the writer's own test compares the bytes.

Easy to get wrong: a kept tensor may change its form (FP8 dequantized to BF16, a scale renamed), but never its logical
shape, and a float32 tensor never its dtype.
"""

from collections.abc import Iterator

from ...checkpoints.safetensors_file import Entry
from ...checkpoints.stored import FLOATS, StoredWeight
from ...recipes.family import HFName
from ...recipes.family_view import Place
from ..facts.findings import Objection, objection
from .runtime_view import RuntimeView


def mtp_is_that_of_the_source(runtime: RuntimeView, source: RuntimeView) -> Iterator[Objection]:
    """MTP tensors against the source's: none lost, same shapes, dtypes kept: R13; F24, C3; E4, E8."""
    for module, theirs in source.weights.items():
        place = source.placed.get(module)
        if place is not None and place.part == "mtp" and not _is_separated(runtime, place):
            yield from _weight(runtime.weights.get(module), theirs)
    for entry in source.others:
        place = source.placed.get(entry.name)
        if place is not None and place.part == "mtp" and not place.row.stacked:
            yield from _other(runtime.source.entries.get(HFName(entry.name)), entry)


def _is_separated(runtime: RuntimeView, place: Place) -> bool:
    """Whether the checkpoint has q, k and v apart where the source has them in one matrix."""
    stem, interleaved = place.module.removesuffix(place.row.path), place.row.interleaved
    return interleaved is not None and all(HFName(stem + path) in runtime.weights for path in interleaved.into)


def _weight(ours: StoredWeight | None, theirs: StoredWeight) -> Iterator[Objection]:
    if ours is None:
        yield _lost(theirs.weight.name)
    elif _is_known(ours) and _is_known(theirs) and ours.shape != theirs.shape:
        yield _shape(ours.weight.name, f"the logical shape {list(ours.shape)}", theirs.shape)
    elif ours.form == theirs.form == "plain":
        yield from _dtype(ours.weight.name, ours.weight.dtype, theirs.weight.dtype)


def _other(ours: Entry | None, theirs: Entry) -> Iterator[Objection]:
    if ours is None:
        yield _lost(theirs.name)
    elif ours.shape != theirs.shape:
        yield _shape(ours.name, f"shape {list(ours.shape)}", theirs.shape)
    else:
        yield from _dtype(ours.name, ours.dtype, theirs.dtype)


def _lost(name: HFName) -> Objection:
    return objection(
        rule="source",
        severity="error",
        where=name,
        says="is in the source's MTP block and not here: the draft runs without it",
        cure="Quantize again, or graft the source's MTP block",
        cause="lost",
    )


def _shape(name: HFName, ours: str, theirs: tuple[int, ...]) -> Objection:
    return objection(
        rule="source",
        severity="error",
        where=name,
        says=f"has {ours}, in the source {list(theirs)}",
        cure="Quantize again",
        cause="shape",
    )


RULES = (mtp_is_that_of_the_source,)


def _is_known(weight: StoredWeight) -> bool:
    """Whether the logical shape is: that of packed integers takes bits and group from the config."""
    return weight.form != "unknown" and (weight.form != "int_packed" or bool(weight.scheme))


def _dtype(name: HFName, ours: str, theirs: str) -> Iterator[Objection]:
    if ours == theirs:
        return
    is_wider = {ours, theirs} <= set(FLOATS) and FLOATS.index(ours) > FLOATS.index(theirs)
    effect = "twice the size for the same numbers" if is_wider else "digits are lost that the draft was trained with"
    yield objection(
        rule="source",
        severity="warning",
        where=name,
        says=f"is {ours}, in the source {theirs}: {effect}",
        cure="Keep the source's dtype",
        cause=f"{ours} {theirs}",
    )
