"""Rules on the KV cache: what a quantization config says of it, and its scales among the tensors.

In: a `RuntimeView`. Out: objections. Sources: F32 (vllm #27227), vllm #44879, #45038.

Easy to get wrong: an entry for the KV cache holds for the draft as well, because vLLM hands the
target's config to it. And of a cache without scales vLLM says no more than one warning in the log,
and serves it. All of it was seen in dry loads of every family.

Source: vLLM 0.32.0 layers/attention/attention.py, layers/quantization/{kv_cache,modelopt}.py,
compressed_tensors/compressed_tensors.py (CompressedTensorsKVCacheMethod), utils/torch_utils.py.
"""

import math
import re
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from ...checkpoints.dialects.compressed_tensors import CompressedTensors
from ...checkpoints.dialects.modelopt import ModelOpt
from ...checkpoints.dialects.runtime_view import RuntimeView
from ...checkpoints.stored import KV_SCALE_LEAVES
from ...quantize.plan.kv_cache import no_place, scale_names
from ...recipes.conventions import CACHE_LEAVES, cache_scale_in
from ...recipes.errors import shortened
from ...recipes.family import HFName, Loader, Part
from ..facts.findings import Objections, Severity, objection

# What stands between an attention module and its scales, by convention: all that vLLM's loaders
# map.
_UNDER_ATTENTION = re.compile(r"\.(?:attn|[kv]_proj|qkv_proj|[kv]_cache)$")


def is_kv_scale(name: str) -> bool:
    """Whether a tensor's name is that of a scale of the KV cache."""
    leaf = name.rpartition(".")[2]
    return leaf in KV_SCALE_LEAVES or leaf == "kv_scale"


def attention_of_scale(name: str) -> HFName:
    """The attention module on disk that a scale of the KV cache is of, whatever convention names
    it.
    """
    return HFName(_UNDER_ATTENTION.sub("", name.rpartition(".")[0]))


def draft_takes(loader: Loader, name: str) -> bool:
    """Whether a draft's loader takes a scale in the MTP layer by this name, or leaves it alone."""
    if loader.draft_kv_names == "own" and ".attn." in name:
        return True  # vLLM's own names need no loader that knows others
    return loader.takes_kv_scales


def kv_entry_is_known(runtime: RuntimeView) -> Objections:
    """The entry is one that vLLM reads: FP8 under compressed-tensors, FP8 or NVFP4 under
    modelopt.
    """
    scheme, algorithm = kv_entry(runtime)
    severity: Severity = "error"
    where = f"{runtime.given.file}: kv_cache_quant_algo"
    cure = "Write FP8, NVFP4 or null"
    if isinstance(runtime.dialect, CompressedTensors) and scheme is not None:
        where = "config.json: quantization_config.kv_cache_scheme"
        cure = (
            "Set num_bits 8, type float, strategy tensor, symmetric true; or remove it, and "
            "the cache is BF16"
        )
        is_taken = _is_fp8(scheme) and scheme.get("symmetric")
        if runtime.loader.refuses_kv_scheme:
            says = f"vLLM raises {runtime.loader.refuses_kv_scheme}"
        # compressed-tensors' entry reaches the class `Attention` alone, modelopt's the whole
        # engine's cache.
        elif runtime.view.text_config.get("kv_lora_rank"):
            severity = "warning"
            cure = "Serve with --kv-cache-dtype fp8 if you want it, or remove it"
            says = (
                "has no effect: latent attention never asks for it, and vLLM keeps that cache "
                "in BF16"
            )
        elif is_taken and scheme.get("strategy") in ("tensor", "attn_head"):
            return
        else:
            says = (
                f"is {shortened(repr(scheme))}: vLLM raises NotImplementedError, ValueError or "
                "AttributeError"
            )
    elif not isinstance(runtime.dialect, ModelOpt) or not algorithm:
        return
    elif not isinstance(algorithm, str) and runtime.given.nested is not None:
        says = (
            f"is {shortened(str(algorithm))}: vLLM raises ValueError: kv_cache_quant_algo must be "
            "a string"
        )
    elif isinstance(algorithm, str) and algorithm.upper() not in ("FP8", "NVFP4"):
        severity = "warning"
        says = (
            f"is {shortened(algorithm)}, which vLLM does not know: it warns and keeps the KV cache "
            "in BF16"
        )
    else:
        return
    yield objection("kv-cache", where, says, cure, severity=severity)


def kv_entry(runtime: RuntimeView) -> tuple[Any, Any]:
    """What compressed-tensors and what modelopt write of the KV cache."""
    given = runtime.given
    return given.raw.get("kv_cache_scheme"), (given.nested or given.raw).get("kv_cache_quant_algo")


def is_fp8_cache(runtime: RuntimeView) -> bool:
    """Whether the config promises an FP8 cache, in either dialect."""
    scheme, algorithm = kv_entry(runtime)
    return str(algorithm).upper() == "FP8" or _is_fp8(scheme)


