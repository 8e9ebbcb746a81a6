"""Fixes of the lists in a quantization config: they say what is on disk, under the names that vLLM
asks for.

In: a `Faulty`, in any dialect whose lists keepmtp knows. Out: changes of lists in config.json or
hf_quant_config.json, in the words of the tool that wrote them.

Easy to get wrong: an entry that is added may hit more than it means. `model.layers.3*` excludes
layers 30 to 39 too, so each entry is compared with every module that must stay quantized, as vLLM
compares it. Entries that do no harm stay: another engine may read them. With an empty
`modules_to_not_convert`, vLLM finds the plain modules of an AWQ checkpoint in its headers; with one
entry it does not look, so the first entry comes with all others. And GPTQ's first expression that
matches decides, so an exception goes before what is there.

Source: vLLM 0.32.0 quantization/utils/gptq_utils.py (get_dynamic_override), auto_awq.py
(maybe_update_config), quark/utils.py (should_ignore_layer), inc/config_parser.py; the classes of
validate/check/dialects read them.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..checkpoints.companions import HF_QUANT_CONFIG
from ..recipes.family import Part
from ..recipes.renamer import renamer
from ..validate.check.dialects.autoround import AutoRound
from ..validate.check.dialects.choose import read_dialect
from ..validate.check.dialects.compressed_tensors import CompressedTensors
from ..validate.check.dialects.fp8 import Fp8
from ..validate.check.dialects.gptq import Awq, Gptq
from ..validate.check.dialects.modelopt import ModelOpt
from ..validate.check.dialects.quark import Quark
from ..validate.check.runtime_view import Module, RuntimeView
from ..validate.check.vllm_module import ConfigEntry, Resolution
from .proposal import CONFIG, Faulty

_ALGORITHMS = {
    "nvfp4_modelopt": "NVFP4",
    "fp8_tensor": "FP8",
    "fp8_channel": "FP8_PER_CHANNEL_PER_TOKEN",
    "fp8_block": "FP8_PB_WO",
    "mxfp8": "MXFP8",
}
_Built = Sequence[tuple[Module, Resolution]]


@dataclass(frozen=True, slots=True)
class _Spelling:
    """How a tool writes that a module is left alone.

    Attributes:
        keys: of the quantization config; the first one that has entries, else the first.
        of_stem: the entry for all names that start so; "" where there are whole names only.
        of_name: the entry for one module.
        value: what an entry of an object has; None where it is a list.
        has_whole_names: vLLM's mapper may spoil a name, so names on disk are tried too.
    """

    keys: tuple[str, ...]
    of_stem: Callable[[str], str]
    of_name: Callable[[str], str]
    value: Mapping[str, Any] | None = None
    has_whole_names: bool = False


_SPELLINGS: Mapping[type, _Spelling] = {
    CompressedTensors: _Spelling(
        ("ignore",), lambda s: f"re:^{re.escape(s)}", lambda n: f"re:^{re.escape(n)}$"
    ),
    ModelOpt: _Spelling(
        ("ignore", "exclude_modules", "ignored_layers"), "{}*".format, str, has_whole_names=True
    ),
    Fp8: _Spelling(
        ("ignored_layers", "modules_to_not_convert"), lambda s: "", str, has_whole_names=True
    ),
    Gptq: _Spelling(
        ("dynamic",), lambda s: f"-:^{re.escape(s)}", lambda n: f"-:^{re.escape(n)}$", {}
    ),
    Awq: _Spelling(("modules_to_not_convert",), str, str),
    Quark: _Spelling(("exclude",), lambda s: f"re:^{re.escape(s)}.*", str),
    AutoRound: _Spelling(
        ("extra_config",),
        lambda s: f"^{re.escape(s)}.*",
        lambda n: f"^{re.escape(n)}$",
        {"bits": 16, "data_type": "float"},
    ),
}


def lists_say_what_is_stored(faulty: Faulty) -> None:
    """Entries that take a quantized module away, and modules that no entry names: F11 to F47, G1,
    G2, H1.
    """
    runtime, proposal = faulty.runtime, faulty.proposal
    spelling = _SPELLINGS.get(type(runtime.dialect))
    if spelling is None:
        return
    key = next((key for key in spelling.keys if proposal.quantization(key)), spelling.keys[0])
    if proposal.quantization_at[1][-1] == "quantization":
        key = "exclude_modules"
    now: Any = proposal.quantization(key) or ([] if spelling.value is None else {})
    harmful = _harmful(runtime)
    if spelling.value is None and (removed := [entry for entry in now if entry in harmful]):
        why = f"{_some(removed)} reaches modules that are stored quantized: "
        why += _some(harmful[entry] for entry in removed)
        now = [entry for entry in now if entry not in harmful]
        proposal.set_quantization((key,), now, why)
    plain = [(module, found) for module, found in _built(faulty) if _is_plain(module)]
    is_first = isinstance(runtime.dialect, Awq) and not now and bool(faulty.findings)
    missed = [module for module, found in plain if is_first or not _builds_plain(found)]
    if isinstance(
        runtime.dialect, Gptq
    ):  # older vLLM does not find in the headers that a linear module is plain
        missed += [
            m for m, found in plain if m.part == "mtp" and not found.entry and m not in missed
        ]
    names = [each.where for each in faulty.findings if each.rule == "draft-head"]
    entries = [*_entries_for(runtime, spelling, missed), *map(spelling.of_name, names)]
    if is_first:  # vLLM's own list has the modules of other parts, too
        entries += [prefix for _, prefix, _ in runtime.view.layout.opaque]
    if added := [entry for entry in entries if entry not in now]:
        names += [module.name for module in missed]
        why = f"plain on disk, and built quantized by vLLM, which calls them so: {_some(names)}"
        value = (
            [*now, *added]
            if spelling.value is None
            else {entry: dict(spelling.value) for entry in added} | now
        )
        proposal.set_quantization((key,), value, why)
    if isinstance(runtime.dialect, CompressedTensors):
        _more_targets(faulty)
    elif isinstance(runtime.dialect, ModelOpt) and runtime.dialect.algorithm == "MIXED_PRECISION":
        _more_lines(faulty)


def _harmful(runtime: RuntimeView) -> dict[str, str]:
    """Entries, as written, by which vLLM builds a stored-quantized module plain or fails; and such
    a module.
    """
    found = {}
    for module in runtime.modules:
        is_split = any(words in module.resolution.error for words in ("scheme", "not all shards"))
        if (
            module.loads_quantized
            and _is_packed(module)
            and (is_split or _builds_plain(module.resolution))
        ):
            names = frozenset((module.name, *module.shards))
            dialect = runtime.draft_dialect if module.part == "mtp" else runtime.dialect
            for entry in dialect.entries:
                if entry.where not in ("targets", "quantized_layers") and dialect.covered(
                    entry, names
                ):
                    found[entry.written] = module.name
    return found


def _built(faulty: Faulty) -> _Built:
    """What vLLM would build for each module that it asks the config about, by the config as it is
    now.
    """
    runtime = faulty.runtime
    config, other = (faulty.proposal.value(file, ()) for file in (CONFIG, HF_QUANT_CONFIG))
    target = draft = read_dialect(config, other, dtypes=runtime.dtypes)
    if runtime.view.layout.draft_reads_afresh:
        draft = read_dialect(config, other, "mtp", runtime.dtypes)
    found = []
    for module in runtime.modules:
        if module.loads_quantized:
            resolution = module.resolution
            # A module that vLLM builds plain whatever the lists say needs no entry.
            if not resolution.entry.startswith("vLLM builds"):
                dialect = draft if module.part == "mtp" else target
                resolution = dialect.resolve(module.name, shards=module.shards, kind=module.kind)
            found.append((module, resolution))
    return found


def _entries_for(runtime: RuntimeView, spelling: _Spelling, missed: Sequence[Module]) -> list[str]:
    """Entries that reach these modules, and none that is stored quantized."""
    packed = [
        name
        for module in runtime.modules
        if _is_packed(module)
        for name in (module.name, *module.shards)
    ]
    layers: dict[tuple[Part, int | None], list[Module]] = defaultdict(list)
    for module in missed:
        layers[module.part, module.layer].append(module)
    found: dict[str, None] = {}
    for (part, layer), modules in layers.items():
        whole = [
            m for m in runtime.modules if (m.part, m.layer) == (part, layer) and m.loads_quantized
        ]
        if part == "mtp" and layer is not None and all(map(_is_plain, whole)):
            entry = spelling.of_stem(runtime.view.runtime_stem(part, layer))
            if entry and not _reached(runtime, part, entry, packed):
                found[entry] = None
                # vLLM looks for the parts of a fused module before it looks at modelopt's patterns.
                modules = [
                    m
                    for m in modules
                    if m.resolution.error and isinstance(runtime.dialect, ModelOpt)
                ]
        for module in modules:
            found.update(dict.fromkeys(_names_for(runtime, spelling, module, packed)))
    return _compacted(found, packed)


def _names_for(
    runtime: RuntimeView, spelling: _Spelling, module: Module, packed: Sequence[str]
) -> list[str]:
    """The entries for one module: vLLM's name, or, where a mapper spoils that, the names on
    disk.
    """
    if isinstance(runtime.dialect, CompressedTensors) and module.kind == "experts":
        return [f"re:^{re.escape(module.name)}[.]"]
    ways = [[spelling.of_name(module.name)]]
    if spelling.has_whole_names:
        ways.append(sorted({_disk_name(member.weight.module, module) for member in module.members}))
    ways = [
        names
        for names in ways
        if not any(_reached(runtime, module.part, name, packed) for name in names)
    ]
    for names in ways:
        if any(_reached(runtime, module.part, name, [module.name]) for name in names):
            return names
    return ways[0] if ways else []


def _disk_name(name: str, module: Module) -> str:
    """The module's name on disk; of routed experts, the one of all."""
    return (
        name.partition(".experts.")[0] + ".experts"
        if module.kind == "experts" and ".experts." in name
        else name
    )


