"""Rules on what tools change in a finished checkpoint: a cache without its scales, a packed head,
and a second tool's config.

In: a `RuntimeView`. Out: objections.

Easy to get wrong: of a cache without scales vLLM says no more than one warning in the log, and
serves it. And a draft that gets the target's head may fill one of its own before.

Source: vLLM 0.31.0 to 0.33.0 layers/quantization/kv_cache.py, layers/vocab_parallel_embedding.py,
the drafts' classes; seen in dry loads of every family.
"""

from ...checkpoints.companions import HF_QUANT_CONFIG
from ...checkpoints.dialects.choose import quantization_of
from ...checkpoints.dialects.modelopt import ModelOpt, reads_other_file
from ...checkpoints.dialects.runtime_view import RuntimeView
from ...quantize.plan.kv_cache import no_place
from ..facts.findings import Objections, objection
from .rules_kv import is_fp8_cache, is_kv_scale


def declared_cache_has_scales(runtime: RuntimeView) -> Objections:
    """A config that promises an FP8 cache comes with scales for it."""
    if not is_fp8_cache(runtime) or no_place(runtime.view):
        return
    for entry in runtime.others:
        if is_kv_scale(entry.name.rpartition(".")[2]):
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


def one_tool_wrote_the_configs(runtime: RuntimeView) -> Objections:
    """hf_quant_config.json is of the tool that wrote config.json's quantization config."""
    given = quantization_of(runtime.source.config)
    if given is None or runtime.hf_quant_config is None or reads_other_file(given):
        return
    if isinstance(runtime.dialect, ModelOpt) or "producer" in given:
        return  # `quantization_configs_agree` compares modelopt's own two
    says = (
        f"is another tool's config: vLLM reads config.json, which says {runtime.dialect.name}; "
        "engines that look for this file first read other names and scales than are stored"
    )
    cure = f"Remove {HF_QUANT_CONFIG}"
    yield objection("two-tools", HF_QUANT_CONFIG, says, cure, severity="warning")


def packed_head_loads(runtime: RuntimeView) -> Objections:
    """A packed head has a form that its target's loader takes, and the draft's."""
    fills = runtime.loader.fills_head
    for module in runtime.modules:
        form = module.resolution.built.form
        if module.kind != "head" or module.part != "backbone" or module.is_plain:
            continue
        if form == "plain" or not module.loads_quantized:
            continue  # `stored_form_is_what_is_built` objects
        says = ""
        if module.resolution.built.block:
            says = (
                "holds FP8 blocks, and a head is loaded row by row: vLLM raises AssertionError at "
                "their scales (vocab_parallel_embedding.py)"
            )
        elif fills and form == "nvfp4_modelopt":
            says = (
                "holds codes of 4 bits, and this draft first fills a plain head of its own with "
                "them: vLLM raises RuntimeError, output with shape doesn't match"
            )
        if says:
            cure = "Store the head in FP8 with a scale a row, or in BF16"
            yield objection("head-form", module.members[0].name, says, cure, "head")


RULES = (declared_cache_has_scales, packed_head_loads, one_tool_wrote_the_configs)
