"""Fixes of config.json and hf_quant_config.json apart from their lists of modules, of tensors, and
of the index. No value of a weight changes: tensors get other names, shapes or dtypes for the same
bytes.

In: a `Faulty`. Out: changes, each with the reason.

Easy to get wrong: a shard has one header, so one renamed scale means that its whole shard is
written again.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from ..checkpoints.companions import HF_QUANT_CONFIG
from ..checkpoints.dialects.choose import quantization_of, read_dialect
from ..checkpoints.dialects.fp8 import Fp8
from ..checkpoints.dialects.layouts import refitted
from ..checkpoints.dialects.modelopt import ModelOpt
from ..checkpoints.dialects.runtime_view import RuntimeView
from ..checkpoints.dialects.said import (
    other_file_agrees,
    say_at_top_level,
    say_what_is_stored,
    would_fit,
)
from ..checkpoints.proposal import CONFIG, JSONPath, Proposal
from ..recipes.errors import counted
from ..recipes.family import HFName
from ..recipes.frozen import Json
from ..validate.check.rules_kv import draft_takes, is_kv_scale
from ..validate.facts.findings import Finding

_PREFIXES = ("language_model.", "model.language_model.", "language_model.model.", "model.")


class Faulty(NamedTuple):
    """What a fix looks at and changes: a checkpoint of a known family, with its findings, as it
    would be by now.
    """

    runtime: RuntimeView
    findings: Sequence[Finding]
    proposal: Proposal


def lists_say_what_is_stored(faulty: Faulty) -> None:
    """Entries that take a quantized module away, and modules that no entry names: F11 to F47, G1,
    G2, H1.
    """
    heads = [finding.where for finding in faulty.findings if finding.rule == "draft-head"]
    say_what_is_stored(faulty.runtime, faulty.proposal, also=heads)


def mtp_count_is_what_is_there(faulty: Faulty) -> None:
    """config.json counts the MTP layers that the files have: F9, M7; and the decoder layers: M9."""
    runtime = faulty.runtime
    proposal = faulty.proposal
    view = runtime.view
    key = view.mtp_count_key
    found = len(runtime.found) // view.num_mtp_parts
    is_beyond = max(runtime.found, default=runtime.promised) >= runtime.promised
    modules = view.required_mtp_modules(sorted(runtime.found))
    is_beyond &= not (runtime.found and runtime.placed.keys() >= {*modules})
    if view.layout.mtp is None and runtime.promised and is_beyond:
        # The tensors that join embedding and hidden state show which layer is the MTP layer.
        key = view.family.num_layers_key
        found = runtime.block_at
        why = f"layer {found} has the modules of an MTP layer, so the decoder layers end before it"
    elif runtime.found == frozenset(range(len(runtime.found))):
        layers = counted(found, "MTP layer")
        why = f"the files have {layers}; with another count vLLM builds another draft"
    else:
        return
    if found:
        proposal.set(CONFIG, (*_holder(proposal, key), key), found, why)


def mtp_names_have_the_promised_number(faulty: Faulty) -> None:
    """MTP layers that are all there under numbers that are too high."""
    runtime = faulty.runtime
    view = runtime.view
    first = min(runtime.found, default=0)
    if not first or not view.is_number_wrong(runtime.found):
        return
    for index in sorted(runtime.found):
        old = view.mtp_stem(index)
        new = view.mtp_stem(index - first)
        why = f"config.json promises the MTP layer as {new}*"
        for name, entry in runtime.source.entries.items():
            if name.startswith(old):
                renamed = HFName(new + name.removeprefix(old))
                faulty.proposal.retensor(entry, replace(entry, name=renamed), why)


def layers_have_known_names(faulty: Faulty) -> None:
    """The class whose layers have the names of the files; else names without a strange prefix."""
    runtime = faulty.runtime
    proposal = faulty.proposal
    if runtime.fitting_class:
        why = f"its decoder layers are {runtime.strange_layers}.*, as in the files"
        proposal.set(CONFIG, ("architectures",), [runtime.fitting_class], why)
        return
    known = runtime.view.layout.layers.disk.partition(".{i}")[0]
    strange = runtime.strange_layers
    while known and known.rpartition(".")[2] == strange.rpartition(".")[2]:
        known = known.rpartition(".")[0]
        strange = strange.rpartition(".")[0]
    start = known and f"{known}."
    for name, entry in runtime.source.entries.items():
        if strange and name.startswith(f"{strange}."):
            renamed = HFName(start + name.removeprefix(f"{strange}."))
            why = f"vLLM's class for this model has no {strange}"
            proposal.retensor(entry, replace(entry, name=renamed), why)


def layer_types_are_cut(faulty: Faulty) -> None:
    """layer_types has an entry for each decoder layer, and for MTP layers where the family counts
    them: E5.
    """
    view = faulty.runtime.view
    types = view.text_config.get("layer_types")
    expected = view.num_layers
    if view.family.layer_types_count_mtp:
        expected += view.num_mtp_layers
    if isinstance(types, list) and len(types) > expected:
        why = f"num_hidden_layers={view.num_layers}: the config of {len(types)} types fails to load"
        place = (*_holder(faulty.proposal, "layer_types"), "layer_types")
        faulty.proposal.set(CONFIG, place, types[:expected], why)


def extras_are_set(faulty: Faulty) -> None:
    """Keys of quantization_config that the family's runtime wants: Fp4."""
    for key, value in faulty.runtime.view.family.config_extras.items():
        if faulty.proposal.config_place and faulty.proposal.quantization(key) is None:
            why = "without it vLLM before 0.32 raises, and later ones pick another scale format"
            faulty.proposal.set_quantization((key,), value, why)