def _reached(runtime: RuntimeView, part: Part, entry: str, names: Iterable[str]) -> Sequence[str]:
    """Those of `names` that an entry of this dialect hits."""
    is_draft = part == "mtp"
    dialect = runtime.draft_dialect if is_draft else runtime.dialect
    rename = renamer(
        runtime.source.config,
        "mtp" if is_draft and runtime.view.layout.draft_reads_afresh else "backbone",
    )
    read = (entry.removeprefix("-:"),)
    if isinstance(dialect, ModelOpt):
        read = rename.modelopt(entry)
    elif isinstance(dialect, CompressedTensors | Fp8):
        read = (rename.path(entry),)
    return dialect.covered(ConfigEntry(where="ignore", written=entry, read=read), frozenset(names))


def _compacted(entries: Iterable[str], packed: Sequence[str]) -> list[str]:
    """Regexes that differ in numbers alone are one, unless that one would hit a quantized
    module.
    """
    groups: dict[str, list[str]] = defaultdict(list)
    for entry in entries:
        groups[
            re.sub(r"(?<=\\\.)\d+(?=\\\.)", r"\\d+", entry) if entry.startswith("re:") else entry
        ].append(entry)
    found = []
    for general, each in groups.items():
        is_safe = len(each) > 1 and not any(re.match(general[3:], name) for name in packed)
        found += [general] if is_safe else each
    return found


