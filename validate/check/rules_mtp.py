"""Rules on the MTP block: config.json promises it, it is there, it is whole, and the draft's loader finds it.

In: a `RuntimeView`. Out: objections. Each rule names its sources by their numbers in docs/failures.md.

Easy to get wrong: what a block needs. There is no list of modules for each family here. A rule compares an MTP layer
with the decoder layers of the same checkpoint: its mixer and its feed-forward part must each have all that some decoder
layer has.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

from ...checkpoints.safetensors_file import Entry
from ...checkpoints.stored import OTHER_LEAVES, SCALE_LEAVES, WEIGHT_LEAVES
from ...recipes.family import HFName, Part
from ...recipes.family_view import Place
from ..facts.findings import Objection, objection
from .dialects.choose import Unquantized
from .dialects.fp8 import Fp8
from .rules_kv import is_kv_scale
from .runtime_view import Module, RuntimeView

_NUM_EXPERTS_KEYS = ("n_routed_experts", "num_experts", "num_local_experts")
_NESTED_MTP = re.compile(r"^(?:model\.)?language_model\.(?:model\.)?mtp\.|^model\.mtp\.")
_RECOMPUTED = re.compile(r"rotary_(?:pos_)?emb\.(?:inv_freq|cos_cached|sin_cached)$")
_GET_IT = "Put the release's block in"
# Of a checkpoint that nobody quantized and that has no MTP tensor: perhaps the release has none.
_NAME_IT = (
    "If this is the original release, it has none, and `keepmtp quantize` needs --mtp-source with the place of a block "
    "that is published apart; else put the release's in"
)
_FFN_ROLES = ("dense_mlp", "experts", "shared_experts", "router")


def promised_layers_exist(runtime: RuntimeView) -> Iterator[Objection]:
    """config.json's count of MTP layers and the tensors agree: R1; F1-F6, F8-F10; C1; M4, M7, M9."""
    extra = sorted(index for index in runtime.found if index >= runtime.promised)
    yield from _layers_without_tensors(runtime)
    if extra:
        yield _extra_layers(runtime, extra)
    elif runtime.promised == 0:
        yield objection(
            rule="mtp-missing",
            severity="error",
            where=f"config.json: {runtime.view.mtp_count_key}",
            says="no MTP block is promised and none is there: method=mtp has nothing to draft with",
            cure=_way_to_a_block(runtime),
        )


def _get_it(runtime: RuntimeView) -> str:
    """What brings the block back, with the release where README.md names one."""
    release = runtime.base_model
    return f"{_GET_IT}: README.md names {release} as base_model" if release else _GET_IT


def _way_to_a_block(runtime: RuntimeView) -> str:
    """What to do about a block that is absent as a whole; a release cannot give what it has not."""
    is_whole = isinstance(runtime.dialect, Unquantized) and not any(
        place.part == "mtp" for place in runtime.placed.values()
    )
    return _NAME_IT if is_whole else _get_it(runtime)


def _layers_without_tensors(runtime: RuntimeView) -> Iterator[Objection]:
    view, promised = runtime.view, runtime.promised
    elsewhere = runtime.view.mtp_layers_of(runtime.source.unindexed) | ({0} if _has_nested(runtime) else set())
    if view.family.loader.refuses_missing_mtp:
        effect = "vLLM raises 'MTP speculative decoding layer ... weights missing from checkpoint'"
    else:
        effect = "quantized, vLLM loads this without a word and drafts from uninitialised memory"
    for index in sorted(set(range(promised)) - runtime.found - elsewhere):
        where, cure = f"{view.mtp_stem(index)}*", _way_to_a_block(runtime)
        if runtime.block_at is not None:
            where, cure = f"{view.disk_stem('backbone', runtime.block_at)}*", _right_depth(runtime)
        elif runtime.found and runtime.found == frozenset(range(index)):
            cure = f"Set {view.mtp_count_key} to {index // view.num_mtp_parts}, or put the release's whole block in"
        yield objection(
            rule="mtp-missing",
            severity="error",
            where=where,
            says=f"{view.mtp_count_key}={promised} promises MTP layer {index}, but no file has a tensor of it: "
            f"{effect}",
            cure=cure,
        )


def _right_depth(runtime: RuntimeView) -> str:
    key, at = runtime.view.family.num_layers_key, runtime.block_at
    return f"Set {key} to {at}: layer {at} has the modules of an MTP layer, and is counted as a decoder layer"


