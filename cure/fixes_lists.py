"""Fixes of the lists in a quantization config: they say what is on disk, under the names that vLLM asks for.

In: a `Checked`, and the proposal that its config is in. Out: changes of lists in config.json or hf_quant_config.json.

Easy to get wrong: an entry that is added may hit more than it means. `model.layers.3*` excludes layers 30 to 39 too, so
each entry is compared with every module that must stay quantized, as vLLM compares it. Entries that do no harm stay:
another engine may read them.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..checkpoints.companions import HF_QUANT_CONFIG
from ..recipes.family import Part
from ..recipes.renamer import renamer
from ..validate.check.check import Checked
from ..validate.check.dialects.choose import quantization_of, read_dialect
from ..validate.check.dialects.compressed_tensors import CompressedTensors
from ..validate.check.dialects.fp8 import Fp8
from ..validate.check.dialects.modelopt import ModelOpt
from ..validate.check.runtime_view import Module, RuntimeView
from ..validate.check.vllm_module import ConfigEntry, Dialect, Resolution
from .json_diff import JSONPath
from .proposal import CONFIG, Edit, Proposal, SetValue

_ALGORITHMS = {
    "nvfp4_modelopt": "NVFP4",
    "fp8_tensor": "FP8",
    "fp8_channel": "FP8_PER_CHANNEL_PER_TOKEN",
    "fp8_block": "FP8_PB_WO",
    "mxfp8": "MXFP8",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Lists:
    """Where a quantization config has its entries.

    Attributes:
        file: config.json or hf_quant_config.json.
        config: the place of the quantization config in it.
        ignore: the place of the list of what is left alone.
    """

    file: str
    config: JSONPath
    ignore: JSONPath


def lists_say_what_is_stored(checked: Checked, proposal: Proposal) -> Iterator[Edit]:
    """Entries that take a quantized module away, and modules that no entry names: F11 to F35, G1, G2, H1."""
    runtime = checked.runtime
    if runtime is None or not isinstance(runtime.dialect, CompressedTensors | ModelOpt | Fp8):
        return
    lists = _lists_of(proposal, runtime.dialect)
    now = proposal.value(lists.file, lists.ignore) or []
    harmful = _harmful(runtime)
    kept = [entry for entry in now if entry not in harmful]
    if removed := [entry for entry in now if entry in harmful]:
        why = (
            f"{_some(removed)} reaches modules that are stored quantized: {_some(harmful[entry] for entry in removed)}"
        )
        yield SetValue(file=lists.file, place=lists.ignore, value=kept, why=why)
    probe = _config_with(proposal, lists, kept)
    missed = [module for module, found in _resolved(runtime, *probe) if _is_plain(module) and not _builds_plain(found)]
    added = _entries_for(runtime, missed, kept)
    if added:
        why = f"plain on disk, and built quantized by vLLM, which calls them so: {_some(each.name for each in missed)}"
        yield SetValue(file=lists.file, place=lists.ignore, value=[*kept, *added], why=why)
    yield from _targets(runtime, proposal, lists, probe)


def draft_head_is_excluded(checked: Checked, proposal: Proposal) -> Iterator[Edit]:
    """modelopt quantizes heads, also the draft's placeholder: F38."""
    runtime = checked.runtime
    if runtime is None or not isinstance(runtime.dialect, ModelOpt):
        return
    lists = _lists_of(proposal, runtime.dialect)
    now = proposal.value(lists.file, lists.ignore) or []
    names = [each.where for each in checked.data.findings if each.rule == "draft-head" and each.where not in now]
    if names:
        why = "vLLM builds this head of the draft quantized, and the checkpoint has no scales for it"
        yield SetValue(file=lists.file, place=lists.ignore, value=[*now, *names], why=why)


def place_of_config(proposal: Proposal) -> JSONPath | None:
    """Where config.json has its quantization config, as `choose.quantization_of` looks for it; None if it has none."""
    places: tuple[JSONPath, ...] = (
        ("quantization_config",),
        ("text_config", "quantization_config"),
        ("compression_config",),
    )
    return next((place for place in places if isinstance(proposal.value(CONFIG, place), dict)), None)


