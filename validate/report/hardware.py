"""On which GPUs vLLM runs each scheme, for people who want to know before they download.

In: names of schemes. Out: for each, the compute capabilities on which vLLM 0.32.0 has kernels of
its own for it, and what vLLM does on other GPUs.

Easy to get wrong: a checkpoint that loads says little about the GPU. vLLM serves 4-bit and 8-bit
floats on older GPUs
too: the kernel unpacks the weights, and activations have 16 bits. Answers are right, but the speed
differs, and the numerics are not those of NVFP4 or FP8 activations.
"""

from collections.abc import Iterable, Mapping
from types import MappingProxyType

READ_FROM = "0.32.0"
"""The vLLM release whose source code this table is from. Older releases were not read."""

# Weight-only kernels take sm75 as well, where vLLM has no BF16 (platforms/cuda.py
# supported_dtypes).
_SM80 = "sm80 (A100) and newer"
_MARLIN = "weights unpacked in the kernel, activations 16-bit (Marlin)"
_FP8 = (
    "sm89 (L40S, RTX 4090) and newer, sm90 (H100, H200) among them",
    f"sm80 (A100) and sm86: {_MARLIN}",
)
_MXFP4 = ("sm100 (B200) and newer", f"{_SM80}: {_MARLIN}")
_INT4 = (f"{_SM80}; CPUs with AVX-512 for all but experts", "none")

HARDWARE: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        # vllm/model_executor/kernels/linear/nvfp4/*.py, layers/fused_moe/oracle/nvfp4.py
        "NVFP4": (
            "sm100 (B200), sm103 (B300), sm120 (RTX PRO 6000, RTX 5090) and sm121",
            f"{_SM80}: {_MARLIN}",
        ),
        "NVFP4A16": (_SM80, "none"),
        # kernels/linear/mxfp4/*.py, layers/fused_moe/oracle/mxfp4.py
        "MXFP4": _MXFP4,
        "MXFP4A8": _MXFP4,
        "MXFP4A16": (
            f"{_SM80}; on sm100 (B200) and newer vLLM rounds activations to 4 bits",
            "none",
        ),
        # layers/quantization/compressed_tensors/schemes/compressed_tensors_w8a8_fp8.py and
        # _w8a16_fp8.py, layers/fused_moe/oracle/fp8.py, kernels/linear/__init__.py
        "FP8": _FP8,
        "FP8_DYNAMIC": _FP8,
        "FP8_BLOCK": (
            "sm90 (H100, H200) and newer; on sm89 (L40S, RTX 4090) for routed experts alone",
            f"sm80 (A100) to sm89: {_MARLIN}",
        ),
        # kernels/linear/mixed_precision/*.py, layers/fused_moe/oracle/int_wna16.py
        "W4A16": _INT4,
        "W4A16_G32": _INT4,
        "W4A16_ASYM": _INT4,
        "W8A16": (_SM80, "none"),
        # kernels/linear/scaled_mm/*.py, layers/fused_moe/oracle/int8.py
        "W8A8": ("sm75 to sm90 (H100, H200); CPUs", "none"),
    }
)
"""Scheme -> compute capabilities whose kernels take weights and activations as the scheme means
them, and what vLLM does on other GPUs. Dry loads on sm89, sm90, sm100 and sm120 showed the same."""


def where_they_run(schemes: Iterable[str]) -> list[tuple[str, str, str]]:
    """The rows of `HARDWARE` for these schemes, in its order; words that are no scheme are left
    out.
    """
    wanted = set(schemes)
    return [(name, *row) for name, row in HARDWARE.items() if name in wanted]
