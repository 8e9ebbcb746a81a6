"""Rules that need no family: what headers and a quantization config say of each other.

In: a `StoredView` of a checkpoint that keepmtp has no table for. Out: objections.

Easy to get wrong: claiming too much. vLLM's names of modules are unknown here, and it fuses some of them. So a module
is judged by its name on disk, and also by the usual fused one; where the two answers differ, nothing is said. A plain
matrix is an error only where the others of its place are packed: vLLM builds many matrices plain whatever the config
says, and only a family knows which.
"""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Set

from ...checkpoints.stored import SCALE_LEAVES, TRANSPOSED_LEAVES, StoredWeight
from ...recipes.family import HFName, VLLMName
from ..facts.findings import Objection, objection
from .layouts import Problem, layout_problem, leaves_built, name_of_leaf
from .rules_config import index_size_is_sane, own_code
from .rules_kv import is_kv_scale
from .rules_mtp import unindexed
from .stored_view import StoredView
from .vllm_module import Kind, Resolution, UnknownDialect, VLLMModule
from .words import resolution_cure

_EXPERTS = re.compile(r"(?P<experts>.*\.experts)\.\d+\.(?P<last>[^.]+)$")
_LAYER = re.compile(r"(?P<stem>.*?)\.(?P<number>\d+)\.(?P<rest>.+)")
_FUSED: Mapping[str, tuple[str, tuple[str, ...]]] = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj"), ("qkv_proj", ("q_proj", "k_proj", "v_proj"))),
    **dict.fromkeys(("gate_proj", "up_proj"), ("gate_up_proj", ("gate_proj", "up_proj"))),
    **dict.fromkeys(("q_a_proj", "kv_a_proj_with_mqa"), ("fused_qkv_a_proj", ("q_a_proj", "kv_a_proj_with_mqa"))),
}
# A leaf that model classes rename as they load, and rows that some put in order: a family knows which.
_RENAMED = "scale"
_REORDERED = "fp8_sliced"
_MTP = re.compile(r"(?:^|\.)(?:mtp|nextn|mtp_layers|mtp_block)\.")
_AGAIN = "Quantize this weight again, or take it from where the checkpoint is from"
_FEWEST = 4  # layers that must agree before the one that differs is named


def weights_are_built_as_stored(view: StoredView) -> Iterator[Objection]:
    """Each packed weight has the tensors, types and shapes that its dialect builds, and no entry leaves it plain."""
    others: dict[str, list[StoredWeight]] = defaultdict(list)
    for weight in view.weights.values():
        others[_place(weight.module)].append(weight)
    for weight in view.weights.values():
        answer = built_for(view, weight.module)
        if answer is None or not _is_judged(weight):
            continue
        if answer.error:
            yield _unresolved(weight, answer)
        elif weight.form == "plain":
            yield from _plain(view, weight, answer, others[_place(weight.module)])
        elif answer.built.form == "plain":
            if answer.entry or not _has_names_as_targets(view):
                yield _built_plain(view, weight, answer)
        elif answer.built.form != "unknown":
            yield from _misfit(view, weight, answer.built)


def schemes_are_known(view: StoredView) -> Iterator[Objection]:
    """A method or scheme whose tensors the check does not know is said to be one: silence would read as good."""
    unknown = [
        weight
        for weight in view.weights.values()
        if weight.form != "plain"
        and (answer := built_for(view, weight.module)) is not None
        and answer.built.form == "unknown"
        and not answer.error
    ]
    if unknown or isinstance(view.dialect, UnknownDialect):
        yield objection(
            rule="dialect",
            severity="warning",
            where="config.json: quantization_config",
            says=f"is {view.dialect.name} with a scheme that keepmtp does not reproduce: {len(unknown)} of "
            f"{len(view.weights)} weights are not judged against it",
            cure="Serve it once without method=mtp: vLLM itself says whether it loads",
        )


def scales_have_weights(view: StoredView) -> Iterator[Objection]:
    """A scale belongs to a weight."""
    for entry in view.others:
        leaf = entry.name.rpartition(".")[2]
        if leaf in (*SCALE_LEAVES, *TRANSPOSED_LEAVES) and not is_kv_scale(leaf) and "." in entry.name:
            yield objection(
                rule="unknown-tensor",
                severity="error",
                where=entry.name,
                says="is a scale without a weight beside it: vLLM raises, or leaves the weight uninitialised",
                cure=_AGAIN,
                cause=f"orphan {leaf}",
            )


