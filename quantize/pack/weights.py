"""Reads weights of a source as the plan names them: in floating point, whatever form they are
stored in.

In: a plan over a local source, and one of its tensors. Out: the weight [N, K] (or a parameter of
any shape), dequantized if the source stores it packed. The writer packs what this returns, and
calibration computes with it.

Easy to get wrong: the tensors of a packed weight have the module's name and differ in the last
component only.
"""

import torch
from torch import Tensor

from ...checkpoints.dequantize import dequantize
from ...checkpoints.safetensors_file import Entry
from ...checkpoints.values import read_bytes, read_tensor, typed
from ..plan.plan import Plan, TensorPlan

CPU = torch.device("cpu")


def load(plan: Plan, tensor: TensorPlan, device: torch.device = CPU) -> Tensor:
    """A tensor of the plan in floating point (integers and the like as they are).

    Args:
        plan: a plan over a local source.
        tensor: its shape is the logical one, `tensor.shape`.
        device: where it is dequantized, and stays; packed, it is a fraction of the size to move.

    Returns: the weight; dequantized forms come as BF16, plain ones in their own dtype.
    """
    found = stored(plan, tensor)
    on_device = {leaf: value.to(device, non_blocking=True) for leaf, value in found.items()}
    return dequantize(tensor.form, on_device, shape=tensor.shape, block=tensor.block)


def separate(weight_NK: Tensor, slices: tuple[int, ...]) -> tuple[Tensor, ...]:
    """q, k and v of a matrix whose rows are interleaved (`TensorPlan.slices`), each with its rows
    in order.
    """
    parts_of_slices = weight_NK.unflatten(0, (-1, sum(slices))).split(slices, dim=1)
    return tuple(part.flatten(0, 1) for part in parts_of_slices)


def load_expert(plan: Plan, tensor: TensorPlan, expert: int, device: torch.device = CPU) -> Tensor:
    """One expert's slice [N, K] of a stacked parameter [E, N, K], without reading the others."""
    entry = plan.entries[tensor.inputs[0]]
    num_bytes = entry.num_bytes // tensor.shape[0]
    raw = read_bytes(plan.source, entry, offset=expert * num_bytes, length=num_bytes)
    return typed(raw, entry.dtype, tensor.shape[1:]).to(device)


def stored(plan: Plan, tensor: TensorPlan) -> dict[str, Tensor]:
    """The tensors a weight is stored as, by the last component of their names."""
    return {leaf: read_tensor(plan.source, entry) for leaf, entry in parts(plan, tensor).items()}


def parts(plan: Plan, tensor: TensorPlan) -> dict[str, Entry]:
    """Where the tensors of a weight are in the source, by the last component of their names."""
    return {name.rpartition(".")[2]: plan.entries[name] for name in tensor.inputs}
