"""Compares dtypes and shapes on disk with those that vLLM builds.

In: what vLLM builds, and a stored weight that has all the tensors for it. Out: the first tensor that does not fit.

Easy to get wrong: vLLM's `copy_` accepts every dtype. FP8 bytes that are stored as U8 become the numbers 0 to 255.
"""

from collections.abc import Mapping

from ...checkpoints.safetensors_file import Entry
from ...checkpoints.stored import FLOATS, StoredWeight
from .vllm_module import VLLMModule

_SCALAR = ((), (1,))
_AGAIN = "Quantize this weight again"


Problem = tuple[str, str, str]
"""(leaf, what happens, cure)"""


def leaves_built(built: VLLMModule, weight: StoredWeight) -> Mapping[str, Entry]:
    """The weight's tensors by the names of vLLM's parameters."""
    return {built.renames.get(leaf, leaf): entry for leaf, entry in weight.parts.items()}


def name_of_leaf(built: VLLMModule, weight: StoredWeight, leaf: str) -> str:
    """The tensor on disk of a parameter, also of one that is not there."""
    entry = leaves_built(built, weight).get(leaf)
    return f"{weight.module}.{leaf}" if entry is None else entry.name


def layout_problem(built: VLLMModule, weight: StoredWeight) -> Problem | None:
    """A dtype or shape that vLLM's parameter does not have."""
    parts = leaves_built(built, weight)
    if built.form in ("gptq", "awq"):
        return _transposed_problem(built, parts)
    return _weight_problem(built, parts) or _scale_problem(built, parts) or _scalar_problem(parts)


def _weight_problem(built: VLLMModule, parts: Mapping[str, Entry]) -> Problem | None:
    leaf = _weight_leaf(built)
    entry, dtypes = parts[leaf], _DTYPES[built.form][0]
    if len(entry.shape) != 2:
        return leaf, f"{leaf} has shape {list(entry.shape)}, no matrix: vLLM raises", _AGAIN
    if entry.dtype not in dtypes:
        return (
            leaf,
            f"{leaf} is {entry.dtype}, not {dtypes[0]}: vLLM's copy_ converts the bytes as numbers, in silence",
            f"Store it as {dtypes[0]} (a view of the same bytes)",
        )
    return None


