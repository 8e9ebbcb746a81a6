"""Which of vLLM's Quark schemes a layer's config means, and what it registers.

In: a layer's config as Quark writes it. Out: the parameters of its scheme, unknown ones for a
scheme whose tensors the check does not know, or why vLLM raises.

Easy to get wrong: a list of one config is as good as the config; a list of two is NVFP4, or for
experts also integers inside FP8. Of NVFP4 the inputs' scale is called `input_scale_2`.

Source: vLLM 0.32.0 quantization/quark/quark.py (_get_scheme_cls_from_config), quark_moe.py
(get_moe_method_target), utils/ocp_mx_utils.py, quark/schemes; compared with the real functions by
tests/validate/check/test_foreign_schemes.py.
"""

from ....checkpoints.stored import Form
from ..vllm_module import UNKNOWN, VLLMModule
from .given import QuarkLayer, QuarkTensor
from .matching import registers

NO_SCHEME = "it has no scheme of Quark's with these weights and inputs"
_TWO = ("weight", "weight_scale")
_MX_DTYPES = ("fp4", "fp6_e3m2", "fp6_e2m3", "fp8_e4m3")


def scheme_of(layer: QuarkLayer, pack_method: str, *, is_experts: bool) -> VLLMModule | str:
    """What a layer that is not excluded builds, or why vLLM raises."""
    weights, inputs = _listed(layer.weight), _listed(layer.input_tensors)
    if layer.output_tensors or layer.bias or not weights:
        return NO_SCHEME
    if len(weights) > 1 or len(inputs) > 1:
        return _of_lists(weights, inputs, is_experts=is_experts) or NO_SCHEME
    if inputs:
        return _with_inputs(weights[0], inputs[0], is_experts=is_experts) or NO_SCHEME
    if weights[0].dtype in ("int4", "uint4") and pack_method in ("order", "reorder"):
        return UNKNOWN
    return _mx(weights[0]) or NO_SCHEME


def _with_inputs(
    weight: QuarkTensor, inputs: QuarkTensor, *, is_experts: bool
) -> VLLMModule | None:
    of_inputs = () if inputs.is_dynamic else ("input_scale",)
    kinds = _kind(weight), _kind(inputs)
    match kinds:
        case ("fp8_e4m3", "per_tensor", False), ("fp8_e4m3", "per_tensor", False) | (
            "fp8_e4m3",
            _,
            True,
        ):
            return registers("fp8_tensor", *_TWO, *of_inputs)
        case ("fp8_e4m3", "per_channel", False), ("fp8_e4m3", "per_tensor", False) | (
            "fp8_e4m3",
            _,
            True,
        ):
            return registers("fp8_channel", *_TWO, *of_inputs)
        case ("fp8_e4m3", "per_block", False), ("fp8_e4m3", "per_group", True) if (
            weight.block_size == (128, 128)
            and inputs.group_size == 128
            and weight.symmetric
            and inputs.symmetric
        ):
            return registers("fp8_block", *_TWO, block=(128, 128))
        case (("int8", scheme, False), ("int8", "per_tensor", False)) | (
            ("int8", scheme, _),
            ("int8", "per_channel", True),
        ) if weight.symmetric:
            zeros = frozenset({"weight_zero_point", "input_zero_point"})
            rows = registers("int8", *_TWO, *of_inputs, optional=zeros)
            return {"per_channel": rows, "per_tensor": UNKNOWN}.get(scheme or "")
        case _, (dtype, _, True) if dtype in _MX_DTYPES:
            return _mx(weight)
        # Static inputs are FP8 of one scale, and outside experts only of FP4.
        case (dtype, group, is_dynamic), ("fp8_e4m3", "per_tensor", False) if inputs.symmetric and (
            is_experts or (dtype, group, is_dynamic) == ("fp4", "per_group", False)
        ):
            return _mx(weight, "input_scale")
    return None


def _of_lists(
    weights: list[QuarkTensor], inputs: list[QuarkTensor], *, is_experts: bool
) -> VLLMModule | None:
    match [*map(_kind, weights)], [*map(_kind, inputs)]:
        case (
            [("fp4", "per_group", False), ("fp8_e4m3", "per_tensor", False)],
            [("fp4", "per_group", True), ("fp8_e4m3", "per_tensor", False)],
        ) if weights[0].group_size == inputs[0].group_size == 16:
            return registers(
                "nvfp4_modelopt", *_TWO, "weight_scale_2", "input_scale_2", group_size=16
            )
        case [_, ("int4", "per_channel", False)], _ if is_experts:
            return UNKNOWN
    return None


def _mx(weight: QuarkTensor, *of_inputs: str) -> VLLMModule | None:
    """What weights in groups of 32 with scales of eight bits register; None for others."""
    match _kind(weight):
        case (dtype, "per_group", _) if weight.group_size == 32 and weight.scale_format == "e8m0":
            forms: dict[str | None, Form] = {"fp4": "mxfp4", "fp8_e4m3": "mxfp8"}
            if dtype in forms:
                return registers(forms[dtype], *_TWO, *of_inputs, group_size=32)
            return UNKNOWN if dtype in _MX_DTYPES else None
        case ("fp8_e4m3", "per_block", False) if (
            weight.scale_type == "float8_e8m0fnu" and weight.symmetric
        ):
            return UNKNOWN if (weight.block_size or ())[1:] == (32,) else None
    return None


def _kind(tensor: QuarkTensor) -> tuple[str | None, str | None, bool]:
    return tensor.dtype, tensor.qscheme, bool(tensor.is_dynamic)


def _listed(given: QuarkTensor | tuple[QuarkTensor, ...] | None) -> list[QuarkTensor]:
    """A list of one is as good as the one."""
    if isinstance(given, tuple):
        return [*given]
    return [given] if given else []
