"""What each quantization scheme stores: tensors, dtypes, shapes, and the widths it needs.

Names and dtypes are those of the scheme's form (`forms.py`); the scheme adds bits, groups and inputs.
In: a weight's logical shape [N, K] (N output channels, K input channels). Out: the tensors that
replace `weight`, and the two argument blocks of compressed-tensors' `config_groups`.
`quantize/pack/pack.py` computes the numbers.

Easy to get wrong: a global scale of NVFP4 is a divisor (448 * 6 / amax) in compressed-tensors and a
multiplier in modelopt. Modules that vLLM fuses must have the same one, because vLLM keeps one value
for the fused module.

Source: compressed-tensors 0.19.0 quantization/quant_scheme.py (presets) and compressors/*. Tests
compare the shapes with those of compressed-tensors' own compressors.
"""

from collections.abc import Collection, Mapping
from math import prod
from pathlib import Path
from types import MappingProxyType

from .errors import did_you_mean, folded
from .forms import FORMS, Form
from .frozen import Json, Raw, Shape, frozen
from .yaml_file import load_shipped


@frozen
class TensorSpec:
    """One tensor of a packed module: `suffix` replaces `weight` in the name; dtype is the name in
    safetensors.
    """

    suffix: str
    dtype: str
    shape: Shape


