"""Fixes of the lists in a quantization config: they say what is on disk, under the names that vLLM
asks for.

In: a `Faulty`, in any dialect whose lists keepmtp knows. Out: changes of lists in config.json or
hf_quant_config.json, in the words of the tool that wrote them: each dialect in
checkpoints/dialects/ knows its own.

Easy to get wrong: entries that do no harm stay, since another engine may read them.

Source: vLLM 0.32.0 quantization/utils/gptq_utils.py (get_dynamic_override), auto_awq.py
(maybe_update_config), quark/utils.py (should_ignore_layer), inc/config_parser.py.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from ..checkpoints.dialects.choose import read_dialect
from ..checkpoints.dialects.compressed_tensors import CompressedTensors
from ..checkpoints.dialects.dialect import UNKNOWN, Dialect, Refusal, Resolution, entry_for
from ..checkpoints.dialects.excepted import PlainModule, entries_for
from ..checkpoints.dialects.gptq import Awq, Gptq
from ..checkpoints.dialects.modelopt import ModelOpt, algorithm_of, layer_row
from ..checkpoints.dialects.quark import Quark
from ..checkpoints.dialects.runtime_view import Module, RuntimeView
from ..recipes.family import Part
from ..recipes.frozen import Json, without
from ..validate.check.layouts import fits
from .proposal import Faulty


def lists_say_what_is_stored(faulty: Faulty) -> None:
    """Entries that take a quantized module away, and modules that no entry names: F11 to F47, G1,
    G2, H1.
    """
    runtime = faulty.runtime
    proposal = faulty.proposal
    dialect = runtime.dialect
    exceptions = dialect.exceptions
    if exceptions is None:
        return
    key = exceptions.keys[0]
    for other in exceptions.keys:
        if proposal.quantization(other):
            key = other
            break
    if proposal.quantization_at[1][-1] == "quantization":
        key = "exclude_modules"
    now: Any = proposal.quantization(key) or []
    harmful = _harmful(runtime)
    removed = [entry for entry in now if entry in harmful]
    if removed and exceptions.value is None:
        why = f"{_some(removed)} reaches modules that are stored quantized: "
        why += _some(harmful[entry] for entry in removed)
        now = [entry for entry in now if entry not in harmful]
        proposal.set_quantization((key,), now, why)
    # With an empty list vLLM finds the plain modules of an AWQ checkpoint in its headers; with one
    # entry it does not look, so the first entry comes with all others.
    is_first = isinstance(dialect, Awq) and not now
    is_first &= bool(faulty.findings)
    missed = list[Module]()
    for module in runtime.modules:
        is_missed = is_first or not _builds_plain(module)
        # Older vLLM does not find in GPTQ's headers that a linear module is plain.
        if isinstance(dialect, Gptq) and module.part == "mtp":
            is_missed |= not module.resolution.entry
        if is_missed and _is_plain(module):
            missed.append(module)
    names = [finding.where for finding in faulty.findings if finding.rule == "draft-head"]
    entries = _entries_for(runtime, missed)
    entries += [entry_for(exceptions.of_name, name) for name in names]
    if is_first:  # vLLM's own list has the modules of other parts, too
        entries += [prefix for _, prefix, _ in runtime.view.layout.opaque]
    added = [entry for entry in entries if entry not in now]
    if added:
        names += [module.name for module in missed]
        why = "plain on disk, and built quantized by vLLM, which calls them so: "
        why += _some(names or added)
        new = [*now, *added]
        if exceptions.value is not None:
            # The first of GPTQ's expressions that matches decides: new ones go before the others.
            new = {entry: dict(exceptions.value) for entry in added} | dict(now)
        proposal.set_quantization((key,), new, why)
    if isinstance(runtime.dialect, CompressedTensors):
        _more_targets(faulty)
    elif isinstance(runtime.dialect, ModelOpt):
        _more_lines(faulty)
    elif isinstance(runtime.dialect, Quark):
        _more_layers(faulty)


def _harmful(runtime: RuntimeView) -> dict[str, str]:
    """Entries, as written, by which vLLM builds a stored-quantized module plain or fails; and such
    a module.
    """
    harmful = dict[str, str]()
    for module in runtime.modules:
        is_split = module.resolution.refusal in ("shards", "projections")
        is_hit = is_split or _builds_plain(module)
        if module.loads_quantized and _is_packed(module) and is_hit:
            dialect = runtime.dialect_of(module.part)
            for entry in dialect.entries:
                for name in (module.name, *module.shards):
                    if entry.where != "targets" and dialect.hits(entry, name):
                        harmful[entry.written] = module.name
    return harmful


def _entries_for(runtime: RuntimeView, missed: Sequence[Module]) -> list[str]:
    """Entries that reach these modules, and none that is stored quantized."""
    packed = list[str]()
    quantized = set[int | None]()
    for module in runtime.modules:
        if _is_packed(module):
            packed += [module.name, *module.shards]
        if module.part == "mtp" and module.loads_quantized and not _is_plain(module):
            quantized.add(module.layer)
    below: dict[tuple[Part, str], list[Module]] = defaultdict(list)
    for module in missed:
        below[module.part, runtime.stem_of(module)].append(module)
    entries = dict[str, None]()
    for (part, stem), modules in below.items():
        is_plain = part == "mtp" and modules[0].layer not in quantized
        if not is_plain and modules[0].role != "vision":
            stem = ""
        plain = [_as_plain(module) for module in modules]
        reader = runtime.dialect_of(modules[0].part)
        entries |= dict.fromkeys(entries_for(reader, plain, packed, stem=stem))
    return [*entries]


def _as_plain(module: Module) -> PlainModule:
    on_disk = {_disk_name(member.weight.module, module) for member in module.members}
    is_refused = bool(module.resolution.error)
    are_experts = module.kind == "experts"
    return PlainModule(module.name, tuple(sorted(on_disk)), are_experts, is_refused)


def _disk_name(name: str, module: Module) -> str:
    """The module's name on disk; of routed experts, the one of all."""
    if module.kind == "experts" and ".experts." in name:
        return name.partition(".experts.")[0] + ".experts"
    return name


