"""How a checkpoint stores each module's weight: plain, or packed with scales. Headers alone decide
it.

In: the entries of a checkpoint. Out: one `StoredWeight` per module that has a weight, and all other
tensors. The plan uses it to find what must be dequantized; the static check compares it with what
the config says.

Easy to get wrong: three conventions share suffixes. `weight_scale` is per block, row or tensor by
its shape only, and NVFP4's second scale is a divisor (`weight_global_scale`) or a multiplier
(`weight_scale_2`).
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

from ..recipes.family import HFName
from ..recipes.schemes import SCHEMES
from .safetensors_file import Entry

Form = Literal[
    "plain",
    "fp8_block",
    "fp8_sliced",
    "fp8_channel",
    "fp8_tensor",
    "mxfp4",
    "nvfp4",
    "nvfp4_modelopt",
    "int_packed",
    "int8",
    "mxfp8",
    "gptq",
    "awq",
    "unknown",
]
# Forms that keepmtp recognizes and does not compute with.
NOT_COMPUTED = ("gptq", "awq", "unknown")

WEIGHT_LEAVES = ("weight", "weight_packed")
SCALE_LEAVES = (
    "weight_scale",
    "weight_scale_inv",
    "scale",
    "weight_scale_2",
    "weight_global_scale",
    "input_global_scale",
    "input_scale",
    "input_scale_2",
    "weight_shape",
    "weight_zero_point",
    "weight_g_idx",
)
# GPTQ's and AWQ's: the packed weight, its scales and zero points, and the group of each input
# channel.
TRANSPOSED_LEAVES = ("qweight", "scales", "qzeros", "g_idx")
# Other tensors of a module, or a parameter that has no module ("").
OTHER_LEAVES = ("", "bias", "e_score_correction_bias", "tid2eid")
# Scales of the KV cache: they belong to an attention module, not to a weight.
KV_SCALE_LEAVES = ("k_scale", "v_scale", "q_scale", "prob_output_scale")
FLOATS = ("BF16", "F16", "F32")
FP8 = ("F8_E4M3", "F8_E5M2")

_INTEGERS = {name: scheme for name, scheme in SCHEMES.items() if scheme.format == "pack-quantized"}
_FIRST_SCALES = ("weight_scale_inv", "weight_scale", "scale")
T = TypeVar("T")


def weight_of(parts: Mapping[str, T]) -> T:
    """The weight among a module's parts, by leaf; a parameter without a module is its own."""
    leaf = next((leaf for leaf in ("weight_packed", "weight") if leaf in parts), next(iter(parts)))
    return parts[leaf]


