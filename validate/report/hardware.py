"""On which GPUs vLLM runs each scheme, for people who want to know before they download.

In: names of schemes. Out: for each, the compute capabilities on which vLLM 0.32.0 has kernels of its own for it, and
what vLLM does on other GPUs.

Easy to get wrong: a checkpoint that loads says little about the GPU. vLLM serves 4-bit and 8-bit floats on older GPUs
too: the kernel unpacks the weights, and activations have 16 bits. Answers are right, but the speed differs, and the
numerics are not those of NVFP4 or FP8 activations.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

READ_FROM = "0.32.0"
"""The vLLM release whose source code this table is from. Older releases were not read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """Where one scheme runs.

    Attributes:
        native: compute capabilities whose kernels take weights and activations as the scheme means them.
        elsewhere: what vLLM does on other GPUs; "" where it has nothing.
        source: files of vLLM below vllm/model_executor that decide.
    """

    native: str
    elsewhere: str = ""
    source: str


# Weight-only kernels take sm75 as well, where vLLM has no BF16 (platforms/cuda.py supported_dtypes).
_MARLIN = "sm80 (A100) and newer: weights unpacked in the kernel, activations 16-bit (Marlin)"
_FP8 = Hardware(
    native="sm89 (L40S, RTX 4090) and newer, sm90 (H100, H200) among them",
    elsewhere=_MARLIN.replace("sm80 (A100) and newer", "sm80 (A100) and sm86"),
    source="layers/quantization/compressed_tensors/schemes/compressed_tensors_w8a8_fp8.py, "
    "compressed_tensors_w8a16_fp8.py, layers/fused_moe/oracle/fp8.py",
)
_NVFP4 = "kernels/linear/nvfp4/*.py, layers/fused_moe/oracle/nvfp4.py"
_MXFP4 = "kernels/linear/mxfp4/*.py, layers/fused_moe/oracle/mxfp4.py"
_INT = "kernels/linear/mixed_precision/*.py, layers/fused_moe/oracle/int_wna16.py"

HARDWARE: Mapping[str, Hardware] = MappingProxyType(
    {
        "NVFP4": Hardware(
            native="sm100 (B200), sm103 (B300), sm120 (RTX PRO 6000, RTX 5090) and sm121",
            elsewhere=_MARLIN,
            source=_NVFP4,
        ),
        "NVFP4A16": Hardware(native="sm80 (A100) and newer", source=_NVFP4),
        "MXFP4": Hardware(native="sm100 (B200) and newer", elsewhere=_MARLIN, source=_MXFP4),
        "MXFP4A8": Hardware(native="sm100 (B200) and newer", elsewhere=_MARLIN, source=_MXFP4),
        "MXFP4A16": Hardware(
            native="sm80 (A100) and newer; on sm100 (B200) and newer vLLM rounds activations to 4 bits", source=_MXFP4
        ),
        "FP8": _FP8,
        "FP8_DYNAMIC": _FP8,
        "FP8_BLOCK": Hardware(
            native="sm90 (H100, H200) and newer; on sm89 (L40S, RTX 4090) for routed experts alone",
            elsewhere=_MARLIN.replace("and newer", "to sm89"),
            source="kernels/linear/__init__.py, layers/fused_moe/oracle/fp8.py",
        ),
        **dict.fromkeys(
            ("W4A16", "W4A16_G32", "W4A16_ASYM"),
            Hardware(native="sm80 (A100) and newer; CPUs with AVX-512 for all but experts", source=_INT),
        ),
        "W8A16": Hardware(native="sm80 (A100) and newer", source=_INT),
        "W8A8": Hardware(
            native="sm75 to sm90 (H100, H200); CPUs",
            source="kernels/linear/scaled_mm/*.py, layers/fused_moe/oracle/int8.py",
        ),
    }
)
"""Scheme -> where it runs. Dry loads on sm89, sm90, sm100 and sm120 showed the same."""


def where_they_run(schemes: Iterable[str]) -> tuple[tuple[str, Hardware], ...]:
    """The rows of `HARDWARE` for these schemes, in its order; words that are no scheme are left out."""
    wanted = set(schemes)
    return tuple((name, row) for name, row in HARDWARE.items() if name in wanted)
