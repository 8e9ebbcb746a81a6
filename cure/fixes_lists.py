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
checkpoints/dialects read them.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..checkpoints.dialects.autoround import AutoRound
from ..checkpoints.dialects.choose import read_dialect
from ..checkpoints.dialects.compressed_tensors import CompressedTensors
from ..checkpoints.dialects.dialect import ConfigEntry
from ..checkpoints.dialects.fp8 import Fp8
from ..checkpoints.dialects.gptq import Awq, Gptq
from ..checkpoints.dialects.modelopt import ModelOpt
from ..checkpoints.dialects.quark import Quark
from ..recipes.family import Part
from ..recipes.renamer import renamer
from ..validate.check.runtime_view import Module, RuntimeView
from .proposal import Faulty

_ALGORITHMS = {
    "nvfp4_modelopt": "NVFP4",
    "fp8_tensor": "FP8",
    "fp8_channel": "FP8_PER_CHANNEL_PER_TOKEN",
    "fp8_block": "FP8_PB_WO",
    "mxfp8": "MXFP8",
}
# How a tool writes that modules are left alone: the keys, of which the first one with entries
# counts; the entry for all names that start so, "" where there are whole names only; and the entry
# for one module.
_SPELLINGS: Mapping[type, tuple[tuple[str, ...], str, str]] = {
    CompressedTensors: (("ignore",), "re:^{}", "re:^{}$"),
    ModelOpt: (("ignore", "exclude_modules", "ignored_layers"), "{}*", "{}"),
    Fp8: (("ignored_layers", "modules_to_not_convert"), "", "{}"),
    Gptq: (("dynamic",), "-:^{}", "-:^{}$"),
    Awq: (("modules_to_not_convert",), "{}", "{}"),
    Quark: (("exclude",), "re:^{}.*", "{}"),
    AutoRound: (("extra_config",), "^{}.*", "^{}$"),
}
# What an entry has where it is no item of a list but a key.
_VALUES: Mapping[type, Mapping[str, Any]] = {
    Gptq: {},
    AutoRound: {"bits": 16, "data_type": "float"},
}


def lists_say_what_is_stored(faulty: Faulty) -> None:
    """Entries that take a quantized module away, and modules that no entry names: F11 to F47, G1,
    G2, H1.
    """
    runtime = faulty.runtime
    proposal = faulty.proposal
    dialect = type(runtime.dialect)
    if dialect not in _SPELLINGS:
        return
    keys, _, of_name = _SPELLINGS[dialect]
    key = next(filter(proposal.quantization, keys), keys[0])
    value = _VALUES.get(dialect)
    if proposal.quantization_at[1][-1] == "quantization":
        key = "exclude_modules"
    now: Any = proposal.quantization(key) or []
    harmful = _harmful(runtime)
    if value is None and (removed := [entry for entry in now if entry in harmful]):
        why = f"{_some(removed)} reaches modules that are stored quantized: "
        why += _some(map(harmful.__getitem__, removed))
        now = [entry for entry in now if entry not in harmful]
        proposal.set_quantization((key,), now, why)
    is_first = dialect is Awq and not now and bool(faulty.findings)
    missed = []
    for module in filter(_is_plain, runtime.modules):
        # Older vLLM does not find in GPTQ's headers that a linear module is plain.
        is_unnamed = dialect is Gptq and module.part == "mtp" and not module.resolution.entry
        if is_first or is_unnamed or not _builds_plain(module):
            missed.append(module)
    names = [each.where for each in faulty.findings if each.rule == "draft-head"]
    entries = [*_entries_for(runtime, missed), *(_spelled(of_name, name) for name in names)]
    if is_first:  # vLLM's own list has the modules of other parts, too
        entries += [prefix for _, prefix, _ in runtime.view.layout.opaque]
    if added := [entry for entry in entries if entry not in now]:
        names += [module.name for module in missed]
        why = "plain on disk, and built quantized by vLLM, which calls them so: "
        why += _some(names or added)
        new = [*now, *added]
        if value is not None:
            new = {entry: dict(value) for entry in added} | dict(now)
        proposal.set_quantization((key,), new, why)
    if isinstance(runtime.dialect, CompressedTensors):
        _more_targets(faulty)
    elif isinstance(runtime.dialect, ModelOpt) and runtime.dialect.algorithm == "MIXED_PRECISION":
        _more_lines(faulty)