@frozen
class Scheme:
    """One row of schemes.yaml.

    Attributes:
        form: how its weights are stored (`forms.FORMS`).
        weights: `config_groups[*].weights`.
        inputs: `config_groups[*].input_activations`, or None for weight-only schemes.
        extra: the static input scales.
        data_free: the scheme to use instead where there are no batches.
        algorithms: those that rewrite its weights in calibration. Others round them to nearest.
    """

    name: str
    summary: str
    form: Form
    weights: Raw
    inputs: Raw | None
    extra: tuple[TensorSpec, ...]
    data_free: str = ""
    hardware: str
    algorithms: tuple[str, ...] = ()

    @property
    def format(self) -> str:
        """compressed-tensors' compression format."""
        return FORMS[self.form].format

    @property
    def bits(self) -> int:
        """Bits of a weight's code."""
        return self.weights["num_bits"]

    @property
    def group_size(self) -> int | None:
        """Input channels for each scale; K must be a multiple. None: one scale is for all of K."""
        return self.weights["group_size"]

    @property
    def block(self) -> tuple[int, int] | None:
        """Rows and columns for each scale in block schemes."""
        sides = self.weights["block_structure"]
        if sides is None:
            return None
        return sides[0], sides[1]

    @property
    def needs_calibration(self) -> bool:
        """Whether input scales are static, so that the model must run on batches."""
        return bool(self.extra)

    @property
    def shares_global_scale(self) -> bool:
        """Whether modules that vLLM fuses need the same global scale."""
        return self.weights["strategy"] == "tensor_group"

    @property
    def has_tensor_scale(self) -> bool:
        """Whether one of its scales is one value for a whole tensor; modules that vLLM fuses have
        it in common.
        """
        return self.weights["strategy"] in ("tensor_group", "tensor")

    @property
    def has_zero_point(self) -> bool:
        """Whether a group has, next to its scale, the code that means 0."""
        return not self.weights["symmetric"]

    def tensors(self, num_rows: int, num_columns: int) -> tuple[TensorSpec, ...]:
        """The tensors on disk for a weight [num_rows, num_columns], in the order of writing."""
        return self.weight_tensors(num_rows, num_columns) + self.extra

    def weight_tensors(self, num_rows: int, num_columns: int) -> tuple[TensorSpec, ...]:
        """The tensors that depend on the weight alone: all but the static input scales."""
        n = num_rows
        k = num_columns
        storage = FORMS[self.form]
        groups = 1
        if self.group_size:
            groups = k // self.group_size
        scale_shape: Shape = (n, groups)
        if self.block:
            rows, columns = self.block
            scale_shape = (-(-n // rows), -(-k // columns))
        elif self.weights["strategy"] == "tensor":
            scale_shape = (1,)
        tensors = [
            (storage.leaf, storage.dtypes[0], (n, k // storage.per_element(self.bits))),
            ("weight_scale", storage.written, scale_shape),
        ]
        if storage.common:
            tensors.append((storage.common, "F32", (1,)))
        if self.form == "int_packed":
            # A word holds several codes, and the last word of a row may hold fewer: the packed shape
            # does not say the width.
            tensors.append(("weight_shape", "I64", (2,)))
            if self.has_zero_point:
                tensors.append(("weight_zero_point", "I32", (-(-n * self.bits // 32), groups)))
        return tuple(
            TensorSpec(suffix=leaf, dtype=dtype, shape=shape) for leaf, dtype, shape in tensors
        )

    def k_multiple(self) -> int:
        """K must be a multiple of this; 1 where any width is possible."""
        group = self.group_size or 1
        if self.form == "int_packed":
            return max(group, 32 // self.bits)
        return group

    def n_multiple(self) -> int:
        """N must be a multiple of this; 1 where any height is possible.

        Zero points are packed along N, so vLLM can cut fused modules and ranks only between words.
        """
        if not self.has_zero_point:
            return 1
        return 32 // self.bits

    def config_group(self) -> Json:
        """`config_groups[*]` of compressed-tensors without its targets."""
        inputs = None
        if self.inputs is not None:
            inputs = dict(self.inputs)
        return {
            "format": self.format,
            "weights": dict(self.weights),
            "input_activations": inputs,
            "output_activations": None,
        }


def _table() -> Mapping[str, Scheme]:
    raw = load_shipped(Path(__file__).with_name("schemes.yaml"))
    found: dict[str, Scheme] = {}
    for name, row in raw["schemes"].items():
        row.setdefault("inputs", None)
        for key in ("weights", "inputs"):
            if row[key] is not None:
                row[key] = MappingProxyType(raw["arguments"] | row[key])
        extra: tuple[TensorSpec, ...] = ()
        input_scale = row.pop("input_scale", None)
        if input_scale is not None:
            extra = (TensorSpec(**input_scale, shape=(1,)),)
        found[name] = Scheme(name=name, extra=extra, **row)
    return MappingProxyType(found)


SCHEMES = _table()


def _rewrites() -> dict[str, frozenset[str]]:
    found = {"minmax": frozenset[str]()}
    for name, scheme in SCHEMES.items():
        for word in scheme.algorithms:
            found[word] = found.get(word, frozenset()) | {name}
    return found


REWRITES: Mapping[str, frozenset[str]] = _rewrites()
"""Calibration algorithm -> the schemes whose weights it rewrites. Others are rounded to nearest."""

_ELSEWHERE = {"int4": "W4A16", "4bit": "W4A16", "fp4": "NVFP4", "int8": "W8A8", "8bit": "W8A8"}


def meant_scheme(word: str, known: Collection[str], *, otherwise: str) -> str:
    """A cure for a word that is no scheme: what other tools call one, an algorithm, or a slip."""
    said = folded(word)
    rewritten = sorted(REWRITES.get(said, ()))
    if rewritten:
        otherwise = f"Set calibration.algorithm: {said} in a recipe with {', '.join(rewritten)}"
    return did_you_mean(_ELSEWHERE.get(said, word), known, otherwise=otherwise)


SWEEPS = frozenset({"mse", "four-over-six", "local-hessian"})
"""Of these, modelopt's: they choose the scale of each group among candidates, and no value of the
layer changes.
"""

RESCALING = frozenset({"awq", "smoothquant"})
"""Algorithms that move scale from one module to the next: modules next to the rewritten weights may
change too.
"""

# Bits of one element of a safetensors dtype.
DTYPE_BITS: Mapping[str, int] = MappingProxyType({
    "F64": 64, "I64": 64, "U64": 64, "F32": 32, "I32": 32, "U32": 32, "F16": 16, "BF16": 16, "I16": 16, "U16": 16,
    "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "I8": 8, "U8": 8, "BOOL": 8,
})  # fmt: skip


def num_bytes(dtype: str, shape: Shape) -> int:
    """Bytes of a tensor on disk."""
    return prod(shape) * DTYPE_BITS[dtype] // 8