def layers_are_there(view: StoredView) -> Iterator[Objection]:
    """The layers that config.json counts have tensors, and none lacks what all the others have."""
    layers = _layers(view)
    count = _text_config(view).get("num_hidden_layers")
    if not layers or not isinstance(count, int) or isinstance(count, bool):
        return
    stem, held = max(layers.items(), key=lambda item: len(item[1]))
    for number in sorted(set(range(min(count, 1000))) - held.keys()):
        yield objection(
            rule="layer-missing",
            severity="error",
            where=f"{stem}.{number}.*",
            says=f"num_hidden_layers={count} promises this layer, but no file has a tensor of it",
            cure="Download or quantize the checkpoint again",
            cause="layer",
        )
    for number, paths in held.items():
        rest = [each for other, each in held.items() if other != number]
        if len(rest) < _FEWEST or not all(paths < each for each in rest):
            continue
        lost = sorted(frozenset.intersection(*rest) - paths)
        if lost:
            yield objection(
                rule="layer-incomplete",
                severity="warning",
                where=f"{stem}.{number}.{lost[0]}",
                says=f"is missing, though the other {len(rest)} layers have it: it was lost, or the model is made so, "
                "which only a family's table knows",
                cure="Compare with the release; if it was lost, download or quantize the checkpoint again",
                count=len(lost),
            )


def files_are_indexed(view: StoredView) -> Iterator[Objection]:
    """Files that the index does not list are not read."""
    for entry in view.source.unindexed.values():
        yield unindexed(entry, is_mtp=False)


def own_code_is_told(view: StoredView) -> Iterator[Objection]:
    """Python that the checkpoint brings: it would run as whoever serves it."""
    yield from own_code(view, (), "Read it before you serve it with --trust-remote-code")


RULES = (
    weights_are_built_as_stored,
    schemes_are_known,
    scales_have_weights,
    layers_are_there,
    files_are_indexed,
    index_size_is_sane,
    own_code_is_told,
)


def names_of_mtp(view: StoredView) -> tuple[HFName, ...]:
    """Tensors whose names speak of an MTP block, or of a layer beyond those that config.json counts."""
    names = [*view.source.entries, *view.source.unindexed]
    count = _text_config(view).get("num_hidden_layers")
    layers = _layers(view)
    stem, held = max(layers.items(), key=lambda item: len(item[1])) if layers else ("", {})
    beyond = {number for number in held if isinstance(count, int) and number >= count}
    later = tuple(f"{stem}.{number}." for number in beyond)
    return tuple(name for name in names if _MTP.search(name) or (later and name.startswith(later)))


def built_for(view: StoredView, module: HFName) -> Resolution | None:
    """What vLLM builds for a module by its name on disk; None where the usual fused name has another answer."""
    kind: Kind = "head" if module.rpartition(".")[2] == "lm_head" else "linear"
    if expert := _EXPERTS.match(module):
        holder = expert["experts"]
        return view.dialect.resolve(
            VLLMName(holder), shards=(VLLMName(f"{holder}.0.{expert['last']}"),), kind="experts"
        )
    alone = view.dialect.resolve(VLLMName(module), shards=(), kind=kind)
    stem, _, last = module.rpartition(".")
    if last not in _FUSED:
        return alone
    fused, parts = _FUSED[last]
    shards = tuple(VLLMName(f"{stem}.{part}") for part in parts)
    together = view.dialect.resolve(VLLMName(f"{stem}.{fused}"), shards=shards, kind="linear")
    return alone if (together.built, bool(together.error)) == (alone.built, bool(alone.error)) else None


def _is_judged(weight: StoredWeight) -> bool:
    """Whether a weight is a matrix that vLLM multiplies with, in a form that its loader does not make anew."""
    is_matrix = len(weight.weight.shape) >= 2 and "embed" not in weight.module.rpartition(".")[2]
    return is_matrix and _RENAMED not in weight.parts and weight.form != _REORDERED


