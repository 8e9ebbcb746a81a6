"""Rules on the MTP block: config.json promises it, it is there, it is whole, and the draft's loader
finds it.

In: a `RuntimeView`, and that of the release where it is given. Out: objections. Each rule names its
sources by their numbers in docs/failures.md.

Easy to get wrong: what a block needs. There is no list of modules for each family here. A rule
compares an MTP layer with the decoder layers of the same checkpoint: its mixer and its feed-forward
part must each have all that some decoder layer has.
"""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from ...checkpoints.safetensors_file import Entry
from ...checkpoints.stored import (
    FLOATS,
    OTHER_LEAVES,
    SCALE_LEAVES,
    TRANSPOSED_LEAVES,
    WEIGHT_LEAVES,
    StoredWeight,
)
from ...recipes.family import HFName, Part
from ...recipes.family_view import Place
from ..facts.findings import Objection, objection
from .dialects.choose import Unquantized
from .dialects.fp8 import Fp8
from .rules_kv import is_kv_scale
from .runtime_view import RuntimeView
from .stored_view import StoredView

_NUM_EXPERTS_KEYS = ("n_routed_experts", "num_experts", "num_local_experts")
_NESTED_MTP = re.compile(r"^(?:model\.)?language_model\.(?:model\.)?mtp\.|^model\.mtp\.")
_RECOMPUTED = re.compile(r"rotary_(?:pos_)?emb\.(?:inv_freq|cos_cached|sin_cached)$")
_FFN_ROLES = ("dense_mlp", "experts", "shared_experts", "router")
_Halves = Mapping[str, frozenset[str]]


def promised_layers_exist(runtime: RuntimeView) -> Iterator[Objection]:
    """config.json's count of MTP layers and the tensors agree: R1; F1-F6, F8-F10; C1; M4, M7,
    M9.
    """
    view, promised, key = runtime.view, runtime.promised, runtime.view.mtp_count_key
    effect = "quantized, vLLM loads this without a word and drafts from uninitialised memory"
    if runtime.loader.refuses_missing_mtp:
        effect = "vLLM raises 'MTP speculative decoding layer ... weights missing from checkpoint'"
    elsewhere = view.mtp_layers_of(runtime.source.unindexed)
    if any(_is_nested(runtime, name) for name in runtime.source.entries):
        elsewhere.add(0)
    for index in sorted(set(range(promised)) - runtime.found - elsewhere):
        where, cure = f"{view.mtp_stem(index)}*", _way_to_a_block(runtime)
        if (at := runtime.block_at) is not None:
            where, depth = f"{view.disk_stem('backbone', at)}*", view.family.num_layers_key
            cure = (
                f"Set {depth} to {at}: layer {at} has the modules of an MTP layer, and is "
                "counted as a decoder layer"
            )
        elif runtime.found and runtime.found == frozenset(range(index)):
            cure = (
                f"Set {key} to {index // view.num_mtp_parts}, or put the release's whole block in"
            )
        says = (
            f"{key}={promised} promises MTP layer {index}, but no file has a tensor of it: {effect}"
        )
        yield objection("mtp-missing", where, says=says, cure=cure)
    extra = sorted(index for index in runtime.found if index >= promised)
    first = f"{view.mtp_stem(extra[0])}*" if extra else ""
    if extra and promised == 0:
        is_missing = not any(
            each in {**view.text_config, **view.config} for each in view.family.mtp_count_keys
        )
        error = runtime.loader.missing_count if is_missing else "ZeroDivisionError"
        yield objection(
            "mtp-not-promised",
            f"config.json: {key}",
            says=f"is {'missing' if is_missing else 0}, but {first} exists: with method=mtp vLLM "
            f"raises {error}",
            cure=f"Set {key} to {len(extra)}",
        )
    elif extra:
        effect = "the draft's loader meets a name it does not know and raises"
        if view.layout.mtp is None:
            effect = (
                f"with num_hidden_layers={view.num_layers} the target model itself fails to load it"
            )
        yield objection(
            "mtp-not-promised",
            first,
            says=f"exists beyond {key}={promised}: {effect}",
            cure=f"Correct {key}, or num_hidden_layers, to what the files hold",
        )
    elif promised == 0:
        yield objection(
            "mtp-missing",
            f"config.json: {key}",
            says="no MTP block is promised and none is there: method=mtp has nothing to draft with",
            cure=_way_to_a_block(runtime),
        )


def _way_to_a_block(runtime: RuntimeView) -> str:
    """What brings a block back; the release where README.md names one. A release cannot give what
    it has not.
    """
    if isinstance(runtime.dialect, Unquantized) and not any(
        place.part == "mtp" for place in runtime.placed.values()
    ):
        return (
            "If this is the original release, it has none, and `keepmtp quantize` needs "
            "--mtp-source with the place of "
            "a block that is published apart; else put the release's in"
        )
    named = f": README.md names {runtime.base_model} as base_model" if runtime.base_model else ""
    return f"Put the release's block in{named}"


