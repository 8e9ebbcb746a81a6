"""Compares dtypes and shapes on disk with those that vLLM builds.

In: what vLLM builds, and a stored weight that has all the tensors for it. Out: the first tensor
that does not fit.

Easy to get wrong: vLLM's `copy_` accepts every dtype. FP8 bytes that are stored as U8 become the
numbers 0 to 255.
"""

from collections.abc import Mapping
from dataclasses import replace

from ...recipes.family import HFName
from ...recipes.forms import (
    FIRST_SCALES,
    FLOAT_SCALES,
    FORMS,
    NOT_COMPUTED,
    TENSOR_SCALES,
    TRANSPOSED,
)
from ...recipes.frozen import Shape
from ..safetensors_file import Entry
from ..stored import StoredWeight
from .dialect import VLLMModule

Problem = tuple[str, str, str]
"""(leaf, what happens, cure)"""

_ONE_VALUE: tuple[Shape, ...] = ((), (1,))
_AGAIN = "Quantize this weight again"
SAY_IT = "Make the quantization config say what the files hold, or quantize this weight again"
# Dtypes of the same width: what a weight or a scale must be -> what it may be stored as.
_VIEWS: Mapping[str, tuple[str, ...]] = {
    "F8_E4M3": ("U8", "I8"),
    "U8": ("F8_E8M0", "I8"),
}


def manner(weight: StoredWeight) -> str:
    """How a weight is stored, in words."""
    if weight.form == "plain":
        return f"plain {weight.weight.dtype}"
    if weight.form != "unknown":
        return f"{weight.form} ({', '.join(weight.parts)})"
    parts = weight.parts.items()
    return ", ".join(f"{leaf} {entry.dtype}{list(entry.shape)}" for leaf, entry in parts)


def leaves_built(built: VLLMModule, weight: StoredWeight) -> Mapping[str, Entry]:
    """The weight's tensors by the names of vLLM's parameters."""
    if not built.renames:
        return weight.parts
    return {built.renames.get(leaf, leaf): entry for leaf, entry in weight.parts.items()}


def fits(built: VLLMModule, weight: StoredWeight) -> bool:
    """Whether a weight has the tensors and the shapes that are built."""
    leaves = leaves_built(built, weight).keys()
    is_whole = weight.form in (built.form, "unknown") and leaves ^ built.leaves <= built.optional
    return is_whole and layout_problem(built, weight) is None


def layout_problem(built: VLLMModule, weight: StoredWeight) -> Problem | None:
    """A dtype or shape that vLLM's parameter does not have."""
    parts = leaves_built(built, weight)
    for leaf in {"qweight", "scales", "weight_packed", "weight"} & built.leaves:
        if len(parts[leaf].shape) != 2:
            says = f"{leaf} has shape {list(parts[leaf].shape)}, no matrix: vLLM raises"
            return leaf, says, _AGAIN
    layout = _in_rows
    if built.form in TRANSPOSED:
        layout = _transposed
    wanted = layout(built, parts)
    if isinstance(wanted, str):
        return _scale_leaf(built), wanted, "Leave this module in BF16"
    for leaf, entry in parts.items():
        dtypes, shapes = wanted.get(leaf, ((entry.dtype,), ()))
        is_longer = entry.dtype == "I64" and "I32" in dtypes  # `copy_` keeps whole numbers
        if entry.dtype not in dtypes and not is_longer:
            says = f"{leaf} is {entry.dtype}, not {dtypes[0]}: "
            if refitted(built, weight) is None:
                return leaf, f"{says}vLLM raises, or converts the bytes as numbers", SAY_IT
            says += "vLLM's copy_ converts the bytes as numbers, in silence"
            return leaf, says, f"Store it as {dtypes[0]} (a view of the same bytes)"
        if shapes and entry.shape not in shapes:
            says = f"{leaf} has shape {list(entry.shape)} where {list(shapes[0])} is built: "
            says += "a linear module raises, routed experts load in silence"
            cure = "Make bits and group_size say what the files hold, or quantize this weight again"
            return leaf, says, cure
    return None


