"""How a checkpoint stores each module's weight: plain, or packed with scales. Headers alone decide
it.

In: the entries of a checkpoint. Out: one `StoredWeight` per module that has a weight, and all other
tensors. The plan uses it to find what must be dequantized; the static check compares it with what
the config says.

Easy to get wrong: three conventions share suffixes. `weight_scale` is per block, row or tensor by
its shape only.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import TypeVar

from ..recipes.family import HFName
from ..recipes.forms import FIRST_SCALES, FLOAT_SCALES, FLOATS, FORMS, FP8, TENSOR_SCALES, Form
from ..recipes.frozen import Shape, frozen
from ..recipes.schemes import SCHEMES
from .safetensors_file import Entry

WEIGHT_LEAVES = ("weight", "weight_packed")
SCALE_LEAVES = (
    *FIRST_SCALES,
    *TENSOR_SCALES,
    "weight_shape",
    "weight_zero_point",
    "weight_g_idx",
)
# GPTQ's and AWQ's: the packed weight, its scales and zero points, and the group of each input
# channel.
TRANSPOSED_LEAVES = ("qweight", "scales", "qzeros", "g_idx")
_LEAVES = {*WEIGHT_LEAVES, *SCALE_LEAVES, *TRANSPOSED_LEAVES}
# Other tensors of a module, or a parameter that has no module ("").
OTHER_LEAVES = ("", "bias", "e_score_correction_bias")
# Scales of the KV cache: they belong to an attention module, not to a weight.
KV_SCALE_LEAVES = ("k_scale", "v_scale", "q_scale", "prob_output_scale")

INPUT_SCALES = ("input_scale", "input_scale_2", "input_global_scale")
# Whatever else a module with a packed weight has is part of how it is packed.
_NO_PART_OF_FORM = {*OTHER_LEAVES, *KV_SCALE_LEAVES, *INPUT_SCALES}
T = TypeVar("T")
_Parts = Mapping[str, Entry]


def weight_of(parts: Mapping[str, T]) -> T:
    """The weight among a module's parts, by leaf; a parameter without a module is its own."""
    return _first_of(parts, ("weight_packed", "weight", "qweight", *parts))


def scale_of(parts: Mapping[str, T]) -> T:
    """The first scale among a module's parts; each convention has its own word for it."""
    return _first_of(parts, (*FIRST_SCALES, "scales"))


def _first_of(parts: Mapping[str, T], leaves: Iterable[str]) -> T:
    for leaf in leaves:
        if leaf in parts:
            return parts[leaf]
    raise KeyError(*leaves)


def unused_leaves(form: Form, leaves: Iterable[str]) -> set[str]:
    """The tensors of a weight that its form has no use for: who decodes it without them gets other
    values.
    """
    storage = FORMS[form]
    found = dict.fromkeys(leaves)
    used = {*INPUT_SCALES, storage.common, *storage.others}
    if storage.scales:
        used.update([leaf for leaf in FIRST_SCALES if leaf in found][:1])
    used.add(weight_of({leaf: leaf for leaf in found}))
    return found.keys() - used


@frozen
class StoredWeight:
    """One module's weight as it is on disk.

    Attributes:
        module: the module's name on disk.
        form: of `recipes.forms`; "unknown" where the tensors fit none (`parts` has what was found).
        parts: leaf -> entry, the weight and its scales.
        shape: logical shape, [N, K] for linear weights.
        scheme: the compressed-tensors scheme with the same bytes; "" if none.
        block: rows and columns per scale, for block forms.
    """

    module: HFName
    form: Form
    parts: _Parts
    shape: Shape
    scheme: str = ""
    block: tuple[int, int] | None = None

    @property
    def weight(self) -> Entry:
        return weight_of(self.parts)

    def is_of(self, scheme: str) -> bool:
        """Whether its tensors are those of a scheme; of no form of `TRANSPOSED`."""
        wanted = SCHEMES[scheme]
        has_order = "weight_g_idx" in self.parts
        has_zero_point = "weight_zero_point" in self.parts
        if has_order or has_zero_point != wanted.has_zero_point:
            return False
        is_coded = self.weight.dtype in FORMS[wanted.form].dtypes
        return is_coded and self.has_sizes_of(scheme)

    def has_sizes_of(self, scheme: str) -> bool:
        """Whether it has as many codes and scales as a scheme."""
        codes, scale, *_ = SCHEMES[scheme].weight_tensors(*self.shape)
        for spec, entry in ((codes, self.weight), (scale, scale_of(self.parts))):
            if math.prod(spec.shape) != math.prod(entry.shape):
                return False
        return True

    def names(self) -> tuple[HFName, ...]:
        """Every tensor on disk that this weight consists of."""
        return tuple(entry.name for entry in self.parts.values())