def files_are_indexed(view: StoredView) -> Iterator[Objection]:
    """Files that the index does not list are not read: R6; F4, F9."""
    for entry in view.source.unindexed.values():
        is_mtp = view.is_mtp_name(entry.name)
        yield objection(
            "unindexed",
            entry.name,
            severity="error" if is_mtp else "warning",
            says=(
                f"lies in {entry.file}, which model.safetensors.index.json does not list: vLLM "
                "does not read it"
            )
            + (", so the draft is missing" if is_mtp else ""),
            cure=f"Add the tensors of {entry.file} to the index"
            + ("" if is_mtp else ", or remove the file"),
            cause=f"{is_mtp} {entry.file}",
        )


def mtp_glue_is_complete(runtime: RuntimeView) -> Iterator[Objection]:
    """Each MTP layer has the modules that join embedding and hidden state, and their norms: R1; F2;
    M1.
    """
    for name in runtime.view.required_mtp_modules(
        sorted(runtime.found.intersection(range(runtime.promised)))
    ):
        if name not in runtime.placed:
            yield objection(
                "mtp-incomplete",
                name,
                says=(
                    "the MTP block cannot work without it, and it is in no indexed file: vLLM "
                    "leaves it uninitialised in silence, the draft guesses"
                ),
                cure=_way_to_a_block(runtime),
                cause=name,
            )


def layers_are_complete(runtime: RuntimeView) -> Iterator[Objection]:
    """Every layer has what other layers of its kind have: projections, norms, router: R1; E2, E7,
    E8; M1, M2, M8.
    """
    view, parts = runtime.view, _layer_parts(runtime)
    depth = 1 + max((index for part, index in parts if part == "backbone"), default=-1)
    for index in range(view.num_layers):
        if ("backbone", index) not in parts:
            shorter = (
                f"; if the release has {depth} layers, set num_hidden_layers to {depth}"
                if index >= depth
                else ""
            )
            yield objection(
                "layer-missing",
                f"{view.disk_stem('backbone', index)}*",
                says=f"num_hidden_layers={view.num_layers} promises this layer, but no file has a "
                "tensor of it",
                cure=f"Download or quantize the checkpoint again{shorter}",
            )
    for half in ("mixer", "ffn"):
        models = {
            halves[half]
            for (part, _), halves in parts.items()
            if part == "backbone" and halves[half]
        }
        for (part, index), halves in parts.items():
            is_mtp = part == "mtp"
            gap = _gap(halves[half], models, is_backbone=not is_mtp)
            for path in sorted(gap - set(view.family.mtp_lacks if is_mtp else ())):
                leaf = (
                    ""
                    if path.endswith((".bias", "e_score_correction_bias", "tid2eid"))
                    else ".weight*"
                )
                yield objection(
                    "mtp-incomplete" if is_mtp else "layer-incomplete",
                    view.disk_stem(part, index) + path.replace("{e}", "0") + leaf,
                    says=(
                        "is missing, though the decoder layers of this checkpoint have it: "
                        "quantized, vLLM leaves the parameter uninitialised in silence"
                    ),
                    cure=_way_to_a_block(runtime) if is_mtp else "Quantize the checkpoint again",
                    cause=f"{part} {index} {half}",
                )


def _layer_parts(runtime: RuntimeView) -> Mapping[tuple[Part, int], _Halves]:
    """The parts of each layer, of its mixer and of its feed-forward part, in any stored form."""
    sets: dict[tuple[Part, int], dict[str, set[str]]] = defaultdict(
        lambda: {"mixer": set(), "ffn": set()}
    )
    family = runtime.view.family
    only_mtp = {row.path for row in family.mtp_block} - {row.path for row in family.block}
    for place in runtime.placed.values():
        path = place.row.path
        # Within one family some layers have a compressor or an indexer, and others have none.
        if (
            place.layer is None
            or not place.row.in_every_layer
            or ".compressor." in path
            or ".indexer." in path
        ):
            continue
        if place.part == "backbone" or path not in only_mtp:
            half = "ffn" if place.role in _FFN_ROLES and not family.one_mixer else "mixer"
            sets[place.part, place.layer][half].update(_elements(place))
    return {
        key: {half: frozenset(paths) for half, paths in halves.items()}
        for key, halves in sets.items()
    }


def _elements(place: Place) -> Sequence[str]:
    if place.row.stacked:
        return place.row.unstacked
    if place.leaf in ("", *WEIGHT_LEAVES):
        return [place.row.path]
    return [f"{place.row.path}.{place.leaf}"] if place.leaf in OTHER_LEAVES else []


