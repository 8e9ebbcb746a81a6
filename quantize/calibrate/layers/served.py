"""Puts the weights that a server will have into a layer, in place of those it was calibrated with.

In: a layer or MTP block that was calibrated, its binding, and what calibration found. Out: the same
module, each quantized weight decompressed from the very tensors that the writer puts into the file
(`unit.packed_groups`).

Easy to get wrong: this cannot be undone. Whatever needs the weights as they were comes before.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from compressed_tensors.quantization import QuantizationStatus
from torch import Tensor

from ....checkpoints.dequantize import dequantize
from ....recipes.family import HFName
from ....recipes.schemes import SCHEMES, Scheme
from ...pack.unit import Calibrations, PackedModule, from_source, packed_groups
from ...plan.plan import Plan
from ...plan.tensor_plan import TensorPlan
from ..model.binding import Binding, Piece, scheme_of
from .caches import serve_cache
from .work import LayerWork


class InMemory(dict[HFName, Tensor]):
    """What calibration found in one layer, in the names of the finished checkpoint, before it is on
    disk.
    """

    def read(self, name: HFName) -> Tensor:
        """One tensor."""
        return self[name]


def serve_weights(model: Any, plan: Plan, work: LayerWork, given: Calibrations) -> None:
    """Give the quantized modules of a layer the weights of the finished checkpoint, one fused group
    at a time.

    Attention whose cache is FP8 gets the scales that it is rounded by.

    Args:
        model: calibrated; its modules have their weights.
        plan: over a local source.
        work: on the layer or block.
        given: what calibration found.

    Raises:
        CheckpointError: a weight is not finite.
    """
    serve_scales(model, work, given)
    for served in served_rows(model, plan, work.binding, work.path, given):
        served.weight.copy_(served.values)


def serve_scales(model: Any, work: LayerWork, given: Calibrations) -> None:
    """What `serve_weights` does where the weights are served already."""
    for name, scales in work.caches.items():
        of_keys = 1.0
        of_values = 1.0
        if scales:
            of_keys, of_values = (float(given.read(scale)) for scale in scales)
        serve_cache(model.get_submodule(name), (of_keys, of_values))
    for name in work.schemes:
        # What is compressed is not rounded again.
        model.get_submodule(name).quantization_status = QuantizationStatus.COMPRESSED


def serve_tuned(
    model: Any, plan: Plan, binding: Binding, given: Calibrations
) -> Iterator[PackedModule]:
    """Round the weights that training has left in the quantized modules of an MTP block; others
    stay as they are.

    Args:
        model: the block, after `serve_weights`.
        plan: with the tensors that are tuned.
        binding: of the block.
        given: static input scales.

    Returns: each module as it is written, once its weight in the model is what a server reads from
    that.

    Raises:
        CheckpointError: a weight is not finite.
    """
    tuned = {name: pieces for name, pieces in binding.items() if pieces[0].tensor.tuned}
    for served in served_rows(model, plan, tuned, "", given, from_model=True):
        served.weight.copy_(served.values)
        yield served.packed


class ServedRows(NamedTuple):
    """A weight of the finished checkpoint, and the rows of a linear layer that have its place.

    Attributes:
        module: the linear layer, by its path under the layer or block.
        rows: of its weight.
        tensor: what the plan says.
        weight: a view of these rows in the model.
        packed: what the writer writes.
        values: [N, K], decompressed.
    """

    module: str
    rows: slice
    tensor: TensorPlan
    weight: Tensor
    packed: PackedModule
    values: Tensor


def served_rows(
    model: Any,
    plan: Plan,
    binding: Binding,
    path: str,
    given: Calibrations,
    *,
    from_model: bool = False,
) -> Iterator[ServedRows]:
    """What `serve_weights` puts into the quantized modules, one fused group at a time, without
    doing it.

    Args:
        model: its modules have their weights.
        plan: over a local source.
        binding: of the layer or block.
        path: its path in the model, with a dot; "" for the model itself.
        given: what calibration found.
        from_model: pack the weights that are there, also where the source has others.
    """
    places: dict[HFName, tuple[str, slice, TensorPlan, Tensor]] = {}
    units: dict[str, dict[HFName, TensorPlan]] = defaultdict(dict)
    for name, pieces in binding.items():
        for piece in pieces:
            if scheme_of(piece):
                units[piece.tensor.unit][piece.tensor.name] = piece.tensor
        if not (name.endswith("weight") and scheme_of(pieces[0])):
            continue
        # A linear of the model may be several tensors on disk, each with scales of its own; and a
        # stack on disk is many linears.
        module = name.rpartition(".")[0]
        first = 0
        weight = model.get_submodule(f"{path}{module}").weight.data
        for piece in pieces:
            rows = slice(first, first + piece.tensor.shape[-2] // max(1, len(piece.tensor.stacked)))
            places[piece.module] = module, rows, piece.tensor, weight[rows]
            first = rows.stop

    device = next((weight.device for *_, weight in places.values()), torch.device("cpu"))
    source = from_source(plan, device)

    def read(tensor: TensorPlan, expert: int | None) -> Sequence[Tensor]:
        """From the model where it has what the source has: it computes in BF16."""
        weights = []
        for part in range(max(1, len(tensor.stacked))):
            piece = Piece(tensor=tensor, expert=expert, part=part)
            *_, weight = places[piece.module]
            if not from_model and weight.dtype != torch.bfloat16:
                return source(tensor, expert)
            weights.append(weight)
        return weights

    for members in units.values():
        unit = [*members.values()]
        scheme = SCHEMES[unit[0].scheme]
        reads = read
        if not from_model and not _has_source_weights(plan, unit, given):
            reads = source
        for group in packed_groups(plan, unit, given, device=device, read=reads):
            for packed in group:
                module, rows, tensor, weight = places[packed.module]
                values = decompressed(scheme, packed, weight.shape)
                yield ServedRows(module, rows, tensor, weight, packed, values)


def _has_source_weights(plan: Plan, unit: Sequence[TensorPlan], given: Calibrations) -> bool:
    """Whether a model in BF16 has what the source has: calibration rewrites some weights, and a
    plain tensor may be of another dtype on disk.
    """
    for tensor in unit:
        if tensor.form == "plain" and plan.entries[tensor.inputs[0]].dtype != "BF16":
            return False
        for output in tensor.outputs:
            if ".weight" in output.name and output.name in given:
                return False
    return True


def decompressed(scheme: Scheme, packed: PackedModule, shape: Sequence[int]) -> Tensor:
    """A packed weight as values: [N, K], BF16, on the device of its tensors."""
    parts = {}
    for spec in scheme.weight_tensors(*shape):  # a table's have their other names, too
        parts[spec.suffix] = packed.tensors[spec.suffix]
    return dequantize(scheme.form, parts, shape=tuple(shape), block=scheme.block)