def _lists_of(proposal: Proposal, dialect: Dialect) -> _Lists:
    """Where vLLM reads the config, and the key of its list that vLLM reads."""
    found = place_of_config(proposal)
    if found is None:
        place = ("quantization",)
        return _Lists(file=HF_QUANT_CONFIG, config=place, ignore=(*place, "exclude_modules"))
    if isinstance(proposal.value(CONFIG, (*found, "quantization")), dict):
        found = (*found, "quantization")
        return _Lists(file=CONFIG, config=found, ignore=(*found, "exclude_modules"))
    keys = ["ignored_layers", "modules_to_not_convert"] if isinstance(dialect, Fp8) else ["ignore"]
    key = next((key for key in keys if proposal.value(CONFIG, (*found, key))), keys[0])
    return _Lists(file=CONFIG, config=found, ignore=(*found, key))


def _harmful(runtime: RuntimeView) -> dict[str, str]:
    """Entries, as written, by which vLLM builds a stored-quantized module plain or fails; and such a module."""
    found = {}
    for module in runtime.modules:
        is_split = any(words in module.resolution.error for words in ("scheme", "not all shards"))
        if module.loads_quantized and _is_packed(module) and (is_split or _builds_plain(module.resolution)):
            names = frozenset((module.name, *module.shards))
            dialect = _dialect(runtime, module)
            for entry in dialect.entries:
                is_list = entry.where not in ("targets", "quantized_layers")
                if is_list and dialect.covered(entry, names):
                    found[entry.written] = module.name
    return found


def _dialect(runtime: RuntimeView, module: Module) -> Dialect:
    return runtime.draft_dialect if module.part == "mtp" else runtime.dialect


def _config_with(proposal: Proposal, lists: _Lists, ignore: list[str]) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """config.json and hf_quant_config.json with another list."""
    files = {file: proposal.value(file, ()) for file in (CONFIG, HF_QUANT_CONFIG)}
    holder = files[lists.file]
    for key in lists.ignore[:-1]:
        holder = holder[key]
    holder[lists.ignore[-1]] = ignore
    return files[CONFIG], files[HF_QUANT_CONFIG]


def _resolved(
    runtime: RuntimeView, config: Mapping[str, Any], hf_quant_config: Mapping[str, Any] | None
) -> list[tuple[Module, Resolution]]:
    """What vLLM would build for each module by another config."""
    target = read_dialect(config, hf_quant_config)
    afresh = runtime.view.layout.draft_reads_afresh
    draft = read_dialect(config, hf_quant_config, "mtp") if afresh else target
    found = []
    for module in runtime.modules:
        if module.loads_quantized:
            dialect = draft if module.part == "mtp" else target
            resolution = dialect.resolve(module.name, shards=module.shards, kind=module.kind)
            # A module that vLLM builds plain whatever the lists say needs no entry.
            is_fixed = module.resolution.entry.startswith("vLLM builds")
            found.append((module, module.resolution if is_fixed else resolution))
    return found


def _entries_for(runtime: RuntimeView, missed: Sequence[Module], kept: list[str]) -> list[str]:
    """Entries that reach these modules, and none that is stored quantized."""
    packed = [name for module in runtime.modules if _is_packed(module) for name in (module.name, *module.shards)]
    found: dict[str, None] = {}
    for (part, layer), modules in _by_layer(missed).items():
        whole = [m for m in runtime.modules if (m.part, m.layer) == (part, layer) and m.loads_quantized]
        stem = "" if layer is None else runtime.view.runtime_stem(part, layer)
        if part == "mtp" and stem and all(map(_is_plain, whole)):
            entry = _stem_entry(runtime, stem)
            if entry and not _reached(runtime, part, entry, packed):
                found[entry] = None
                # vLLM looks for the parts of a fused module before it looks at modelopt's patterns.
                modules = [m for m in modules if m.resolution.error and isinstance(runtime.dialect, ModelOpt)]
        for module in modules:
            found.update(dict.fromkeys(_names_for(runtime, module, packed)))
    return [entry for entry in _compacted(found, packed) if entry not in kept]