def _more_targets(faulty: Faulty) -> None:
    """Targets of compressed-tensors in a group that builds what is stored."""
    proposal = faulty.proposal
    groups: Json = proposal.quantization("config_groups") or {}
    lost = _lost(faulty.runtime)
    placed = list[Module]()
    given = proposal.quantization()
    config = faulty.runtime.source.config
    for key, group in [*groups.items()]:
        weights = group.get("weights") or {}
        otherwise = {**group, "weights": {**weights, "symmetric": not weights.get("symmetric", 1)}}
        for made in (group, otherwise):
            # What it builds, whatever its targets are.
            alone = {"config_groups": {"group": {**made, "targets": ["Linear"]}}, "ignore": []}
            dialect = read_dialect({**config, "quantization_config": given | alone}, None)
            mine = list[Module]()
            for module in lost:
                if module not in placed and would_fit(dialect, module):
                    mine.append(module)
            if mine:
                placed += mine
                groups = _with_targets(groups, key, made, mine, faulty.runtime)
                why = "stored in this group's form, which no target gives them under vLLM's names: "
                why += _some(module.name for module in mine)
                proposal.set_quantization(("config_groups",), groups, why)


def _with_targets(
    groups: Json, key: str, made: Json, mine: Sequence[Module], runtime: RuntimeView
) -> Json:
    """The groups, of which one builds these modules."""
    targets = list[str]()
    named = set[str]()  # by another group, which vLLM would take
    for other, group in groups.items():
        if other != key:
            named.update(group.get("targets") or ())
    is_hit = False
    for module in mine:
        targets.append(_target(module))
        entry = module.resolution.entry
        # A target that is a class counts after all names.
        is_hit |= entry in named and not str(entry).isidentifier()
    if made == groups[key] and not is_hit:
        had = groups[key].get("targets") or ()
        return groups | {key: {**made, "targets": [*had, *targets]}}
    entries = {module.resolution.entry for module in mine}
    is_whole = made != groups[key]
    for module in runtime.modules:
        is_whole &= module in mine or module.resolution.entry not in entries
    if is_whole:
        return groups | {key: made}
    # vLLM takes the first target that matches: one of another group matches these modules too.
    return {f"{key}_by_name": {**made, "targets": targets}, **groups}


