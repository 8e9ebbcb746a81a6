"""The tensors that a quantized unit of the plan becomes: the one place where weights are read and
packed.

In: a unit (the members of one fused group, or a whole stack of experts), and what calibration gave.
Out: the tensors of each module. The writer puts them into the file; calibration decompresses them
into the model that it measures.

Easy to get wrong: a second way to round a weight. A measurement with weights that were rounded
otherwise than those in the file describes a checkpoint that nobody has. MXFP4 weights, as
DeepSeek-V4 releases them, become NVFP4 without rounding wherever their exponents let them: a block
whose largest code is 4 would get a scale of 4/6 and every code a new error.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, starmap
from typing import Protocol

import torch
from torch import Tensor

from ...checkpoints.dequantize import dequantize, refuse_odd_integers, refuse_other_order
from ...checkpoints.safetensors_file import Entry
from ...checkpoints.stored import WEIGHT_LEAVES, scale_of, weight_of
from ...checkpoints.values import read_bytes, read_parts, read_tensor, row_ranges, typed
from ...recipes.conventions import FORMATS, Change, in_compressed_tensors
from ...recipes.errors import CheckpointError
from ...recipes.family import HFName
from ...recipes.forms import GLOBAL_SCALE
from ...recipes.frozen import frozen
from ...recipes.schemes import SCHEMES
from ..plan.decide import served_at
from ..plan.plan import Plan
from ..plan.tensor_plan import Output, TensorPlan, batch_suffixes, same_output
from .pack import largest, pack, shared_scale

CPU = torch.device("cpu")
# E4M3 has the powers of two from 2**-9, its smallest subnormal, to 2**8.
_TOP = 8
_BOTTOM = -9
_MAGNITUDE_BITS = 0x77
# A slice on a CPU, whole blocks and whole words of zero points. glibc takes blocks over 32 MiB from
# the system each time, zeroed, which took as long as packing; those of a slice it keeps.
_ROWS = 256
# What the headers of integers do not show.
_SMALL = ("weight_shape", "qzeros", "g_idx")


class Calibrations(Protocol):
    """What calibration gave, by names in the finished checkpoint."""

    def __contains__(self, name: object, /) -> bool: ...

    def read(self, name: HFName) -> Tensor:
        """One tensor, on any device."""
        ...


@frozen
class PackedModule:
    """One module as it is written.

    Attributes:
        module: its name in the finished checkpoint.
        outputs: what the plan says of its tensors.
        tensors: by the last component of their names; of a slice, its rows and what is of the
            whole.
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
        read: gives weights as the source holds them, whole. By default they are read from there,
            a large matrix that is packed alone in slices of rows.

    Returns: a group for each expert of a stack, each part of a table and each slice in order,
        otherwise one.

    Raises:
        CheckpointError: a weight is not finite; the message names the unit.
    """
    static = batch_suffixes(unit[0].scheme)
    if unit[0].role == "table":
        yield from _table(plan, unit, device, read)
        return
    experts: Sequence[int | None] = [None]
    if unit[0].stacked:
        experts = range(unit[0].shape[0])
    for expert in experts:
        modules: dict[HFName, list[Output]] = defaultdict(list)
        is_given = True
        for tensor in unit:
            first = 0
            last = len(tensor.outputs)
            if expert is not None:
                last //= tensor.shape[0]
                first = expert * last
                last = (expert + 1) * last
            for output in tensor.outputs[first:last]:
                modules[HFName(output.name.rpartition(".")[0])].append(output)
                is_given &= output.name in given or output.name.endswith(static)
        computed: Iterable[Sequence[Mapping[str, Tensor]]] = [[{}] * len(modules)]
        # Where an algorithm rewrote every weight of the group, nothing is left to be packed.
        if not is_given:
            computed = _packed(plan, unit, expert, device, read)
        for packed in computed:
            group = []
            for (name, outputs), own in zip(modules.items(), packed, strict=True):
                tensors = {}
                for output in outputs:
                    leaf = output.name.rpartition(".")[2]
                    if output.name in given:  # what calibration gave comes first
                        tensors[leaf] = given.read(output.name)
                    else:
                        tensors[leaf] = own[leaf]
                group.append(PackedModule(module=name, outputs=tuple(outputs), tensors=tensors))
            yield group


def from_source(plan: Plan, device: torch.device) -> ReadWeights:
    """Reads weights from the plan's source, one expert of a stack without the others."""

    def read(tensor: TensorPlan, expert: int | None) -> Sequence[Tensor]:
        if expert is None:
            return [load(plan, tensor, device)]
        weight = load_rows(plan, tensor, expert, expert + 1, device)[0]
        return weight.chunk(len(tensor.stacked))

    return read