def _stem_entry(runtime: RuntimeView, stem: str) -> str:
    """One entry for all modules of a layer; "" where the dialect has whole names only."""
    if isinstance(runtime.dialect, CompressedTensors):
        return f"re:^{re.escape(stem)}"
    return f"{stem}*" if isinstance(runtime.dialect, ModelOpt) else ""


def _names_for(runtime: RuntimeView, module: Module, packed: Iterable[str]) -> list[str]:
    """The entries for one module: vLLM's name, or, where a mapper spoils that, the names on disk."""
    if isinstance(runtime.dialect, CompressedTensors):
        return [f"re:^{re.escape(module.name)}{'[.]' if module.kind == 'experts' else '$'}"]
    spellings = [[module.name], sorted({_disk_name(member.weight.module, module) for member in module.members})]
    for names in spellings:
        reach = [module.name in _reached(runtime, module.part, name, [module.name]) for name in names]
        if any(reach) and not any(_reached(runtime, module.part, name, packed) for name in names):
            return names
    return spellings[0]


def _disk_name(name: str, module: Module) -> str:
    """The module's name on disk; of routed experts, the one of all."""
    return name.partition(".experts.")[0] + ".experts" if module.kind == "experts" and ".experts." in name else name


def _reached(runtime: RuntimeView, part: str, entry: str, names: Iterable[str]) -> Sequence[str]:
    """Those of `names` that an entry of this dialect hits."""
    dialect = runtime.draft_dialect if part == "mtp" else runtime.dialect
    afresh = part == "mtp" and runtime.view.layout.draft_reads_afresh
    rename = renamer(runtime.source.config, "mtp" if afresh else "backbone")
    read = rename.modelopt(entry) if isinstance(dialect, ModelOpt) else (rename.path(entry),)
    as_entry = ConfigEntry(where="ignore", written=entry, read=read)
    return dialect.covered(as_entry, frozenset(names))


def _compacted(entries: Iterable[str], packed: Sequence[str]) -> list[str]:
    """Regexes that differ in numbers alone are one, unless that one would hit a quantized module."""
    groups: dict[str, list[str]] = defaultdict(list)
    for entry in entries:
        groups[re.sub(r"(?<=\\\.)\d+(?=\\\.)", r"\\d+", entry) if entry.startswith("re:") else entry].append(entry)
    found = []
    for general, each in groups.items():
        is_safe = len(each) > 1 and not any(re.match(general[3:], name) for name in packed)
        found += [general] if is_safe else each
    return found


def _targets(
    runtime: RuntimeView, proposal: Proposal, lists: _Lists, probe: tuple[dict[str, Any], dict[str, Any] | None]
) -> Iterator[Edit]:
    """Modules that are stored quantized and that no target, or no line of quantized_layers, matches."""
    lost = [(module, found) for module, found in _resolved(runtime, *probe) if _is_packed(module) and not found.error]
    if isinstance(runtime.dialect, CompressedTensors):
        others = [module for module, found in lost if found.built.form not in (_form(module), "unknown")]
        yield from _more_targets(runtime, proposal, lists, others)
    elif isinstance(runtime.dialect, ModelOpt) and runtime.dialect.algorithm == "MIXED_PRECISION":
        yield from _more_lines(runtime, proposal, lists, [module for module, found in lost if _builds_plain(found)])


