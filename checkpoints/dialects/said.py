"""The smallest edit of a quantization config with which it says what is stored, under the names
that vLLM asks for.

In: a checkpoint as it would be, in any dialect whose lists keepmtp knows, and the `Proposal` that
has its config. Out: changes of lists in config.json or hf_quant_config.json, in the words of the
tool that wrote them: each dialect in this folder knows its own.

Easy to get wrong: entries that do no harm stay, since another engine may read them. And an edit may
uncover what it hid: who asks for one asks again, of what it would then be.

Source: vLLM 0.32.0 quantization/utils/gptq_utils.py (get_dynamic_override), auto_awq.py
(maybe_update_config), quark/utils.py (should_ignore_layer), inc/config_parser.py.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ...recipes.conventions import FP8_CACHE
from ...recipes.family import HFName, Part, VLLMName
from ...recipes.frozen import Json, without
from ...recipes.schemes import SCHEMES
from ..companions import HF_QUANT_CONFIG
from ..proposal import CONFIG, Proposal
from .choose import read_dialect
from .compressed_tensors import CompressedTensors
from .dialect import UNKNOWN, Dialect, Exceptions, Refusal, Resolution, entry_for
from .excepted import entries_for, names_on_disk, reach
from .gptq import Awq, Gptq
from .layouts import fits
from .modelopt import (
    MIXED,
    OF_MODULES,
    ModelOpt,
    hf_quant_config,
    layer_row,
    reads_other_file,
)
from .modules import Spellings, regexes, spell, spell_whole
from .quark import Quark
from .runtime_view import Module, RuntimeView

Schemes = Mapping[HFName, str]
"""Modules on disk, each with the scheme that it has now, "" for plain."""
_NONE: Schemes = {}


def say_what_is_stored(
    runtime: RuntimeView,
    proposal: Proposal,
    schemes: Schemes | None = None,
    *,
    also: Sequence[str] = (),
) -> None:
    """Take away entries that reach a quantized module, and name modules that no entry names.

    Args:
        runtime: the checkpoint as it would be.
        proposal: whose quantization config is edited.
        schemes: what the edit is about; None for every module, of which the stored forms alone say
            what it is.
        also: names to leave plain that no module has.
    """
    modules = asked_about(runtime, schemes)
    dialect = runtime.dialect
    exceptions = dialect.exceptions
    if exceptions is None:
        return
    key = _key_of(exceptions, proposal)
    written: Any = proposal.quantization(key) or []
    now: Any = written
    if exceptions.value is None:
        now = _without_harm(runtime, modules, written)
        if now != written:
            why = "an entry reaches modules that are stored quantized"
            proposal.set_quantization((key,), now, why)
    missed = [module for module in modules if _is_missed(module, dialect, of=schemes)]
    # With an empty list vLLM finds the plain modules of an AWQ checkpoint in its headers; with one
    # entry it does not look, so the first entry comes with all others.
    is_first = isinstance(dialect, Awq) and not now
    is_first &= bool(missed or also) or any(map(_is_taken, modules))
    if is_first:
        missed = [*filter(_is_plain, runtime.modules)]
    entries = _entries_for(runtime, missed)
    entries += [entry_for(exceptions.of_name, name) for name in also]
    if is_first:  # vLLM's own list has the modules of other parts, too
        entries += [prefix for _, prefix, _ in runtime.view.layout.opaque]
    added = [entry for entry in entries if entry not in now]
    if added:
        why = "plain on disk, and built quantized by vLLM, which calls them so: "
        why += _some([*also, *_names(missed)] or added)
        new = [*now, *added]
        if exceptions.value is not None:
            # The first of GPTQ's expressions that matches decides: new ones go before the others.
            new = {entry: dict(exceptions.value) for entry in added} | dict(now)
        proposal.set_quantization((key,), new, why)
    if isinstance(dialect, CompressedTensors):
        _more_targets(runtime, proposal, modules, schemes or _NONE)
    elif isinstance(dialect, ModelOpt):
        _more_lines(runtime, proposal, modules, schemes)
    elif isinstance(dialect, Quark):
        _more_layers(runtime, dialect, proposal, modules)


def other_file_agrees(proposal: Proposal) -> None:
    """hf_quant_config.json says what config.json says, where there are both and vLLM reads that."""
    other = proposal.value(HF_QUANT_CONFIG, ("quantization",))
    config = proposal.quantization()
    if not proposal.config_place or not isinstance(other, dict):
        return
    if config.get("quant_algo") and not reads_other_file(config):
        if "exclude_modules" not in config:
            listed = config.get("ignore") or config.get("ignored_layers") or []
            config = hf_quant_config({**config, "ignore": listed})["quantization"]
        why = "config.json is what vLLM reads, and fits what is stored"
        # What config.json has no word for stays.
        proposal.set(HF_QUANT_CONFIG, ("quantization",), other | config, why)


def is_said(runtime: RuntimeView, module: Module, schemes: Schemes) -> bool:
    """Whether the config builds a module as it is stored, and in this scheme."""
    return _is_built(module, module.resolution, runtime.dialect_of(module.part), schemes)


def would_fit(dialect: Dialect, module: Module, schemes: Schemes = _NONE) -> bool:
    """Whether a config builds a module as it is stored."""
    # A head is named by a target of its own, which is added.
    kind = "linear"
    if module.kind == "experts":
        kind = "experts"
    answer = dialect.resolve(module.name, shards=module.shards, kind=kind)
    return _is_built(module, answer, dialect, schemes)


def _is_built(module: Module, answer: Resolution, dialect: Dialect, schemes: Schemes) -> bool:
    if answer.error:
        return False
    if module.is_plain:
        return answer.built.form == "plain"
    for member in module.members:
        if not fits(answer.built, member.weight):
            return False
        scheme = schemes.get(member.weight.module)
        # FP8 with a scale a row has the same bytes whatever becomes of the inputs.
        if (
            scheme
            and isinstance(dialect, CompressedTensors)
            and dialect.scheme_of(answer) != scheme
        ):
            return False
    return True


def asked_about(runtime: RuntimeView, schemes: Schemes | None) -> list[Module]:
    """The modules that vLLM asks the config about, and that the edit is about."""
    modules = list[Module]()
    for module in runtime.modules:
        is_meant = schemes is None
        for member in module.members:
            is_meant |= schemes is not None and member.weight.module in schemes
        if is_meant and module.loads_quantized:
            modules.append(module)
    return modules


def _key_of(exceptions: Exceptions, proposal: Proposal) -> str:
    """The list of exceptions that has entries, or the first."""
    if proposal.is_nested:
        return "exclude_modules"
    for key in exceptions.keys:
        if proposal.quantization(key):
            return key
    return exceptions.keys[0]


def _is_missed(module: Module, dialect: Dialect, *, of: Schemes | None) -> bool:
    """Whether a module that is plain on disk needs an entry; one that vLLM builds plain whatever
    the lists say needs none.
    """
    if not _is_plain(module):
        return False
    # Older vLLM does not find in GPTQ's headers that a linear module is plain.
    needs_name = isinstance(dialect, Gptq) and module.part == "mtp"
    # SGLang raises for a module that no entry of compressed-tensors names.
    needs_name |= isinstance(dialect, CompressedTensors) and of is not None
    if needs_name and not module.resolution.entry:
        return True
    return not _builds_plain(module)


def _without_harm(
    runtime: RuntimeView, modules: Iterable[Module], written: Iterable[str]
) -> list[str]:
    """The entries without those by which vLLM builds a stored-quantized module plain or fails."""
    kept = list(written)
    for module in modules:
        names = [module.name, *module.shards]
        is_head = module.kind == "head" and _is_packed(module)
        if is_head:  # the draft builds one, too, under its own name
            names.append(VLLMName(runtime.view.layout.draft_head or module.name))
        if is_head or _is_taken(module):
            dialect = runtime.dialect_of(module.part)
            kept = [entry for entry in kept if not reach(dialect, [entry], names)]
    return kept


def _is_taken(module: Module) -> bool:
    """Whether an entry makes vLLM build a stored-quantized module plain, or fail."""
    is_split = module.resolution.refusal in ("shards", "projections")
    return _is_packed(module) and (is_split or _builds_plain(module))


def _regexes(runtime: RuntimeView, modules: Iterable[Module]) -> list[str]:
    """Expressions for exactly these modules, by all their names."""
    spelled = set[Spellings]()
    for module in modules:
        for member in module.members:
            if module.name == member.place.row.joins:
                spelled.add(spell_whole(module.name))
            else:
                spelled.add(spell(runtime.view, member.place))
    return regexes(spelled)


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
        reader = runtime.dialect_of(modules[0].part)
        entries |= dict.fromkeys(entries_for(reader, modules, packed, stem=stem))
    return [*entries]


# --- compressed-tensors ---------------------------------------------------------------------------


def _more_targets(
    runtime: RuntimeView, proposal: Proposal, modules: Sequence[Module], schemes: Schemes
) -> None:
    """Targets in a group that builds what is stored; in a new one where none does."""
    raw = proposal.quantization()
    groups: Json = raw.get("config_groups") or {}
    left = _lost(runtime, modules, schemes)
    for key, group in [*groups.items()]:
        weights = group.get("weights") or {}
        otherwise = {**group, "weights": {**weights, "symmetric": not weights.get("symmetric", 1)}}
        for made in (group, otherwise):
            # What it builds, whatever its targets are.
            alone = {"config_groups": {"group": {**made, "targets": ["Linear"]}}, "ignore": []}
            config = {**runtime.source.config, "quantization_config": raw | alone}
            dialect = read_dialect(config, None)
            mine = list[Module]()
            others = list[Module]()
            for module in left:
                if would_fit(dialect, module, schemes):
                    mine.append(module)
                else:
                    others.append(module)
            left = others
            if mine:
                groups = _with_targets(groups, key, made, mine, runtime)
                why = "stored in this group's form, which no target gives them under vLLM's names: "
                why += _some(_names(mine))
                proposal.set_quantization(("config_groups",), groups, why)
    for scheme in sorted({*schemes.values()} - {""}):
        mine = [each for each in left if schemes.get(each.members[0].weight.module) == scheme]
        if mine:
            number = 0
            while f"{mine[0].part}_{number}" in groups:
                number += 1
            key = f"{mine[0].part}_{number}"
            groups = _with_targets(groups, key, SCHEMES[scheme].config_group(), mine, runtime)
            _set_formats(proposal, groups, raw.get("format"))


def _set_formats(proposal: Proposal, groups: Json, usual: str | None) -> None:
    """The groups, of which one has a format of its own: all others say that of the whole."""
    formats = set[str | None]()
    for key, group in groups.items():
        groups[key] = {**group, "format": group.get("format") or usual}
        formats.add(groups[key]["format"])
    why = "vLLM builds these modules packed"
    proposal.set_quantization(("config_groups",), groups, why)
    if formats != {usual}:
        why = "they have another format than the others"
        proposal.set_quantization(("format",), "mixed-precision", why)


def _with_targets(
    groups: Json, key: str, made: Json, mine: Sequence[Module], runtime: RuntimeView
) -> Json:
    """The groups, of which one builds these modules."""
    targets = _regexes(runtime, mine)
    named = set[str]()  # by another group, which vLLM would take
    for other, group in [*groups.items()]:
        if other == key:
            continue
        # Of one text in two groups the last counts.
        left = [target for target in group.get("targets") or () if target not in targets]
        groups = groups | {other: {**group, "targets": left}}
        named.update(left)
        if not left:
            groups = without(groups, other)
    # A target that is a class counts after all names.
    entries = set[str]()
    is_hit = False
    for module in mine:
        entry = module.resolution.entry
        entries.add(entry)
        is_hit |= entry in named and not entry.isidentifier()
    if not is_hit and key not in groups:
        return {**groups, key: {"targets": targets, **made}}
    if not is_hit and made == groups[key]:
        had = groups[key].get("targets") or ()
        return groups | {key: {**made, "targets": [*had, *targets]}}
    is_whole = key in groups and made != groups[key]
    for module in runtime.modules:
        is_whole &= module in mine or module.resolution.entry not in entries
    if is_whole:
        return groups | {key: made}
    # vLLM takes the first target that matches: one of another group matches these modules too.
    return {f"{key}_by_name": {**made, "targets": targets}, **groups}


# --- modelopt and Quark ---------------------------------------------------------------------------


def _more_lines(
    runtime: RuntimeView, proposal: Proposal, modules: Sequence[Module], schemes: Schemes | None
) -> None:
    """Lines of modelopt's quantized_layers; where one algorithm was enough, for each quantized
    module.
    """
    now = proposal.quantization("quantized_layers")
    lost = _lost(runtime, modules)
    if now is None and lost and schemes is not None:
        now = {}
        lost = [*filter(_is_packed, asked_about(runtime, None))]
    lines = dict[str, Json]()
    for module in lost:
        dialect = runtime.dialect_of(module.part)
        if isinstance(dialect, ModelOpt):
            lines |= _lines_of(module, dialect)
    if lines and now is not None:
        why = f"quantized on disk, and not in quantized_layers: {_some(lines)}"
        proposal.set_quantization(("quantized_layers",), now | lines, why)
        proposal.set_quantization(("quant_algo",), MIXED, why)
        say_at_top_level(proposal)


def say_at_top_level(proposal: Proposal) -> None:
    """What is below `quantization` in config.json's own form, of which vLLM takes any algorithm."""
    if not proposal.is_nested:
        return
    value: Json = {"quant_method": "modelopt", **proposal.quantization()}
    value["ignore"] = value.pop("exclude_modules", [])
    if value.pop("kv_cache_quant_algo", "") == "FP8":
        value["kv_cache_scheme"] = dict(FP8_CACHE)
    why = "vLLM takes this quant_algo only at the top level of quantization_config"
    proposal.set(CONFIG, proposal.config_place or ("quantization_config",), value, why)


