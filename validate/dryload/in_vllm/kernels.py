"""What vLLM would run: post-load processing on meta tensors, and the kernel that each layer got.

In: a loaded model. Out: an entry for each kind of layer, with the fields of `KernelUse` in
validate/facts/dry_load.py. The outcome is "ok", "refused: <vLLM's words>" where vLLM itself raises,
or "not judged: <why>" where it raised after it read a value from the meta device or called a stub:
the kernel is known even then. The kernel of attention is its backend and the number format of its
KV cache.

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


def process(
    model: torch.nn.Module, config: Any, done: dict[torch.nn.Module, dict[str, Any]]
) -> list[dict[str, Any]]:
    """Run process_weights_after_loading of every kind of layer, but for layers that are `done`: a
    server does it once, before a draft gets the target's head.
    """
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
    from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase

    outcomes: dict[tuple[Any, ...], dict[str, Any]] = {}
    uses: dict[tuple[str, ...], dict[str, Any]] = {}
    with set_current_vllm_config(config):
        for prefix, module in model.named_modules():
            method = getattr(module, "quant_method", None)
            scheme = getattr(module, "scheme", None)
            is_cached = hasattr(module, "kv_cache_dtype")
            is_attention = is_cached and isinstance(module, AttentionLayerBase)
            is_method = isinstance(method, QuantizeMethodBase)
            if not is_attention and not is_method:
                continue
            outcome = {"outcome": "ok"}
            if is_attention:
                kernel, lacks = _attention(module)
                if lacks:
                    outcome = {**_refused(lacks), "lacks_gpu": True}
            else:
                kernel = _kernel(method, scheme)
            # Layers with the same parameters have the same outcome: one of each is processed.
            params = module.named_parameters()
            shapes = [(name, tuple(param.shape), param.dtype) for name, param in params]
            same = (type(module), type(method), type(scheme), *shapes, kernel)
            if same not in outcomes:
                if module in done:
                    outcome = done[module]
                elif is_method and "refused" not in outcome:
                    outcome = done[module] = _process(module, method)
                outcomes[same] = outcome
            outcome = outcomes[same]
            layer = class_of(module)
            names = {"layer": layer, "method": class_of(scheme or method), "kernel": kernel}
            use = (*names.values(), outcome["outcome"])
            if use not in uses:
                where = getattr(module, "prefix", "") or getattr(module, "layer_name", "") or prefix
                uses[use] = {**names, **outcome, "where": where, "count": 0}
            uses[use]["count"] += 1
    return list(uses.values())


def _refused(words: str) -> dict[str, Any]:
    """The outcome of what vLLM raises on, for people and as a value."""
    return {"outcome": f"refused: {words}", "refused": words}


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
    last = frames[-1]
    for frame in frames:
        if frame.filename.startswith(f"{folder}/"):
            last = frame
    at = last.filename.removeprefix(folder.removesuffix("vllm")).rpartition("site-packages/")[2]
    return f"{at}:{last.lineno}", last is frames[-1]


def _one(value: torch.Tensor) -> float:
    if value.dtype == torch.bool:
        return True
    if value.dtype.is_floating_point:
        return 1.0
    return 1


def _true(value: torch.Tensor) -> bool:
    return True


def _all_alike(value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    first = value.flatten()[:1]
    index = first.to(torch.int64)
    return first, index, index


# Operators that read a value, or whose result has a shape that values decide: numbers are one,
# comparisons true.
_ANSWERS: dict[Any, Callable[[torch.Tensor], Any]] = {
    aten._local_scalar_dense.default: _one,
    aten.item.default: _one,
    aten.is_nonzero.default: _true,
    aten.nonzero.default: lambda value: value.new_empty(0, value.ndim, dtype=torch.int64),
    aten.equal.default: _true,
    aten.allclose.default: _true,
    aten._unique2.default: _all_alike,
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


def _process(module: torch.nn.Module, method: Any) -> dict[str, Any]:
    calls = Calls.count
    values = _MetaValues()
    try:
        with torch.device("meta"), values:
            method.process_weights_after_loading(module)
    except Exception as error:  # noqa: BLE001  what vLLM raises is its verdict, unless it read a pretended value
        at, is_vllms = last_frame(error)
        # Where a library raises, as torch does, meta has no values.
        if values.count or Calls.count > calls or not is_vllms:
            return {"outcome": f"not judged: depends on values ({at})"}
        words = str(error).strip().split("\n")[0][:200]
        return _refused(f"{type(error).__name__}: {words} ({at})")
    return {"outcome": "ok"}


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
                # An enum's member, or a text.
                found[str(getattr(value, "name", value))] = None
    return " ".join(found)


def _attention(module: Any) -> tuple[str, str]:
    """The backend, and the number format of the KV cache where it is another than the model's:
    `FLASHINFER kv=fp8`; and why it is not for this GPU: a model that names its own backend passes
    by vLLM's choice of one.
    """
    from vllm.platforms import current_platform

    backend = module.get_attn_backend()
    capability = current_platform.get_device_capability()
    name = backend.get_name()
    kernel = f"{name} kv={module.kv_cache_dtype}".removesuffix(" kv=auto")
    if backend.supports_compute_capability(capability):
        return kernel, ""
    return kernel, f"{name} has no kernels for compute capability {capability.as_version_str()}"