def experts_are_named(faulty: Faulty) -> None:
    """DeepSeek-V4's config.json says which form its routed experts have."""
    runtime = faulty.runtime
    config = runtime.source.config
    if not runtime.view.family.fp8_class or not isinstance(runtime.dialect, Fp8):
        return
    for word in ("fp4", "fp8"):
        dialect = read_dialect({**config, "expert_dtype": word}, None)
        is_right = config.get("expert_dtype") != word
        for module in runtime.modules:
            is_right &= module.kind != "experts" or would_fit(dialect, module)
        if is_right:
            faulty.proposal.set(CONFIG, ("expert_dtype",), word, "so the routed experts are stored")


def activations_are_named(faulty: Faulty) -> None:
    """FP8 groups of W8A8 say how activations are quantized: M10, Fp3."""
    if not any(module.resolution.refusal == "inputs" for module in faulty.runtime.modules):
        return
    for name, group in (faulty.proposal.quantization("config_groups") or {}).items():
        weights = group.get("weights") or {}
        place = ("config_groups", name, "input_activations")
        is_fp8 = weights.get("type") == "float" and weights.get("num_bits") == 8
        if is_fp8 and group.get("input_activations") is None:
            value = {"num_bits": 8, "type": "float", "dynamic": True, "symmetric": True}
            value["strategy"] = "token"
            if weights.get("strategy") == "block":
                value |= {"strategy": "group", "group_size": 128}
            why = "vLLM has no kernel for FP8 weights alone here, and needs no values for this"
            faulty.proposal.set_quantization(place, value, why)


def kv_cache_is_one_that_vllm_has(faulty: Faulty) -> None:
    """A scheme of the KV cache that vLLM refuses or does not know: without it the cache is BF16."""
    for finding in faulty.findings:
        if finding.rule == "kv-cache":
            key = finding.where.partition(": ")[2].rpartition(".")[2]
            why = f"{finding.says}. Without it the cache is BF16"
            faulty.proposal.set_quantization((key,), None, why)


def modelopt_fields_are_there(faulty: Faulty) -> None:
    """The fields that vLLM asks of a config with NVFP4, read from the headers: R7."""
    proposal = faulty.proposal
    inner = faulty.proposal.quantization()
    is_there = proposal.is_nested and isinstance(inner, dict)
    if not isinstance(faulty.runtime.dialect, ModelOpt) or not is_there:
        return
    places = {finding.where for finding in faulty.findings if finding.rule == "algorithm"}
    if any(place.endswith(": quantization.quant_algo") for place in places):
        say_at_top_level(proposal)
        return
    known: Json = {"kv_cache_quant_algo": None, "exclude_modules": []}
    for weight in faulty.runtime.weights.values():
        if weight.form != "nvfp4_modelopt":
            continue
        scale = weight.parts["weight_scale"]
        if scale.shape:
            known["group_size"] = weight.shape[1] // scale.shape[-1]
            break
    for key, value in known.items():
        if key not in inner:
            why = "without it vLLM raises 'NVFP4 quantization requires the following fields'"
            proposal.set_quantization((key,), value, why)


