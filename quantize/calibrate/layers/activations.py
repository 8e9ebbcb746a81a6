"""Activations rounded as vLLM's kernels round them, for the measurement.

In: the input of a quantized linear layer, and its scheme. Out: the values that the kernel
multiplies, in the input's own dtype. Each distinct input is rounded once: query, key and value
projections see one, and so do gate and up.

Source: vLLM 0.32.0 quantization/utils/nvfp4_emulation_utils.py (ref_nvfp4_quant_dequant),
utils/int8_utils.py (_per_token_quant_int8) and input_quant_fp8.py (QuantFP8.forward_native).
tests/vllm/test_activations.py compares the bits. MXFP4's inputs are rounded by compressed-tensors:
vLLM takes a package for them that is not on a CPU.
"""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, cast

import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationStrategy
from compressed_tensors.quantization.lifecycle.forward import forward_quantize
from torch import Tensor

from ..model.hooks import hooked_before
from .observed import input_identity

_E4M3_MAX = 448.0
_E2M1_MAX = 6.0
_SMALLEST_FP8_SCALE = 1 / (_E4M3_MAX * 512)

Rounding = Callable[[Tensor], Tensor]


def rounded_inputs(modules: Iterable[Any]) -> AbstractContextManager[None]:
    """Lets quantized linear layers compute with rounded inputs, and with their weights as they are.

    Args:
        modules: with a `quantization_scheme`.
    """
    # The input that was rounded last, and what became of it.
    last: tuple[object, Tensor] = None, torch.empty(0)

    def rounded(rounding: Rounding, key: object, _module: object, args: tuple[Tensor]) -> Tensor:
        nonlocal last
        (value,) = args
        identity = key, input_identity(value)
        if identity != last[0]:
            last = identity, through(value, rounding)
        return last[1].view(value.shape)

    hooks = {}
    for module in modules:
        args = module.quantization_scheme.input_activations
        if args is not None:
            scale = 0.0
            if args.strategy == QuantizationStrategy.TENSOR_GROUP:
                scale = float(module.input_global_scale)
            elif args.strategy == QuantizationStrategy.TENSOR:
                scale = float(module.input_scale.bfloat16())  # as it is on disk
            key = args.strategy, args.num_bits, args.type, args.group_size, scale
            hooks[module] = partial(rounded, rounding_of(module, scale), key)
    return hooked_before(hooks)


def rounding_of(module: Any, scale: float) -> Rounding:
    """How a module's input is rounded.

    Args:
        module: with a `quantization_scheme` that rounds inputs.
        scale: its static one, as it is on disk.
    """
    args: QuantizationArgs = module.quantization_scheme.input_activations
    match args.strategy, args.num_bits:
        case QuantizationStrategy.TENSOR_GROUP, 4:
            return partial(nvfp4, divisor=scale)
        case QuantizationStrategy.TENSOR, 8:
            return partial(fp8_tensor, scale=scale)
        case QuantizationStrategy.TOKEN, 8:
            return int8_tokens if args.type == "int" else fp8_tokens
        case QuantizationStrategy.GROUP, 8:
            assert args.group_size
            return partial(fp8_groups, group_size=args.group_size)
        case _:
            return partial(forward_quantize, module, base_name="input", args=args)


def nvfp4(value: Tensor, *, divisor: float) -> Tensor:
    """E2M1 values [..., K] with an E4M3 scale for each 16, in units of 1 / divisor."""
    groups = value.float().unflatten(-1, (-1, 16))
    common = value.new_full((), divisor, dtype=torch.float32)
    scale = (common * (groups.abs().amax(dim=-1, keepdim=True) * (1 / _E2M1_MAX))).clamp(
        max=_E4M3_MAX
    )
    scale = scale.to(torch.float8_e4m3fn).float()
    unit = scale * common.reciprocal()
    groups = groups * torch.where(unit == 0, 0.0, unit.reciprocal())
    return (e2m1(groups) * (scale / common)).flatten(-2).to(value.dtype)


def int8_tokens(value: Tensor) -> Tensor:
    """INT8 values [..., K] with a scale a token."""
    # In F32, a token at a time, and with 127: compressed-tensors would take the input's dtype, one
    # scale for all tokens of an expert, and 127.5.
    wide = value.float()
    largest = wide.abs().amax(dim=-1, keepdim=True).clamp(min=1e-10)
    return ((wide * (127 / largest)).round_() * (largest / 127)).to(value.dtype)


def fp8_tokens(value: Tensor) -> Tensor:
    """E4M3 values [..., K] with a scale a token."""
    wide = value.float()
    scale = (wide.abs().amax(dim=-1, keepdim=True) / _E4M3_MAX).clamp(min=_SMALLEST_FP8_SCALE)
    return (e4m3(wide * scale.reciprocal()) * scale).to(value.dtype)


def fp8_groups(value: Tensor, *, group_size: int) -> Tensor:
    """E4M3 values [..., K] with a scale for each `group_size` channels of a token."""
    width = value.shape[-1]
    groups = torch.nn.functional.pad(value.float(), (0, -width % group_size)).unflatten(
        -1, (-1, group_size)
    )
    scale = (groups.abs().amax(dim=-1, keepdim=True) / _E4M3_MAX).clamp(min=_SMALLEST_FP8_SCALE)
    return (e4m3(groups / scale) * scale).flatten(-2)[..., :width].to(value.dtype)


def fp8_tensor(value: Tensor, *, scale: float) -> Tensor:
    """E4M3 values [..., K] with one scale that is known before."""
    common = value.new_full((), scale, dtype=torch.float32)
    return (e4m3(value.float() * common.reciprocal()) * common).to(value.dtype)


def e4m3(scaled: Tensor) -> Tensor:
    """Nearest E4M3 values, as F32, in place of none larger than 448."""
    return scaled.clamp_(-_E4M3_MAX, _E4M3_MAX).to(torch.float8_e4m3fn).float()


def e2m1(scaled: Tensor) -> Tensor:
    """Nearest of 0, 0.5, 1, 1.5, 2, 3, 4 and 6, with the sign; ties go to the even code (see
    `pack._e2m1_codes`).
    """
    magnitude = scaled.abs().clamp_(max=_E2M1_MAX)
    power = magnitude.clamp(min=1.0).view(torch.int32).bitwise_and_(0x7F800000)
    power = power.view(torch.float32).mul_(2.0**22)
    return magnitude.add_(power).sub_(power).copysign_(scaled)


class _StraightThrough(torch.autograd.Function):
    """Rounds; a gradient passes as if nothing had been rounded."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, rounding: Rounding) -> Tensor:
        return rounding(value)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


def through(value: Tensor, rounding: Rounding) -> Tensor:
    """A rounded value; where gradients are kept, its gradient is the value's own."""
    return cast(Tensor, _StraightThrough.apply(value, rounding))
