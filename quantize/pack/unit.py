"""The tensors that a quantized unit of the plan becomes: the one place where weights are packed.

In: a unit (the members of one fused group, or a whole stack of experts), and what calibration gave.
Out: the tensors of each module. The writer puts them into the file; calibration decompresses them
into the model that it measures.

Easy to get wrong: a second way to round a weight. A measurement with weights that were rounded
otherwise than those in the file describes a checkpoint that nobody has.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ...checkpoints.stored import scale_of, weight_of
from ...recipes.errors import CheckpointError
from ...recipes.family import HFName
from ...recipes.schemes import SCHEMES
from ..plan.plan import Plan
from ..plan.tensor_plan import Output, TensorPlan, importance_of
from .mxfp4_to_nvfp4 import mxfp4_as_nvfp4
from .pack import pack
from .weights import load, load_expert, stored


class Calibrations(Protocol):
    """What calibration gave, by names in the finished checkpoint."""

    def __contains__(self, name: object, /) -> bool: ...

    def read(self, name: HFName) -> Tensor:
        """One tensor, on any device."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedModule:
    """One module as it is written.

    Attributes:
        module: its name in the finished checkpoint.
        outputs: what the plan says of its tensors.
        tensors: by the last component of their names.
    """

    module: HFName
    outputs: tuple[Output, ...]
    tensors: Mapping[str, Tensor]


ReadWeights = Callable[[TensorPlan, int | None], Sequence[Tensor]]
"""The weights of the modules that a tensor of the plan, or one expert of a stack, becomes: [N, K]
in floating point.
"""


def packed_groups(
    plan: Plan,
    unit: Sequence[TensorPlan],
    given: Calibrations,
    *,
    device: torch.device,
    read: ReadWeights | None = None,
) -> Iterator[list[PackedModule]]:
    """Pack a unit whose fate is `quantize`, one fused group at a time.

    Args:
        plan: over a local source.
        unit: a member of `plan.units`.
        given: takes the place of what would be packed from the source.
        device: where weights are packed.
        read: gives weights as the source holds them; by default they are read from there.

    Returns: a group for each expert of a stack, otherwise one.

    Raises:
        CheckpointError: a weight is not finite; the message names the unit.
    """
    static = tuple(f".{spec.suffix}" for spec in SCHEMES[unit[0].scheme].extra)
    read = read or from_source(plan, device)
    stacked = any(tensor.stacked for tensor in unit)
    experts: Sequence[int | None] = range(unit[0].shape[0]) if stacked else [None]
    for expert in experts:
        modules: dict[HFName, list[Output]] = defaultdict(list)
        for tensor in unit:
            first, last = 0, len(tensor.outputs)
            if expert is not None:
                last //= tensor.shape[0]
                first, last = expert * last, (expert + 1) * last
            for output in tensor.outputs[first:last]:
                modules[HFName(output.name.rpartition(".")[0])].append(output)
        names = [output.name for outputs in modules.values() for output in outputs]
        computed: Sequence[Mapping[str, Tensor]] = [{}] * len(modules)
        # Where an algorithm rewrote every weight of the group, nothing is left to be packed.
        if not all(name in given for name in names if not name.endswith(static)):
            importance = [_importance(name, given) for name in modules] if unit[0].weighted else []
            computed = _packed(plan, unit, expert, device, read, importance)
        group = []
        for (name, outputs), own in zip(modules.items(), computed, strict=True):
            tensors = {}
            for output in outputs:  # what calibration gave comes first
                leaf = output.name.rpartition(".")[2]
                tensors[leaf] = given.read(output.name) if output.name in given else own[leaf]
            group.append(PackedModule(module=name, outputs=tuple(outputs), tensors=tensors))
        yield group


def from_source(plan: Plan, device: torch.device) -> ReadWeights:
    """Reads weights from the plan's source, one expert of a stack without the others."""

    def read(tensor: TensorPlan, expert: int | None) -> Sequence[Tensor]:
        if expert is None:
            return [load(plan, tensor, device)]
        return load_expert(plan, tensor, expert, device).chunk(len(tensor.stacked))

    return read


def _packed(
    plan: Plan,
    unit: Sequence[TensorPlan],
    expert: int | None,
    device: torch.device,
    read: ReadWeights,
    importance: Sequence[Tensor],
) -> list[dict[str, Tensor]]:
    """The weights of one fused group, without rounding where source and scheme have the same
    codes.
    """
    scheme = SCHEMES[unit[0].scheme]
    if scheme.format == "nvfp4-pack-quantized" and all(tensor.form == "mxfp4" for tensor in unit):
        members = [
            {leaf: value.to(device) for leaf, value in stored(plan, tensor).items()}
            for tensor in unit
        ]
        exact = mxfp4_as_nvfp4([(weight_of(member), scale_of(member)) for member in members])
        if exact is not None:
            return exact
    weights = [weight for tensor in unit for weight in read(tensor, expert)]
    try:
        return pack(scheme, weights, search=plan.recipe.search or "", importance=importance)
    except CheckpointError as error:
        names = ", ".join(tensor.name for tensor in unit)
        raise error.at(f"{plan.source.where}: {names}") from error


def _importance(module: HFName, given: Calibrations) -> Tensor:
    """How much each input channel of a module counts, F32 [K].

    Raises:
        CheckpointError: a value is no such number; by then the layer's activations have been found
            to be finite.
    """
    name = importance_of(module)
    found = given.read(name)
    if not bool((found >= 0).all() & found.isfinite().all()):
        rule, cure = (
            "every value must be finite and not negative",
            "Remove search: imatrix, or use search: mse",
        )
        raise CheckpointError(name, rule, got="NaN, Inf or a negative number", cure=cure)
    return found