def two_configs_agree(faulty: Faulty) -> None:
    """hf_quant_config.json says what config.json says; where that has another algorithm than the
    bytes, its own: R5.
    """
    proposal = faulty.proposal
    other = proposal.value(HF_QUANT_CONFIG, ("quantization",))
    if not proposal.config_place or proposal.value(HF_QUANT_CONFIG, ()) is None:
        return
    # Which of the two is right: vLLM reads config.json, and the check compares that with the bytes;
    # the other file is written from it, once it is right.
    is_wrong = False
    for each in faulty.findings:
        is_wrong |= each.severity == "error" and each.rule in ("form", "config-group")
    if not isinstance(faulty.runtime.dialect, ModelOpt) or not isinstance(other, dict):
        return
    if is_wrong:
        why = f"config.json builds modules otherwise than stored: {HF_QUANT_CONFIG} may be right"
        for key in ("quant_algo", "group_size"):
            if key in other:
                proposal.set_quantization((key,), other[key], why)
    else:
        other_file_agrees(proposal)


def _holder(proposal: Proposal, key: str) -> JSONPath:
    """Where config.json has the keys of the language model."""
    is_nested = isinstance(proposal.value(CONFIG, ("text_config",)), dict)
    if is_nested and proposal.value(CONFIG, (key,)) is None:
        return ("text_config",)
    return ()


def mtp_files_are_indexed(faulty: Faulty) -> None:
    """Files with MTP tensors that the index does not list, or all without one: F4, F9, R6."""
    faulty.proposal.write_index()
    for name, entry in sorted(faulty.runtime.source.unindexed.items()):
        if faulty.runtime.is_mtp_name(name):
            why = f"vLLM reads what the index lists, and {entry.file} has MTP tensors"
            faulty.proposal.index(entry.file, why)


def mtp_names_lose_a_prefix(faulty: Faulty) -> None:
    """MTP tensors under a vision-language model's prefix: F37."""
    stem = faulty.runtime.view.mtp_stem(0).partition("layers.")[0] or "mtp."
    for name, entry in faulty.runtime.source.entries.items():
        head, found, rest = name.partition("mtp.")
        if found and head in _PREFIXES and not faulty.runtime.is_mtp_name(name):
            why = "the draft's loader does not strip the vision-language model's prefix"
            faulty.proposal.retensor(entry, replace(entry, name=HFName(f"{stem}{rest}")), why)


def kv_scales_leave(faulty: Faulty) -> None:
    """Scales of the KV cache that the loader of the target or of the draft has no place for:
    F32.
    """
    runtime = faulty.runtime
    loader = faulty.runtime.view.family.loader
    for entry in runtime.others:
        is_mtp = runtime.is_mtp_name(entry.name)
        is_taken = loader.backbone_takes_kv_scales
        if is_mtp:
            is_taken = draft_takes(loader, entry.name)
        if is_kv_scale(entry.name) and not is_taken:
            why = "vLLM's loader raises on this scale of the KV cache; without it the scale is 1"
            faulty.proposal.retensor(entry, None, why)


def orders_leave_the_draft(faulty: Faulty) -> None:
    """GPTQ's g_idx in the MTP block, whose loader knows none; without desc_act it is the natural
    order.
    """
    runtime = faulty.runtime
    if (quantization_of(runtime.source.config) or {}).get("desc_act"):
        return
    if not any(each.rule == "form" and each.where.endswith(".g_idx") for each in faulty.findings):
        return
    for name, entry in runtime.source.entries.items():
        if name.endswith(".g_idx") and runtime.is_mtp_name(name):
            why = "this draft's loader has no place for g_idx: without desc_act the natural order"
            faulty.proposal.retensor(entry, None, why)


def tensors_have_the_form_that_is_built(faulty: Faulty) -> None:
    """Scales under another name, shapes with the same elements, bytes under another dtype: Fp1,
    Fp2, Fp5, F24, M3.
    """
    for module in faulty.runtime.modules:
        built = module.resolution.built
        if not module.loads_quantized or module.resolution.error:
            continue
        for member in module.members:
            for had, new in refitted(built, member.weight) or ():
                if new != had:
                    why = f"vLLM builds it as {new.name.rpartition('.')[2]} in {new.dtype}, with "
                    why += f"{len(new.shape)} dimensions; the bytes stay"
                    faulty.proposal.retensor(had, new, why)