def _spelled(template: str, name: str) -> str:
    """An entry, which is a regular expression where it has an anchor."""
    return template.format(re.escape(name) if "^" in template else name)


def _harmful(runtime: RuntimeView) -> dict[str, str]:
    """Entries, as written, by which vLLM builds a stored-quantized module plain or fails; and such
    a module.
    """
    found = {}
    for module in runtime.modules:
        error = module.resolution.error
        is_hit = "scheme" in error or "not all shards" in error or _builds_plain(module)
        if module.loads_quantized and _is_packed(module) and is_hit:
            dialect = runtime.dialect_of(module)
            for entry in dialect.entries:
                for name in (module.name, *module.shards):
                    if entry.where != "targets" and dialect.hits(entry, name):
                        found[entry.written] = module.name
    return found


def _entries_for(runtime: RuntimeView, missed: Sequence[Module]) -> list[str]:
    """Entries that reach these modules, and none that is stored quantized."""
    _, of_stem, of_name = _SPELLINGS[type(runtime.dialect)]
    packed = list[str]()
    quantized = set[int | None]()
    for module in runtime.modules:
        if _is_packed(module):
            packed += [module.name, *module.shards]
        if module.part == "mtp" and module.loads_quantized and not _is_plain(module):
            quantized.add(module.layer)
    stems: dict[tuple[Part, str], list[Module]] = defaultdict(list)
    for module in missed:
        stems[module.part, runtime.stem_of(module)].append(module)
    found: dict[str, None] = {}
    for (part, stem), modules in stems.items():
        is_plain = part == "mtp" and modules[0].layer not in quantized
        if of_stem and stem and (is_plain or modules[0].role == "vision"):
            entry = _spelled(of_stem, stem)
            if not _reached(runtime, part, [entry], packed):
                found[entry] = None
                # vLLM looks for the parts of a fused module before it looks at modelopt's patterns.
                if not isinstance(runtime.dialect, ModelOpt):
                    continue
                modules = [module for module in modules if module.resolution.error]
        for module in modules:
            found |= dict.fromkeys(_names_for(runtime, of_name, module, packed))
    return [*found]


def _names_for(
    runtime: RuntimeView, of_name: str, module: Module, packed: Sequence[str]
) -> list[str]:
    """The entries for one module: vLLM's name, or, where a mapper spoils that, the names on
    disk.
    """
    if isinstance(runtime.dialect, CompressedTensors) and module.kind == "experts":
        return [f"re:^{re.escape(module.name)}[.]"]
    ways = [[_spelled(of_name, module.name)]]
    if isinstance(runtime.dialect, ModelOpt | Fp8):
        ways.append(sorted({_disk_name(member.weight.module, module) for member in module.members}))
    safe = []
    for names in ways:
        if not _reached(runtime, module.part, names, packed):
            if _reached(runtime, module.part, names, [module.name]):
                return names
            safe += [names]
    return next(iter(safe), [])


def _disk_name(name: str, module: Module) -> str:
    """The module's name on disk; of routed experts, the one of all."""
    if module.kind == "experts" and ".experts." in name:
        return name.partition(".experts.")[0] + ".experts"
    return name


