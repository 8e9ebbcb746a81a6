"""dtypes and shapes of the tensors of each built form, against those on disk.

In: what vLLM builds, and a stored weight that has all the tensors for it. Out: the first one that does not fit.

Easy to get wrong: vLLM's `copy_` never complains about a dtype. FP8 bytes kept as U8 become the numbers 0 to 255.
"""

from ...checkpoints.stored import FLOATS, StoredWeight
from .vllm_module import Built

_SCALAR = ((), (1,))


def layout_problem(built: Built, weight: StoredWeight) -> tuple[str, str, str] | None:
    """A dtype or shape that vLLM's parameter does not have: (leaf, what happens, cure)."""
    parts = {built.renames.get(leaf, leaf): entry for leaf, entry in weight.parts.items()}
    main_leaf = "weight_packed" if "weight_packed" in built.leaves else "weight"
    scale_leaf = "weight_scale_inv" if "weight_scale_inv" in built.leaves else "weight_scale"
    main, scale = parts[main_leaf], parts[scale_leaf]
    again = "Quantize this weight again"
    if len(main.shape) != 2:
        return main_leaf, f"{main_leaf} has shape {list(main.shape)}, no matrix: vLLM raises", again
    dtypes, per_element, scale_dtypes = _DTYPES[built.form]
    if built.form == "mxfp4" and main_leaf == "weight_packed":
        scale_dtypes = ("U8",)  # only the loaders of DeepSeek-V4 take the bytes of E8M0 as they are
    if main.dtype not in dtypes:
        return (
            main_leaf,
            f"{main_leaf} is {main.dtype}, not {dtypes[0]}: vLLM's copy_ converts the bytes as numbers, in silence",
            f"Store it as {dtypes[0]} (a view of the same bytes)",
        )
    n, k = main.shape[0], main.shape[1] * (32 // built.bits if built.form == "int_packed" else per_element)
    if scale.dtype not in scale_dtypes:
        return (
            scale_leaf,
            f"{scale_leaf} is {scale.dtype}, not {scale_dtypes[0]}: vLLM's copy_ converts the bytes as "
            "numbers, in silence",
            f"Store it as {scale_dtypes[0]}",
        )
    if built.group_size and k % built.group_size:
        return (
            scale_leaf,
            f"its {k} input channels are no multiple of the group of {built.group_size}: vLLM "
            "raises, or its kernel reads past the scales",
            "Leave this module in BF16",
        )
    shapes = _scale_shapes(built, n, k)
    wanted = tuple(shape for shape in shapes if built.scale_ndim in (0, len(shape)))
    if scale.shape not in wanted:
        return (
            scale_leaf,
            f"{scale_leaf} has shape {list(scale.shape)} where {list(wanted[0])} is built: a linear "
            "module raises, routed experts load in silence",
            again,
        )
    for leaf in ("weight_global_scale", "input_global_scale", "weight_scale_2", "input_scale"):
        entry = parts.get(leaf)
        if entry is not None and entry.shape not in _SCALAR:
            return leaf, f"{leaf} has shape {list(entry.shape)} where one number is built: vLLM raises", again
        if entry is not None and entry.dtype not in FLOATS:
            return leaf, f"{leaf} is {entry.dtype}, not F32: vLLM's copy_ converts the bytes as numbers", again
    return None


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


def _scale_shapes(built: Built, n: int, k: int) -> tuple[tuple[int, ...], ...]:
    if built.block:
        rows, columns = -(-n // built.block[0]), -(-k // built.block[1])
        return ((rows, columns), (rows, 1, columns, 1))
    if built.group_size:
        return ((n, k // built.group_size),)
    if built.form == "fp8_tensor":
        return _SCALAR
    return ((n, 1), (n,))
