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
from typing import Any

from ..checkpoints.dialects.choose import read_dialect
from ..checkpoints.dialects.compressed_tensors import CompressedTensors
from ..checkpoints.dialects.dialect import entry_for
from ..checkpoints.dialects.excepted import PlainModule, entries_for
from ..checkpoints.dialects.gptq import Awq, Gptq
from ..checkpoints.dialects.modelopt import ModelOpt, algorithm_of, layer_row
from ..checkpoints.dialects.runtime_view import Module, RuntimeView
from ..recipes.family import Part
from ..recipes.frozen import Json
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
    elif isinstance(runtime.dialect, ModelOpt) and runtime.dialect.algorithm == "MIXED_PRECISION":
        _more_lines(faulty)


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
    """Targets of compressed-tensors in the group whose form a module has."""
    proposal = faulty.proposal
    lost = list[Module]()
    for module in faulty.runtime.modules:
        is_wrong = module.resolution.built.form not in (_form(module), "unknown")
        is_wrong &= module.loads_quantized and _is_packed(module)
        if is_wrong and not module.resolution.error:
            lost.append(module)
    if not lost:
        return
    for key, group in (proposal.quantization("config_groups") or {}).items():
        # What it builds, whatever its targets are.
        alone = {"config_groups": {"group": {**group, "targets": ["Linear"]}}, "ignore": []}
        quantization = {**proposal.quantization(), **alone}
        config = {**faulty.runtime.source.config, "quantization_config": quantization}
        dialect = read_dialect(config, None)
        mine = []
        for module in lost:
            # A head is named by a target of its own, which is added.
            kind = "linear"
            if module.kind == "experts":
                kind = "experts"
            answer = dialect.resolve(module.name, shards=module.shards, kind=kind)
            differing = module.members[0].weight.parts.keys() ^ answer.built.leaves
            fits = answer.built.form == _form(module) and differing <= answer.built.optional
            if fits and not answer.error:
                mine.append(module)
        if mine:
            why = "stored in this group's form, which no target gives them under vLLM's names: "
            why += _some(module.name for module in mine)
            place = ("config_groups", key, "targets")
            targets = dict.fromkeys(_target(module) for module in mine)
            proposal.set_quantization(place, [*(group.get("targets") or ()), *targets], why)


def _target(module: Module) -> str:
    """The target of compressed-tensors for one module; of routed experts, for their projections."""
    name = re.escape(module.name)
    if module.kind != "experts":
        return f"re:^{name}$"
    projections = sorted({shard.rpartition(".")[2] for shard in module.shards})
    return rf"re:^{name}\.\d+\.({'|'.join(projections)})$"


def _more_lines(faulty: Faulty) -> None:
    """Lines of modelopt's quantized_layers, new or with the algorithm that is stored."""
    now = faulty.proposal.quantization("quantized_layers")
    lines = dict[str, Json]()
    for module in faulty.runtime.modules:
        algorithm = algorithm_of(_form(module))
        if module.loads_quantized and algorithm and _builds_plain(module):
            for member in module.members:
                lines[_disk_name(member.weight.module, module)] = layer_row(algorithm)
    if lines and now is not None:
        why = f"quantized on disk, and not in quantized_layers: {_some(lines)}"
        faulty.proposal.set_quantization(("quantized_layers",), now | lines, why)


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
