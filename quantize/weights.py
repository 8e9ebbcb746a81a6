"""Reads weights of a source as the plan names them: in floating point, whatever form they are stored in.

In: a plan over a local source, and one of its tensors. Out: the weight [N, K] (or a parameter of any shape),
dequantized if the source stores it packed. The writer packs what this returns, and calibration computes with it.

Easy to get wrong: a packed weight's parts share the module's name and differ in the last component only, and each
convention has its own word for the scale.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..checkpoints import dequantize
from ..checkpoints.source import Entry, read
from .plan import Plan, TensorPlan

TORCH_DTYPES: Mapping[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
}

CPU = torch.device("cpu")


def load(plan: Plan, tensor: TensorPlan, device: torch.device = CPU) -> Tensor:
    """A tensor of the plan in floating point (integers and the like as they are).

    Args:
        plan: a plan over a local source.
        tensor: its shape is the logical one, `tensor.shape`.
        device: where it is dequantized, and lies afterwards; packed, it is a fraction of the size to move.

    Returns: the weight; dequantized forms come as BF16, plain ones in their own dtype.
    """
    parts = {leaf: value.to(device) for leaf, value in stored(plan, tensor).items()}
    weight = weight_of(parts)
    if tensor.form == "plain":
        return weight
    scale = scale_of(parts)
    match tensor.form:
        case "fp8_block":
            assert tensor.block is not None
            return dequantize.fp8_block(weight, scale, tensor.block)
        case "fp8_channel" | "fp8_tensor" | "int8":
            return dequantize.fp8_channel(weight, scale)
        case "mxfp4":
            return dequantize.mxfp4(weight, scale)
        case "nvfp4":
            return dequantize.nvfp4(weight, scale, parts["weight_global_scale"], divisor=True)
        case "nvfp4_modelopt":
            return dequantize.nvfp4(weight, scale, parts["weight_scale_2"], divisor=False)
        case "int_packed":
            bits = 32 * weight.shape[1] // tensor.shape[1]
            return dequantize.int_packed(weight, scale, bits, (tensor.shape[0], tensor.shape[1]))
        case form:
            raise AssertionError(f"{tensor.name}: the plan let form {form} through")


def load_expert(plan: Plan, tensor: TensorPlan, expert: int) -> Tensor:
    """One expert's slice [N, K] of a stacked parameter [E, N, K], without reading the others."""
    entry = plan.entries[tensor.inputs[0]]
    num_bytes = entry.num_bytes // tensor.shape[0]
    raw = read_bytes(plan, entry, offset=expert * num_bytes, length=num_bytes)
    return typed(raw, entry.dtype, tensor.shape[1:])


def stored(plan: Plan, tensor: TensorPlan) -> dict[str, Tensor]:
    """The tensors a weight is stored as, by the last component of their names."""
    entries = parts(plan, tensor)
    return {leaf: typed(read_bytes(plan, entry), entry.dtype, entry.shape) for leaf, entry in entries.items()}


def parts(plan: Plan, tensor: TensorPlan) -> dict[str, Entry]:
    """Where the tensors of a weight lie, by the last component of their names."""
    return {name.rpartition(".")[2]: plan.entries[name] for name in tensor.inputs}


def weight_of(parts: Mapping[str, Any]) -> Any:
    """The weight among a module's parts; a plain parameter is its own."""
    return next((parts[leaf] for leaf in ("weight_packed", "weight") if leaf in parts), next(iter(parts.values())))


def scale_of(parts: Mapping[str, Any]) -> Any:
    """The first scale among a module's parts."""
    return next(parts[leaf] for leaf in ("weight_scale_inv", "weight_scale", "scale") if leaf in parts)


def read_bytes(plan: Plan, entry: Entry, *, offset: int = 0, length: int | None = None) -> Tensor:
    """Bytes of a source tensor, U8; not zeroed first, which would cost as much as reading them."""
    raw = torch.empty(entry.num_bytes - offset if length is None else length, dtype=torch.uint8)
    read(plan.source, entry, raw.numpy().data, offset=offset)
    return raw


def typed(raw: Tensor, dtype: str, shape: tuple[int, ...]) -> Tensor:
    """Raw bytes as a tensor of a safetensors dtype."""
    return raw.view(TORCH_DTYPES[dtype]).reshape(shape)