def _gap(
    paths: frozenset[str], models: set[frozenset[str]], *, is_backbone: bool
) -> frozenset[str]:
    """What a layer lacks, compared with the decoder layer most like it; nothing if some decoder
    layer has no more.

    Decoder layers of one family differ. So a decoder layer lacks something only if another one has
    all that it has, and more.
    """
    gaps = [model - paths for model in models if not is_backbone or paths < model]
    return min(gaps, key=len, default=frozenset())


def experts_are_complete(runtime: RuntimeView) -> Iterator[Objection]:
    """Routed experts 0 to n-1 have all projections, in the backbone and in the MTP layer: E2;
    M1.
    """
    config = runtime.view.text_config
    expected = next(
        (config[key] for key in _NUM_EXPERTS_KEYS if isinstance(config.get(key), int)), 0
    )
    for module in runtime.modules if expected else ():
        have: dict[str, set[int]] = defaultdict(set)
        stacked: dict[str, range] = {}
        for member in module.members if module.kind == "experts" else ():
            row = member.place.row
            if row.stacked:
                stacked[row.path] = range(*member.weight.shape[:1])
            elif member.place.expert is not None:
                have[row.path].add(member.place.expert)
        for path, experts in (have | stacked).items():
            # A stacked tensor without elements may say that it has a milliard experts: they are not
            # listed.
            extra = (
                experts[expected:]
                if isinstance(experts, range)
                else sorted(experts - set(range(expected)))
            )
            missing = [expert for expert in range(expected) if expert not in experts]
            lost = f"is missing from {expected} experts: vLLM leaves it uninitialised in silence"
            more = f"exists, but config.json counts {expected} experts: vLLM raises"
            for wrong, says in ((missing, lost), (extra, more)):
                if wrong:
                    stem = runtime.view.disk_stem(module.part, module.layer or 0)
                    yield objection(
                        "experts",
                        stem + path.replace("{e}", str(wrong[0])),
                        says=says,
                        cure="Quantize the checkpoint again: shards of some experts were lost",
                        cause=f"{module.part} {module.layer} {wrong is extra}",
                        count=len(wrong),
                    )


def scales_have_weights(view: StoredView) -> Iterator[Objection]:
    """A scale belongs to a weight."""
    for entry in view.others:
        leaf = view.leaf_of(entry.name)
        if "." in entry.name and _is_of_a_weight(leaf):
            yield objection(
                "unknown-tensor",
                entry.name,
                says=(
                    "is a scale without a weight beside it: vLLM raises, or drops it and leaves "
                    "the weight uninitialised"
                ),
                cure="Quantize the checkpoint again, or take the weight from where it is from",
                cause=f"orphan {leaf}",
            )


def _is_of_a_weight(leaf: str) -> bool:
    return leaf in (*SCALE_LEAVES, *TRANSPOSED_LEAVES) and not is_kv_scale(leaf)


def names_are_known(runtime: RuntimeView) -> Iterator[Objection]:
    """Every tensor has a parameter to go to: R7, R11, R12; F7, F37; E7, E9; M5, M9."""
    known = runtime.loader.mtp_leaves
    names = {module: weight.weight.name for module, weight in runtime.weights.items()}
    names |= {entry.name: entry.name for entry in runtime.others}
    for key, name in names.items():
        place, weight = runtime.placed.get(key), runtime.weights.get(key)
        others = [leaf for leaf in weight.parts if known and leaf not in known] if weight else []
        if _is_nested(runtime, name):
            yield objection(
                "mtp-prefix",
                name,
                says="carries the vision-language model's prefix, which the draft's loader does "
                "not strip: vLLM raises "
                "'There is no module or parameter named language_model', or skips the block",
                cure="Rename it to start with "
                f"{runtime.view.mtp_stem(0).partition('layers.')[0] or 'mtp.'}",
                cause="nested",
            )
        elif not _has_place(runtime, place, name, is_weight=weight is not None):
            yield _unknown(runtime, name)
        elif place is not None and place.part == "mtp" and others:
            yield objection(
                "unknown-tensor",
                f"{key}.{others[0]}",
                says=(
                    "is not among the names that this draft's loader renames "
                    f"({', '.join(known)}): vLLM raises KeyError"
                ),
                cure="Leave the MTP block plain",
                cause="mtp leaf",
            )


def _has_place(runtime: RuntimeView, place: Place | None, name: HFName, *, is_weight: bool) -> bool:
    """Whether a tensor is known, or another rule judges it."""
    if is_weight:
        return place is not None and place.leaf == "weight"
    leaf = runtime.leaf_of(name)
    if is_kv_scale(leaf) or _is_of_a_weight(leaf) or _RECOMPUTED.search(name):
        return True
    return place is not None and (place.role == "vision" or leaf in OTHER_LEAVES)