def _table(
    plan: Plan, unit: Sequence[TensorPlan], device: torch.device, read: ReadWeights | None
) -> Iterator[list[PackedModule]]:
    """An n-gram table part by part. It is read twice, because one scale is that of all parts: the
    published one has 100 GB.
    """
    scheme = SCHEMES[unit[0].scheme]
    look = read or from_source(plan, device)
    amax = list[Tensor]()
    for tensor in unit:
        try:
            amax.append(largest(look(tensor, None)))
        except CheckpointError as error:
            raise error.at(f"{plan.source.where}: {tensor.name}") from error
    shared = shared_scale(scheme, torch.stack(amax).amax())
    for tensor in unit:
        for (own,) in _packed(plan, [tensor], None, device, read, shared):
            if GLOBAL_SCALE in own:  # vLLM has modelopt's names and multiplier
                own["weight"] = own["weight_packed"]
                own["weight_scale_2"] = own[GLOBAL_SCALE].reciprocal()
            yield [PackedModule(module=tensor.module, outputs=tensor.outputs, tensors=own)]


def _packed(
    plan: Plan,
    unit: Sequence[TensorPlan],
    expert: int | None,
    device: torch.device,
    read: ReadWeights | None,
    shared: Mapping[str, Tensor] | None = None,
) -> Iterator[list[dict[str, Tensor]]]:
    """The weights of one fused group, without rounding where source and scheme have the same
    codes; or those of each slice.
    """
    scheme = SCHEMES[unit[0].scheme]
    if scheme.form == "nvfp4" and {tensor.form for tensor in unit} == {"mxfp4"}:
        members = []
        for tensor in unit:
            found = stored(plan, tensor)
            members.append((weight_of(found).to(device), scale_of(found).to(device)))
        exact = mxfp4_as_nvfp4(members)
        if exact is not None:
            yield exact
            return
    tensor = unit[0]
    shaped = torch.empty(1, device=device).expand(tensor.shape[-2:])
    slices = [*row_ranges(shaped, _ROWS)]
    is_alone = len(unit) == 1 and expert is None and tensor.form == "plain"
    try:
        if read is None and is_alone and len(slices) > 1:
            given = {"weight_shape": torch.tensor(tensor.shape), **(shared or {})}
            if shared is None and scheme.has_tensor_scale:
                # It needs a look at all rows before the first is packed.
                looked_at = (load_rows(plan, tensor, *rows, device) for rows in slices)
                given |= shared_scale(scheme, largest(looked_at))
            for rows in slices:
                yield pack(scheme, [load_rows(plan, tensor, *rows, device)], shared=given)
            return
        read = read or from_source(plan, device)
        weights = list[Tensor]()
        for tensor in unit:
            weights += read(tensor, expert)
        yield pack(scheme, weights, shared=shared)
    except CheckpointError as error:
        names = ", ".join(tensor.name for tensor in unit)
        raise error.at(f"{plan.source.where}: {names}") from error


# --- MXFP4 as NVFP4 -------------------------------------------------------------------------------


