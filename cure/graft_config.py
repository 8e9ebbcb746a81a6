"""config.json and hf_quant_config.json of a checkpoint that gets its MTP block back.

In: the two as they are, the release's config.json, and the plan of the block. Out: both files anew, with the reasons of
what changes. Every key of the checkpoint stays but those that count or describe MTP layers, and the entries that say
how vLLM builds the block.

Easy to get wrong: lists with one value for each layer. The release's have the MTP layers at their end, and a tool that
drops the block cuts them. And in compressed-tensors a config group without a format of its own has that of the whole.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy
from typing import Any

from ..quantize.config.written import config_of, modules_of
from ..quantize.plan.plan import Plan
from ..recipes.errors import CheckpointError
from ..recipes.family import Family
from ..recipes.family_view import FamilyView
from ..validate.check.dialects.choose import quantization_of
from ..validate.check.dialects.methods import method_of
from ..validate.check.dialects.patterns import time_limit
from ..validate.check.runtime_view import RuntimeView
from .json_diff import JSONPath

Reasons = list[tuple[JSONPath, str]]
PLAIN_ONLY = (
    "modelopt",
    "modelopt_fp4",
    "modelopt_mixed",
    "modelopt_mxfp8",
    "mxfp8",
    "gptq",
    "gptq_marlin",
    "auto_gptq",
    "awq",
    "awq_marlin",
    "auto_awq",
    "inc",
    "quark",
)
"""Dialects in which graft has no words for a packed block: the block is BF16 there."""
NATIVE_FP8 = ("fp8", "deepseek_v4_fp8")
_ABOUT_MTP = re.compile(r"mtp|nextn|n_predict", re.IGNORECASE)
_MTP_GROUP = "mtp_{}"


def method_in(config: Mapping[str, Any], hf_quant_config: Mapping[str, Any] | None) -> str:
    """The quantization method that vLLM reads; "" for a checkpoint that is not quantized.

    Raises:
        CheckpointError: a method for which keepmtp cannot write entries.
    """
    found = quantization_of(config)
    if found is None:
        return "modelopt" if hf_quant_config is not None else ""
    method = method_of(found)
    if method in ("compressed-tensors", *NATIVE_FP8, *PLAIN_ONLY):
        return method
    rule = "graft writes compressed-tensors, modelopt, native FP8, GPTQ, AWQ, AutoRound and Quark"
    cure = "Quantize the release with keepmtp, which keeps its MTP block"
    raise CheckpointError("config.json: quantization_config", rule, got=method or "no quant_method", cure=cure)


def with_mtp_keys(config: Mapping[str, Any], released: Mapping[str, Any], family: Family) -> tuple[dict, Reasons]:
    """A config.json that counts and describes MTP layers as the release's does.

    Args:
        config: the checkpoint's; it may have the language model's keys at top level where the release nests them.
        released: the release's config.json.
        family: of both.
    """
    new = deepcopy(dict(config))
    reasons: Reasons = []
    holders: list[tuple[dict[str, Any], JSONPath, Mapping[str, Any]]] = [(new, (), released)]
    if isinstance(text := released.get("text_config"), Mapping):
        own = new.get("text_config")
        holders.append((own, ("text_config",), text) if isinstance(own, dict) else (new, (), text))
    outer = {key.partition(".")[0] for key in (*family.mtp_count_keys, *family.mtp_parts_keys)}
    for holder, path, theirs in holders:
        for key, value in theirs.items():
            if key in ("text_config", "quantization_config") or holder.get(key) == value:
                continue
            if key in outer or _ABOUT_MTP.search(key):
                holder[key] = deepcopy(value)
                reasons.append(((*path, key), "the release describes its MTP block so"))
            elif _is_cut(holder.get(key), value):
                holder[key] = deepcopy(value)
                reasons.append(((*path, key), "the release has a value for each layer, MTP layers too"))
    return new, reasons


def _is_cut(value: Any, released: Any) -> bool:
    """Whether a list is the release's without its end."""
    if not (isinstance(value, list) and isinstance(released, list)):
        return False
    return 0 < len(value) < len(released) and released[: len(value)] == value


