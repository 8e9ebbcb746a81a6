"""What vLLM would run: post-load processing on meta tensors, and the kernel that each layer got.

In: a loaded model. Out: an entry for each kind of layer: {layer, method, kernel, count, where (its
first prefix), outcome}. The outcome is "ok", "refused: <vLLM's words>" where vLLM itself raises, or
"not judged: <why>" where it raised after it read a value from the meta device or called a stub: the
kernel is known even then. The kernel of attention is its backend and the number format of its KV
cache.

Easy to get wrong: a model has thousands of layers. Layers of one kind and shape have the same
outcome, so only one of each is processed.
"""

import traceback
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from .stubs import Calls

aten = torch.ops.aten


def process(model: torch.nn.Module, config: Any) -> list[dict[str, Any]]:
    """Run process_weights_after_loading of every kind of layer."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
    from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase

    outcomes: dict[tuple[Any, ...], str] = {}
    kinds: dict[tuple[str, ...], dict[str, Any]] = {}
    with set_current_vllm_config(config):
        for prefix, module in model.named_modules():
            method, scheme = getattr(module, "quant_method", None), getattr(module, "scheme", None)
            is_attention = isinstance(module, AttentionLayerBase) and hasattr(
                module, "kv_cache_dtype"
            )
            is_method = isinstance(method, QuantizeMethodBase)
            if not is_attention and not is_method:
                continue
            kernel, refused = _kernel(method, scheme), ""
            if is_attention:
                kernel, refused = _attention(module)
            shapes = []
            for name, param in module.named_parameters():
                shapes.append((name, tuple(param.shape), param.dtype))
            same = (type(module), type(method), type(scheme), *shapes, kernel)
            if same not in outcomes:
                outcomes[same] = refused or "ok"
                if is_method and not refused:
                    outcomes[same] = _process(module, method)
            kind = (class_of(module), class_of(scheme or method), kernel, outcomes[same])
            where = getattr(module, "prefix", "") or getattr(module, "layer_name", "") or prefix
            known = dict(zip(("layer", "method", "kernel", "outcome"), kind, strict=True))
            kinds.setdefault(kind, {**known, "where": where, "count": 0})["count"] += 1
    return list(kinds.values())


def class_of(value: object) -> str:
    """The name of a value's class; "" for None."""
    return type(value).__name__.replace("NoneType", "")


def last_frame(error: BaseException) -> tuple[str, bool]:
    """file:line of the last frame in vLLM, and whether vLLM itself raised there, not a library that
    it called.
    """
    import vllm

    folder = vllm.__path__[0]
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if frame.filename.startswith(f"{folder}/")] or frames
    last = own[-1]
    at = last.filename.removeprefix(folder.removesuffix("vllm")).rpartition("site-packages/")[2]
    return f"{at}:{last.lineno}", last is frames[-1]


def _one(value: torch.Tensor) -> float:
    return value.dtype == torch.bool or (1.0 if value.dtype.is_floating_point else 1)


# Operators that read a value, or whose result has a shape that values decide: numbers are one,
# comparisons true.
_ANSWERS: dict[Any, Callable[[torch.Tensor], Any]] = {
    aten._local_scalar_dense.default: _one,
    aten.item.default: _one,
    aten.is_nonzero.default: lambda value: True,
    aten.nonzero.default: lambda value: torch.empty(
        0, value.ndim, dtype=torch.int64, device="meta"
    ),
    aten.equal.default: lambda value: True,
    aten.allclose.default: lambda value: True,
    aten._unique2.default: lambda value: (
        value.flatten()[:1],
        *[value.flatten()[:1].to(torch.int64)] * 2,
    ),
}


class _MetaValues(TorchDispatchMode):
    """Lets code that reads a value go on. `count` is how many it read."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if args and isinstance(args[0], torch.Tensor) and args[0].is_meta:
            if func in _ANSWERS:
                self.count += 1
                return _ANSWERS[func](args[0])
            if func is aten._to_copy.default:
                kwargs = {**kwargs, "device": torch.device("meta")}
        return func(*args, **kwargs)


def _process(module: torch.nn.Module, method: Any) -> str:
    calls = Calls.count
    values = _MetaValues()
    try:
        with torch.device("meta"), values:
            method.process_weights_after_loading(module)
    except Exception as error:  # noqa: BLE001  what vLLM raises is its verdict, unless it read a pretended value
        at, is_vllms = last_frame(error)
        if (
            values.count or Calls.count > calls or not is_vllms
        ):  # torch raises where meta has no values
            return f"not judged: depends on values ({at})"
        words = str(error).strip().split("\n")[0][:200]
        return f"refused: {type(error).__name__}: {words} ({at})"
    return "ok"


def _kernel(method: Any, scheme: Any) -> str:
    """The kernel's class or the backend's name, from the attributes where vLLM 0.32.0's methods
    keep them.
    """
    found: dict[str, None] = {}
    for owner in (method, scheme):
        for name, value in sorted(getattr(owner, "__dict__", {}).items()):
            is_kernel = "kernel" in name or "experts_cls" in name or name.endswith("linear")
            if value is None:
                continue
            if is_kernel and not isinstance(value, str | bool | int | float | dict | torch.dtype):
                if not isinstance(value, type):
                    value = type(value)
                found[value.__name__] = None
            elif "backend" in name:
                found[str(getattr(value, "name", value))] = None
    return " ".join(found)


def _attention(module: Any) -> tuple[str, str]:
    """The backend, and the number format of the KV cache where it is another than the model's:
    `FLASHINFER kv=fp8`; and why it is not for this GPU: a model that names its own backend passes
    by vLLM's choice of one.
    """
    from vllm.platforms import current_platform

    backend, capability = module.get_attn_backend(), current_platform.get_device_capability()
    name = kernel = backend.get_name()
    if module.kv_cache_dtype != "auto":
        kernel += f" kv={module.kv_cache_dtype}"
    if backend.supports_compute_capability(capability):
        return kernel, ""
    version = capability.as_version_str()
    return kernel, f"refused: {name} has no kernels for compute capability {version}"
