"""Which of vLLM's Quark schemes a layer's config means, and what it registers.

In: a layer's config as Quark writes it. Out: the scheme's parameters, or the exception that vLLM raises.

Easy to get wrong: linear modules and routed experts are asked in another order, and not about the same schemes. A list
of one config is as good as the config; a list of two is NVFP4, or for experts also integers inside FP8. Of NVFP4 the
inputs' scale is called `input_scale_2`.

Source: vLLM 0.32.0 quantization/quark/quark.py (_get_scheme_cls_from_config), quark_moe.py (get_moe_method_target),
utils/ocp_mx_utils.py, quark/schemes; compared with the real functions by tests/validate/check/test_foreign_schemes.py.
"""

from typing import NamedTuple

from ..vllm_module import UNKNOWN, VLLMModule
from .given import QuarkLayer, QuarkTensor

LINEAR_ERROR = "NotImplementedError: No quark compatible scheme was found"
LISTS_ERROR = "NotImplementedError: Multi-entry weight or activation quantization configs are only supported for NVFP4"
EXPERTS_ERROR = "RuntimeError: Unsupported FusedMoe scheme"
BLOCK_ERROR = "ValueError: Quark W8A8 FP8 per-block weight quantization requires `block_size`"
OUTPUT_ERROR = "NotImplementedError: Currently, Quark models with output_tensors and bias quantized are not supported"
_MX, _NV = 32, 16
_FP8, _LEAVES = "fp8_e4m3", frozenset({"weight", "weight_scale"})
_ONE_SCALE = (_FP8, "per_tensor", False)
_MX_INPUTS = ("fp4", "fp6_e3m2", "fp6_e2m3", "fp8_e4m3")
_Tensors = QuarkTensor | tuple[QuarkTensor, ...] | None


class QuarkScheme(NamedTuple):
    """vLLM's class by a short name, and what it registers; or the exception."""

    name: str = ""
    built: VLLMModule = UNKNOWN
    error: str = ""


def scheme_of(layer: QuarkLayer, pack_method: str, *, is_experts: bool) -> QuarkScheme:
    """The scheme of a layer that is not excluded."""
    if layer.output_tensors or layer.bias:
        return QuarkScheme(error=OUTPUT_ERROR)
    weight, inputs = layer.weight, layer.input_tensors
    if _is_list(weight) or _is_list(inputs):
        return _of_lists(weight, inputs, is_experts=is_experts)
    one, given = _single(weight), _single(inputs)
    if one is not None and one.qscheme == "per_block" and not one.block_size and not is_experts:
        return QuarkScheme(error=BLOCK_ERROR)
    tried = (_fp8, _int4, _mx, _int8) if is_experts else (_fp8, _int8, _int4, _mx)
    for scheme in tried:
        if one is not None and (found := scheme(one, given, pack_method, is_experts)):
            return found
    return QuarkScheme(error=EXPERTS_ERROR if is_experts else LINEAR_ERROR)


def _of_lists(weight: _Tensors, inputs: _Tensors, *, is_experts: bool) -> QuarkScheme:
    if is_experts and _is_int4_in_fp8(weight, _single(inputs)):
        return QuarkScheme("int4_fp8")
    if _is_nvfp4(weight, inputs):
        leaves = _LEAVES | {"weight_scale_2", "input_scale_2"}
        return QuarkScheme("nvfp4", VLLMModule(form="nvfp4_modelopt", leaves=leaves, group_size=_NV))
    return QuarkScheme(error=EXPERTS_ERROR if is_experts else LISTS_ERROR)


def _is_nvfp4(weight: _Tensors, inputs: _Tensors) -> bool:
    if not isinstance(weight, tuple) or not isinstance(inputs, tuple) or len(weight) != 2 or len(inputs) != 2:
        return False
    groups = (weight[0], inputs[0])
    has_groups = all((each.dtype, each.qscheme, each.group_size) == ("fp4", "per_group", _NV) for each in groups)
    tensors = (weight[1], inputs[1])
    has_tensors = all((each.dtype, each.qscheme, bool(each.is_dynamic)) == _ONE_SCALE for each in tensors)
    return has_groups and has_tensors and not weight[0].is_dynamic and bool(inputs[0].is_dynamic)


def _is_int4_in_fp8(weight: _Tensors, inputs: QuarkTensor | None) -> bool:
    if not isinstance(weight, tuple) or len(weight) != 2 or inputs is None:
        return False
    tensor, channel = weight
    is_stored = tensor.dtype == _FP8 and tensor.qscheme == "per_tensor" and channel.dtype == "int4"
    is_channel = channel.qscheme == "per_channel" and channel.symmetric is True and channel.ch_axis == 0
    is_input = inputs.dtype == _FP8 and (inputs.is_dynamic or inputs.qscheme == "per_tensor")
    return is_stored and is_channel and bool(is_input) and not (tensor.is_dynamic or channel.is_dynamic)