def with_entries(
    config: Mapping[str, Any], hf_quant_config: Mapping[str, Any] | None, plan: Plan, backbone: RuntimeView
) -> tuple[dict[str, Any], dict[str, Any] | None, Reasons, Reasons]:
    """Both files with what vLLM must read of the block.

    Args:
        config, hf_quant_config: as they are, but for the keys that count MTP layers.
        plan: of the block.
        backbone: the checkpoint, with what vLLM reads of its old quantization config.

    Returns: config.json, hf_quant_config.json (None if there is none), and the reasons for each.
    """
    new, reasons, hf_reasons = deepcopy(dict(config)), [], []
    hf_new = None if hf_quant_config is None else deepcopy(dict(hf_quant_config))
    method = method_in(config, hf_quant_config)
    raw = quantization_of(new)
    if isinstance(raw, dict):
        path = _path_of(new, raw)
        said = _freed(raw, plan, backbone) if method in ("compressed-tensors", *NATIVE_FP8) else []
        reasons = [((*path, *inner), why) for inner, why in (*said, *_write(raw, method, plan, backbone))]
    if hf_new is not None and method in PLAIN_ONLY:
        hf_reasons = list(_write(hf_new, method, plan, backbone))
    return new, hf_new, reasons, hf_reasons


def _path_of(config: Mapping[str, Any], raw: Mapping[str, Any]) -> JSONPath:
    for key in ("quantization_config", "compression_config"):
        if config.get(key) is raw:
            return (key,)
    return ("text_config", "quantization_config")


def _write(raw: dict[str, Any], method: str, plan: Plan, backbone: RuntimeView) -> Reasons:
    """Put the block's entries into one quantization config; where, and why."""
    starts = _starts(plan, backbone)
    why = "vLLM builds the MTP block plain only where an entry says so"
    if method == "compressed-tensors":
        return _write_compressed_tensors(raw, plan, backbone)
    if method in NATIVE_FP8:
        key = "ignored_layers" if raw.get("ignored_layers") else "modules_to_not_convert"
        names = [name for module in modules_of(plan) if not module.scheme for name in module.asked]
        packed = _packed_names(plan)
        return _extend(raw, (key,), [name for name in names if name not in packed], why)
    if method in ("gptq", "gptq_marlin", "auto_gptq"):
        entries = {f"-:^{re.escape(start)}": {} for start in starts}
        raw["dynamic"] = {**entries, **(raw.get("dynamic") or {})}  # the first that matches counts
        return [(("dynamic",), why)]
    if method == "inc":
        entries = {f"^{re.escape(start)}": {"bits": 16, "data_type": "float"} for start in starts}
        raw["extra_config"] = {**(raw.get("extra_config") or {}), **entries}
        return [(("extra_config",), why)]
    if method in ("awq", "awq_marlin", "auto_awq"):
        return _extend(raw, ("modules_to_not_convert",), starts, why)
    if method == "quark":
        return _extend(raw, ("exclude",), [f"re:^{re.escape(start)}" for start in starts], why)
    return _write_modelopt(raw, plan, starts, backbone, why)


def _write_modelopt(raw: dict[str, Any], plan: Plan, starts: list[str], backbone: RuntimeView, why: str) -> Reasons:
    """Globs for layers and whole names for other modules, in the list that vLLM reads."""
    path: tuple[str, ...] = ("ignored_layers" if not raw.get("ignore") and raw.get("ignored_layers") else "ignore",)
    holder = raw
    if isinstance(raw.get("quantization"), dict):
        path, holder = ("quantization", "exclude_modules"), raw["quantization"]
    names = [name for module in modules_of(plan) for name in module.asked] + _draft_heads(plan.view)
    said = _said(names, holder.get(path[-1]) or (), backbone)
    left = [start for start in (*starts, *_draft_heads(plan.view)) if not _under(start, names) <= said]
    return _extend(raw, path, [f"{start}*" if start.endswith(".") else start for start in left], why)


def _under(start: str, names: Iterable[str]) -> set[str]:
    return {name for name in names if name == start or (start.endswith(".") and name.startswith(start))}


def _said(names: Iterable[str], listed: Iterable[str], backbone: RuntimeView) -> set[str]:
    """The names that entries reach which are there already."""
    dialect, written = backbone.draft_dialect, {*listed}
    entries = [entry for entry in dialect.entries if entry.written in written]
    with time_limit():
        asked = frozenset(names)
        return {name for entry in entries for name in dialect.covered(entry, asked)}


