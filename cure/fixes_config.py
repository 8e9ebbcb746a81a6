"""Fixes of config.json and hf_quant_config.json apart from their lists of modules.

In: a `Checked`, and the proposal that its files are in. Out: changes of JSON values, each with the reason.

Easy to get wrong: which of two files is right. vLLM reads config.json, so that alone is no reason: the bytes decide.
Both are read as vLLM would read them alone, and the one that fits what is stored wins.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from ..checkpoints.companions import HF_QUANT_CONFIG
from ..checkpoints.stored import StoredWeight
from ..validate.check.check import Checked
from ..validate.check.dialects.choose import quantization_of, read_dialect
from ..validate.check.dialects.modelopt import ModelOpt
from ..validate.check.runtime_view import RuntimeView
from ..validate.check.vllm_module import Dialect
from .fixes_lists import place_of_config
from .json_diff import JSONPath
from .proposal import CONFIG, REMOVED, Edit, Proposal, SetValue

_DYNAMIC_BLOCKS = {"strategy": "group", "group_size": 128}
_LINEAR = "linear_attn"  # the module of Qwen's layers with linear attention
_DYNAMIC_TOKENS = {"strategy": "token"}


def mtp_count_is_what_is_there(checked: Checked, proposal: Proposal) -> Iterator[Edit]:
    """config.json counts the MTP layers that the files have: F9, M7; and the decoder layers: M9."""
    runtime = checked.runtime
    if runtime is None:
        return
    view = runtime.view
    found = len(runtime.found) // view.num_mtp_parts
    is_beyond = max(runtime.found, default=runtime.promised) >= runtime.promised
    if view.layout.mtp is None and runtime.promised and is_beyond:
        yield from _decoder_layers(runtime, proposal)
    elif found and runtime.found == frozenset(range(len(runtime.found))):
        holder = _holder(proposal, view.mtp_count_key)
        why = f"the files have {found} MTP layers; without the right count vLLM builds no draft, or another one"
        yield SetValue(file=CONFIG, place=(*holder, view.mtp_count_key), value=found, why=why)


def layer_types_are_cut(checked: Checked, proposal: Proposal) -> Iterator[Edit]:
    """layer_types has an entry for each decoder layer, and for MTP layers where the family counts them: E5."""
    runtime = checked.runtime
    if runtime is None:
        return
    view = runtime.view
    types = view.text_config.get("layer_types")
    expected = view.num_layers + (view.num_mtp_layers if view.family.layer_types_count_mtp else 0)
    if isinstance(types, list) and len(types) > expected:
        why = f"num_hidden_layers={view.num_layers}: loading the config fails with {len(types)} entries"
        place = (*_holder(proposal, "layer_types"), "layer_types")
        value = [_kind_of_layer(runtime, index, kind) for index, kind in enumerate(types[:expected])]
        yield SetValue(file=CONFIG, place=place, value=value, why=why)


def _kind_of_layer(runtime: RuntimeView, index: int, said: Any) -> Any:
    """The kind of a decoder layer that its tensors show; what was said where they do not show it."""
    stem = f"{runtime.view.disk_stem('backbone', index)}{_LINEAR}."
    if any(name.startswith(stem) for name in runtime.source.entries):
        return "linear_attention"
    has_any = any(f".{_LINEAR}." in name for name in runtime.source.entries)
    return "full_attention" if said == "linear_attention" and has_any else said


def extras_are_set(checked: Checked, proposal: Proposal) -> Iterator[Edit]:
    """Keys of quantization_config that the family's runtime wants: Fp4."""
    runtime = checked.runtime
    place = place_of_config(proposal)
    if runtime is None or place is None:
        return
    for key, value in runtime.view.family.config_extras.items():
        if proposal.value(CONFIG, (*place, key)) is None:
            why = "older vLLM raises KeyError without it, 0.32 picks another scale format for its FP8 kernels"
            yield SetValue(file=CONFIG, place=(*place, key), value=value, why=why)


def activations_are_named(checked: Checked, proposal: Proposal) -> Iterator[Edit]:
    """FP8 groups of W8A8 say how activations are quantized: M10, Fp3."""
    place = place_of_config(proposal)
    if place is None or not any("input_activations" in each.says for each in checked.data.findings):
        return
    for name, group in (proposal.value(CONFIG, (*place, "config_groups")) or {}).items():
        weights = group.get("weights") or {}
        if group.get("input_activations") is None and weights.get("type") == "float" and weights.get("num_bits") == 8:
            shape = _DYNAMIC_BLOCKS if weights.get("strategy") == "block" else _DYNAMIC_TOKENS
            value = {"num_bits": 8, "type": "float", **shape, "dynamic": True, "symmetric": True}
            why = "vLLM has no kernel for FP8 weights alone here; it quantizes activations as it runs, without values"
            key = (*place, "config_groups", name, "input_activations")
            yield SetValue(file=CONFIG, place=key, value=value, why=why)


def kv_cache_is_one_that_vllm_has(checked: Checked, proposal: Proposal) -> Iterator[Edit]:
    """A scheme of the KV cache that vLLM refuses or does not know: without it the cache is BF16."""
    place = place_of_config(proposal)
    for finding in checked.data.findings:
        if finding.rule != "kv-cache":
            continue
        why = f"{finding.says}. Without it the cache is BF16, and --kv-cache-dtype can ask for another"
        if finding.where.endswith("kv_cache_scheme") and place is not None:
            yield SetValue(file=CONFIG, place=(*place, "kv_cache_scheme"), value=None, why=why)
        elif finding.where.startswith(HF_QUANT_CONFIG):
            key = ("quantization", "kv_cache_quant_algo")
            yield SetValue(file=HF_QUANT_CONFIG, place=key, value=None, why=why)
        elif place is not None:
            inner = (
                (*place, "quantization")
                if isinstance(proposal.value(CONFIG, (*place, "quantization")), dict)
                else place
            )
            yield SetValue(file=CONFIG, place=(*inner, "kv_cache_quant_algo"), value=None, why=why)