def refitted(built: VLLMModule, weight: StoredWeight) -> list[tuple[Entry, Entry]] | None:
    """The weight's tensors, each with the one that vLLM builds in rows: the same bytes by another
    name, dtype or number of sides. None where they would be read as other numbers.

    Every tensor must fit: bytes of FP8 and pairs of 4-bit codes have the same dtype, and only
    their scales show which of the two they are.
    """
    if built.form in ("plain", *NOT_COMPUTED) or len(weight.weight.shape) != 2:
        return None
    given = leaves_built(built, weight)
    parts = dict(given)
    extra = [*(parts.keys() - built.leaves - built.optional)]
    missing = [*(built.leaves - parts.keys())]
    if len(extra) == len(missing) == 1 and {*extra, *missing} <= {*FIRST_SCALES}:
        old = given[extra[0]]
        given = {**given, missing[0]: old}
        del parts[extra[0]]
        parts[missing[0]] = replace(old, name=HFName(f"{weight.module}.{missing[0]}"))
    elif extra or missing:
        return None
    wanted = _in_rows(built, parts)
    if isinstance(wanted, str):
        return None
    for leaf, entry in parts.items():
        dtypes, shapes = wanted.get(leaf, ((entry.dtype,), ()))
        if entry.dtype not in dtypes:
            if entry.dtype not in _VIEWS.get(dtypes[0], ()):
                return None
            entry = replace(entry, dtype=dtypes[0])
        if shapes and entry.shape not in shapes:
            # Two global scales are not one, and a transposed scale is another.
            alike = [shape for shape in shapes if _sides(shape) == _sides(entry.shape)]
            if not alike:
                return None
            entry = replace(entry, shape=alike[0])
        parts[leaf] = entry
    return [(given[leaf], entry) for leaf, entry in parts.items()]


def _sides(shape: Shape) -> list[int]:
    """The sides of more than one element."""
    return [side for side in shape if side != 1]


_Wanted = dict[str, tuple[tuple[str, ...], tuple[Shape, ...]]]
"""leaf -> dtypes and shapes that its parameter takes; no shape: any."""


def _in_rows(built: VLLMModule, parts: Mapping[str, Entry]) -> _Wanted | str:
    """The tensors of a weight [N, K] and of the scale that follows its shape, by leaf; or why it
    cannot be built.
    """
    storage = FORMS[built.form]
    leaf = "weight"
    if "weight_packed" in built.leaves:
        leaf = "weight_packed"
    n, columns = parts[leaf].shape
    k = columns * storage.per_element(built.bits)
    groups = 1
    # Without a group, a value a row may come with its dimension of 1 or without.
    scale_shapes: list[Shape] = [(n, 1), (n,)]
    if built.group_size:
        groups, rest = divmod(k, built.group_size)
        scale_shapes = [(n, groups)]
        if rest:
            return (
                f"its {k} input channels are no multiple of the group of {built.group_size}: vLLM "
                "raises, or its kernel reads past the scales"
            )
    if built.block:
        sides = (-(-n // built.block[0]), -(-k // built.block[1]))
        scale_shapes = [sides, (sides[0], 1, sides[1], 1)]
    elif built.form == "fp8_tensor":
        scale_shapes = [*_ONE_VALUE]
    if built.scale_ndim:
        scale_shapes = [shape for shape in scale_shapes if len(shape) == built.scale_ndim]
    return {
        leaf: (storage.dtypes, ()),
        _scale_leaf(built): (built.scales or storage.scales, tuple(scale_shapes)),
        **dict.fromkeys(TENSOR_SCALES, (FLOAT_SCALES, _ONE_VALUE)),
        "weight_shape": (("I64", "I32"), ((2,),)),
        # Codes that mean 0, packed along the outputs.
        "weight_zero_point": (("I32",), ((-(-n * built.bits // 32), groups),)),
    }


def _transposed(built: VLLMModule, parts: Mapping[str, Entry]) -> _Wanted:
    """GPTQ's and AWQ's matrices, [inputs, outputs]: GPTQ packs the inputs, AWQ the outputs."""
    pack = 32 // built.bits
    inputs = parts["qweight"].shape[0]
    outputs = parts["scales"].shape[1]
    packed = (inputs, outputs // pack)
    if built.form == "gptq":
        packed = (inputs, outputs)
        inputs *= pack
    groups = inputs // (built.group_size or inputs or 1)
    return {
        "qweight": (FORMS[built.form].dtypes, (packed,)),
        "scales": (FLOAT_SCALES, ((groups, outputs),)),
        "qzeros": (("I32",), ((groups, outputs // pack),)),
    }


def _scale_leaf(built: VLLMModule) -> str:
    if "weight_scale_inv" in built.leaves:
        return "weight_scale_inv"
    return "weight_scale"
