"""What a checkpoint must fill of a model's parameters; vLLM's own modules say it.

In: a model as vLLM built it. Out: `Demands`. The account compares the load with them.

Easy to get wrong: a rule by name alone also hides faults. A checkpoint may leave out input scales
only where nothing quantizes inputs. Padding is allowed only where vLLM says that it rounded a size
up. Source: vLLM 0.31.0 to 0.33.0.
"""

from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Demands:
    """What a checkpoint must fill.

    Attributes:
        optional: parameters that it need not have.
        may_pad: parameters that may keep the value of construction in a part.
        counts: elements to fill, for parameters with more elements than that.
    """

    optional: frozenset[str] = frozenset()
    may_pad: frozenset[str] = frozenset()
    counts: dict[str, int] = field(default_factory=dict)


def demands_of(model: torch.nn.Module) -> Demands:
    """Read a model that vLLM built."""
    from vllm.model_executor.layers.fused_moe import RoutedExperts

    optional = set[str]()
    may_pad = set[str]()
    counts = dict[str, int]()
    for prefix, module in model.named_modules():
        if type(module).__name__ == "MimoAudioEncoder":
            # It builds a Qwen2 with a table of tokens, and gives it embeddings only
            # (models/mimo_audio.py).
            optional.add(f"{prefix}.input_local_transformer.embed_tokens.weight")
        method = getattr(module, "quant_method", None)
        is_weight_only = _is_weight_only(method)
        for name, param in module.named_parameters(recurse=False):
            if _is_optional(name, method, is_weight_only=is_weight_only):
                optional.add(f"{prefix}.{name}")
            if method is None:  # such as sinks
                may_pad.add(f"{prefix}.{name}")
            if hasattr(param, "weight_loader_numel"):
                counts[f"{prefix}.{name}"] = param.weight_loader_numel
        # A module with a `pad_size` gives a fused linear beneath it that many rows more.
        pad_size = getattr(module, "pad_size", 0)
        if isinstance(pad_size, int) and pad_size:
            for name, child in module.named_children():
                if getattr(child, "output_sizes", ())[-1:] == [pad_size]:
                    weight = child.weight
                    counts[f"{prefix}.{name}.weight"] = weight.numel() - pad_size * weight.shape[1]
        if isinstance(module, RoutedExperts):
            counts |= _unpadded(prefix, module)
    return Demands(optional=frozenset(optional), may_pad=frozenset(may_pad), counts=counts)


def _is_weight_only(method: Any) -> bool:
    """Whether a quantization method leaves inputs as they are."""
    # What a config says in general, in two places; and what modelopt has a method for in 0.31.0.
    spec = getattr(method, "spec", None)
    if spec is not None and spec.activation is None:
        return True
    if type(method).__name__ == "ModelOptNvFp4W4A16LinearMethod":
        return True
    return getattr(method, "use_a16", False)


def _is_optional(name: str, method: Any, *, is_weight_only: bool) -> bool:
    """Whether a checkpoint need not have a parameter of a module with this method."""
    from vllm.model_executor.layers.quantization import auto_gptq
    from vllm.model_executor.layers.quantization.kv_cache import BaseKVCacheMethod

    # Scales of a KV cache have defaults (quantization/kv_cache.py).
    if isinstance(method, BaseKVCacheMethod):
        return True
    # Set from the config alone; and an order that vLLM computes by sorting.
    if name == "input_scale_ub" or name.endswith("_sort_indices"):
        return True
    # Registered for weight-only schemes too, and dropped where there is no activation key
    # (fused_moe/oracle/nvfp4.py, quantization/modelopt.py). The same names under W4A4 are demanded.
    if is_weight_only and name.endswith(("input_scale", "input_global_scale")):
        return True
    # Its integers are symmetric (quantization/auto_gptq.py: zero_points=False). AutoRound's method
    # has it inside (quantization/inc/schemes/inc_wna16_linear.py).
    inner = getattr(getattr(method, "scheme", None), "linear_method", method)
    if name == "qzeros" and isinstance(inner, auto_gptq.AutoGPTQLinearMethod):
        return True
    # Deleted again if none was loaded (quantization/auto_gptq.py:620).
    is_of_experts = isinstance(method, auto_gptq.AutoGPTQMoEMethod)
    drops_bias = is_of_experts and not method.moe.has_bias
    return drops_bias and name.endswith("_bias")


def _unpadded(prefix: str, experts: Any) -> dict[str, int]:
    """Elements to fill of experts that vLLM rounded up for its kernel: both sizes are in their
    config. w13 is [E, 2 * inner, hidden], w2 [E, hidden, inner], packed or in groups along the
    last; biases lack it.
    """
    moe = experts.moe_config
    counts = dict[str, int]()
    inner = moe.intermediate_size_per_partition_unpadded / moe.intermediate_size_per_partition
    hidden = moe.hidden_dim_unpadded / moe.hidden_dim
    if inner == hidden == 1:
        return {}
    for name, param in experts.named_parameters():
        if param.dim() == 3 or name.endswith("_bias"):
            rows = hidden
            columns = inner
            if name.startswith("w13"):
                rows = inner
                columns = hidden
            if param.dim() < 3 or param.shape[2] == 1:
                columns = 1
            counts[f"{prefix}.{name}"] = round(param.numel() * rows * columns)
    return counts