def _is_fp8(scheme: Any) -> bool:
    if not isinstance(scheme, Mapping):
        return False
    return scheme.get("type") == "float" and scheme.get("num_bits") == 8


def kv_scales_have_a_place(runtime: RuntimeView) -> Objections:
    """vLLM's classes load the scales of the KV cache, or leave them alone: R9; F32."""
    loader = runtime.loader
    for entry in runtime.others:
        if not is_kv_scale(entry.name):
            continue
        is_mtp = runtime.is_mtp_name(entry.name)
        if is_mtp and not draft_takes(loader, entry.name):
            cured_by = "edit"
            cure = "Remove the KV-cache scales of the MTP layer"
            says = (
                "is a scale of the KV cache inside the MTP layer, which this draft's loader does "
                "not know: vLLM raises KeyError, ValueError or AttributeError"
            )
        elif not is_mtp and not loader.backbone_takes_kv_scales:
            cured_by = "edit"
            cure = "Remove the scales of the KV cache"
            says = (
                "is a scale of the KV cache, for which this family's class has no parameter: vLLM "
                "raises KeyError or ValueError, with and without a draft"
            )
        elif isinstance(runtime.dialect, ModelOpt) and math.prod(entry.shape) != 1:
            cured_by = "quantize"
            cure = "Store one number for each of k and v"
            says = (
                f"has shape {list(entry.shape)}: vLLM raises ValueError: KV-cache scale "
                "expects a scalar weight"
            )
        else:
            continue
        yield objection("kv-scales", entry.name, says, cure, cure, cured_by=cured_by)


def kv_scales_are_whole(runtime: RuntimeView) -> Objections:
    """Where some attention layers have scales of an FP8 cache, all have two; and nothing else
    has any.
    """
    if not is_fp8_cache(runtime) or no_place(runtime.view):
        return
    # An attention module with a cache of keys has the matrix that makes them.
    attentions = dict[HFName, Part]()
    for name, place in runtime.placed.items():
        if place.role == "attention" and name.endswith(".k_proj"):
            attentions[HFName(name.removesuffix(".k_proj"))] = place.part
    stored: dict[HFName, set[str]] = defaultdict(set)
    with_some = set[Part]()
    for name in [entry.name for entry in runtime.others]:
        module = attention_of_scale(name)
        leaf = name.rpartition(".")[2]
        if leaf not in CACHE_LEAVES:
            continue
        stored[module].add(leaf)
        if module in attentions:
            with_some.add(attentions[module])
        elif not runtime.is_mtp_name(name) or draft_takes(runtime.loader, name):
            cure = "Remove it, or bring the layer back"
            says = "is a scale of the KV cache, and no attention layer with a cache is there: "
            yield objection("kv-scales", name, f"{says}vLLM raises or skips it", cure, cure)
    # With none at all `declared_cache_has_scales` says what vLLM does.
    for module, part in attentions.items():
        taken = "1"
        convention = "compressed-tensors"
        if isinstance(runtime.dialect, ModelOpt):
            convention = "modelopt"
            if stored[module]:
                taken = "the other scale of this layer"
        severity = "error"
        if part not in with_some:
            # As with a block of the release: the draft's cache is FP8 all the same, with scales
            # of 1.
            severity = "warning"
        cure = "Calibrate the cache again: each layer has two scales"
        says = f"is not there, and other layers have theirs: vLLM takes {taken} for it, in silence"
        for name in scale_names(runtime.view, part, module):
            if with_some and name.rpartition(".")[2] not in stored[module]:
                where = cache_scale_in(convention, name)
                yield objection("kv-scales", where, says, cure, cure, severity)


def declared_cache_has_scales(runtime: RuntimeView) -> Objections:
    """A config that promises an FP8 cache comes with scales for it."""
    if not is_fp8_cache(runtime) or no_place(runtime.view):
        return
    for entry in runtime.others:
        if is_kv_scale(entry.name):
            return
    key = "kv_cache_scheme"
    given = runtime.given.nested or runtime.given.raw
    if given.get("kv_cache_quant_algo"):
        key = "kv_cache_quant_algo"
    says = (
        "promises an FP8 cache, and no layer has scales for it: vLLM serves it all the same, and "
        "computes with 1.0 ('Using KV cache scaling factor 1.0 for fp8_e4m3'): what is above 448 "
        "is cut, what is small loses digits, and long answers may repeat"
    )
    cure = f"Calibrate the cache (kv_cache: FP8 in a recipe), or remove {key}: the cache is BF16"
    yield objection(
        "kv-unscaled", f"{runtime.given.file}: {key}", says, cure, key, severity="warning"
    )


RULES = (
    kv_entry_is_known,
    kv_scales_have_a_place,
    kv_scales_are_whole,
    declared_cache_has_scales,
)
