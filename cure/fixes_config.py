"""Fixes of config.json and hf_quant_config.json apart from their lists of modules.

In: a `Faulty`. Out: changes of JSON values, each with the reason.

Easy to get wrong: which of two files is right. vLLM reads config.json, and the check compares that
with the bytes; the other file is written from it, once it is right.
"""

from typing import Any

from ..checkpoints.companions import HF_QUANT_CONFIG
from ..quantize.config.modelopt import hf_quant_config
from ..validate.check.dialects.modelopt import ModelOpt, reads_other_file
from .proposal import CONFIG, Faulty, JSONPath, Proposal


def mtp_count_is_what_is_there(faulty: Faulty) -> None:
    """config.json counts the MTP layers that the files have: F9, M7; and the decoder layers: M9."""
    runtime, proposal = faulty.runtime, faulty.proposal
    view = runtime.view
    key, found = view.mtp_count_key, len(runtime.found) // view.num_mtp_parts
    is_beyond = max(runtime.found, default=runtime.promised) >= runtime.promised
    if view.layout.mtp is None and runtime.promised and is_beyond:
        # The tensors that join embedding and hidden state show which layer is the MTP layer.
        key, found = view.family.num_layers_key, runtime.block_at
        why = f"layer {found} has the modules of an MTP layer, so the decoder layers end before it"
    elif runtime.found == frozenset(range(len(runtime.found))):
        why = (
            f"the files have {found} MTP layers; without the right count vLLM builds no draft, "
            "or another one"
        )
    else:
        return
    if found:
        proposal.set(CONFIG, (*_holder(proposal, key), key), found, why)


def layer_types_are_cut(faulty: Faulty) -> None:
    """layer_types has an entry for each decoder layer, and for MTP layers where the family counts
    them: E5.
    """
    view = faulty.runtime.view
    types = view.text_config.get("layer_types")
    expected = view.num_layers + (view.num_mtp_layers if view.family.layer_types_count_mtp else 0)
    if isinstance(types, list) and len(types) > expected:
        why = (
            f"num_hidden_layers={view.num_layers}: loading the config fails with {len(types)} "
            "entries"
        )
        place = (*_holder(faulty.proposal, "layer_types"), "layer_types")
        faulty.proposal.set(CONFIG, place, types[:expected], why)


def extras_are_set(faulty: Faulty) -> None:
    """Keys of quantization_config that the family's runtime wants: Fp4."""
    for key, value in faulty.runtime.view.family.config_extras.items():
        if faulty.proposal.config_place and faulty.proposal.quantization(key) is None:
            why = (
                "older vLLM raises KeyError without it, 0.32 picks another scale format for its "
                "FP8 kernels"
            )
            faulty.proposal.set_quantization((key,), value, why)


def activations_are_named(faulty: Faulty) -> None:
    """FP8 groups of W8A8 say how activations are quantized: M10, Fp3."""
    if not any("input_activations" in each.says for each in faulty.findings):
        return
    for name, group in (faulty.proposal.quantization("config_groups") or {}).items():
        weights = group.get("weights") or {}
        if group.get("input_activations") is None and (
            weights.get("type"),
            weights.get("num_bits"),
        ) == ("float", 8):
            shape: dict[str, Any] = {"strategy": "token"}
            if weights.get("strategy") == "block":
                shape = {"strategy": "group", "group_size": 128}
            value = {"num_bits": 8, "type": "float", **shape, "dynamic": True, "symmetric": True}
            why = (
                "vLLM has no kernel for FP8 weights alone here; it quantizes activations as it "
                "runs, without values"
            )
            faulty.proposal.set_quantization(
                ("config_groups", name, "input_activations"), value, why
            )


def kv_cache_is_one_that_vllm_has(faulty: Faulty) -> None:
    """A scheme of the KV cache that vLLM refuses or does not know: without it the cache is BF16."""
    for finding in faulty.findings:
        if finding.rule == "kv-cache":
            key = (
                "kv_cache_scheme"
                if finding.where.endswith("kv_cache_scheme")
                else "kv_cache_quant_algo"
            )
            why = (
                f"{finding.says}. Without it the cache is BF16, and --kv-cache-dtype can ask for "
                "another"
            )
            faulty.proposal.set_quantization((key,), None, why)


def modelopt_fields_are_there(faulty: Faulty) -> None:
    """The fields that vLLM asks of a config with NVFP4, read from the headers: R7."""
    proposal, inner = faulty.proposal, faulty.proposal.quantization()
    is_nested = proposal.quantization_at[1][-1] == "quantization" and isinstance(inner, dict)
    if not isinstance(faulty.runtime.dialect, ModelOpt) or not is_nested:
        return
    if any("Unknown ModelOpt quant algo" in each.says for each in faulty.findings):
        value = {"quant_method": "modelopt", **inner, "ignore": inner.get("exclude_modules") or []}
        value.pop("exclude_modules", None)
        why = (
            f"vLLM takes {inner.get('quant_algo')} only at the top level of config.json's "
            "quantization_config"
        )
        proposal.set(CONFIG, proposal.config_place or ("quantization_config",), value, why)
        return
    known: dict[str, Any] = {"kv_cache_quant_algo": None, "exclude_modules": []}
    for weight in faulty.runtime.weights.values():
        if weight.form == "nvfp4_modelopt" and (scale := weight.parts["weight_scale"]).shape:
            known["group_size"] = weight.shape[1] // scale.shape[-1]
            break
    for key, value in known.items():
        if key not in inner:
            why = (
                "vLLM raises ValueError 'NVFP4 quantization requires the following fields' "
                "without it"
            )
            proposal.set_quantization((key,), value, why)


def two_configs_agree(faulty: Faulty) -> None:
    """hf_quant_config.json says what config.json says; where that has another algorithm than the
    bytes, its own: R5.
    """
    proposal = faulty.proposal
    config, other = proposal.quantization(), proposal.value(HF_QUANT_CONFIG, ("quantization",))
    if not proposal.config_place or proposal.value(HF_QUANT_CONFIG, ()) is None:
        return
    is_wrong = any(
        each.rule in ("form", "config-group")
        for each in faulty.findings
        if each.severity == "error"
    )
    if not isinstance(faulty.runtime.dialect, ModelOpt) or not isinstance(other, dict):
        if not is_wrong:
            proposal.put(
                HF_QUANT_CONFIG, None, "it is in another dialect, and vLLM reads config.json"
            )
    elif is_wrong:
        why = (
            f"modules are built otherwise than stored by config.json: {HF_QUANT_CONFIG} may be "
            "right"
        )
        for key in ("quant_algo", "group_size"):
            if key in other:
                proposal.set_quantization((key,), other[key], why)
    elif config.get("quant_algo") and not reads_other_file(config):
        if "exclude_modules" not in config:
            listed = config.get("ignore") or config.get("ignored_layers") or []
            config = hf_quant_config({**config, "ignore": listed})["quantization"]
        why = "config.json is what vLLM reads, and fits what is stored"
        proposal.set(HF_QUANT_CONFIG, ("quantization",), config, why)


def _holder(proposal: Proposal, key: str) -> JSONPath:
    """Where config.json has the keys of the language model."""
    if proposal.value(CONFIG, (key,)) is not None or not isinstance(
        proposal.value(CONFIG, ("text_config",)), dict
    ):
        return ()
    return ("text_config",)
