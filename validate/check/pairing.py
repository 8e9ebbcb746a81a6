"""Which weights of a checkpoint and of its release are one and the same, by name.

In: the `RuntimeView` of both. Out: pairs of stored weights, all or a sample of layers and experts.

Easy to get wrong: a release may hold all experts in one tensor [experts, projections x N, K], and its quantization a
tensor an expert and projection, or the reverse. A slice of such a tensor is described as if it were a tensor of its
own, with the name of the whole in messages.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from ...checkpoints.safetensors_file import Entry
from ...checkpoints.stored import NOT_COMPUTED, StoredWeight
from ...recipes.family import HFName
from ...recipes.family_view import Place
from .runtime_view import RuntimeView

# What is compared of a release that is not compared whole: enough to tell what was done to each kind of module.
_SAMPLED_LAYERS, _SAMPLED_EXPERTS = 3, 2


class Pair(NamedTuple):
    """One weight of the checkpoint, and the release's of the same name."""

    weight: StoredWeight
    theirs: StoredWeight
    place: Place

    @property
    def entries(self) -> tuple[list[Entry], list[Entry]]:
        """The tensors that are read of the checkpoint, and of the release."""
        return list(self.weight.parts.values()), list(self.theirs.parts.values())


def pairs(runtime: RuntimeView, release: RuntimeView, *, whole: bool) -> list[Pair]:
    """Weights that both have by name, in a form that can be read; not whole: of some layers and experts only."""
    theirs = dict(_matrices(release))
    wanted = _Sample(runtime, whole=whole)
    found = []
    for module, (weight, place) in _matrices(runtime):
        other, _ = theirs.get(module, (None, None))
        if other is not None and can_be_read(weight) and can_be_read(other) and wanted.has(place, module):
            found.append(Pair(weight, other, place))
    return found


def can_be_read(weight: StoredWeight) -> bool:
    """Groups in another order are not what `dequantize` knows."""
    return weight.form not in NOT_COMPUTED and "weight_g_idx" not in weight.parts


class _Sample:
    """The MTP block, and of the backbone the first, the last and some layers between, with some experts each."""

    def __init__(self, runtime: RuntimeView, *, whole: bool) -> None:
        self._whole = whole
        indices = [_expert(module, place) or 0 for module, (_, place) in _matrices(runtime)]
        self._layers = _some_of(runtime.view.num_layers, _SAMPLED_LAYERS)
        self._experts = _some_of(max(indices, default=0) + 1, _SAMPLED_EXPERTS)

    def has(self, place: Place, module: HFName) -> bool:
        if self._whole:
            return True
        expert = _expert(module, place)
        is_near = place.part == "mtp" or place.layer in self._layers
        return is_near and place.role not in ("embedding", "head") and (expert is None or expert in self._experts)


def _expert(module: HFName, place: Place) -> int | None:
    """The index of an expert, also of one in a stack."""
    if not place.row.stacked:
        return place.expert
    return int(module.rpartition(".")[0].rpartition(".")[2])


def _matrices(runtime: RuntimeView) -> Iterator[tuple[HFName, tuple[StoredWeight, Place]]]:
    """Every weight [N, K] of the language model, by the name that it has where experts are not stacked."""
    for module, weight in runtime.weights.items():
        place = runtime.placed.get(module)
        if place is None or place.role == "vision":
            continue
        if place.row.stacked and weight.form == "plain" and len(weight.shape) == 3:
            yield from _unstacked(weight.weight, place)
        elif len(weight.shape) == 2:
            yield module, (weight, place)
    for entry in runtime.others:
        place = runtime.placed.get(entry.name)
        if place is not None and place.row.stacked and len(entry.shape) == 3:
            yield from _unstacked(entry, place)


def _unstacked(entry: Entry, place: Place) -> Iterator[tuple[HFName, tuple[StoredWeight, Place]]]:
    """The experts and projections of a tensor [experts, projections x N, K], as weights of their own."""
    num_experts, num_rows, num_columns = entry.shape
    shape = (num_rows // len(place.row.stacked), num_columns)
    num_bytes = entry.num_bytes // max(1, num_experts * len(place.row.stacked))
    stem, start = place.module.removesuffix(place.row.path), entry.start
    if math.prod(shape) * num_experts * len(place.row.stacked) != math.prod(entry.shape):
        return
    for expert in range(num_experts):
        for path in place.row.unstacked:
            module = HFName(stem + path.replace("{e}", str(expert)))
            part = replace(entry, shape=shape, start=start, num_bytes=num_bytes)
            yield module, (StoredWeight(module=module, form="plain", parts={"weight": part}, shape=shape), place)
            start += num_bytes


def _some_of(count: int, number: int) -> frozenset[int]:
    """Some of `count` indices: the first, the last, and those evenly between."""
    steps = max(1, number - 1)
    return frozenset(round((count - 1) * step / steps) for step in range(number)) if count else frozenset()