def stored_weights(entries: Iterable[Entry]) -> tuple[dict[HFName, StoredWeight], list[Entry]]:
    """Group a checkpoint's tensors by module.

    Returns:
        The weights by module, and every other tensor (biases, parameters without a module, scales
        without a weight).
    """
    modules: dict[HFName, dict[str, Entry]] = {}
    rest: list[Entry] = []
    for entry in entries:
        module, _, leaf = entry.name.rpartition(".")
        if module and leaf in _LEAVES:
            modules.setdefault(HFName(module), {})[leaf] = entry
        else:
            rest.append(entry)
    found: dict[HFName, StoredWeight] = {}
    for module, parts in modules.items():
        if not parts.keys().isdisjoint(WEIGHT_LEAVES):
            weight = _classified(module, parts)
        elif "qweight" in parts:
            weight = _transposed(module, parts)
        else:
            rest.extend(parts.values())
            continue
        if unused_leaves(weight.form, parts):
            weight = replace(weight, form="unknown", scheme="")
        found[module] = weight
    return found, [entry for entry in rest if not _belongs_to_packed(entry, found)]


def _belongs_to_packed(entry: Entry, found: dict[HFName, StoredWeight]) -> bool:
    """Whether a tensor with a leaf that the form lacks is next to a packed weight: the form is then
    unknown.
    """
    module, _, leaf = entry.name.rpartition(".")
    weight = found.get(HFName(module))
    if weight is None or weight.form == "plain" or leaf in _NO_PART_OF_FORM:
        return False
    parts = {**weight.parts, leaf: entry}
    found[weight.module] = replace(weight, form="unknown", scheme="", parts=parts)
    return True


def _transposed(module: HFName, parts: dict[str, Entry]) -> StoredWeight:
    """A matrix of GPTQ or AWQ, [input, output].

    GPTQ packs along the inputs: qweight I32 [K / pack, N], scales [groups, N]. AWQ packs along the
    outputs: qweight I32 [K, N / pack]. Both pack qzeros along the outputs.
    """
    parts = {leaf: parts[leaf] for leaf in (*TRANSPOSED_LEAVES, *parts) if leaf in parts}
    packed = parts["qweight"].shape
    scales = parts.get("scales")
    form: Form = "unknown"
    shape = packed
    has_rows = len(packed) == 2 and packed[0] > 0
    if has_rows and scales is not None and len(scales.shape) == 2 and scales.shape[1]:
        outputs = scales.shape[1]
        if packed[1] * 8 == outputs:
            form = "awq"
            shape = (outputs, packed[0])
        elif packed[1] == outputs:
            form = "gptq"
            pack = 8
            # Zero points are packed along the outputs by as many as the codes along the inputs.
            if "qzeros" in parts:
                zeros = parts["qzeros"].shape
                if len(zeros) == 2 and zeros[1]:
                    pack = outputs // zeros[1]
            if pack not in (4, 8):
                form = "unknown"
            shape = (outputs, packed[0] * pack)
    return StoredWeight(module=module, form=form, parts=parts, shape=shape)


