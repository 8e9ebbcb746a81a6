"""Rules on the KV cache: what a quantization config says of it, and its scales among the tensors.

In: a `RuntimeView`. Out: objections. Sources: F32 (vllm #27227), vllm #44879, #45038.

Easy to get wrong: an entry for the KV cache holds for the draft as well, because vLLM hands the target's config to it.
compressed-tensors' entry reaches the class `Attention` alone: latent attention (MLA) never asks, and keeps a cache in
BF16. modelopt's entry sets the whole engine's cache. All of it was seen in dry loads of every family.

Source: vLLM 0.32.0 layers/attention/attention.py, layers/quantization/{kv_cache,modelopt}.py,
compressed_tensors/compressed_tensors.py (CompressedTensorsKVCacheMethod), utils/torch_utils.py.
"""

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from ...checkpoints.companions import HF_QUANT_CONFIG
from ...checkpoints.stored import KV_SCALE_LEAVES
from ...quantize.plan.kv_cache import no_place, scale_names
from ...recipes.conventions import CACHE_LEAVES, cache_scale_in
from ...recipes.errors import shortened
from ...recipes.family import HFName, Loader, Part
from ..facts.findings import Objection, objection
from .dialects.choose import quantization_of
from .dialects.compressed_tensors import CompressedTensors
from .dialects.modelopt import ModelOpt
from .runtime_view import RuntimeView

_SCHEME = "config.json: quantization_config.kv_cache_scheme"
_FP8 = "Set num_bits 8, type float, strategy tensor, symmetric true; or remove it, and the cache is BF16"
_ALGORITHMS = ("FP8", "NVFP4")
# What stands between an attention module and its scales, by convention: all that vLLM's loaders map.
_UNDER_ATTENTION = re.compile(r"\.(?:attn|[kv]_proj|qkv_proj|[kv]_cache)$")


def is_kv_scale(leaf: str) -> bool:
    """Whether the last part of a tensor's name is that of a scale of the KV cache."""
    return leaf in KV_SCALE_LEAVES or leaf == "kv_scale"


def attention_of_scale(name: str) -> HFName:
    """The attention module on disk that a scale of the KV cache is of, whatever convention names it."""
    return HFName(_UNDER_ATTENTION.sub("", name.rpartition(".")[0]))


def kv_scheme_is_known(runtime: RuntimeView) -> Iterator[Objection]:
    """`kv_cache_scheme` of compressed-tensors is FP8, in one scale a tensor or a head, for a class that asks for it."""
    if not isinstance(runtime.dialect, CompressedTensors):
        return
    scheme = (quantization_of(runtime.source.config) or {}).get("kv_cache_scheme")
    if scheme is None:
        return
    if runtime.view.family.model_type == "qwen4_exp":
        says = "vLLM raises NotImplementedError: Qwen4Exp QSA does not support KV quantization"
        yield _wrong("error", _SCHEME, says, "Remove it: the cache is BF16 then")
    elif runtime.view.text_config.get("kv_lora_rank"):
        says = "has no effect: latent attention never asks for it, and vLLM keeps that cache in BF16"
        yield _wrong("warning", _SCHEME, says, "Serve with --kv-cache-dtype fp8 if you want it, or remove it")
    elif fault := _scheme_fault(scheme):
        yield _wrong("error", _SCHEME, fault, _FP8)


def _scheme_fault(scheme: Any) -> str:
    """What `validate_kv_cache_scheme` raises; "" if it is content."""
    if not isinstance(scheme, Mapping):
        return f"is {shortened(repr(scheme))}, not an object: vLLM raises AttributeError"
    if scheme.get("type") != "float" or scheme.get("num_bits") != 8:
        got = shortened(f"num_bits={scheme.get('num_bits')}, type={scheme.get('type')}")
        return f"has {got}: vLLM raises NotImplementedError: Currently supported kv cache quantization is num_bits=8"
    if scheme.get("strategy") not in ("tensor", "attn_head"):
        got = shortened(repr(scheme.get("strategy")))
        return f"has strategy {got}: vLLM raises NotImplementedError or ValueError for all but tensor and attn_head"
    if not scheme.get("symmetric"):
        return "is not symmetric: vLLM raises NotImplementedError: Only support symmetric scaling factor"
    return ""


def kv_algorithm_is_known(runtime: RuntimeView) -> Iterator[Objection]:
    """modelopt's entry names a number format that vLLM has; else vLLM warns, and the cache is BF16."""
    if not isinstance(runtime.dialect, ModelOpt):
        return
    given = quantization_of(runtime.source.config)
    raw = (runtime.hf_quant_config if given is None else given) or {}
    inner = raw.get("quantization") if isinstance(raw.get("quantization"), Mapping) else raw
    assert inner is not None
    file = HF_QUANT_CONFIG if given is None else "config.json"
    algorithm = inner.get("kv_cache_quant_algo")
    where = f"{file}: kv_cache_quant_algo"
    if algorithm is not None and not isinstance(algorithm, str):
        if inner is not raw:
            says = f"is {shortened(repr(algorithm))}: vLLM raises ValueError: kv_cache_quant_algo must be a string"
            yield _wrong("error", where, says, "Write FP8, NVFP4 or null")
    elif algorithm and algorithm.upper() not in _ALGORITHMS:
        says = f"is {shortened(algorithm)}, which vLLM does not know: it warns and keeps the KV cache in BF16"
        yield _wrong("warning", where, says, "Write FP8, NVFP4 or null")