def modelopt_fields_are_there(checked: Checked, proposal: Proposal) -> Iterator[Edit]:
    """The fields that vLLM asks of a config with NVFP4, read from the headers: R7."""
    runtime = checked.runtime
    if runtime is None or not isinstance(runtime.dialect, ModelOpt):
        return
    is_file = quantization_of(proposal.value(CONFIG, ())) is None
    file = HF_QUANT_CONFIG if is_file else CONFIG
    place: JSONPath = ("quantization",) if is_file else (*(place_of_config(proposal) or ()), "quantization")
    inner = proposal.value(file, place)
    if not isinstance(inner, dict):
        return
    if any("Unknown ModelOpt quant algo" in each.says for each in checked.data.findings):
        value = {"quant_method": "modelopt", **inner, "ignore": inner.get("exclude_modules") or []}
        value.pop("exclude_modules", None)
        why = f"vLLM takes {inner.get('quant_algo')} only at the top level of config.json's quantization_config"
        yield SetValue(file=CONFIG, place=place_of_config(proposal) or ("quantization_config",), value=value, why=why)
        return
    known = {"group_size": _group_size(runtime), "kv_cache_quant_algo": None, "exclude_modules": []}
    for key, value in known.items():
        if key not in inner and not (key == "group_size" and value is None):
            why = "vLLM raises ValueError 'NVFP4 quantization requires the following fields' without it"
            yield SetValue(file=file, place=(*place, key), value=value, why=why)


def two_configs_agree(checked: Checked, proposal: Proposal) -> Iterator[Edit]:
    """config.json and hf_quant_config.json say the same: the one that fits the bytes wins; R5."""
    runtime = checked.runtime
    place = place_of_config(proposal)
    other = proposal.value(HF_QUANT_CONFIG, ()) if HF_QUANT_CONFIG in proposal.names else None
    if runtime is None or place is None or other is None:
        return
    config = proposal.value(CONFIG, ())
    bare = _without(config, place)
    faults = _faults(runtime, read_dialect(config, None)), _faults(runtime, read_dialect(bare, other))
    counts = f"by config.json {faults[0]} modules are built otherwise than stored, by {HF_QUANT_CONFIG} {faults[1]}"
    if not isinstance(read_dialect(config, other), ModelOpt) or not isinstance(read_dialect(bare, other), ModelOpt):
        if faults[0] <= faults[1]:
            yield SetValue(file=HF_QUANT_CONFIG, place=(), value=REMOVED, why=f"{counts}; vLLM reads config.json")
        return
    inner = (*place, "quantization") if isinstance(proposal.value(CONFIG, (*place, "quantization")), dict) else place
    list_key = "exclude_modules" if inner != place else "ignore"
    names = {"quant_algo": "quant_algo", list_key: "exclude_modules"}
    for key, other_key in names.items():
        here, there = (*inner, key), ("quantization", other_key)
        if faults[0] <= faults[1]:
            value = proposal.value(CONFIG, here)
            yield SetValue(file=HF_QUANT_CONFIG, place=there, value=value, why=f"{counts}: config.json is right")
        else:
            value = proposal.value(HF_QUANT_CONFIG, there)
            yield SetValue(file=CONFIG, place=here, value=value, why=f"{counts}: {HF_QUANT_CONFIG} is right")


def _decoder_layers(runtime: RuntimeView, proposal: Proposal) -> Iterator[Edit]:
    """num_hidden_layers, where the tensors that join embedding and hidden state show which layer is the MTP layer."""
    if runtime.block_at is not None:
        why = f"layer {runtime.block_at} has the modules of an MTP layer, so the decoder layers end before it"
        key = runtime.view.family.num_layers_key
        yield SetValue(file=CONFIG, place=(*_holder(proposal, key), key), value=runtime.block_at, why=why)


def _holder(proposal: Proposal, key: str) -> JSONPath:
    """Where config.json has the keys of the language model."""
    if proposal.value(CONFIG, (key,)) is not None or not isinstance(proposal.value(CONFIG, ("text_config",)), dict):
        return ()
    return ("text_config",)


def _group_size(runtime: RuntimeView) -> int | None:
    """Input channels for each scale, from the first NVFP4 weight."""
    for weight in runtime.weights.values():
        if weight.form == "nvfp4_modelopt" and (scale := weight.parts["weight_scale"]).shape:
            return weight.shape[1] // scale.shape[-1]
    return None


def _faults(runtime: RuntimeView, dialect: Dialect) -> int:
    """How many modules a dialect builds otherwise than they are stored."""
    count = 0
    for module in runtime.modules:
        if module.loads_quantized:
            built = dialect.resolve(module.name, shards=module.shards, kind=module.kind)
            count += bool(built.error) or not _fits(module.members[0].weight, built.built.form)
    return count


def _fits(weight: StoredWeight, form: str) -> bool:
    return weight.form == form or {weight.form, form} <= {"fp8_tensor", "fp8_channel"} or form == "unknown"


def _without(config: Mapping[str, Any], place: JSONPath) -> dict[str, Any]:
    """config.json without its quantization config."""
    kept = dict(config)
    if len(place) == 1:
        kept.pop(str(place[0]))
    else:
        outer = str(place[0])
        kept[outer] = {key: value for key, value in kept[outer].items() if key != place[1]}
    return kept
