"""What each quantization scheme stores: tensors, dtypes, shapes, and the widths it needs.

In: a weight's logical shape [N, K] (N output channels, K input channels). Out: the tensors that
replace `weight`, and the two argument blocks of compressed-tensors' `config_groups`.
`quantize/pack/pack.py` computes the numbers.

Easy to get wrong: a global scale of NVFP4 is a divisor (448 * 6 / amax) in compressed-tensors and a
multiplier in modelopt. Modules that vLLM fuses must have the same one, because vLLM keeps one value
for the fused module.

Source: compressed-tensors 0.19.0 quantization/quant_scheme.py (presets) and compressors/*. Tests
compare the shapes with those of compressed-tensors' own compressors.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """One tensor of a packed module: `suffix` replaces `weight` in the name; dtype is the name in
    safetensors.
    """

    suffix: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """One row of the table below.

    Attributes:
        format: compressed-tensors' compression format.
        weights: `config_groups[*].weights`.
        inputs: `config_groups[*].input_activations`, or None for weight-only schemes.
        group_size: input channels for each scale; K must be a multiple. None where one scale is for
            all of K.
        block: rows and columns for each scale in block schemes.
        shares_global_scale: modules that vLLM fuses need the same global scale.
        needs_calibration: input scales are static, so the model must run on batches.
        data_free: the scheme to use instead where there are no batches.
        extra: the static input scales.
    """

    name: str
    format: str
    bits: int
    summary: str
    weights: Mapping[str, Any]
    inputs: Mapping[str, Any] | None = None
    group_size: int | None = None
    block: tuple[int, int] | None = None
    shares_global_scale: bool = False
    needs_calibration: bool = False
    data_free: str = ""
    hardware: str = ""
    extra: tuple[TensorSpec, ...] = field(default=())

    @property
    def has_tensor_scale(self) -> bool:
        """Whether one of its scales is one value for a whole tensor; modules that vLLM fuses have
        it in common.
        """
        return self.shares_global_scale or self.weights["strategy"] == "tensor"

    @property
    def has_zero_point(self) -> bool:
        """Whether a group has, next to its scale, the code that means 0."""
        return not self.weights["symmetric"]

    def tensors(self, num_rows: int, num_columns: int) -> tuple[TensorSpec, ...]:
        """The tensors on disk for a weight [num_rows, num_columns], in the order they are
        written.
        """
        return self.weight_tensors(num_rows, num_columns) + self.extra

    def weight_tensors(self, num_rows: int, num_columns: int) -> tuple[TensorSpec, ...]:
        """The tensors that depend on the weight alone: all but the static input scales."""
        n, k = num_rows, num_columns
        scale_columns = k // self.group_size if self.group_size else 1
        match self.format:
            case "nvfp4-pack-quantized":
                main = (
                    TensorSpec(suffix="weight_packed", dtype="U8", shape=(n, k // 2)),
                    TensorSpec(suffix="weight_scale", dtype="F8_E4M3", shape=(n, scale_columns)),
                    TensorSpec(suffix="weight_global_scale", dtype="F32", shape=(1,)),
                )
            case "mxfp4-pack-quantized":
                main = (
                    TensorSpec(suffix="weight_packed", dtype="U8", shape=(n, k // 2)),
                    TensorSpec(suffix="weight_scale", dtype="U8", shape=(n, scale_columns)),
                )
            case "pack-quantized":
                per_word = 32 // self.bits
                main = (
                    TensorSpec(suffix="weight_packed", dtype="I32", shape=(n, k // per_word)),
                    TensorSpec(suffix="weight_scale", dtype="BF16", shape=(n, scale_columns)),
                    TensorSpec(suffix="weight_shape", dtype="I64", shape=(2,)),
                )
                if self.has_zero_point:
                    shape = (-(-n // per_word), scale_columns)
                    main += (TensorSpec(suffix="weight_zero_point", dtype="I32", shape=shape),)
            case "int-quantized":
                main = (
                    TensorSpec(suffix="weight", dtype="I8", shape=(n, k)),
                    TensorSpec(suffix="weight_scale", dtype="BF16", shape=(n, 1)),
                )
            case "float-quantized" if self.block:
                rows, columns = self.block
                # DeepGEMM asserts float32 block scales; BF16 ones fail at the first forward on
                # Hopper and Blackwell.
                main = (
                    TensorSpec(suffix="weight", dtype="F8_E4M3", shape=(n, k)),
                    TensorSpec(
                        suffix="weight_scale", dtype="F32", shape=(-(-n // rows), -(-k // columns))
                    ),
                )
            case "float-quantized":
                scale_shape = (1,) if self.weights["strategy"] == "tensor" else (n, 1)
                main = (
                    TensorSpec(suffix="weight", dtype="F8_E4M3", shape=(n, k)),
                    TensorSpec(suffix="weight_scale", dtype="BF16", shape=scale_shape),
                )
            case other:
                raise AssertionError(f"scheme {self.name} has no layout for format {other}")
        return main

    def k_multiple(self) -> int:
        """K must be a multiple of this; 1 where any width is possible."""
        per_word = 32 // self.bits if self.format == "pack-quantized" else 1
        return max(self.group_size or 1, per_word)

    def n_multiple(self) -> int:
        """N must be a multiple of this; 1 where any height is possible.

        Zero points are packed along N, so vLLM can cut fused modules and ranks only between words.
        """
        return 32 // self.bits if self.has_zero_point else 1

    def config_group(self) -> dict[str, Any]:
        """`config_groups[*]` of compressed-tensors without its targets."""
        return {
            "format": self.format,
            "weights": dict(self.weights),
            "input_activations": dict(self.inputs) if self.inputs else None,
            "output_activations": None,
        }


def _args(**given: Any) -> Mapping[str, Any]:
    """All fields of compressed-tensors' QuantizationArgs: other tools may have other defaults."""
    base = {
        "num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel", "dynamic": False,
        "group_size": None, "block_structure": None, "actorder": None,
    }  # fmt: skip
    return MappingProxyType(base | given)