def mxfp4_as_nvfp4(members: Sequence[tuple[Tensor, Tensor]]) -> list[dict[str, Tensor]] | None:
    """The NVFP4 tensors with exactly the same values, one dict per member, or None if the exponents
    span too much.

    Args:
        members: (packed [N_i, K // 2] uint8 or int8, low nibble the even column; scale [N_i, K //
            32], E8M0 as uint8 or float8_e8m0fnu) of modules that share a global scale at run time.

    Returns: `weight_packed` uint8 [N, K // 2], `weight_scale` float8_e4m3fn [N, K // 16] and
        `GLOBAL_SCALE` F32 [1], a divisor: value = code * weight_scale / divisor.
    """
    exponents = list[Tensor]()
    used = list[Tensor]()
    for packed, scale in members:
        exponent = scale.view(torch.uint8).to(torch.int16) - 127
        exponents.append(exponent)
        blocks = (packed.view(torch.uint8) & _MAGNITUDE_BITS).unflatten(1, (exponent.shape[1], -1))
        # Blocks of zeros carry arbitrary exponents, and must not widen the range.
        used.append(exponent[blocks.ne(0).any(-1)])
    occupied = torch.cat(used)
    highest = 0
    if occupied.numel():
        highest = int(occupied.max())
        if highest - int(occupied.min()) > _TOP - _BOTTOM:
            return None
    shift = _TOP - highest
    found = []
    global_scale = occupied.new_full((1,), 2.0**shift, dtype=torch.float32)
    for (packed, _), exponent in zip(members, exponents, strict=True):
        # Powers of two become E4M3 without rounding.
        scale = (exponent + shift).clamp(_BOTTOM, _TOP).float().exp2().to(torch.float8_e4m3fn)
        tensors = {"weight_packed": packed.view(torch.uint8), GLOBAL_SCALE: global_scale}
        found.append(tensors | {"weight_scale": scale.repeat_interleave(2, dim=1)})
    return found


# --- weights of a source as the plan names them ---------------------------------------------------


def load(plan: Plan, tensor: TensorPlan, device: torch.device = CPU) -> Tensor:
    """A tensor of the plan in floating point (integers and the like as they are).

    Args:
        plan: a plan over a local source.
        tensor: its shape is the logical one, `tensor.shape`.
        device: where it is dequantized, and stays; packed, it is a fraction of the size to move.

    Returns: the weight; dequantized forms come as BF16, plain ones in their own dtype.
    """
    on_device = dict[str, Tensor]()
    for leaf, value in stored(plan, tensor).items():
        on_device[leaf] = value.to(device, non_blocking=True)
    return dequantize(
        tensor.form, on_device, shape=tensor.shape, block=tensor.block, where=tensor.module
    )


def refuse_other_integers(plan: Plan) -> None:
    """Refuse integers that are not what the headers and the config say: it takes a look at their
    small tensors, before a byte is written.

    Raises:
        CheckpointError: names the tensor; see `refuse_odd_integers` and `refuse_other_order`.
    """
    for tensor in chain(*chain(*[shard.units for shard in plan.written])):
        is_decoded = tensor.form == "int_packed" and tensor.fate != "keep"
        if plan.stays(tensor) or (not is_decoded and tensor.form != "gptq"):
            continue
        found = parts(plan, tensor).items()
        small = {leaf: entry for leaf, entry in found if leaf in _SMALL}
        read = read_parts(plan.source, small)
        where = f"{plan.source.where}: {tensor.module}"
        try:
            refuse_odd_integers(tensor.form, read, tensor.shape)
            refuse_other_order(tensor.form, read)
        except CheckpointError as error:
            raise error.at(where) from error