def _classified(module: HFName, parts: dict[str, Entry]) -> StoredWeight:
    """The first form that the tensors fit: by their leaves, then by dtypes, last by the shape of
    the scale.
    """
    weight = weight_of(parts)
    leaves = parts.keys() - {*INPUT_SCALES}
    shape = weight.shape

    stored = partial(StoredWeight, module=module, parts=parts, shape=shape)
    if leaves == {"weight"} and weight.dtype in FLOATS:
        return stored(form="plain")
    is_unscaled = parts.keys().isdisjoint(FIRST_SCALES)
    if is_unscaled or len(shape) != 2:
        return stored(form="unknown")
    scale = scale_of(parts)
    (n, k) = shape
    of_pairs = (n, 2 * k)  # two 4-bit codes in a byte
    nvfp4_forms: tuple[Form, ...] = ("nvfp4", "nvfp4_modelopt")
    for form in nvfp4_forms:
        storage = FORMS[form]
        if leaves == {storage.leaf, "weight_scale", storage.common} and weight.dtype == "U8":
            scheme = ""
            if storage.divides:
                scheme = "NVFP4" if "input_global_scale" in parts else "NVFP4A16"
            return stored(form=form, shape=of_pairs, scheme=scheme)
    mxfp4 = FORMS["mxfp4"]
    is_e8m0 = scale.dtype in mxfp4.scales and scale.shape == (n, 2 * k // mxfp4.group)
    if weight.dtype in mxfp4.dtypes and is_e8m0:
        # With FP8 activations vLLM runs it by its native MXFP4 method; without, as if it were W4A4
        # (0.32.0, compressed_tensors_moe.py).
        return stored(form="mxfp4", shape=of_pairs, scheme="MXFP4A8")
    if weight.dtype in FP8 and len(leaves) == 2:
        form, scheme, block = _fp8((n, k), scale, has_input_scale="input_scale" in parts)
        if weight.dtype != "F8_E4M3":
            scheme = ""
        return stored(form=form, scheme=scheme, block=block)
    if weight.dtype == "I8" and scale.dtype in FLOAT_SCALES and scale.shape in ((n, 1), (n,)):
        return stored(form="int8", scheme="" if "weight_zero_point" in parts else "W8A8")
    if weight.dtype == "I32" and {"weight_packed", "weight_scale", "weight_shape"} <= leaves:
        width, scheme = _integers((n, k), scale, parts)
        return stored(form="int_packed", shape=(n, width), scheme=scheme)
    return stored(form="unknown")


def _integers(shape: tuple[int, int], scale: Entry, parts: _Parts) -> tuple[int, str]:
    """The width and the scheme of integers in words [N, words a row]; "" where no scheme has this
    many groups, or their order.
    """
    n, words = shape
    zero = parts.get("weight_zero_point")
    order = parts.get("weight_g_idx")
    if order is not None:
        return math.prod(order.shape), ""
    groups = 1
    if len(scale.shape) == 2:
        groups = scale.shape[1]
    for name, scheme in SCHEMES.items():
        if scheme.form != "int_packed" or scheme.has_zero_point != (zero is not None):
            continue
        width = words * 32 // scheme.bits
        zeros = (-(-n // scheme.n_multiple()), groups)
        is_whole = groups * (scheme.group_size or 0) == width
        if is_whole and (zero is None or zero.shape == zeros):
            return width, name
    # Of no scheme: 8 bits in groups of 128, or 4.
    if groups * 32 == words:
        return words * 4, ""
    return words * 8, ""


def _fp8(
    shape: tuple[int, int], scale: Entry, *, has_input_scale: bool
) -> tuple[Form, str, tuple[int, int] | None]:
    """The form, scheme and block of FP8 with one scale tensor."""
    n, k = shape
    if scale.shape[1::2] == (1, 1):  # modelopt's blocks: [rows, 1, columns, 1]
        scale = replace(scale, shape=scale.shape[::2])
    if scale.shape in ((), (1,), (1, 1)) and shape != (1, 1):
        scheme = ""
        if has_input_scale:
            scheme = "FP8"
        return "fp8_tensor", scheme, None
    if scale.dtype == "U8" and scale.shape == (n, k // FORMS["mxfp8"].group):
        return "mxfp8", "", None
    if scale.shape in ((n, 1), (n,)):
        return "fp8_channel", "FP8_DYNAMIC", None
    if len(scale.shape) == 2:
        rows = _block_side(n, scale.shape[0])
        columns = _block_side(k, scale.shape[1])
        if rows == columns == 128:
            return "fp8_block", "FP8_BLOCK", (rows, columns)
        if rows and columns:
            return "fp8_block", "", (rows, columns)
        if num_slices(n, scale.shape[0], 128) and columns == 128:
            return "fp8_sliced", "", (128, 128)
    return "unknown", "", None


def num_slices(rows: int, scales: int, block: int) -> int:
    """The slices of rows that have blocks of their own, so that each ends in a part block; 0 where
    none fit.

    MiMo-V2.5 (XiaomiMiMo/MiMo-V2.5) stores q, k and v of four ranks one after the other, 3392 rows
    each: 27 blocks for each rank, where blocks over all 13568 rows would be 106.
    """
    for count in range(2, 129):
        if rows % count == 0 and count * -(-rows // count // block) == scales:
            return count
    return 0


def _block_side(size: int, count: int) -> int:
    """The block's side that cuts `size` into `count` blocks: 128 wherever it fits, else the one
    power of two that does; 0 if none.
    """
    for side in (128, 1, 2, 4, 8, 16, 32, 64, 256, 512):
        if -(-size // side) == count:
            return side
    return 0