_FP4_WEIGHT = _args(
    num_bits=4, strategy="tensor_group", group_size=16, scale_dtype="torch.float8_e4m3fn"
)
_MXFP4_WEIGHT = _args(num_bits=4, strategy="group", group_size=32, scale_dtype="torch.uint8")
_INPUT_GLOBAL_SCALE = (TensorSpec(suffix="input_global_scale", dtype="F32", shape=(1,)),)
_INPUT_SCALE = (TensorSpec(suffix="input_scale", dtype="BF16", shape=(1,)),)

SCHEMES: Mapping[str, Scheme] = MappingProxyType({
    scheme.name: scheme
    for scheme in (
        Scheme(
            name="NVFP4", format="nvfp4-pack-quantized", bits=4, group_size=16, shares_global_scale=True,
            summary="4-bit floats, FP8 scale per 16, activations 4-bit with a calibrated global scale",
            weights=_FP4_WEIGHT,
            inputs=_args(num_bits=4, strategy="tensor_group", group_size=16, dynamic="local",
                         observer="static_minmax", scale_dtype="torch.float8_e4m3fn"),
            needs_calibration=True, data_free="NVFP4A16", extra=_INPUT_GLOBAL_SCALE, hardware="sm100, sm120",
        ),
        Scheme(
            name="NVFP4A16", format="nvfp4-pack-quantized", bits=4, group_size=16, shares_global_scale=True,
            summary="4-bit floats, FP8 scale per 16, activations 16-bit", weights=_FP4_WEIGHT,
            hardware="sm80 and newer (Marlin)",
        ),
        Scheme(
            name="MXFP4", format="mxfp4-pack-quantized", bits=4, group_size=32,
            summary="4-bit floats, power-of-two scale per 32, activations 4-bit on the fly", weights=_MXFP4_WEIGHT,
            inputs=_args(num_bits=4, strategy="group", group_size=32, dynamic=True, scale_dtype="torch.uint8"),
            hardware="sm100, sm120",
        ),
        Scheme(
            name="MXFP4A8", format="mxfp4-pack-quantized", bits=4, group_size=32,
            summary="4-bit floats, power-of-two scale per 32, activations FP8 on the fly or 16-bit",
            weights=_MXFP4_WEIGHT, inputs=_args(strategy="group", group_size=128, dynamic=True),
            hardware="sm80 and newer; DeepSeek-V4's own form",
        ),
        Scheme(
            name="MXFP4A16", format="mxfp4-pack-quantized", bits=4, group_size=32,
            summary="4-bit floats, power-of-two scale per 32, activations 16-bit (vLLM 0.32: 4-bit " "where it can)",
            weights=_MXFP4_WEIGHT, hardware="sm80 and newer",
        ),
        Scheme(
            name="FP8", format="float-quantized", bits=8,
            summary="8-bit floats, one scale a tensor, activations with a calibrated scale",
            weights=_args(strategy="tensor"), inputs=_args(strategy="tensor", observer="static_minmax"),
            needs_calibration=True, data_free="FP8_DYNAMIC", extra=_INPUT_SCALE, hardware="sm89 and newer",
        ),
        Scheme(
            name="FP8_DYNAMIC", format="float-quantized", bits=8,
            summary="8-bit floats, scale a row, activations per token on the fly", weights=_args(),
            inputs=_args(strategy="token", dynamic=True), hardware="sm89 and newer; CPU",
        ),
        Scheme(
            name="FP8_BLOCK", format="float-quantized", bits=8, block=(128, 128),
            summary="8-bit floats, scale per 128x128 block, activations per token and 128 channels " "on the fly",
            weights=_args(strategy="block", block_structure=[128, 128]),
            inputs=_args(strategy="group", group_size=128, dynamic=True), hardware="sm89 and newer",
        ),
        Scheme(
            name="W4A16", format="pack-quantized", bits=4, group_size=128,
            summary="4-bit integers, scale per 128, activations 16-bit",
            weights=_args(num_bits=4, type="int", strategy="group", group_size=128),
            hardware="sm75 and newer; CPUs with AVX-512",
        ),
        Scheme(
            name="W4A16_G32", format="pack-quantized", bits=4, group_size=32,
            summary="4-bit integers, scale per 32, activations 16-bit",
            weights=_args(num_bits=4, type="int", strategy="group", group_size=32),
            hardware="sm75 and newer; CPUs with AVX-512",
        ),
        Scheme(
            name="W4A16_ASYM", format="pack-quantized", bits=4, group_size=128,
            summary="4-bit integers, scale and zero point per 128, activations 16-bit",
            weights=_args(num_bits=4, type="int", strategy="group", group_size=128, symmetric=False,
                          zp_dtype="torch.int8"),
            hardware="sm75 and newer; CPUs with AVX-512",
        ),
        Scheme(
            name="W8A16", format="pack-quantized", bits=8, group_size=128,
            summary="8-bit integers, scale per 128, activations 16-bit",
            weights=_args(num_bits=8, type="int", strategy="group", group_size=128), hardware="sm75 and newer",
        ),
        Scheme(
            name="W8A8", format="int-quantized", bits=8,
            summary="8-bit integers, scale a row, activations per token on the fly", weights=_args(type="int"),
            inputs=_args(type="int", strategy="token", dynamic=True), hardware="sm75 to sm90; CPU",
        ),
    )
})  # fmt: skip