def _has_names_as_targets(view: StoredView) -> bool:
    """Whether targets name modules: then they are vLLM's names, and what they do not reach here is not known."""
    return any(entry.where == "targets" and not entry.written.isidentifier() for entry in view.dialect.entries)


def _place(module: str) -> str:
    """A module's name without its numbers: the same place in every layer and expert."""
    return re.sub(r"(?<=\.)\d+(?=\.)", "{}", module)


def _text_config(view: StoredView) -> Mapping[str, object]:
    inner = view.source.config.get("text_config")
    return inner if isinstance(inner, Mapping) else view.source.config


def _layers(view: StoredView) -> dict[str, dict[int, frozenset[str]]]:
    """For each stem that numbers follow: number -> what stands below it, experts as one."""
    found: dict[str, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
    for name in view.source.entries:
        if match := _LAYER.match(name):
            found[match["stem"]][int(match["number"])].add(_place(f".{match['rest']}").removeprefix("."))
    return {stem: {number: frozenset(paths) for number, paths in held.items()} for stem, held in found.items()}


def _unresolved(weight: StoredWeight, answer: Resolution) -> Objection:
    return objection(
        rule="config-group",
        severity="error",
        where=answer.entry or weight.module,
        says=f"vLLM fails as it builds {weight.module}: {answer.error}",
        cure=resolution_cure(answer.error),
        cause=f"{answer.entry} {answer.error.partition(' of ')[0]}",
    )


def _plain(
    view: StoredView, weight: StoredWeight, answer: Resolution, peers: list[StoredWeight]
) -> Iterator[Objection]:
    """A plain matrix among packed ones of the same place, which no entry leaves alone."""
    packed = sum(peer.form != "plain" for peer in peers)
    if answer.built.form in ("plain", "unknown") or not packed:
        return
    yield objection(
        rule="form",
        severity="error",
        where=weight.weight.name,
        says=f"is plain, {packed} others of its place are packed, and no entry of {view.dialect.name} leaves it alone: "
        f"vLLM builds it as {answer.built.form}, and raises or leaves it unwritten",
        cure="Quantize it too, or name it where the config lists what stays plain",
        cause=f"plain {_place(weight.module)}",
    )


def _built_plain(view: StoredView, weight: StoredWeight, answer: Resolution) -> Objection:
    by = f"by the entry {answer.entry!r}" if answer.entry else f"since {view.dialect.name} does not reach it"
    if view.dialect.name == "none":
        by = "since config.json has no quantization_config"
    return objection(
        rule="form",
        severity="error",
        where=weight.weight.name,
        says=f"is packed ({', '.join(weight.parts)}), but vLLM builds {weight.module} plain, {by}: it raises on a name "
        "that no parameter has, or takes the codes for numbers",
        cure="Narrow or remove that entry"
        if answer.entry
        else "Take quantization_config from where the weights are from",
        cause=f"built plain {answer.entry or _place(weight.module)}",
    )


def _misfit(view: StoredView, weight: StoredWeight, built: VLLMModule) -> Iterator[Objection]:
    """A tensor too few or too many, or one of another type or shape."""
    problem = _leaves_problem(built, leaves_built(built, weight).keys()) or layout_problem(built, weight)
    if problem is None:
        return
    leaf, said, cure = problem
    yield objection(
        rule="form",
        severity="error",
        where=name_of_leaf(built, weight, leaf),
        says=f"{view.dialect.name} builds {built.form} here; {said}",
        cure=cure,
        cause=f"{built.form} {leaf} {said}",
    )


def _leaves_problem(built: VLLMModule, leaves: Set[str]) -> Problem | None:
    has_slot = {"input_global_scale"} if built.form == "nvfp4" else set[str]()  # experts of NVFP4A16
    if missing := sorted(built.leaves - leaves):
        return missing[0], f"{missing[0]} is not in the checkpoint: vLLM raises, or leaves it uninitialised", _AGAIN
    if extra := sorted(leaves - built.leaves - built.optional - has_slot):
        wanted = ", ".join(sorted(built.leaves))
        return (
            extra[0],
            f"its parameters are {wanted}, so {extra[0]} has no place",
            "Make quantization_config say the form that is stored",
        )
    return None