def _more_targets(faulty: Faulty) -> None:
    """Targets of compressed-tensors in the group whose form a module has; those of no module leave
    for others.
    """
    runtime, proposal = faulty.runtime, faulty.proposal
    lost = [
        module
        for module, found in _built(faulty)
        if _is_packed(module)
        and not found.error
        and found.built.form not in (_form(module), "unknown")
    ]
    for key, group in (proposal.quantization("config_groups") or {}).items() if lost else ():
        mine = [module for module in lost if _is_form_of(faulty, group, module)]
        if added := dict.fromkeys(map(_target_for, mine)):
            others = [
                n
                for m in runtime.modules
                if _form(m) != _form(mine[0])
                for n in (m.name, *m.shards)
            ]
            now = [each for each in group.get("targets") or () if not _is_dead(runtime, each)]
            why = "stored in this group's form, which no target gives them under vLLM's names: "
            why += _some(module.name for module in mine)
            place = ("config_groups", key, "targets")
            proposal.set_quantization(place, [*now, *_compacted(added, others)], why)


def _is_dead(runtime: RuntimeView, target: str) -> bool:
    """Whether a target is a pattern that matches no name, neither of vLLM nor on disk."""
    as_entry = ConfigEntry(where="targets", written=target, read=(target,))
    names = runtime.known_names[0] | runtime.known_names[1] | runtime.sglang_names
    return target.startswith("re:") and not runtime.dialect.covered(as_entry, names)


