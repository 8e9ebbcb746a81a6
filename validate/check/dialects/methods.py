"""The quantization methods that vLLM 0.32.0 has, by the names that a checkpoint may say.

In: config.json. Out: an `Unloadable`, or None if vLLM has the method.

Easy to get wrong: MLX writes its own `quantization` key, and vLLM does not look at it. Newer MLX
writes a copy of it as quantization_config, without a quant_method, and vLLM takes the model for an
unquantized one.
Source: vLLM 0.32.0 model_executor/layers/quantization/__init__.py (QUANTIZATION_METHODS and
DEPRECATED_QUANTIZATION_METHODS), config/model.py (_verify_quantization),
transformers_utils/model_arch_config_convertor.py; compared with them by
tests/validate/check/test_methods.py.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

METHODS = frozenset(
    {
        "auto_awq",
        "auto_gptq",
        "awq",
        "awq_marlin",
        "compressed-tensors",
        "deepseek_v4_fp8",
        "experts_int8",
        "fbgemm_fp8",
        "fp8",
        "fp8_per_block",
        "fp8_per_channel",
        "fp8_per_tensor",
        "fp_quant",
        "gpt_oss_mxfp4",
        "gptq",
        "gptq_marlin",
        "humming",
        "inc",
        "int8_per_channel_weight_only",
        "modelopt",
        "modelopt_fp4",
        "modelopt_mixed",
        "modelopt_mxfp8",
        "moe_wna16",
        "mxfp4",
        "mxfp8",
        "nvfp4_per_token",
        "online",
        "quark",
        "torchao",
    }
)
DEPRECATED = frozenset({"fbgemm_fp8", "fp_quant"})
# Names that vLLM reads as another one.
ALIASES = {"auto-round": "inc", "compressed_tensors": "compressed-tensors"}
_ELSEWHERE = "Serve it with the engine that it was made for, or quantize the original release"
_LOWER = f"{_ELSEWHERE[0].lower()}{_ELSEWHERE[1:]}"


class Unloadable(NamedTuple):
    """Why vLLM does not load a checkpoint, from its quantization method alone.

    Attributes:
        where: the key of config.json.
        says: what vLLM does.
        cure: what to do.
    """

    where: str
    says: str
    cure: str


def method_of(raw: Mapping[str, Any]) -> str:
    """The quant_method as vLLM reads it; "" where there is none."""
    word = raw.get("quant_method")
    method = word.lower() if isinstance(word, str) else ""
    return ALIASES.get(method, method)


def unloadable(config: Mapping[str, Any], found: Mapping[str, Any] | None) -> Unloadable | None:
    """Why vLLM has nothing to load this with, if it has not.

    Args:
        config: config.json.
        found: its quantization config, wherever vLLM finds it.
    """
    method = method_of(found or {})
    given = config.get("quantization")
    if not method and isinstance(given, Mapping) and "bits" in given and "group_size" in given:
        says = (
            "is MLX's key, which vLLM 0.32 does not read: it builds a plain model and raises on "
            "the packed weights"
        )
        return Unloadable("config.json: quantization", says, _ELSEWHERE)
    says, cure = "", _ELSEWHERE
    if method in DEPRECATED:
        says = (
            f"is {method}, which vLLM 0.32 refuses as deprecated unless "
            "--allow-deprecated-quantization is set"
        )
        cure = f"Set that option, or {_LOWER}"
    elif method and method not in METHODS:
        says = (
            f"is {method}, which vLLM 0.32 does not have: it raises ValueError 'Unknown "
            f"quantization method: {method}'"
        )
    if method == "bitsandbytes":
        says += ". With 0.28 it moved to vllm-bnb-plugin (vllm #43529)"
        cure = (
            f"Install vllm-bnb-plugin beside vLLM, whose rules keepmtp does not know, or {_LOWER}"
        )
    return Unloadable("config.json: quantization_config.quant_method", says, cure) if says else None
