"""Puts the weights that a server will have into a layer, in place of those it was calibrated with.

In: a layer or MTP block that was calibrated, its binding, and what calibration found. Out: the same module, each
quantized weight decompressed from the very tensors that the writer puts into the file (`unit.packed_groups`).

Easy to get wrong: a linear of the model may be several tensors on disk, each with scales of its own, and a stack on
disk is many linears. And this cannot be undone: whatever needs the weights as they were comes before.
"""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from compressed_tensors.quantization import QuantizationStatus
from torch import Tensor

from ....checkpoints.dequantize import dequantize
from ....checkpoints.stored import Form
from ....recipes.family import HFName
from ....recipes.schemes import SCHEMES, Scheme
from ...pack.unit import Calibrations, PackedModule, ReadWeights, from_source, packed_groups
from ...plan.plan import Plan
from ...plan.tensor_plan import TensorPlan
from ..model.binding import Binding, Piece
from ..model.skeleton import caches_in, scheme_of
from .caches import serve_cache

_FORMS: Mapping[str, Form] = {
    "nvfp4-pack-quantized": "nvfp4",
    "mxfp4-pack-quantized": "mxfp4",
    "float-quantized": "fp8_channel",
    "pack-quantized": "int_packed",
    "int-quantized": "int8",
}


@dataclass(frozen=True, slots=True)
class InMemory:
    """What calibration found in one layer, in the names of the finished checkpoint, before it is on disk."""

    tensors: Mapping[HFName, Tensor]

    def __contains__(self, name: object) -> bool:
        return name in self.tensors

    def read(self, name: HFName) -> Tensor:
        """One tensor."""
        return self.tensors[name]