def _is_nested(runtime: RuntimeView, name: HFName) -> bool:
    """Whether an MTP tensor carries a prefix that its family does not have."""
    return _NESTED_MTP.match(name) is not None and not runtime.is_mtp_name(name)


def _unknown(runtime: RuntimeView, name: HFName) -> Objection:
    is_mtp, at = runtime.is_mtp_name(name), runtime.block_at
    effect = "vLLM raises on it unless the model's loader skips unknown names"
    cause = f"{is_mtp} {re.sub(r'[0-9]+', '*', name)}"
    if is_mtp:
        effect = "the draft's loader raises KeyError or ValueError on names it does not know"
    elif at is not None and name.startswith(runtime.view.disk_stem("backbone", at)):
        cause = "counted as a decoder layer"
    return objection(
        "unknown-tensor",
        name,
        severity="error" if is_mtp else "warning",
        says=f"has no place in this family: {effect}",
        cure="Rename it to the original release's name, or remove it",
        cause=cause,
    )


def aliases_are_present(runtime: RuntimeView) -> Iterator[Objection]:
    """Copies that older vLLM reads the draft's embedding and head from: R10; E10 (vllm #43456,
    #43459); M14.

    The original releases have no such copies either, and vLLM serves them: the rule says nothing
    there.
    """
    if isinstance(runtime.dialect, Fp8 | Unquantized):
        return
    for index in sorted(runtime.found):
        for alias in runtime.view.family.aliases:
            name = HFName(runtime.view.mtp_stem(index) + alias.path)
            if name not in runtime.source.entries:
                yield objection(
                    "alias",
                    name,
                    severity="warning",
                    says=f"is missing: {alias.reason}; vLLM 0.32 takes the target's instead",
                    cure=f"Add a copy of {alias.source}, or require vLLM 0.32",
                    cause=f"alias {index}",
                )


def mtp_is_that_of_the_source(runtime: RuntimeView, source: RuntimeView) -> Iterator[Objection]:
    """MTP tensors against the release's: none lost, same shapes, dtypes kept: R13; F24, C3; E4, E8.

    A kept tensor may change its form (FP8 dequantized to BF16, a scale renamed), but never its
    logical shape, and a float32 tensor never its dtype. The writer's own test compares the bytes.
    """
    own = {entry.name: _plain(entry) for entry in runtime.others} | dict(runtime.weights)
    others = {entry.name: _plain(entry) for entry in source.others} | dict(source.weights)
    for name, theirs in others.items():
        place = source.placed.get(name)
        if (
            place is None
            or place.part != "mtp"
            or place.row.stacked
            or _is_separated(runtime, place)
        ):
            continue
        if name in own:
            yield from _changed(own[name], theirs)
        else:
            yield objection(
                "source",
                theirs.weight.name,
                says="is in the source's MTP block and not here: the draft runs without it",
                cure="Quantize again, or graft the source's MTP block",
                cause="lost",
            )


def _plain(entry: Entry) -> StoredWeight:
    """A tensor that is no weight, described as one."""
    return StoredWeight(module=entry.name, form="plain", parts={"": entry}, shape=entry.shape)


def _is_separated(runtime: RuntimeView, place: Place) -> bool:
    """Whether the checkpoint has q, k and v apart where the source has them in one matrix."""
    stem, interleaved = place.module.removesuffix(place.row.path), place.row.interleaved
    return interleaved is not None and all(
        HFName(stem + path) in runtime.weights for path in interleaved.into
    )


def _changed(ours: StoredWeight, theirs: StoredWeight) -> Iterator[Objection]:
    """Another logical shape, or another dtype of a plain tensor.

    The shape of packed integers takes bits and group from the config.
    """
    name, dtypes = ours.weight.name, (ours.weight.dtype, theirs.weight.dtype)
    are_known = all(
        each.form != "unknown" and (each.form != "int_packed" or each.scheme)
        for each in (ours, theirs)
    )
    if are_known and ours.shape != theirs.shape:
        says = f"has the logical shape {list(ours.shape)}, in the source {list(theirs.shape)}"
        yield objection("source", name, says=says, cure="Quantize again", cause="shape")
    elif ours.form == theirs.form == "plain" and dtypes[0] != dtypes[1]:
        is_wider = {*dtypes} <= {*FLOATS} and FLOATS.index(dtypes[0]) > FLOATS.index(dtypes[1])
        effect = "digits are lost that the draft was trained with"
        if is_wider:
            effect = "twice the size for the same numbers"
        yield objection(
            "source",
            name,
            severity="warning",
            says=f"is {dtypes[0]}, in the source {dtypes[1]}: {effect}",
            cure="Keep the source's dtype",
            cause=" ".join(dtypes),
        )


RULES = (
    promised_layers_exist,
    files_are_indexed,
    mtp_glue_is_complete,
    layers_are_complete,
    experts_are_complete,
    scales_have_weights,
    names_are_known,
    aliases_are_present,
)
