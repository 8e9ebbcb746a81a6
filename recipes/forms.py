"""Every form that a weight may be stored in: its tensors, their dtypes, and what its numbers are.

In: the name of a form. Out: a `Storage`. One table says what is read of a checkpoint, what a scheme
writes, what a server's parameters take and which values are possible; a new form is a row of it.

Easy to get wrong: two conventions have the same bytes. NVFP4's second scale is a divisor in
compressed-tensors and a multiplier in modelopt, under names that look alike.

Source: compressed-tensors 0.19.0 compressors/*; vLLM 0.32.0 quantization/modelopt.py, fp8.py and
compressed_tensors/schemes.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Literal

from .frozen import frozen

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

FLOATS = ("BF16", "F16", "F32")
FP8 = ("F8_E4M3", "F8_E5M2")
E8M0 = ("U8", "F8_E8M0")
"""Powers of two; most files call their dtype U8."""
FLOAT_SCALES = (*FLOATS, "F8_E8M0")
"""What vLLM's copy_ puts into a float without a change."""

FIRST_SCALES = ("weight_scale_inv", "weight_scale", "scale")
"""What a convention calls the scale of a block, a row or a tensor. A weight has one of them."""
GLOBAL_SCALE = "weight_global_scale"
INPUT_GLOBAL_SCALE = "input_global_scale"
DIVISORS = (GLOBAL_SCALE, INPUT_GLOBAL_SCALE)
IN_MODELOPT: Mapping[str, str] = MappingProxyType(
    {GLOBAL_SCALE: "weight_scale_2", INPUT_GLOBAL_SCALE: "input_scale"}
)
"""compressed-tensors' divisor -> the multiplier that modelopt has in its place: 1 / x."""
TENSOR_SCALES = (*DIVISORS, *IN_MODELOPT.values(), "input_scale_2")
"""Scales that are one value for a whole tensor, in every form that has them."""


@frozen
class Storage:
    """How a form stores a weight [N, K].

    Attributes:
        leaf: the tensor of the codes, in place of `weight`.
        dtypes: of the codes; the usual one first.
        codes: in one element along K; 0 where the bits of the scheme decide, in words of 32.
        scales: dtypes that a server takes of the scale; the usual one first.
        written: the dtype that keepmtp writes the scale in.
        format: compressed-tensors' word for the form; "" where it has none.
        common: the leaf of one more scale, of the whole weight; "" if there is none.
        others: leaves that a weight in this form may have next to its codes and its scales.
        group: input channels under a scale, where the form fixes them.
        largest: the largest magnitude of a code before its scales; NaN where it says nothing.
        error: the relative error (of the Frobenius norm) that rounding to the form never reaches.
    """

    leaf: str = "weight"
    dtypes: tuple[str, ...] = ()
    codes: int = 1
    scales: tuple[str, ...] = ()
    written: str = ""
    format: str = ""
    common: str = ""
    others: tuple[str, ...] = ()
    group: int = 0
    largest: float = math.nan
    error: float = math.nan

    @property
    def divides(self) -> bool:
        """Whether values are divided by `common`, and not multiplied."""
        return self.common in DIVISORS

    def per_element(self, bits: int) -> int:
        """Codes of so many bits in one element of the stored tensor."""
        return self.codes or 32 // bits


# Errors are two to three times those on a normal distribution: GPTQ moves weights further than
# rounding does.
_FP8 = Storage(
    dtypes=("F8_E4M3",),
    scales=FLOAT_SCALES,
    written="BF16",
    format="float-quantized",
    largest=448.0,
    error=0.08,
)
# DeepGEMM asserts float32 block scales; BF16 ones fail at the first forward on Hopper and
# Blackwell.
_FP8_BLOCKS = replace(_FP8, written="F32")
_NVFP4 = Storage(
    leaf="weight_packed",
    dtypes=("U8",),
    codes=2,
    scales=("F8_E4M3",),
    written="F8_E4M3",
    format="nvfp4-pack-quantized",
    common=GLOBAL_SCALE,
    group=16,
    largest=6.0,
    error=0.3,
)
_TRANSPOSED = Storage(leaf="qweight", dtypes=("I32",), error=0.35)
FORMS: Mapping[Form, Storage] = MappingProxyType(
    {
        "plain": Storage(dtypes=FLOATS, error=0.01),
        "fp8_block": _FP8_BLOCKS,
        "fp8_sliced": _FP8_BLOCKS,
        "fp8_channel": _FP8,
        "fp8_tensor": replace(_FP8, error=0.1),
        "mxfp8": replace(_FP8, scales=E8M0, written="U8", format="", group=32),
        "nvfp4": _NVFP4,
        "nvfp4_modelopt": replace(
            _NVFP4, leaf="weight", format="", common=IN_MODELOPT[GLOBAL_SCALE]
        ),
        "mxfp4": Storage(
            leaf="weight_packed",
            dtypes=("U8", "I8"),
            codes=2,
            scales=E8M0,
            written="U8",
            format="mxfp4-pack-quantized",
            group=32,
            largest=6.0,
            error=0.35,
        ),
        "int_packed": Storage(
            leaf="weight_packed",
            dtypes=("I32",),
            codes=0,
            scales=FLOAT_SCALES,
            written="BF16",
            format="pack-quantized",
            others=("weight_shape", "weight_zero_point", "weight_g_idx"),
            error=0.35,
        ),
        "int8": Storage(
            dtypes=("I8",),
            scales=FLOAT_SCALES,
            written="BF16",
            format="int-quantized",
            others=("weight_zero_point",),
            largest=127.0,
            error=0.05,
        ),
        "gptq": replace(_TRANSPOSED, others=("qweight", "scales", "qzeros", "g_idx")),
        "awq": replace(_TRANSPOSED, others=("qweight", "scales", "qzeros")),
        "unknown": Storage(),
    }
)
TRANSPOSED: tuple[Form, ...] = ("gptq", "awq")
"""Matrices as [K, N]. Where the config says how they are read, a scheme may have the same codes."""
NOT_COMPUTED: tuple[Form, ...] = (*TRANSPOSED, "unknown")
"""Forms that keepmtp recognizes and does not compute with."""