def _extra_layers(runtime: RuntimeView, extra: list[int]) -> Objection:
    """MTP layers on disk that config.json does not count."""
    view, promised = runtime.view, runtime.promised
    first = f"{view.mtp_stem(extra[0])}*"
    if promised == 0:
        holders = (view.text_config, view.config)
        is_missing = not any(key in holder for holder in holders for key in view.family.mtp_count_keys)
        error = view.family.loader.missing_count if is_missing else "ZeroDivisionError"
        return objection(
            rule="mtp-not-promised",
            severity="error",
            where=f"config.json: {view.mtp_count_key}",
            says=f"is {'missing' if is_missing else 0}, but {first} exists: with method=mtp vLLM raises {error}",
            cure=f"Set {view.mtp_count_key} to {len(extra)}",
        )
    effect = ": the draft's loader meets a name it does not know and raises"
    if view.layout.mtp is None:
        effect = f" and num_hidden_layers={view.num_layers}: the target model itself fails to load it"
    return objection(
        rule="mtp-not-promised",
        severity="error",
        where=first,
        says=f"exists beyond {view.mtp_count_key}={promised}{effect}",
        cure=f"Correct {view.mtp_count_key}, or num_hidden_layers, to what the files hold",
    )


def mtp_file_is_indexed(runtime: RuntimeView) -> Iterator[Objection]:
    """Files that the index does not list are not read: R6; F4, F9."""
    for entry in runtime.source.unindexed.values():
        yield unindexed(entry, is_mtp=runtime.is_mtp_name(entry.name))


def unindexed(entry: Entry, *, is_mtp: bool) -> Objection:
    """A tensor in a file that the index does not list."""
    return objection(
        rule="unindexed",
        severity="error" if is_mtp else "warning",
        where=entry.name,
        says=f"lies in {entry.file}, which model.safetensors.index.json does not list: vLLM does not read it"
        + (", so the draft is missing" if is_mtp else ""),
        cure=f"Add the tensors of {entry.file} to the index" + ("" if is_mtp else ", or remove the file"),
        cause=f"{is_mtp} {entry.file}",
    )


def mtp_glue_is_complete(runtime: RuntimeView) -> Iterator[Objection]:
    """Each MTP layer has the modules that join embedding and hidden state, and their norms: R1; F2; M1."""
    view = runtime.view
    layers = [index for index in range(runtime.promised) if index in runtime.found]
    for name in view.required_mtp_modules(layers):
        if name not in runtime.placed:
            yield objection(
                rule="mtp-incomplete",
                severity="error",
                where=name,
                says="the MTP block cannot work without it, and it is in no indexed file: vLLM leaves it uninitialised "
                "in silence, the draft guesses",
                cure=_get_it(runtime),
                cause=name,
            )


def layers_are_complete(runtime: RuntimeView) -> Iterator[Objection]:
    """Every layer has what other layers of its kind have: projections, norms, router: R1; E2, E7, E8; M1, M2, M8."""
    parts = _layer_parts(runtime)
    view = runtime.view
    depth = 1 + max((index for part, index in parts if part == "backbone"), default=-1)
    for index in range(view.num_layers):
        if ("backbone", index) not in parts:
            yield objection(
                rule="layer-missing",
                severity="error",
                where=f"{view.disk_stem('backbone', index)}*",
                says=f"num_hidden_layers={view.num_layers} promises this layer, but no file has a tensor of it",
                cure="Download or quantize the checkpoint again"
                + (f"; if the release has {depth} layers, set num_hidden_layers to {depth}" if index >= depth else ""),
            )
    for half in ("mixer", "ffn"):
        models = {halves[half] for (part, _), halves in parts.items() if part == "backbone" and halves[half]}
        for (part, index), halves in parts.items():
            gap = _gap(halves[half], models, is_backbone=part == "backbone")
            gap -= set(view.family.mtp_lacks) if part == "mtp" else set()
            for path in sorted(gap):
                leaf = "" if path.endswith((".bias", "e_score_correction_bias", "tid2eid")) else ".weight*"
                yield objection(
                    rule="mtp-incomplete" if part == "mtp" else "layer-incomplete",
                    severity="error",
                    where=view.disk_stem(part, index) + path.replace("{e}", "0") + leaf,
                    says="is missing, though the decoder layers of this checkpoint have it: quantized, vLLM leaves the "
                    "parameter uninitialised in silence",
                    cure=_get_it(runtime) if part == "mtp" else "Quantize the checkpoint again",
                    cause=f"{part} {index} {half}",
                )