REWRITES: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "minmax": frozenset(),
        "gptq": frozenset(
            {"W4A16", "W4A16_G32", "W4A16_ASYM", "NVFP4", "NVFP4A16", "W8A16", "W8A8"}
        ),
        "awq": frozenset({"W4A16", "W4A16_G32", "W4A16_ASYM", "W8A16", "NVFP4A16"}),
        "smoothquant": frozenset({"W8A8"}),
        "autoround": frozenset({"W4A16", "W4A16_G32", "W4A16_ASYM", "W8A16"}),
        "mse": frozenset({"NVFP4", "NVFP4A16"}),
        "four-over-six": frozenset({"NVFP4", "NVFP4A16"}),
        "local-hessian": frozenset({"NVFP4", "NVFP4A16"}),
    }
)
"""Calibration algorithm -> the schemes whose weights it rewrites. Weights of other schemes are
rounded to nearest.
"""

SWEEPS = frozenset({"mse", "four-over-six", "local-hessian"})
"""Of these, modelopt's: they choose the scale of each group among candidates, and no value of the
layer changes.
"""

_SWEPT = frozenset(
    {
        "NVFP4",
        "NVFP4A16",
        "FP8_DYNAMIC",
        "FP8_BLOCK",
        "W4A16",
        "W4A16_G32",
        "W4A16_ASYM",
        "W8A16",
        "W8A8",
    }
)
SEARCHES: Mapping[str, frozenset[str]] = MappingProxyType(
    {"mse": _SWEPT, "four-over-six": frozenset({"NVFP4", "NVFP4A16"}), "imatrix": _SWEPT}
)
"""Search of scales -> the schemes that it has a meaning for; the weights of others are rounded as
without it.

Not MXFP4, whose scales are powers of two, and not FP8 with one scale a tensor, where the best one
takes 0.5 % of the squared error away at most."""

RESCALING = frozenset({"awq", "smoothquant"})
"""Algorithms that move scale from one module to the next: modules next to the rewritten weights may
change too.
"""

# Bits of one element of a safetensors dtype.
DTYPE_BITS: Mapping[str, int] = MappingProxyType({
    "F64": 64, "I64": 64, "U64": 64, "F32": 32, "I32": 32, "U32": 32, "F16": 16, "BF16": 16, "I16": 16, "U16": 16,
    "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "I8": 8, "U8": 8, "BOOL": 8,
})  # fmt: skip


def num_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    """Bytes of a tensor on disk."""
    elements = 1
    for size in shape:
        elements *= size
    return elements * DTYPE_BITS[dtype] // 8