def scale_of(parts: Mapping[str, T]) -> T:
    """The first scale among a module's parts; each convention has its own word for it."""
    return next(parts[leaf] for leaf in _FIRST_SCALES if leaf in parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredWeight:
    """One module's weight as it is on disk.

    Attributes:
        module: the module's name on disk.
        form: see `Form`; "unknown" where the tensors fit no form (`parts` has what was found).
        parts: leaf -> entry, the weight and its scales.
        shape: logical shape, [N, K] for linear weights.
        scheme: the compressed-tensors scheme with the same bytes; "" if none.
        block: rows and columns per scale, for block forms.
    """

    module: HFName
    form: Form
    parts: Mapping[str, Entry]
    shape: tuple[int, ...]
    scheme: str = ""
    block: tuple[int, int] | None = None

    @property
    def weight(self) -> Entry:
        return weight_of(self.parts)

    def names(self) -> tuple[HFName, ...]:
        """Every tensor on disk that this weight consists of."""
        return tuple(entry.name for entry in self.parts.values())


def stored_weights(entries: Iterable[Entry]) -> tuple[dict[HFName, StoredWeight], list[Entry]]:
    """Group a checkpoint's tensors by module.

    Returns:
        The weights by module, and every other tensor (biases, parameters without a module, scales
        without a weight).
    """
    return _grouped(entries, WEIGHT_LEAVES, (*WEIGHT_LEAVES, *SCALE_LEAVES), _classify)


def transposed_weights(entries: Iterable[Entry]) -> tuple[dict[HFName, StoredWeight], list[Entry]]:
    """Group the tensors of GPTQ and AWQ, whose matrices are stored as [input, output].

    GPTQ packs along the inputs: qweight I32 [K / pack, N], scales [groups, N]. AWQ packs along the
    outputs: qweight I32 [K, N / pack]. Both pack qzeros along the outputs.

    Returns:
        The weights by module, and every other tensor.
    """
    return _grouped(entries, TRANSPOSED_LEAVES[:1], TRANSPOSED_LEAVES, _transposed)


def _grouped(
    entries: Iterable[Entry],
    weights: tuple[str, ...],
    leaves: tuple[str, ...],
    classify: Callable[[HFName, Mapping[str, Entry]], StoredWeight],
) -> tuple[dict[HFName, StoredWeight], list[Entry]]:
    """Modules with one of `weights` among their `leaves`, and every other tensor."""
    modules: dict[HFName, dict[str, Entry]] = {}
    rest: list[Entry] = []
    for entry in entries:
        module, _, leaf = entry.name.rpartition(".")
        if module and leaf in leaves:
            modules.setdefault(HFName(module), {})[leaf] = entry
        else:
            rest.append(entry)
    found: dict[HFName, StoredWeight] = {}
    for module, parts in modules.items():
        if parts.keys().isdisjoint(weights):
            rest.extend(parts.values())
        else:
            found[module] = classify(module, parts)
    return found, rest


def _transposed(module: HFName, found: Mapping[str, Entry]) -> StoredWeight:
    parts = {leaf: found[leaf] for leaf in TRANSPOSED_LEAVES if leaf in found}
    packed, scales = parts["qweight"].shape, parts["scales"].shape if "scales" in parts else ()
    if len(packed) != 2 or len(scales) != 2 or not scales[1]:
        return StoredWeight(module=module, form="unknown", parts=parts, shape=packed)
    outputs = scales[1]
    if packed[1] != outputs:
        return StoredWeight(module=module, form="awq", parts=parts, shape=(outputs, packed[0]))
    zeros = parts["qzeros"].shape if "qzeros" in parts else ()
    pack = outputs // zeros[1] if len(zeros) == 2 and zeros[1] else 8
    return StoredWeight(module=module, form="gptq", parts=parts, shape=(outputs, packed[0] * pack))


def _classify(module: HFName, parts: Mapping[str, Entry]) -> StoredWeight:
    weight = weight_of(parts)
    leaves = frozenset(parts) - {
        "input_scale",
        "input_scale_2",
        "input_global_scale",
        "weight_g_idx",
    }
    shape = weight.shape

    def stored(
        form: Form, logical: tuple[int, ...], scheme: str = "", block: tuple[int, int] | None = None
    ):
        return StoredWeight(
            module=module, form=form, parts=parts, shape=logical, scheme=scheme, block=block
        )

    if leaves == {"weight"} and weight.dtype in FLOATS:
        return stored("plain", shape)
    scale = scale_of(parts) if any(leaf in parts for leaf in _FIRST_SCALES) else None
    if scale is None or len(shape) != 2 or ("weight" in parts and "weight_packed" in parts):
        return stored("unknown", shape)
    n, k = shape
    if leaves == {"weight_packed", "weight_scale", "weight_global_scale"} and weight.dtype == "U8":
        return stored("nvfp4", (n, 2 * k), "NVFP4" if "input_global_scale" in parts else "NVFP4A16")
    if leaves == {"weight", "weight_scale", "weight_scale_2"} and weight.dtype == "U8":
        return stored("nvfp4_modelopt", (n, 2 * k))
    if (
        weight.dtype in ("U8", "I8")
        and scale.dtype in ("U8", "F8_E8M0")
        and scale.shape == (n, 2 * k // 32)
    ):
        # With FP8 activations vLLM runs it by its native MXFP4 method; without, as if it were W4A4
        # (0.32.0, compressed_tensors_moe.py).
        return stored("mxfp4", (n, 2 * k), "MXFP4A8")
    if weight.dtype in FP8 and len(leaves) == 2:
        found = _fp8(stored, (n, k), scale, "input_scale" in parts)
        return found if weight.dtype == "F8_E4M3" else replace(found, scheme="")
    if weight.dtype == "I8" and scale.dtype in FLOATS and scale.shape in ((n, 1), (n,)):
        return stored("int8", shape, "W8A8")
    if weight.dtype == "I32" and {"weight_packed", "weight_scale", "weight_shape"} <= leaves:
        return _int_packed(stored, (n, k), scale, parts)
    return stored("unknown", shape)


def _fp8(stored, shape: tuple[int, int], scale: Entry, has_input_scale: bool) -> StoredWeight:
    n, k = shape
    if scale.shape in ((), (1,), (1, 1)) and shape != (1, 1):
        return stored("fp8_tensor", shape, "FP8" if has_input_scale else "")
    if scale.dtype == "U8" and scale.shape == (n, k // 32):
        return stored("mxfp8", shape)
    if scale.shape in ((n, 1), (n,)):
        return stored("fp8_channel", shape, "FP8_DYNAMIC")
    if len(scale.shape) == 2:
        rows, columns = (
            _block_side(size, count) for size, count in zip(shape, scale.shape, strict=True)
        )
        if rows and columns:
            return stored(
                "fp8_block",
                shape,
                "FP8_BLOCK" if (rows, columns) == (128, 128) else "",
                (rows, columns),
            )
        if num_slices(n, scale.shape[0], 128) and columns == 128:
            return stored("fp8_sliced", shape, block=(128, 128))
    return stored("unknown", shape)


def num_slices(rows: int, scales: int, block: int) -> int:
    """The slices of rows that have blocks of their own, so that each ends in a part block; 0 where
    none fit.

    MiMo-V2.5 (XiaomiMiMo/MiMo-V2.5) stores q, k and v of four ranks one after the other, 3392 rows
    each: 27 blocks for each rank, where blocks over all 13568 rows would be 106.
    """
    counts = (count for count in range(2, 129) if rows % count == 0)
    return next((count for count in counts if count * -(-rows // count // block) == scales), 0)


def _block_side(size: int, count: int) -> int:
    """The block's side that cuts `size` into `count` blocks: 128 wherever it fits, else a power of
    two; 0 if none.
    """
    for side in (128, 32, 64, 256, 512, 16):
        if -(-size // side) == count:
            return side
    return 0


def _int_packed(
    stored, shape: tuple[int, int], scale: Entry, parts: Mapping[str, Entry]
) -> StoredWeight:
    n, words = shape
    groups = scale.shape[1] if len(scale.shape) == 2 else 1
    zero = parts.get("weight_zero_point")
    for name, scheme in _INTEGERS.items():
        k = words * 32 // scheme.bits
        fits = zero is None or zero.shape == (-(-n // scheme.n_multiple()), groups)
        if (
            groups * (scheme.group_size or 0) == k
            and scheme.has_zero_point == (zero is not None)
            and fits
        ):
            return stored("int_packed", (n, k), "" if "weight_g_idx" in parts else name)
    return stored(
        "int_packed", (n, words * (4 if groups * 32 == words else 8))
    )  # 8 bits in groups of 128, or 4