def experts_are_complete(runtime: RuntimeView) -> Iterator[Objection]:
    """Routed experts 0 to n-1 have all projections, in the backbone and in the MTP layer: E2; M1."""
    config = runtime.view.text_config
    expected = next((config[key] for key in _NUM_EXPERTS_KEYS if isinstance(config.get(key), int)), None)
    if not expected:
        return
    for module in runtime.modules:
        if module.kind != "experts":
            continue
        have: dict[str, set[int]] = defaultdict(set)
        stacked: dict[str, int] = {}
        for member in module.members:
            row = member.place.row
            if row.stacked:
                stacked[row.path] = member.weight.shape[0] if member.weight.shape else 0
            elif member.place.expert is not None:
                have[row.path].add(member.place.expert)
        for path, count in stacked.items():
            yield from _wrong_experts(runtime, module, path, range(count, expected), range(expected, count), expected)
        for path, experts in have.items():
            missing = sorted(set(range(expected)) - experts)
            extra = sorted(expert for expert in experts if expert >= expected)
            yield from _wrong_experts(runtime, module, path, missing, extra, expected)


def _wrong_experts(
    runtime: RuntimeView, module: Module, path: str, missing: Sequence[int], extra: Sequence[int], expected: int
) -> Iterator[Objection]:
    """At most two objections for one projection, however many experts it lacks or has too many."""
    stem = runtime.view.disk_stem(module.part, module.layer or 0)
    lost = f"is missing from {expected} experts: vLLM leaves it uninitialised in silence"
    more = f"exists, but config.json counts {expected} experts: vLLM raises"
    for experts, says in ((missing, lost), (extra, more)):
        if experts:
            yield objection(
                rule="experts",
                severity="error",
                where=f"{stem}{path.replace('{e}', str(experts[0]))}",
                says=says,
                cure="Quantize the checkpoint again: shards of some experts were lost",
                cause=f"{module.part} {module.layer} {experts is extra}",
                count=len(experts),
            )


def names_are_known(runtime: RuntimeView) -> Iterator[Objection]:
    """Every tensor has a parameter to go to: R7, R11, R12; F7, F37; E7, E9; M5, M9."""
    for entry in runtime.others:
        yield from _other_name(runtime, entry.name)
    loader = runtime.view.family.loader
    for module, weight in runtime.weights.items():
        place = runtime.placed.get(module)
        if _is_nested(runtime, weight.weight.name):
            yield _nested(runtime, weight.weight.name)
        elif place is None or place.leaf != "weight":
            yield _unknown(runtime, weight.weight.name)
        elif place.part == "mtp" and (leaves := _unrenamed(loader.mtp_leaves, weight.parts)):
            yield objection(
                rule="unknown-tensor",
                severity="error",
                where=f"{module}.{leaves[0]}",
                says=f"is not among the names that this draft's loader renames ({', '.join(loader.mtp_leaves)}): vLLM "
                "raises KeyError",
                cure="Leave the MTP block plain",
                cause="mtp leaf",
            )


def _other_name(runtime: RuntimeView, name: HFName) -> Iterator[Objection]:
    """A tensor that is no weight and no scale of one."""
    place = runtime.placed.get(name)
    leaf = name.rpartition(".")[2] if place is None else place.leaf
    if _is_nested(runtime, name):
        yield _nested(runtime, name)
    elif leaf in SCALE_LEAVES and not is_kv_scale(leaf):
        yield objection(
            rule="unknown-tensor",
            severity="error",
            where=name,
            says="is a scale without a weight beside it: vLLM raises, or drops it and leaves the weight uninitialised",
            cure="Quantize the checkpoint again",
            cause=f"orphan {leaf}",
        )
    elif not is_kv_scale(leaf) and not _RECOMPUTED.search(name) and not _has_place(runtime, place, leaf):
        yield _unknown(runtime, name)


def _has_place(runtime: RuntimeView, place: Place | None, leaf: str) -> bool:
    if place is None:
        return False
    return place.role == "vision" or leaf in OTHER_LEAVES


