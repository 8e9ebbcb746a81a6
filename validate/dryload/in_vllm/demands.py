"""What a checkpoint must fill of a model's parameters; vLLM's own modules say it.

In: a model as vLLM built it. Out: `Demands`. The account compares the load with them.

Easy to get wrong: a rule by name alone also hides faults. A checkpoint may leave out input scales
only where nothing quantizes inputs. Padding is allowed only where vLLM says that it rounded a size
up. Source: vLLM 0.32.0.
"""

from dataclasses import dataclass, field

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
    return Demands(
        optional=frozenset(_optional(model)),
        may_pad=frozenset(_may_pad(model)),
        counts=_unpadded(model),
    )


def _optional(model: torch.nn.Module) -> set[str]:
    """Parameters that a checkpoint need not have.

    Scales of a KV cache have defaults (quantization/kv_cache.py); `input_scale_ub` is set from the
    config alone; scales of inputs are registered for weight-only schemes too, and dropped where
    there is no activation key (fused_moe/oracle/nvfp4.py, quantization/modelopt.py). The same names
    under W4A4 are demanded. MiMo's audio encoder builds a Qwen2 with a table of tokens, and gives
    it embeddings only (models/mimo_audio.py). Biases of GPTQ's experts are deleted again if none
    was loaded (quantization/auto_gptq.py:620).
    """
    from vllm.model_executor.layers.quantization.auto_gptq import AutoGPTQMoEMethod
    from vllm.model_executor.layers.quantization.kv_cache import BaseKVCacheMethod

    names = set()
    for prefix, module in model.named_modules():
        if type(module).__name__ == "MimoAudioEncoder":
            names.add(f"{prefix}.input_local_transformer.embed_tokens.weight")
        method = getattr(module, "quant_method", None)
        spec = getattr(method, "spec", None)
        is_weight_only = getattr(method, "use_a16", False) or (
            spec is not None and spec.activation is None
        )
        for name, _ in module.named_parameters(recurse=False):
            is_input = is_weight_only and name.endswith(("input_scale", "input_global_scale"))
            is_input |= isinstance(method, BaseKVCacheMethod) or name == "input_scale_ub"
            is_bias = (
                isinstance(method, AutoGPTQMoEMethod)
                and name.endswith("_bias")
                and not method.moe.has_bias
            )
            if is_input or is_bias:
                names.add(f"{prefix}.{name}")
    return names


def _may_pad(model: torch.nn.Module) -> set[str]:
    """Parameters of modules without a quantization method, such as sinks, which vLLM pads for its
    kernels.
    """
    return {
        f"{prefix}.{name}"
        for prefix, module in model.named_modules()
        if getattr(module, "quant_method", None) is None
        for name, _ in module.named_parameters(recurse=False)
    }


def _unpadded(model: torch.nn.Module) -> dict[str, int]:
    """Elements to fill of parameters that vLLM rounded up for its kernel, where it says by how
    much.

    A module with a `pad_size` gives a fused linear beneath it that many rows more. Experts have
    both sizes in their
    config: w13 is [E, 2 * inner, hidden], w2 [E, hidden, inner], packed or in groups along the
    last; biases lack it.
    """
    from vllm.model_executor.layers.fused_moe import RoutedExperts

    counts = {
        name: param.weight_loader_numel
        for name, param in model.named_parameters()
        if hasattr(param, "weight_loader_numel")
    }
    for prefix, module in model.named_modules():
        pad_size = getattr(module, "pad_size", 0)
        for name, child in (
            module.named_children() if isinstance(pad_size, int) and pad_size else ()
        ):
            if getattr(child, "output_sizes", ())[-1:] == [pad_size]:
                weight = child.weight
                counts[f"{prefix}.{name}.weight"] = weight.numel() - pad_size * weight.shape[1]
        if not isinstance(module, RoutedExperts):
            continue
        moe = module.moe_config
        inner = moe.intermediate_size_per_partition_unpadded / moe.intermediate_size_per_partition
        hidden = moe.hidden_dim_unpadded / moe.hidden_dim
        if inner == hidden == 1:
            continue
        for name, param in module.named_parameters():
            if param.dim() == 3 or name.endswith("_bias"):
                rows, columns = (inner, hidden) if name.startswith("w13") else (hidden, inner)
                columns = 1 if param.dim() < 3 or param.shape[2] == 1 else columns
                counts[f"{prefix}.{name}"] = round(param.numel() * rows * columns)
    return counts