def _fp8(weight: QuarkTensor, inputs: QuarkTensor | None, pack_method: str, is_experts: bool) -> QuarkScheme | None:
    if inputs is None or (weight.dtype, inputs.dtype) != (_FP8, _FP8) or weight.is_dynamic:
        return None
    if weight.qscheme == "per_block" and weight.block_size == (128, 128) and weight.symmetric is True:
        is_group = inputs.qscheme == "per_group" and inputs.group_size == 128 and inputs.symmetric is True
        built = VLLMModule(form="fp8_block", leaves=_LEAVES, block=(128, 128))
        return QuarkScheme("fp8_block", built) if inputs.is_dynamic and is_group else None
    if weight.qscheme not in ("per_tensor", "per_channel"):
        return None
    if not inputs.is_dynamic and inputs.qscheme != "per_tensor":
        return None
    leaves = _LEAVES | (frozenset() if inputs.is_dynamic else {"input_scale"})
    form = "fp8_tensor" if weight.qscheme == "per_tensor" else "fp8_channel"
    return QuarkScheme("fp8", VLLMModule(form=form, leaves=leaves))


def _int8(weight: QuarkTensor, inputs: QuarkTensor | None, pack_method: str, is_experts: bool) -> QuarkScheme | None:
    if inputs is None or (weight.dtype, inputs.dtype) != ("int8", "int8") or weight.symmetric is not True:
        return None
    is_static = inputs.qscheme == "per_tensor" and not inputs.is_dynamic
    is_row = inputs.qscheme == "per_channel" and inputs.is_dynamic is True
    if weight.qscheme not in ("per_tensor", "per_channel") or not ((is_static and not weight.is_dynamic) or is_row):
        return None
    zeros = frozenset({"weight_zero_point", "input_zero_point"})
    leaves = _LEAVES | ({"input_scale"} if is_static else frozenset())
    is_channel = weight.qscheme == "per_channel"
    return QuarkScheme("int8", VLLMModule(form="int8", leaves=leaves, optional=zeros) if is_channel else UNKNOWN)


def _int4(weight: QuarkTensor, inputs: QuarkTensor | None, pack_method: str, is_experts: bool) -> QuarkScheme | None:
    if inputs is not None or weight.dtype not in ("int4", "uint4") or pack_method not in ("order", "reorder"):
        return None
    size = weight.group_size
    missing = "group_size" if size is None else "symmetric" if weight.symmetric is None else ""
    if missing:
        return QuarkScheme(error=f"ValueError: Quark W4A16 INT4/UINT4 configs must specify weight.{missing}")
    if size is None or size <= 0:
        return QuarkScheme(error=f"ValueError: Quark W4A16 weight.group_size must be a positive int, got {size}")
    return QuarkScheme("int4")


def _mx(weight: QuarkTensor, inputs: QuarkTensor | None, pack_method: str, is_experts: bool) -> QuarkScheme | None:
    """MXFP4, MXFP6 and MXFP8: weights decide, and inputs may not be static, but for FP8 of one scale."""
    if not _is_mx(weight):
        return None
    leaves, is_fp8 = _LEAVES, inputs is not None and inputs.dtype == _FP8
    if inputs is not None and not inputs.is_dynamic:
        is_tensor = is_fp8 and inputs.qscheme == "per_tensor" and inputs.symmetric is True
        has_kernel = is_experts or (weight.dtype == "fp4" and weight.qscheme == "per_group" and not weight.is_dynamic)
        if not is_tensor or not has_kernel:
            return None
        leaves |= {"input_scale"}
    elif inputs is not None and not is_fp8 and inputs.dtype not in _MX_INPUTS:
        return QuarkScheme(error=f"ValueError: Unsupported input_dtype=mx{inputs.dtype} in Quark's vLLM integration")
    name = "mxfp4_fp8" if "input_scale" in leaves and not is_experts else "mx"
    if weight.dtype == "fp4":
        return QuarkScheme(name, VLLMModule(form="mxfp4", leaves=leaves, group_size=_MX))
    is_row = weight.dtype == _FP8 and weight.qscheme == "per_group"
    return QuarkScheme(name, VLLMModule(form="mxfp8", leaves=leaves, group_size=_MX) if is_row else UNKNOWN)


def _is_mx(weight: QuarkTensor) -> bool:
    if weight.dtype not in _MX_INPUTS:
        return False
    if weight.qscheme == "per_group":
        return weight.group_size == _MX and weight.scale_format == "e8m0"
    is_block = weight.qscheme == "per_block" and weight.dtype == _FP8 and len(weight.block_size or ()) == 2
    is_scaled = weight.scale_type == "float8_e8m0fnu" and weight.symmetric is True and not weight.is_dynamic
    return is_block and is_scaled and bool(weight.block_size) and weight.block_size[1] == _MX


def _is_list(given: _Tensors) -> bool:
    return isinstance(given, tuple) and len(given) > 1


def _single(given: _Tensors) -> QuarkTensor | None:
    """A list of one is as good as the one."""
    if isinstance(given, tuple):
        return given[0] if len(given) == 1 else None
    return given