def _reached(
    runtime: RuntimeView, part: Part, entries: Iterable[str], names: Iterable[str]
) -> bool:
    """Whether one of these entries of this dialect hits one of `names`."""
    dialect = runtime.dialect
    reader = "backbone"
    if part == "mtp":
        dialect = runtime.draft_dialect
        if runtime.view.layout.draft_reads_afresh:
            reader = "mtp"
    rename = renamer(runtime.source.config, reader)
    for entry in entries:
        read = (entry.removeprefix("-:"),)
        if isinstance(dialect, ModelOpt):
            read = rename.modelopt(entry)
        elif isinstance(dialect, CompressedTensors | Fp8):
            read = (rename.path(entry),)
        for name in names:
            if dialect.hits(ConfigEntry("ignore", entry, read), name):
                return True
    return False


def _more_targets(faulty: Faulty) -> None:
    """Targets of compressed-tensors in the group whose form a module has."""
    proposal = faulty.proposal
    lost = list[Module]()
    for module in faulty.runtime.modules:
        is_wrong = module.resolution.built.form not in (_form(module), "unknown")
        is_wrong &= module.loads_quantized and _is_packed(module)
        if is_wrong and not module.resolution.error:
            lost.append(module)
    for key, group in (proposal.quantization("config_groups") or {}).items() if lost else ():
        # What it builds, whatever its targets are.
        alone = {"config_groups": {"group": {**group, "targets": ["Linear"]}}, "ignore": []}
        quantization = {**proposal.quantization(), **alone}
        config = {**faulty.runtime.source.config, "quantization_config": quantization}
        dialect = read_dialect(config, None)
        mine = []
        for module in lost:
            # A head is named by a target of its own, which is added.
            kind = "experts" if module.kind == "experts" else "linear"
            found = dialect.resolve(module.name, shards=module.shards, kind=kind)
            built = found.built
            differing = module.members[0].weight.parts.keys() ^ built.leaves
            fits = built.form == _form(module) and differing <= built.optional
            if fits and not found.error:
                mine.append(module)
        if mine:
            why = "stored in this group's form, which no target gives them under vLLM's names: "
            why += _some(module.name for module in mine)
            place = ("config_groups", key, "targets")
            new = dict[str, None]()
            for module in mine:
                target = f"re:^{re.escape(module.name)}$"
                if module.kind == "experts":
                    last = sorted({shard.rpartition(".")[2] for shard in module.shards})
                    target = rf"{target[:-1]}\.\d+\.({'|'.join(last)})$"
                new[target] = None
            proposal.set_quantization(place, [*(group.get("targets") or ()), *new], why)


def _more_lines(faulty: Faulty) -> None:
    """Lines of modelopt's quantized_layers, new or with the algorithm that is stored."""
    now = faulty.proposal.quantization("quantized_layers")
    lines = {}
    for module in faulty.runtime.modules:
        form = _form(module)
        if module.loads_quantized and form in _ALGORITHMS and _builds_plain(module):
            line: dict[str, Any] = {"quant_algo": _ALGORITHMS[form]}
            if form == "nvfp4_modelopt":
                line["group_size"] = 16
            for member in module.members:
                lines[_disk_name(member.weight.module, module)] = line
    if lines and now is not None:
        why = f"quantized on disk, and not in quantized_layers: {_some(lines)}"
        faulty.proposal.set_quantization(("quantized_layers",), now | lines, why)


def _form(module: Module) -> str:
    return module.members[0].weight.form


def _is_plain(module: Module) -> bool:
    forms = {member.weight.form for member in module.members}
    return module.loads_quantized and forms == {"plain"}


def _is_packed(module: Module) -> bool:
    return all(member.weight.form not in ("plain", "unknown") for member in module.members)


def _builds_plain(module: Module) -> bool:
    """Whether vLLM builds it plain; one that it builds so whatever the lists say needs no entry."""
    return not module.resolution.error and module.resolution.built.form == "plain"


def _some(names: Iterable[str]) -> str:
    """The first names, and how many more there are."""
    first, *others = dict.fromkeys(names)
    if others:
        first += f" and {len(others):,} more"
    return first