def _target(module: Module) -> str:
    """The target of compressed-tensors for one module; of routed experts, for their projections."""
    name = re.escape(module.name)
    if module.kind != "experts":
        return f"re:^{name}$"
    projections = sorted({shard.rpartition(".")[2] for shard in module.shards})
    return rf"re:^{name}\.\d+\.({'|'.join(projections)})$"


def _more_lines(faulty: Faulty) -> None:
    """Lines of modelopt's quantized_layers, new or with the algorithm that is stored, by the first
    name that vLLM takes.
    """
    now = faulty.proposal.quantization("quantized_layers")
    lines = dict[str, Json]()
    for module in _lost(faulty.runtime):
        algorithm = algorithm_of(_form(module))
        dialect = faulty.runtime.dialect_of(module.part)
        if not algorithm or not isinstance(dialect, ModelOpt):
            continue
        on_disk = _as_plain(module).on_disk
        for names in (on_disk, (module.name,)):
            layers = dict.fromkeys(map(dialect.rename.name, names), algorithm)
            if would_fit(replace(dialect, quantized_layers=layers), module):
                lines |= dict.fromkeys(names, layer_row(algorithm))
                break
    if lines and now is not None:
        why = f"quantized on disk, and not in quantized_layers: {_some(lines)}"
        faulty.proposal.set_quantization(("quantized_layers",), now | lines, why)


def _more_layers(faulty: Faulty) -> None:
    """Names in Quark's layer_quant_config, in place of patterns that reach modules which are stored
    otherwise.
    """
    runtime = faulty.runtime
    dialect = runtime.dialect
    if not isinstance(dialect, Quark):
        return
    wrong = set[str]()
    for module in _lost(runtime, "shards"):
        wrong |= _patterns(dialect, module)
    now: Json = faulty.proposal.quantization("layer_quant_config") or {}
    written = dict(zip(dialect.layers, now, strict=True))
    named = Json()
    for module in runtime.modules:
        if wrong.isdisjoint(_patterns(dialect, module)):
            continue
        for pattern, layer in {"": dialect.usual, **dialect.layers}.items():
            if would_fit(replace(dialect, layers={}, usual=layer), module):
                if pattern:
                    named |= dict.fromkeys(_parts(module), now[written[pattern]])
                break
    if wrong:
        why = f"modules that these patterns reach are stored otherwise: {_some(sorted(wrong))}"
        kept = without(now, *(written[pattern] for pattern in wrong if pattern))
        faulty.proposal.set_quantization(("layer_quant_config",), named | kept, why)


def _patterns(dialect: Quark, module: Module) -> set[str]:
    """Those that decide a module; "" for none."""
    return {dialect.layer_of(part)[0] for part in _parts(module)}


def _parts(module: Module) -> Sequence[str]:
    """The names that Quark's patterns are compared with."""
    if module.kind == "experts":
        return (module.name,)
    return module.shards or (module.name,)


def _lost(runtime: RuntimeView, refusal: Refusal = "projections") -> list[Module]:
    """Modules that are quantized on disk, and otherwise than vLLM builds them, or so that it raises
    by that refusal.
    """
    lost = list[Module]()
    for module in runtime.modules:
        answer = module.resolution
        is_asked = answer.refusal == refusal or not (answer.error or answer.built == UNKNOWN)
        if module.loads_quantized and _is_packed(module) and is_asked and not _fits(module, answer):
            lost.append(module)
    return lost


def would_fit(dialect: Dialect, module: Module) -> bool:
    """Whether a config builds a module as it is stored."""
    # A head is named by a target of its own, which is added.
    kind = "linear"
    if module.kind == "experts":
        kind = "experts"
    return _fits(module, dialect.resolve(module.name, shards=module.shards, kind=kind))


def _fits(module: Module, answer: Resolution) -> bool:
    does_fit = not answer.error
    for member in module.members:
        does_fit &= fits(answer.built, member.weight)
    return does_fit


def _form(module: Module) -> str:
    return module.members[0].weight.form


def _is_plain(module: Module) -> bool:
    if not module.loads_quantized:
        return False
    return all(member.weight.form == "plain" for member in module.members)


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