def _is_form_of(faulty: Faulty, group: Mapping[str, Any], module: Module) -> bool:
    """Whether a config group builds what the module is stored as, whatever its targets are."""
    config = faulty.runtime.source.config
    alone = {"config_groups": {"group": {**group, "targets": ["Linear"]}}, "ignore": []}
    dialect = read_dialect(
        {**config, "quantization_config": {**faulty.proposal.quantization(), **alone}}, None
    )
    # A head is named by a target of its own, which is added.
    kind = "experts" if module.kind == "experts" else "linear"
    found = dialect.resolve(module.name, shards=module.shards, kind=kind)
    is_form = not found.error and found.built.form == _form(module)
    return (
        is_form
        and not (module.members[0].weight.parts.keys() ^ found.built.leaves) - found.built.optional
    )


def _target_for(module: Module) -> str:
    if module.kind != "experts":
        return f"re:^{re.escape(module.name)}$"
    last = sorted({shard.rpartition(".")[2] for shard in module.shards})
    return rf"re:^{re.escape(module.name)}\.\d+\.({'|'.join(last)})$"


def _more_lines(faulty: Faulty) -> None:
    """Lines of modelopt's quantized_layers, new or with the algorithm that is stored."""
    now, lines = faulty.proposal.quantization("quantized_layers"), {}
    for module, found in _built(faulty):
        form = _form(module)
        if form in _ALGORITHMS and _is_packed(module) and _builds_plain(found):
            size = {"group_size": 16} if form == "nvfp4_modelopt" else {}
            for member in module.members[:1] if module.kind == "experts" else module.members:
                lines[_disk_name(member.weight.module, module)] = {
                    "quant_algo": _ALGORITHMS[form],
                    **size,
                }
    if lines and now is not None:
        why = f"quantized on disk, and not in quantized_layers: {_some(lines)}"
        faulty.proposal.set_quantization(("quantized_layers",), now | lines, why)


def _form(module: Module) -> str:
    return module.members[0].weight.form


def _is_plain(module: Module) -> bool:
    return module.loads_quantized and all(
        member.weight.form == "plain" for member in module.members
    )


def _is_packed(module: Module) -> bool:
    return all(member.weight.form not in ("plain", "unknown") for member in module.members)


def _builds_plain(resolution: Resolution) -> bool:
    return not resolution.error and resolution.built.form == "plain"


def _some(names: Iterable[str]) -> str:
    """The first names, and how many more there are."""
    every = [*dict.fromkeys(names)]
    return ", ".join(every[:2]) + (f" and {len(every) - 2:,} more" if len(every) > 2 else "")