def serve_weights(model: Any, plan: Plan, binding: Binding, path: str, given: Calibrations) -> None:
    """Give the quantized modules under `path` the weights of the finished checkpoint, one fused group at a time.

    Attention whose cache is FP8 gets the scales that it is rounded by.

    Args:
        model: calibrated; its modules have their weights.
        plan: over a local source.
        binding: of the layer or block.
        path: its path in the model, with a dot; "" for the model itself.
        given: what calibration found.

    Raises:
        CheckpointError: a weight is not finite.
    """
    for name, scales in caches_in(binding, path).items():
        keys, values = [float(given.read(scale)) for scale in scales] or (1.0, 1.0)
        serve_cache(model.get_submodule(name), (keys, values))
    rows: dict[HFName, Tensor] = {}
    for name, pieces in binding.items():
        if name.endswith("weight") and scheme_of(pieces[0]):
            module = model.get_submodule(f"{path}{name.rpartition('.')[0]}")
            rows |= _rows(module.weight.data, pieces)
            # What is compressed is not rounded again.
            module.quantization_status = QuantizationStatus.COMPRESSED
    for unit in _units(binding):
        deque(_served(plan, unit, given, rows, _reader(plan, unit, rows, given)), maxlen=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedRows:
    """A weight of the finished checkpoint, and the rows of a linear layer that have its place.

    Attributes:
        module: the linear layer, by its path under the layer or block.
        rows: of its weight.
        tensor: what the plan says.
        values: [N, K], decompressed.
    """

    module: str
    rows: slice
    tensor: TensorPlan
    values: Tensor


def served_rows(model: Any, plan: Plan, binding: Binding, path: str, given: Calibrations) -> Iterator[ServedRows]:
    """What `serve_weights` puts into the quantized modules, without doing it; the arguments are the same."""
    rows: dict[HFName, Tensor] = {}
    places: dict[HFName, tuple[str, slice, TensorPlan]] = {}
    for name, pieces in binding.items():
        if not (name.endswith("weight") and scheme_of(pieces[0])):
            continue
        module, first = name.rpartition(".")[0], 0
        for piece, (disk, weight) in zip(
            pieces, _rows(model.get_submodule(f"{path}{module}").weight.data, pieces), strict=True
        ):
            rows[disk] = weight
            places[disk] = module, slice(first, first + len(weight)), piece.tensor
            first += len(weight)
    for unit in _units(binding):
        for group in packed_groups(plan, unit, given, device=_device(rows), read=_reader(plan, unit, rows, given)):
            for packed in group:
                module, own, tensor = places[packed.module]
                values = decompressed(SCHEMES[unit[0].scheme], packed, rows[packed.module].shape)
                yield ServedRows(module=module, rows=own, tensor=tensor, values=values)


def serve_tuned(model: Any, plan: Plan, binding: Binding, given: Calibrations) -> Iterator[PackedModule]:
    """Round the weights that training has left in the quantized modules of an MTP block; others stay as they are.

    Args:
        model: the block, after `serve_weights`.
        plan: with the tensors that are tuned.
        binding: of the block.
        given: static input scales.

    Returns: each module as it is written, once its weight in the model is what a server reads from that.

    Raises:
        CheckpointError: a weight is not finite.
    """
    rows: dict[HFName, Tensor] = {}
    for name, pieces in binding.items():
        if name.endswith("weight") and scheme_of(pieces[0]) and pieces[0].tensor.tuned:
            rows |= _rows(model.get_submodule(name.rpartition(".")[0]).weight.data, pieces)

    def read(tensor: TensorPlan, expert: int | None) -> Sequence[Tensor]:
        return [rows[module] for module in _modules_of(tensor, expert)]

    for unit in _units(binding):
        if unit[0].tuned:
            yield from _served(plan, unit, given, rows, read)


def _served(
    plan: Plan, unit: Sequence[TensorPlan], given: Calibrations, rows: Mapping[HFName, Tensor], read: ReadWeights
) -> Iterator[PackedModule]:
    """Each module of a unit packed, and then decompressed into its rows of the model."""
    for group in packed_groups(plan, unit, given, device=_device(rows), read=read):
        for packed in group:
            weight_NK = rows[packed.module]
            weight_NK.copy_(decompressed(SCHEMES[unit[0].scheme], packed, weight_NK.shape))
            yield packed


def decompressed(scheme: Scheme, packed: PackedModule, shape: Sequence[int]) -> Tensor:
    """A packed weight as values: [N, K], BF16, on the device of its tensors."""
    form = "fp8_block" if scheme.block else _FORMS[scheme.format]
    return dequantize(form, packed.tensors, shape=tuple(shape), block=scheme.block)


def _rows(weight: Tensor, pieces: Sequence[Piece]) -> Iterator[tuple[HFName, Tensor]]:
    """Module on disk -> its rows in a weight of the model."""
    sizes = [piece.tensor.shape[-2] // max(1, len(piece.tensor.stacked)) for piece in pieces]
    return zip((piece.module for piece in pieces), weight.split(sizes), strict=True)


def _units(binding: Binding) -> list[list[TensorPlan]]:
    """The quantized tensors of a layer by unit, each once."""
    units: dict[str, dict[HFName, TensorPlan]] = {}
    for piece in (piece for pieces in binding.values() for piece in pieces):
        if scheme_of(piece):
            units.setdefault(piece.tensor.unit, {})[piece.tensor.name] = piece.tensor
    return [list(members.values()) for members in units.values()]


def _device(rows: Mapping[HFName, Tensor]) -> torch.device:
    return next(iter(rows.values())).device


def _reader(plan: Plan, unit: Sequence[TensorPlan], rows: Mapping[HFName, Tensor], given: Calibrations) -> ReadWeights:
    """Reads a unit's weights: from the model, which has them already, or from the source where the model changed them.

    The model computes in BF16, so an F32 weight is not there as the source holds it.
    """
    source = from_source(plan, _device(rows))
    is_changed = any(output.name in given for t in unit for output in t.outputs if ".weight" in output.name)
    if is_changed or any(t.form == "plain" and plan.entries[t.inputs[0]].dtype != "BF16" for t in unit):
        return source

    def read(tensor: TensorPlan, expert: int | None) -> Sequence[Tensor]:
        weights = [rows[module] for module in _modules_of(tensor, expert)]
        return weights if all(weight.dtype == torch.bfloat16 for weight in weights) else source(tensor, expert)

    return read


def _modules_of(tensor: TensorPlan, expert: int | None) -> list[HFName]:
    """The modules that a tensor, or one expert of a stack, becomes."""
    parts = range(len(tensor.stacked) or 1)
    return [Piece(tensor=tensor, expert=expert, part=part).module for part in parts]