def _extend(raw: dict[str, Any], path: tuple[str, ...], entries: Iterable[str], why: str) -> Reasons:
    """Add what is not there to the list at `path`."""
    holder = raw
    for key in path[:-1]:
        holder = holder[key]
    listed = list(holder.get(path[-1]) or [])
    new = [entry for entry in dict.fromkeys(entries) if entry not in listed]
    if new:
        holder[path[-1]] = [*listed, *new]
    return [(path, why)] if new else []


def _write_compressed_tensors(raw: dict[str, Any], plan: Plan, backbone: RuntimeView) -> Reasons:
    """The block's groups and its ignored modules, next to those of the backbone."""
    made = config_of(plan).value
    plain = [name for module in modules_of(plan) if not module.scheme for name in module.asked]
    said = _said(plain, raw.get("ignore") or (), backbone)
    new = [entry for entry in made["ignore"] if not {name for name in plain if re.match(entry[3:], name)} <= said]
    reasons = _extend(raw, ("ignore",), new, "vLLM builds these modules of the MTP block plain")
    if not made["config_groups"]:
        return reasons
    groups = raw.setdefault("config_groups", {})
    whole = raw.get("format")
    for number, group in enumerate(made["config_groups"].values()):
        groups[_MTP_GROUP.format(number)] = group
    formats = {group.get("format") or whole for group in groups.values()}
    if formats != {whole}:
        for group in groups.values():
            group["format"] = group.get("format") or whole
        raw["format"] = "mixed-precision"
        reasons.append((("format",), "the MTP block has another format than the backbone"))
    return [*reasons, (("config_groups",), "vLLM builds these modules of the MTP block packed")]


def _freed(raw: dict[str, Any], plan: Plan, backbone: RuntimeView) -> Reasons:
    """Take out what a tool wrote so that its own block stays plain, where the new block is packed.

    An entry that reaches the backbone too becomes the names that it reaches there.
    """
    packed = _packed_names(plan)
    dialect, others = backbone.draft_dialect, frozenset(_names_of_backbone(backbone))
    key = next((key for key in ("ignore", "ignored_layers", "modules_to_not_convert") if raw.get(key)), "ignore")
    listed: dict[str, None] = {}
    with time_limit():
        for entry in dialect.entries:
            if entry.where not in ("ignore", "ignored_layers"):
                continue
            if entry.written in packed or dialect.covered(entry, packed):
                listed |= dict.fromkeys(sorted(dialect.covered(entry, others)))
            else:
                listed[entry.written] = None
    if not packed or [*listed] == raw.get(key):
        return []
    raw[key] = [*listed]
    return [((key,), "an entry for a plain block does not fit one that is packed")]


def _names_of_backbone(backbone: RuntimeView) -> Iterator[str]:
    """Modules of the backbone under the names that vLLM asks for, and on disk; vision too."""
    for module in backbone.modules:
        if module.part == "backbone":
            yield from (module.name, *module.shards, *(member.weight.module for member in module.members))
    for name, place in backbone.placed.items():
        if place.role == "vision":
            yield from (place.runtime, name)


def _packed_names(plan: Plan) -> frozenset[str]:
    """The block's packed modules, in a scheme or as they were released, under every name that vLLM may ask for."""
    kept = {tensor.runtime for tensor in plan.tensors if tensor.fate == "keep" and tensor.form != "plain"}
    packed = [module for module in modules_of(plan) if module.scheme or module.name in kept]
    return frozenset(name for module in packed for name in (module.name, *module.asked))


def _starts(plan: Plan, backbone: RuntimeView) -> list[str]:
    """How the names of the block's modules start, in vLLM and on disk: a layer with a dot at its end, or a module.

    Where a layer of the backbone has the same name, as in Inkling, each module is named.
    """
    view, others = plan.view, [*_names_of_backbone(backbone)]
    found = []
    for tensor in plan.tensors:
        if tensor.layer is not None:
            found += [view.runtime_stem("mtp", tensor.layer), view.disk_stem("mtp", tensor.layer)]
        elif len(tensor.shape) >= 2:
            found += [tensor.runtime, tensor.module]
    asked = [name for module in modules_of(plan) for name in module.asked]
    starts: list[str] = []
    for start in dict.fromkeys(found):
        is_shared = start.endswith(".") and any(name.startswith(start) for name in others)
        starts += [name for name in asked if name.startswith(start)] if is_shared else [start]
    return starts


def _draft_heads(view: FamilyView) -> list[str]:
    """A head that the draft builds by the quantization config although it then uses the target's."""
    return [view.layout.draft_head] if view.layout.draft_head else []
