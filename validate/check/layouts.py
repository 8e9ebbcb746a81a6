"""Compares dtypes and shapes on disk with those that vLLM builds.

In: what vLLM builds, and a stored weight that has all the tensors for it. Out: the first tensor
that does not fit.

Easy to get wrong: vLLM's `copy_` accepts every dtype. FP8 bytes that are stored as U8 become the
numbers 0 to 255.
"""

from collections.abc import Mapping

from ...checkpoints.dialects.dialect import VLLMModule
from ...checkpoints.safetensors_file import Entry
from ...checkpoints.stored import FLOATS, Form, StoredWeight
from ...recipes.frozen import Shape

Problem = tuple[str, str, str]
"""(leaf, what happens, cure)"""

_SCALAR: tuple[Shape, ...] = ((), (1,))
_SCALARS = (
    "weight_global_scale",
    "input_global_scale",
    "weight_scale_2",
    "input_scale",
    "input_scale_2",
)
_AGAIN = "Quantize this weight again"


_U8, _FP8 = ("U8",), ("F8_E4M3",)
# How vLLM holds a form: dtypes of the weight, numbers in one element of it, dtypes of the scale;
# the usual dtype first.
_HELD: Mapping[Form, tuple[tuple[str, ...], int, tuple[str, ...]]] = {
    "nvfp4": (_U8, 2, _FP8),
    "nvfp4_modelopt": (_U8, 2, _FP8),
    "mxfp4": (("U8", "I8"), 2, ("U8", "F8_E8M0")),
    "mxfp8": (_FP8, 1, ("U8", "F8_E8M0")),
    "fp8_block": (_FP8, 1, ("F32", "BF16", "F16", "F8_E8M0")),
    "fp8_channel": (_FP8, 1, ("F32", "BF16", "F16")),
    "fp8_tensor": (_FP8, 1, ("F32", "BF16", "F16")),
    "int_packed": (("I32",), 1, FLOATS),
    "int8": (("I8",), 1, FLOATS),
}


def manner(weight: StoredWeight) -> str:
    """How a weight is stored, in words."""
    if weight.form == "plain":
        return f"plain {weight.weight.dtype}"
    if weight.form != "unknown":
        return f"{weight.form} ({', '.join(weight.parts)})"
    leaves = (f"{leaf} {entry.dtype}{list(entry.shape)}" for leaf, entry in weight.parts.items())
    return ", ".join(leaves)


def leaves_built(built: VLLMModule, weight: StoredWeight) -> Mapping[str, Entry]:
    """The weight's tensors by the names of vLLM's parameters."""
    if not built.renames:
        return weight.parts
    return {built.renames.get(leaf, leaf): entry for leaf, entry in weight.parts.items()}


def layout_problem(built: VLLMModule, weight: StoredWeight) -> Problem | None:
    """A dtype or shape that vLLM's parameter does not have."""
    parts = leaves_built(built, weight)
    is_transposed = built.form in ("gptq", "awq")
    for leaf in {"qweight", "scales", "weight_packed", "weight"} & built.leaves:
        if len(parts[leaf].shape) != 2:
            says = f"{leaf} has shape {list(parts[leaf].shape)}, no matrix: vLLM raises"
            return leaf, says, _AGAIN
    wanted = _transposed(built, parts) if is_transposed else _in_rows(built, parts)
    if isinstance(wanted, str):
        return _scale_leaf(built), wanted, "Leave this module in BF16"
    for leaf, (dtypes, shapes) in wanted.items():
        entry = parts.get(leaf)
        if entry is None:
            continue
        if entry.dtype not in dtypes:
            says = (
                f"{leaf} is {entry.dtype}, not {dtypes[0]}: vLLM's copy_ converts the bytes as "
                "numbers, in silence"
            )
            return leaf, says, f"Store it as {dtypes[0]} (a view of the same bytes)"
        if shapes and entry.shape not in shapes:
            says = f"{leaf} has shape {list(entry.shape)} where {list(shapes[0])} is built: "
            says += "a linear module raises, routed experts load in silence"
            return (
                leaf,
                says,
                "Make bits and group_size say what the files hold, or quantize this weight again",
            )
    return None


_Wanted = dict[str, tuple[tuple[str, ...], tuple[Shape, ...]]]
"""leaf -> dtypes and shapes that its parameter takes; no shape: any."""


def _in_rows(built: VLLMModule, parts: Mapping[str, Entry]) -> _Wanted | str:
    """The tensors of a weight [N, K] and of the scale that follows its shape, or why it cannot be
    built.
    """
    packed = "weight_packed" if "weight_packed" in built.leaves else "weight"
    dtypes, codes, scale_dtypes = _HELD[built.form]
    n, columns = parts[packed].shape
    k = columns * (32 // built.bits if built.form == "int_packed" else codes)
    if built.group_size and k % built.group_size:
        return (
            f"its {k} input channels are no multiple of the group of {built.group_size}: vLLM "
            "raises, or its kernel reads past the scales"
        )
    groups = k // built.group_size if built.group_size else 1
    shapes: tuple[Shape, ...] = ((n, groups),) if built.group_size else ((n, 1), (n,))
    if built.block:
        rows = -(-n // built.block[0])
        columns = -(-k // built.block[1])
        shapes = ((rows, columns), (rows, 1, columns, 1))
    elif built.form == "fp8_tensor":
        shapes = _SCALAR
    # Only the loaders of DeepSeek-V4 take the bytes of E8M0 as they are.
    if built.form == "mxfp4" and packed == "weight_packed":
        scale_dtypes = _U8
    wanted: _Wanted = {
        packed: (dtypes, ()),
        _scale_leaf(built): (
            scale_dtypes,
            tuple(s for s in shapes if built.scale_ndim in (0, len(s))),
        ),
        **dict.fromkeys(_SCALARS, (FLOATS, _SCALAR)),
    }
    if "weight_zero_point" in built.leaves:  # codes that mean 0, packed along the outputs
        wanted["weight_zero_point"] = (("I32",), ((-(-n * built.bits // 32), groups),))
    return wanted


def _transposed(built: VLLMModule, parts: Mapping[str, Entry]) -> _Wanted:
    """GPTQ's and AWQ's matrices, [inputs, outputs]: GPTQ packs the inputs, AWQ the outputs."""
    pack = 32 // built.bits
    rows = parts["qweight"].shape[0]
    outputs = parts["scales"].shape[1]
    inputs, packed = (
        (rows * pack, (rows, outputs)) if built.form == "gptq" else (rows, (rows, outputs // pack))
    )
    groups = inputs // built.group_size if built.group_size else 1
    return {
        "qweight": (("I32",), (packed,)),
        "scales": ((parts["scales"].dtype,), ((groups, outputs),)),
        "qzeros": (("I32",), ((groups, outputs // pack),)),
    }


def _scale_leaf(built: VLLMModule) -> str:
    return "weight_scale_inv" if "weight_scale_inv" in built.leaves else "weight_scale"