def with_dtypes(plan: Plan) -> Plan:
    """The plan of a checkpoint that gets another dialect, in which each scale that is written in
    another dtype is BF16, or F32 where that cannot hold its values.

    Raises:
        CheckpointError: a scale is re-expressed, and not positive and finite.
    """
    if plan.served is None or {plan.served.dialect.name, plan.recipe.format} != {*FORMATS}:
        return plan
    tensors = []
    for tensor in plan.tensors:
        if tensor.fate == "keep" and not plan.stays(tensor):
            outputs = tuple(starmap(partial(_with_dtype, plan), carried(plan, tensor)))
            tensor = tensor._replace(outputs=outputs)
        tensors.append(tensor)
    return replace(plan, tensors=tuple(tensors))


def _with_dtype(plan: Plan, output: Output, entry: Entry, change: Change) -> Output:
    other = plan.spelled.get(output.name)
    if other is not None:
        change = other.change
    if change == "none" or plan.on_disk(output) == same_output(entry):
        return output
    value = read_tensor(plan.source, entry).float()
    if not bool(((value > 0) & value.isfinite()).all()):
        raise CheckpointError(
            f"{plan.source.where}: {entry.name}",
            "a scale that is re-expressed must be positive and finite",
            got=f"{value.flatten().tolist()[:4]}",
            cure="See `keepmtp check --values`",
        )
    if change != "dtype":
        return output
    dtype = "F32"
    if torch.equal(value.bfloat16().float(), value):
        dtype = "BF16"
    return output._replace(dtype=dtype)


def separate(weight_NK: Tensor, slices: tuple[int, ...]) -> tuple[Tensor, ...]:
    """q, k and v of a matrix whose rows are interleaved (`TensorPlan.slices`), each with its rows
    in order.
    """
    parts_of_slices = weight_NK.unflatten(0, (-1, sum(slices))).split(slices, dim=1)
    return tuple(part.flatten(0, 1) for part in parts_of_slices)


def load_rows(
    plan: Plan, tensor: TensorPlan, first: int, last: int, device: torch.device
) -> Tensor:
    """Rows of a plain matrix, or experts of a stacked parameter [E, N, K], from the first to before
    the last, without reading the others.
    """
    entry = plan.entries[tensor.inputs[0]]
    num_bytes = entry.num_bytes // tensor.shape[0]
    length = (last - first) * num_bytes
    raw = read_bytes(plan.source, entry, offset=first * num_bytes, length=length)
    return typed(raw, entry.dtype, (last - first, *tensor.shape[1:])).to(device)


def stored(plan: Plan, tensor: TensorPlan) -> dict[str, Tensor]:
    """The tensors a weight is stored as, by the last component of their names."""
    return read_parts(plan.source, parts(plan, tensor))


def parts(plan: Plan, tensor: TensorPlan) -> dict[str, Entry]:
    """Where the tensors of a weight are in the source, by the last component of their names."""
    return {name.rpartition(".")[2]: plan.entries[name] for name in tensor.inputs}


def carried(plan: Plan, tensor: TensorPlan) -> Iterator[tuple[Output, Entry, Change]]:
    """Each output of a tensor that is kept or added, the tensor of the source that it is made from,
    and what becomes of its values in compressed-tensors' convention.
    """
    if not tensor.scheme:
        for output, name in zip(tensor.outputs, tensor.inputs, strict=True):
            yield output, plan.entries[name], "dtype"
        return
    found = parts(plan, tensor)
    weight = weight_of(found)
    # By their names in compressed-tensors' convention, and by their own.
    origins = dict[str, tuple[Entry, Change]]()
    served = served_at(plan.origins, weight)
    for leaf, entry in found.items():
        origins[leaf] = entry, "none"
        if served is not None and served.dialect.name == "modelopt":
            other = in_compressed_tensors(tensor.scheme, leaf, entry.dtype, entry.shape)
            origins[other.leaf] = entry, other.change
    for output in tensor.outputs:
        leaf = output.name.rpartition(".")[2]
        if leaf in WEIGHT_LEAVES:
            yield output, weight, "none"
            continue
        entry, change = origins.get(leaf) or (scale_of(found), "none")
        yield output, entry, change
