"""What vLLM would run: post-load processing on meta tensors, and the kernel that each layer got.

In: a loaded model. Out: an entry for each kind of layer: {layer, method, kernel, count, where (its first prefix),
outcome}. The outcome is "ok", "refused: <vLLM's words>" where vLLM itself raises, or "not judged: <why>" where it
raised after it read a value from the meta device or called a stub: the kernel is known even then. The kernel of
attention is its backend and the number format of its KV cache.

Easy to get wrong: a model has thousands of layers. Layers of one kind and shape have the same outcome, so only one of
each is processed.
"""

import traceback
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from .stubs import Calls

aten = torch.ops.aten


# Operators that read a value, or whose result has a shape that values decide.
_ASKED = {
    aten._local_scalar_dense.default,
    aten.item.default,
    aten.is_nonzero.default,
    aten.nonzero.default,
    aten.equal.default,
    aten.allclose.default,
    aten._unique2.default,
}


def process(model: torch.nn.Module, config: Any) -> list[dict[str, Any]]:
    """Run process_weights_after_loading of every kind of layer."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
    from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase

    kinds: dict[tuple[Any, ...], dict[str, Any]] = {}
    with set_current_vllm_config(config):
        for prefix, module in model.named_modules():
            method = getattr(module, "quant_method", None)
            is_attention = isinstance(module, AttentionLayerBase) and hasattr(module, "kv_cache_dtype")
            if not is_attention and not isinstance(method, QuantizeMethodBase):
                continue
            kernel = _attention(module) if is_attention else _kernel(module, method)
            shapes = tuple((name, tuple(param.shape), param.dtype) for name, param in module.named_parameters())
            key = (type(module), type(method), type(getattr(module, "scheme", None)), shapes, is_attention and kernel)
            if key in kinds:
                kinds[key]["count"] += 1
                continue
            outcome = _refused_attention(module) if is_attention else ""
            outcome = outcome or (_process(module, method) if isinstance(method, QuantizeMethodBase) else "ok")
            kinds[key] = {
                "layer": type(module).__name__,
                "method": _method(module, method) if method is not None else "",
                "kernel": kernel,
                "count": 1,
                "where": getattr(module, "prefix", "") or getattr(module, "layer_name", "") or prefix,
                "outcome": outcome,
            }
    return _merged(kinds.values())


class _MetaValues(TorchDispatchMode):
    """Lets code that reads a value go on: every number is one, every comparison true. `count` is how many it read."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args and isinstance(args[0], torch.Tensor) else None
        if first is not None and first.is_meta and func in _ASKED:
            self.count += 1
            if func in (aten._local_scalar_dense.default, aten.item.default):
                return first.dtype == torch.bool or (1.0 if first.dtype.is_floating_point else 1)
            if func is aten.is_nonzero.default:
                return True
            if func is aten.nonzero.default:
                return torch.empty(0, first.ndim, dtype=torch.int64, device="meta")
            if func in (aten.equal.default, aten.allclose.default):
                return True
            if func is aten._unique2.default:
                one = first.flatten()[:1]
                return one, one.to(torch.int64), one.to(torch.int64)
        if first is not None and first.is_meta and func is aten._to_copy.default:
            kwargs = {**kwargs, "device": torch.device("meta")}
        return func(*args, **kwargs)


def _process(module: torch.nn.Module, method: Any) -> str:
    calls = Calls.count
    values = _MetaValues()
    try:
        with torch.device("meta"), values:
            method.process_weights_after_loading(module)
    except Exception as error:  # noqa: BLE001  what vLLM raises is its verdict, unless it read a pretended value
        frames = traceback.extract_tb(error.__traceback__)
        own = [frame for frame in frames if "site-packages/vllm/" in frame.filename]
        at = f"{own[-1].filename.rpartition('site-packages/')[2]}:{own[-1].lineno}"
        if values.count or Calls.count > calls or frames[-1] is not own[-1]:  # torch raises where meta has no values
            return f"not judged: depends on values ({at})"
        words = str(error).strip().split("\n")[0][:200]
        return f"refused: {type(error).__name__}: {words} ({at})"
    return "ok"


def _method(module: torch.nn.Module, method: Any) -> str:
    scheme = getattr(module, "scheme", None)
    return type(scheme if scheme is not None else method).__name__


def _kernel(module: torch.nn.Module, method: Any) -> str:
    """The kernel's class or the backend's name, from the attributes where vLLM 0.32.0's methods keep them."""
    found: list[str] = []
    for owner in (method, getattr(module, "scheme", None)):
        for name, value in sorted(vars(owner).items()) if owner is not None else ():
            is_kernel = "kernel" in name or "experts_cls" in name or name.endswith("linear")
            if is_kernel and value is not None and not isinstance(value, str | bool | int | float | dict | torch.dtype):
                found.append(value.__name__ if isinstance(value, type) else type(value).__name__)
            elif "backend" in name and value is not None:
                found.append(str(getattr(value, "name", value)))
    return " ".join(dict.fromkeys(found))


def _attention(module: Any) -> str:
    """The backend, and the number format of the KV cache where it is another than the model's: `FLASHINFER kv=fp8`."""
    kept = "" if module.kv_cache_dtype == "auto" else f" kv={module.kv_cache_dtype}"
    return module.get_attn_backend().get_name() + kept


def _refused_attention(module: Any) -> str:
    """A backend that is not for this GPU: a model that names its own backend passes by vLLM's choice of one."""
    from vllm.platforms import current_platform

    backend, capability = module.get_attn_backend(), current_platform.get_device_capability()
    if backend.supports_compute_capability(capability):
        return ""
    return f"refused: {backend.get_name()} has no kernels for compute capability {capability.as_version_str()}"


def _merged(kinds: Any) -> list[dict[str, Any]]:
    """Kinds that differ in shape alone are one."""
    merged: dict[tuple[str, ...], dict[str, Any]] = {}
    for kind in kinds:
        key = tuple(kind[name] for name in ("layer", "method", "kernel", "outcome"))
        if key in merged:
            merged[key]["count"] += kind["count"]
        else:
            merged[key] = kind
    return list(merged.values())
