"""An FP8 KV cache: the range of its keys and values during calibration, and their rounding as a
server does it.

In: attention modules of transformers, and batches that run through them. Out: the scales of each
module's cache; or, for a measurement, modules that compute with rounded keys and values.

An attention module hands its keys, after the rotary embedding, and its values to a cache. Here
something stands between the two (compressed-tensors' `QuantizedKVCache` does the same). A server
writes every key and value to its cache and reads all of them from there, the token's own too; so
each one is rounded.

Easy to get wrong: llm-compressor's default observer is a moving average, below the largest value of
all batches. vLLM cuts off what is above 448 times the scale, so the largest value counts here: that
is the observer `static_minmax`.

Source: vLLM 0.32.0 v1/attention/ops/triton_reshape_and_cache_flash.py (a value is divided by its
scale, then cast; its operator for CPUs cuts off digits instead of rounding:
tests/vllm/test_kv_cache.py); compressed-tensors 0.19.0 modeling/kvcache.py and
quantization/utils/helpers.py.
"""

import inspect
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.utils import calculate_qparams
from torch import Tensor

from ....recipes.conventions import CACHE_LEAVES, FP8_CACHE
from ....recipes.errors import CheckpointError
from ...run.ranks import has_others
from ..model.hooks import hooked_before, modules_of
from .activations import e4m3, through

_SCALES = "served_cache_scales"
# What attention modules call their cache; the first since transformers 5.24, which drops a cache
# under the old name where it is given one under the new.
_CACHES = ("cache", "past_key_values", "past_key_value")

# Both [B, heads, T, D], as an attention module hands them to its cache.
KeysValues = tuple[Tensor, Tensor]


class CacheRanges:
    """State: the largest magnitude of keys and of values of each attention module."""

    def __init__(self, model: Any, modules: Collection[str]):
        self._modules = modules_of(model, modules)
        self._largest: dict[str, Tensor] = {}

    def observing(self) -> AbstractContextManager[None]:
        """Looks at what goes into the caches."""

        def see(name: str, keys: Tensor, values: Tensor) -> KeysValues:
            extremes = [torch.stack(torch.aminmax(each)).abs().amax() for each in (keys, values)]
            # BF16 would hold them as well; F32 is what every back-end reduces.
            seen = torch.stack(extremes).float()
            self._largest[name] = torch.maximum(self._largest.get(name, seen), seen)
            return keys, values

        return _between({module: partial(see, name) for name, module in self._modules.items()})

    def scales(self) -> dict[str, Tensor]:
        """`<module>.k_scale` and `<module>.v_scale`, [1] in BF16, on the CPU; over all ranks.

        Raises:
            CheckpointError: naming the module that handed nothing to a cache.
        """
        found = {}
        args = QuantizationArgs.model_validate(dict(FP8_CACHE))
        for name in self._modules:
            largest = self._largest.get(name)
            if largest is None:
                raise CheckpointError(
                    name,
                    "attention must hand its keys to a cache during calibration",
                    got="none",
                    cure="Remove kv_cache: keepmtp cannot observe this class",
                )
            if has_others():
                dist.all_reduce(largest, dist.ReduceOp.MAX)
            for leaf, value in zip(CACHE_LEAVES, largest.cpu().bfloat16().split(1), strict=True):
                # As compressed-tensors computes it of BF16 keys: in BF16, and never 0.
                scale, _ = calculate_qparams(-value, value, args)
                found[f"{name}.{leaf}"] = scale.reshape(1).contiguous()
        return found


def serve_cache(module: Any, scales: tuple[float, float]) -> None:
    """Lets an attention module round its keys and values by these scales under `rounded_caches`."""
    setattr(module, _SCALES, scales)


def rounded_caches(model: Any) -> AbstractContextManager[None]:
    """Keys and values as an FP8 cache gives them back, in the modules of `serve_cache`."""

    def rounded(scales: tuple[float, float], keys: Tensor, values: Tensor) -> KeysValues:
        of_keys, of_values = (partial(e4m3_by, scale) for scale in scales)
        return through(keys, of_keys), through(values, of_values)

    changes = {}
    for module in model.modules():
        if hasattr(module, _SCALES):
            changes[module] = partial(rounded, getattr(module, _SCALES))
    return _between(changes)


def e4m3_by(scale: float, value: Tensor) -> Tensor:
    """What a cache in E4M3 makes of a value [...], in the value's dtype."""
    common = value.new_full((), scale, dtype=torch.float32)
    return (e4m3(value.float() / common) * common).to(value.dtype)


class _Between:
    """Stands before an attention module's cache, or in its place where it has none."""

    def __init__(self, change: Callable[[Tensor, Tensor], KeysValues], cache: Any):
        self._change = change
        self._cache = cache

    def update(self, keys: Tensor, values: Tensor, *args: Any, **kwargs: Any) -> KeysValues:
        keys, values = self._change(keys, values)
        if self._cache is None:
            return keys, values
        return self._cache.update(keys, values, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)


def _between(
    changes: Mapping[Any, Callable[[Tensor, Tensor], KeysValues]],
) -> AbstractContextManager[None]:
    """Puts something between each of these attention modules and its cache."""

    def hand(module: Any, args: tuple, kwargs: dict) -> tuple:
        parameters = inspect.signature(module.forward).parameters
        name = next(filter(parameters.__contains__, _CACHES), "past_key_values")
        return args, {**kwargs, name: _Between(changes[module], kwargs.get(name))}

    return hooked_before(dict.fromkeys(changes, hand), with_kwargs=True)
