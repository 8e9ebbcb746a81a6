"""Two conventions for the same packed bytes: compressed-tensors' names and scales, and modelopt's.

In: a scheme and a tensor of it as `Scheme.tensors` lists it. Out: the same tensor in modelopt's
convention, and what becomes of its values. `quantize/` writes a checkpoint in either convention.

Easy to get wrong: NVFP4's common scales are reciprocals of each other. compressed-tensors stores a
divisor, modelopt a multiplier. The packed bytes were computed with the divisor, so the multiplier
is 1 / divisor, as vLLM computes it for compressed-tensors, and not amax / 2688 once more.

Source: vLLM 0.32.0 quantization/modelopt.py: the `create_weights` of KNvfp4Static, KNvfp4Dynamic,
KFp8StaticTensor, KFp8StaticChannel, KFp8Block128, ModelOptNvFp4FusedMoE and ModelOptFp8MoEMethod;
for FP8 blocks of experts under MIXED_PRECISION, Fp8MoEMethod in fp8.py.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

from .forms import IN_MODELOPT
from .frozen import Shape, frozen

FORMATS = ("compressed-tensors", "modelopt")
Format = Literal["compressed-tensors", "modelopt", "fp8"]
"""FP8 blocks as releases have them are written for a draft alone, whose target has them."""

Change = Literal["none", "reciprocal", "dtype"]
"""What becomes of the values: nothing, 1 / x, or the same numbers in another dtype. Shapes have as
many elements.
"""

ALGORITHMS: Mapping[str, str] = MappingProxyType(
    {
        "NVFP4": "NVFP4",
        "NVFP4A16": "W4A16_NVFP4",
        "FP8": "FP8",
        "FP8_DYNAMIC": "FP8_PER_CHANNEL_PER_TOKEN",
        "FP8_BLOCK": "FP8_PB_WO",
    }
)
"""Scheme -> modelopt's `quant_algo`, of those that vLLM loads. Other schemes have no word there."""

FP8_CACHE: Mapping[str, object] = MappingProxyType(
    {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor", "dynamic": False}
)
"""`kv_cache_scheme` of both conventions: E4M3 with one scale for all keys of a layer, and one for
all values.
"""

CACHE_LEAVES = ("k_scale", "v_scale")
"""The scales of an FP8 cache, of all keys and of all values of a layer."""

CACHE = "kv_cache: FP8"
"""What a cache's scales are of, where a weight's are of a scheme."""

NOT_FOR_EXPERTS = ("FP8_DYNAMIC",)
"""vLLM's class for routed experts under modelopt has no scales a row."""

MIXED_FOR_EXPERTS = ("FP8_BLOCK",)
"""vLLM reads blocks of routed experts only where MIXED_PRECISION names their algorithm."""


@frozen
class Spelling:
    """One tensor in modelopt's convention; `change` leads there, and back."""

    leaf: str
    dtype: str
    shape: Shape
    change: Change = "none"


def in_modelopt(scheme: str, leaf: str, dtype: str, shape: Shape, *, of_experts: bool) -> Spelling:
    """How modelopt writes a tensor of a packed module.

    Args:
        scheme: a key of `ALGORITHMS`, or `CACHE` for an attention module.
        leaf: compressed-tensors' name for it, such as `weight_packed`.
        dtype: its dtype there.
        shape: its shape there.
        of_experts: the module is a projection of a routed expert.
    """
    if scheme == CACHE:
        return _cast(f"{leaf[0]}_proj.{leaf}", dtype, "F32", ())
    if leaf in IN_MODELOPT:  # of NVFP4 alone
        return Spelling(leaf=IN_MODELOPT[leaf], dtype="F32", shape=(), change="reciprocal")
    if scheme.startswith("NVFP4") or leaf == "weight":
        return Spelling(leaf=leaf.replace("weight_packed", "weight"), dtype=dtype, shape=shape)
    if scheme == "FP8_BLOCK" and of_experts:
        return _cast("weight_scale_inv", dtype, "F32", shape)
    shapes = {"FP8_BLOCK": (*shape[:1], 1, *shape[1:], 1), "FP8_DYNAMIC": shape[:1]}
    return _cast(leaf, dtype, "F32", shapes.get(scheme, ()))


def _cast(leaf: str, dtype: str, to: str, shape: Shape) -> Spelling:
    """The same numbers in another dtype."""
    change: Change = "none"
    if dtype != to:
        change = "dtype"
    return Spelling(leaf=leaf, dtype=to, shape=shape, change=change)


def cache_scale_in(convention: Format, name: str) -> str:
    """The name of a scale of the KV cache: `self_attn.k_scale`, or under modelopt
    `self_attn.k_proj.k_scale`.

    vLLM maps both to the parameters of its class `Attention` (quantization/base_config.py:
    `get_cache_scale_mapper`, model_loader/weight_utils.py: `maybe_remap_kv_scale_name`). A name
    that is vLLM's own (`self_attn.attn.k_scale`) stays.
    """
    holder, _, leaf = name.rpartition(".")
    if holder.endswith(".attn"):
        return name
    projection = f"{leaf[0]}_proj"
    holder = holder.removesuffix(f".{projection}")
    if convention == "modelopt":
        holder = f"{holder}.{projection}"
    return f"{holder}.{leaf}"


_DIVISORS = {multiplier: divisor for divisor, multiplier in IN_MODELOPT.items()}


def in_compressed_tensors(scheme: str, leaf: str, dtype: str, shape: Shape) -> Spelling:
    """How compressed-tensors writes a tensor of a module in modelopt's convention: the way back of
    `in_modelopt`.

    A scale that compressed-tensors writes in BF16 is said to be BF16 here; where its values are
    not, it stays F32.
    """
    if scheme == CACHE:
        return _cast(leaf, dtype, "BF16", (1,))
    if scheme.startswith("NVFP4"):
        if leaf in _DIVISORS:
            return Spelling(leaf=_DIVISORS[leaf], dtype="F32", shape=(1,), change="reciprocal")
        packed = {"weight": "weight_packed"}
        return Spelling(leaf=packed.get(leaf, leaf), dtype=dtype, shape=shape)
    if leaf == "weight":
        return Spelling(leaf=leaf, dtype=dtype, shape=shape)
    if scheme == "FP8_BLOCK":
        if len(shape) == 4:
            shape = (shape[0], shape[2])
        return Spelling(leaf="weight_scale", dtype=dtype, shape=shape)
    shapes = {"FP8_DYNAMIC": (*shape[:1], 1)}
    return _cast(leaf, dtype, "BF16", shapes.get(scheme, (1,)))