def _scale_problem(built: VLLMModule, parts: Mapping[str, Entry]) -> Problem | None:
    """Of the scale that follows the weight's shape; the weight itself is a matrix of the right dtype."""
    leaf = "weight_scale_inv" if "weight_scale_inv" in built.leaves else "weight_scale"
    scale, shape_NK = parts[leaf], parts[_weight_leaf(built)].shape
    _, per_element, dtypes = _DTYPES[built.form]
    if built.form == "mxfp4" and "weight_packed" in built.leaves:
        dtypes = ("U8",)  # only the loaders of DeepSeek-V4 take the bytes of E8M0 as they are
    if scale.dtype not in dtypes:
        return (
            leaf,
            f"{leaf} is {scale.dtype}, not {dtypes[0]}: vLLM's copy_ converts the bytes as numbers, in silence",
            f"Store it as {dtypes[0]}",
        )
    n, k = shape_NK[0], shape_NK[1] * (32 // built.bits if built.form == "int_packed" else per_element)
    if built.group_size and k % built.group_size:
        return (
            leaf,
            f"its {k} input channels are no multiple of the group of {built.group_size}: vLLM "
            "raises, or its kernel reads past the scales",
            "Leave this module in BF16",
        )
    wanted = [shape for shape in _scale_shapes(built, n, k) if built.scale_ndim in (0, len(shape))]
    if scale.shape not in wanted:
        return (
            leaf,
            f"{leaf} has shape {list(scale.shape)} where {list(wanted[0])} is built: a linear "
            "module raises, routed experts load in silence",
            _AGAIN,
        )
    return _zero_point_problem(built, parts.get("weight_zero_point"), n, scale.shape)


def _zero_point_problem(built: VLLMModule, zero: Entry | None, n: int, scales: tuple[int, ...]) -> Problem | None:
    """Of the codes that mean 0, packed along the outputs."""
    if zero is None or "weight_zero_point" not in built.leaves:
        return None
    wanted = (-(-n * built.bits // 32), scales[1])
    if zero.dtype == "I32" and zero.shape == wanted:
        return None
    says = f"weight_zero_point is {zero.dtype}{list(zero.shape)} where I32{list(wanted)} is built: a linear module"
    return "weight_zero_point", f"{says} raises, routed experts load in silence", _AGAIN


def _transposed_problem(built: VLLMModule, parts: Mapping[str, Entry]) -> Problem | None:
    """GPTQ's and AWQ's matrices, [inputs, outputs]: GPTQ packs the inputs, AWQ the outputs."""
    packed, scales = parts["qweight"], parts["scales"]
    if packed.dtype != "I32":
        return "qweight", f"qweight is {packed.dtype}, not I32: vLLM's copy_ converts the bytes as numbers", _AGAIN
    if len(packed.shape) != 2 or len(scales.shape) != 2:
        return "qweight", f"qweight has shape {list(packed.shape)}, no matrix: vLLM raises", _AGAIN
    pack = 32 // built.bits
    inputs, outputs = packed.shape[0] * (pack if built.form == "gptq" else 1), scales.shape[1]
    groups = inputs // built.group_size if built.group_size else 1
    wanted = {
        "qweight": (inputs // pack, outputs) if built.form == "gptq" else (inputs, outputs // pack),
        "scales": (groups, outputs),
        "qzeros": (groups, outputs // pack),
    }
    for leaf, shape in wanted.items():
        if leaf in parts and parts[leaf].shape != shape:
            says = f"{leaf} has shape {list(parts[leaf].shape)} where {list(shape)} is built: vLLM raises"
            return leaf, says, "Make bits and group_size say what the files hold"
    return None


def _scalar_problem(parts: Mapping[str, Entry]) -> Problem | None:
    for leaf in ("weight_global_scale", "input_global_scale", "weight_scale_2", "input_scale", "input_scale_2"):
        entry = parts.get(leaf)
        if entry is not None and entry.shape not in _SCALAR:
            return leaf, f"{leaf} has shape {list(entry.shape)} where one number is built: vLLM raises", _AGAIN
        if entry is not None and entry.dtype not in FLOATS:
            return leaf, f"{leaf} is {entry.dtype}, not F32: vLLM's copy_ converts the bytes as numbers", _AGAIN
    return None


def _weight_leaf(built: VLLMModule) -> str:
    return "weight_packed" if "weight_packed" in built.leaves else "weight"


_DTYPES: dict[str, tuple[tuple[str, ...], int, tuple[str, ...]]] = {
    # form: dtypes of the weight, elements in one of them, dtypes of the scale (the usual one first)
    "nvfp4": (("U8",), 2, ("F8_E4M3",)),
    "nvfp4_modelopt": (("U8",), 2, ("F8_E4M3",)),
    "mxfp4": (("U8", "I8"), 2, ("U8", "F8_E8M0")),
    "mxfp8": (("F8_E4M3",), 1, ("U8", "F8_E8M0")),
    "fp8_block": (("F8_E4M3",), 1, ("F32", "BF16", "F16", "F8_E8M0")),
    "fp8_channel": (("F8_E4M3",), 1, ("F32", "BF16", "F16")),
    "fp8_tensor": (("F8_E4M3",), 1, ("F32", "BF16", "F16")),
    "int_packed": (("I32",), 1, ("BF16", "F16", "F32")),
    "int8": (("I8",), 1, ("BF16", "F16", "F32")),
}


def _scale_shapes(built: VLLMModule, n: int, k: int) -> tuple[tuple[int, ...], ...]:
    if built.block:
        rows, columns = -(-n // built.block[0]), -(-k // built.block[1])
        return ((rows, columns), (rows, 1, columns, 1))
    if built.group_size:
        return ((n, k // built.group_size),)
    if built.form == "fp8_tensor":
        return _SCALAR
    return ((n, 1), (n,))