def _lines_of(module: Module, dialect: ModelOpt) -> dict[str, Json]:
    for algorithm in (dialect.algorithm, *OF_MODULES):
        for names in (names_on_disk(module), [module.name]):
            layers = dict.fromkeys(map(dialect.rename.name, names), algorithm)
            if would_fit(replace(dialect, algorithm=MIXED, quantized_layers=layers), module):
                return dict.fromkeys(names, layer_row(algorithm))
    return {}


def _more_layers(
    runtime: RuntimeView, dialect: Quark, proposal: Proposal, modules: Sequence[Module]
) -> None:
    """Names in Quark's layer_quant_config, in place of patterns that reach modules which are stored
    otherwise.
    """
    wrong = set[str]()
    for module in _lost(runtime, modules, refusal="shards"):
        wrong |= _patterns(dialect, module)
    now: Json = proposal.quantization("layer_quant_config") or {}
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
        proposal.set_quantization(("layer_quant_config",), named | kept, why)


def _patterns(dialect: Quark, module: Module) -> set[str]:
    """Those that decide a module; "" for none."""
    return {dialect.layer_of(part)[0] for part in _parts(module)}


def _parts(module: Module) -> Sequence[str]:
    """The names that Quark's patterns are compared with."""
    if module.kind == "experts":
        return (module.name,)
    return module.shards or (module.name,)


# --- what is stored -------------------------------------------------------------------------------


def _lost(
    runtime: RuntimeView,
    modules: Iterable[Module],
    schemes: Schemes = _NONE,
    refusal: Refusal = "projections",
) -> list[Module]:
    """Modules that are quantized on disk, and otherwise than vLLM builds them, or so that it raises
    by that refusal.
    """
    lost = list[Module]()
    for module in modules:
        answer = module.resolution
        is_asked = answer.refusal == refusal or not (answer.error or answer.built == UNKNOWN)
        if _is_packed(module) and is_asked and not is_said(runtime, module, schemes):
            lost.append(module)
    return lost


def _is_plain(module: Module) -> bool:
    return module.loads_quantized and module.is_plain


def _is_packed(module: Module) -> bool:
    return all(member.weight.form not in ("plain", "unknown") for member in module.members)


def _builds_plain(module: Module) -> bool:
    return not module.resolution.error and module.resolution.built.form == "plain"


def _names(modules: Iterable[Module]) -> list[str]:
    return [module.name for module in modules]


def _some(names: Iterable[str]) -> str:
    """The first names, and how many more there are."""
    first, *others = dict.fromkeys(names)
    if others:
        first += f" and {len(others):,} more"
    return first