def _more_targets(runtime: RuntimeView, proposal: Proposal, lists: _Lists, lost: Sequence[Module]) -> Iterator[Edit]:
    """Targets in the group whose form a module has; those of no module are gone once others do their work."""
    other = {
        form: [n for m in runtime.modules if _form(m) != form for n in (m.name, *m.shards)]
        for form in {*map(_form, lost)}
    }
    for key, group in (proposal.value(lists.file, (*lists.config, "config_groups")) or {}).items():
        mine = [module for module in lost if _is_form_of(runtime, group, module)]
        added = dict.fromkeys(target for module in mine for target in _target_for(module))
        if added:
            place = (*lists.config, "config_groups", key, "targets")
            now = proposal.value(lists.file, place) or []
            value = [*(each for each in now if not _is_dead(runtime, each)), *_compacted(added, other[_form(mine[0])])]
            names = _some(module.name for module in mine)
            why = f"stored in this group's form, which no target gives them under vLLM's names: {names}"
            yield SetValue(file=lists.file, place=place, value=value, why=why)


def _is_dead(runtime: RuntimeView, target: str) -> bool:
    """Whether a target is a pattern that matches no name, neither of vLLM nor on disk."""
    as_entry = ConfigEntry(where="targets", written=target, read=(target,))
    names = runtime.known_names[0] | runtime.known_names[1] | runtime.sglang_names
    return target.startswith("re:") and not runtime.dialect.covered(as_entry, names)


def _is_form_of(runtime: RuntimeView, group: Mapping[str, Any], module: Module) -> bool:
    """Whether a config group builds what the module is stored as, whatever its targets are."""
    raw = quantization_of(runtime.source.config) or {}
    alone = {**raw, "config_groups": {"group": {**group, "targets": ["Linear"]}}, "ignore": []}
    dialect = read_dialect({**runtime.source.config, "quantization_config": alone}, None)
    assert isinstance(dialect, CompressedTensors)
    built = (dialect.expert_targets if module.kind == "experts" else dialect.targets).builds["Linear"]
    leaves = frozenset(module.members[0].weight.parts)
    return not isinstance(built, str) and built.form == _form(module) and not (leaves ^ built.leaves) - built.optional


def _target_for(module: Module) -> list[str]:
    if module.kind != "experts":
        return [f"re:^{re.escape(module.name)}$"]
    last = sorted({shard.rpartition(".")[2] for shard in module.shards})
    return [rf"re:^{re.escape(module.name)}\.\d+\.({'|'.join(last)})$"]


def _more_lines(runtime: RuntimeView, proposal: Proposal, lists: _Lists, lost: Sequence[Module]) -> Iterator[Edit]:
    """Lines of modelopt's quantized_layers, new or with the algorithm that is stored."""
    place = (*lists.config, "quantized_layers")
    now = proposal.value(lists.file, place)
    lines: dict[str, Any] = {}
    for module in lost:
        weight = module.members[0].weight
        if weight.form in _ALGORITHMS:
            size = {"group_size": 16} if weight.form == "nvfp4_modelopt" else {}
            for member in module.members[:1] if module.kind == "experts" else module.members:
                lines[_disk_name(member.weight.module, module)] = {"quant_algo": _ALGORITHMS[weight.form], **size}
    if lines and now is not None:
        why = f"quantized on disk, and not in quantized_layers: {_some(lines)}"
        yield SetValue(file=lists.file, place=place, value=now | lines, why=why)


def _form(module: Module) -> str:
    return module.members[0].weight.form


def _by_layer(modules: Iterable[Module]) -> Mapping[tuple[Part, int | None], list[Module]]:
    found: dict[tuple[Part, int | None], list[Module]] = defaultdict(list)
    for module in modules:
        found[module.part, module.layer].append(module)
    return found


def _is_plain(module: Module) -> bool:
    return module.loads_quantized and all(member.weight.form == "plain" for member in module.members)


def _is_packed(module: Module) -> bool:
    return all(member.weight.form not in ("plain", "unknown") for member in module.members)


def _builds_plain(resolution: Resolution) -> bool:
    return not resolution.error and resolution.built.form == "plain"


def _some(names: Iterable[str]) -> str:
    """The first names, and how many more there are."""
    every = [*dict.fromkeys(names)]
    return ", ".join(every[:2]) + (f" and {len(every) - 2:,} more" if len(every) > 2 else "")