def kv_scales_have_a_place(runtime: RuntimeView) -> Iterator[Objection]:
    """vLLM's classes load the scales of the KV cache, or leave them alone: R9; F32."""
    loader = runtime.view.family.loader
    for entry in runtime.others:
        if not is_kv_scale(entry.name.rpartition(".")[2]):
            continue
        is_mtp = runtime.is_mtp_name(entry.name)
        if is_mtp and not draft_takes(loader, entry.name):
            says = "is a scale of the KV cache inside the MTP layer, which this draft's loader does not know: vLLM "
            says += "raises KeyError, ValueError or AttributeError"
            yield _scale(entry.name, says, "Remove the KV-cache scales of the MTP layer")
        elif not is_mtp and not loader.backbone_takes_kv_scales:
            says = "is a scale of the KV cache, for which this family's class has no parameter: vLLM raises KeyError "
            says += "or ValueError, with and without a draft"
            yield _scale(entry.name, says, "Remove the scales of the KV cache")
        elif isinstance(runtime.dialect, ModelOpt) and math.prod(entry.shape) != 1:
            says = f"has shape {list(entry.shape)}: vLLM raises ValueError: KV-cache scale expects a scalar weight"
            yield _scale(entry.name, says, "Store one number for each of k and v")


def draft_takes(loader: Loader, name: str) -> bool:
    """Whether a draft's loader takes a scale in the MTP layer by this name, or leaves it alone."""
    return loader.takes_kv_scales or (loader.draft_kv_names == "own" and ".attn." in name)


def kv_scales_are_whole(runtime: RuntimeView) -> Iterator[Objection]:
    """Where some attention layers have scales of an FP8 cache, all have two; and nothing else has any."""
    if not _asks_for_fp8(runtime) or no_place(runtime.view):
        return
    attention = dict(_attention(runtime))
    stored: dict[HFName, set[str]] = {module: set() for module in attention}
    for entry in runtime.others:
        leaf = entry.name.rpartition(".")[2]
        if leaf not in CACHE_LEAVES:
            continue
        module = attention_of_scale(entry.name)
        if module in stored:
            stored[module].add(leaf)
        elif not runtime.is_mtp_name(entry.name) or draft_takes(runtime.view.family.loader, entry.name):
            says = "is a scale of the KV cache, and no attention layer with a cache is there: vLLM raises or skips it"
            yield _scale(entry.name, says, "Remove it, or bring the layer back")
    with_some = {attention[module] for module, leaves in stored.items() if leaves}
    for module, leaves in stored.items() if with_some else ():
        yield from _missing(runtime, attention[module], module, leaves, is_error=attention[module] in with_some)


def _missing(
    runtime: RuntimeView, part: Part, module: HFName, leaves: set[str], *, is_error: bool
) -> Iterator[Objection]:
    """One objection for each scale that a layer lacks; a warning where the whole MTP block has none."""
    convention = "modelopt" if isinstance(runtime.dialect, ModelOpt) else "compressed-tensors"
    for name in scale_names(runtime.view, part, module):
        if name.rpartition(".")[2] not in leaves:
            instead = "the other scale of this layer" if leaves and convention == "modelopt" else "1"
            says = f"is not there, and other layers have theirs: vLLM takes {instead} for it, in silence"
            cure = "Calibrate the cache again: each layer has two scales"
            severity = "error" if is_error else "warning"
            where = cache_scale_in(convention, name)
            yield objection(rule="kv-scales", severity=severity, where=where, says=says, cure=cure, cause=cure)


def _attention(runtime: RuntimeView) -> Iterator[tuple[HFName, Part]]:
    """The attention modules on disk with a projection of keys, each with its part."""
    for name in runtime.weights:
        place = runtime.placed.get(name)
        if place is not None and place.role == "attention" and name.endswith(".k_proj"):
            yield HFName(name.removesuffix(".k_proj")), place.part


def _asks_for_fp8(runtime: RuntimeView) -> bool:
    """Whether the quantization config makes the cache FP8."""
    given = quantization_of(runtime.source.config) or runtime.hf_quant_config or {}
    nested = given.get("quantization")
    inner = nested if isinstance(nested, Mapping) else given
    scheme, word = given.get("kv_cache_scheme"), inner.get("kv_cache_quant_algo")
    is_fp8 = isinstance(scheme, Mapping) and (scheme.get("type"), scheme.get("num_bits")) == ("float", 8)
    return is_fp8 or (isinstance(word, str) and word.upper() == "FP8")


RULES = (kv_scheme_is_known, kv_algorithm_is_known, kv_scales_have_a_place, kv_scales_are_whole)


def _wrong(severity: Any, where: str, says: str, cure: str) -> Objection:
    return objection(rule="kv-cache", severity=severity, where=where, says=says, cure=cure)


def _scale(where: str, says: str, cure: str) -> Objection:
    return objection(rule="kv-scales", severity="error", where=where, says=says, cure=cure, cause=cure)