def aliases_are_present(runtime: RuntimeView) -> Iterator[Objection]:
    """Copies that older vLLM reads the draft's embedding and head from: R10; E10 (vllm #43456, #43459); M14.

    The original releases have no such copies either, and vLLM serves them: the rule says nothing there.
    """
    if isinstance(runtime.dialect, Fp8) or runtime.dialect.name == "none":
        return
    for index in sorted(runtime.found):
        for alias in runtime.view.family.aliases:
            name = HFName(runtime.view.mtp_stem(index) + alias.path)
            if name not in runtime.source.entries:
                yield objection(
                    rule="alias",
                    severity="warning",
                    where=name,
                    says=f"is missing: {alias.reason}; vLLM 0.32 takes the target's instead",
                    cure=f"Add a copy of {alias.source}, or require vLLM 0.32",
                    cause=f"alias {index}",
                )


RULES = (
    promised_layers_exist,
    mtp_file_is_indexed,
    mtp_glue_is_complete,
    layers_are_complete,
    experts_are_complete,
    names_are_known,
    aliases_are_present,
)


def _has_nested(runtime: RuntimeView) -> bool:
    return any(_is_nested(runtime, weight.weight.name) for weight in runtime.weights.values())


def _is_nested(runtime: RuntimeView, name: HFName) -> bool:
    """Whether an MTP tensor carries a prefix that its family does not have."""
    return _NESTED_MTP.match(name) is not None and not runtime.is_mtp_name(name)


def _nested(runtime: RuntimeView, name: HFName) -> Objection:
    return objection(
        rule="mtp-prefix",
        severity="error",
        where=name,
        says="carries the vision-language model's prefix, which the draft's loader does not strip: vLLM raises "
        "'There is no module or parameter named language_model', or skips the block",
        cure=f"Rename it to start with {runtime.view.mtp_stem(0).partition('layers.')[0] or 'mtp.'}",
        cause="nested",
    )


def _unknown(runtime: RuntimeView, name: HFName) -> Objection:
    is_mtp, at = runtime.is_mtp_name(name), runtime.block_at
    is_counted = at is not None and not is_mtp and name.startswith(runtime.view.disk_stem("backbone", at))
    return objection(
        rule="unknown-tensor",
        severity="error" if is_mtp else "warning",
        where=name,
        says="has no place in this family: "
        + (
            "the draft's loader raises KeyError or ValueError on names it does not know"
            if is_mtp
            else "vLLM raises on it unless the model's loader skips unknown names"
        ),
        cure="Rename it to the original release's name, or remove it",
        cause="counted as a decoder layer" if is_counted else f"{is_mtp} {re.sub(r'[0-9]+', '*', name)}",
    )


def _unrenamed(known: tuple[str, ...], leaves: Iterable[str]) -> list[str]:
    return [leaf for leaf in leaves if known and leaf not in known]


def _layer_parts(runtime: RuntimeView) -> Mapping[tuple[Part, int], Mapping[str, frozenset[str]]]:
    """The parts of each layer, of its mixer and of its feed-forward part, in any stored form."""
    sets: dict[tuple[Part, int], dict[str, set[str]]] = defaultdict(lambda: {"mixer": set(), "ffn": set()})
    family = runtime.view.family
    only_mtp = {row.path for row in family.mtp_block} - {row.path for row in family.block}
    for place in runtime.placed.values():
        path = place.row.path
        # Within one family some layers have a compressor or an indexer, and others have none.
        if place.layer is None or not place.row.in_every_layer or ".compressor." in path or ".indexer." in path:
            continue
        if place.part == "backbone" or path not in only_mtp:
            half = "ffn" if place.role in _FFN_ROLES and not family.one_mixer else "mixer"
            sets[place.part, place.layer][half].update(_elements(place))
    return {key: {half: frozenset(paths) for half, paths in halves.items()} for key, halves in sets.items()}


def _elements(place: Place) -> Iterator[str]:
    if place.row.stacked:
        yield from place.row.unstacked
    elif place.leaf in ("", *WEIGHT_LEAVES):
        yield place.row.path
    elif place.leaf in OTHER_LEAVES:
        yield f"{place.row.path}.{place.leaf}"


def _gap(paths: frozenset[str], models: set[frozenset[str]], *, is_backbone: bool) -> frozenset[str]:
    """What a layer lacks, compared with the decoder layer most like it; nothing if some decoder layer has no more.

    Decoder layers of one family differ. So a decoder layer lacks something only if another one has all that it has, and
    more.
    """
    if is_backbone:
        larger = [model for model in models if paths < model]
        return min(larger, key=len) - paths if larger else frozenset()
    return min((model - paths for model in models), key=len, default=frozenset())
