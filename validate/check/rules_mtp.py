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
from collections.abc import Mapping

from ...checkpoints.dialects.choose import Unquantized
from ...checkpoints.dialects.fp8 import Fp8
from ...checkpoints.stored import (
    OTHER_LEAVES,
    SCALE_LEAVES,
    TRANSPOSED_LEAVES,
    WEIGHT_LEAVES,
    StoredWeight,
)
from ...recipes.family import HFName, Part
from ...recipes.forms import FLOATS
from ..facts.findings import Objection, Objections, objection
from .rules_kv import is_kv_scale
from .runtime_view import RuntimeView, StoredView

_NUM_EXPERTS_KEYS = ("n_routed_experts", "num_experts", "num_local_experts")
_NESTED_MTP = re.compile(r"^(?:model\.)?language_model\.(?:model\.)?mtp\.|^model\.mtp\.")
_RECOMPUTED = re.compile(r"rotary_(?:pos_)?emb\.(?:inv_freq|cos_cached|sin_cached)$")
_DIGITS = re.compile(r"[0-9]+")
_FFN_ROLES = ("dense_mlp", "experts", "shared_experts", "router")
_MOST_LAYERS = 1000
_OF_WEIGHTS = {*SCALE_LEAVES, *TRANSPOSED_LEAVES}
_AGAIN = "Quantize the checkpoint again"
_BLOCK_BACK = "Put the release's block in"


def promised_layers_exist(runtime: RuntimeView) -> Objections:
    """config.json's count of MTP layers and the tensors agree: R1; F1-F6, F8-F10; C1; M4, M7,
    M9.
    """
    view = runtime.view
    promised = runtime.promised
    key = view.mtp_count_key
    where = f"config.json: {key}"
    way_back = _way_to_a_block(runtime)
    effect = "quantized, vLLM loads this without a word and drafts from uninitialised memory"
    if runtime.loader.refuses_missing_mtp:
        effect = "vLLM raises 'MTP speculative decoding layer ... weights missing from checkpoint'"
    elsewhere = view.mtp_layers_of(runtime.source.unindexed)
    if any(_is_nested(runtime, name) for name in runtime.source.entries):
        elsewhere.add(0)
    for index in sorted(set(range(promised)) - runtime.found - elsewhere):
        place = f"{view.mtp_stem(index)}*"
        cure = way_back
        if (at := runtime.block_at) is not None:
            place = f"{view.disk_stem('backbone', at)}*"
            depth = view.family.num_layers_key
            cure = (
                f"Set {depth} to {at}: layer {at} has the modules of an MTP layer, and is "
                "counted as a decoder layer"
            )
        elif view.is_number_wrong(runtime.found) and min(runtime.found):
            cure = f"Rename {view.mtp_stem(min(runtime.found) + index)}* to {place}"
        elif view.is_number_wrong(runtime.found):
            count = len(runtime.found) // view.num_mtp_parts
            cure = f"Set {key} to {count}, or put the release's whole block in"
        says = (
            f"{key}={promised} promises MTP layer {index}, but no file has a tensor of it: {effect}"
        )
        yield objection("mtp-missing", place, says, cure)
    extra = sorted(index for index in runtime.found if index >= promised)
    if extra:
        first = f"{view.mtp_stem(extra[0])}*"
        cure = f"Correct {key}, or num_hidden_layers, to what the files hold"
        if promised == 0:
            count = "missing"
            error = runtime.loader.missing_count
            if {*view.text_config, *view.config}.intersection(view.family.mtp_count_keys):
                count = "0"
                error = "ZeroDivisionError"
            says = f"is {count}, but {first} exists: with method=mtp vLLM raises {error}"
            yield objection("mtp-not-promised", where, says, f"Set {key} to {len(extra)}")
        else:
            effect = "the draft's loader meets a name it does not know and raises"
            if view.layout.mtp is None:
                layers = f"num_hidden_layers={view.num_layers}"
                effect = f"with {layers} the target model itself fails to load it"
            says = f"exists beyond {key}={promised}: {effect}"
            yield objection("mtp-not-promised", first, says, cure)
    elif promised == 0:
        says = "no MTP block is promised and none is there: method=mtp has nothing to draft with"
        yield objection("mtp-missing", where, says, way_back)


def _way_to_a_block(runtime: RuntimeView) -> str:
    """What brings a block back. A release cannot give what it has not."""
    has_some = any(place.part == "mtp" for place in runtime.placed.values())
    if isinstance(runtime.dialect, Unquantized) and not has_some:
        return (
            "If this is the original release, it has none, and `keepmtp quantize` needs "
            "--mtp-source with the place of "
            "a block that is published apart; else put the release's in"
        )
    return _BLOCK_BACK


def files_are_indexed(view: StoredView) -> Objections:
    """Files that the index does not list are not read: R6; F4, F9."""
    for entry in view.source.unindexed.values():
        says = (
            f"lies in {entry.file}, which model.safetensors.index.json does not list: vLLM "
            "does not read it"
        )
        cure = f"Add the tensors of {entry.file} to the index"
        severity = "warning"
        is_mtp = view.is_mtp_name(entry.name)
        if is_mtp:
            severity = "error"
            says = f"{says}, so the draft is missing"
        else:
            cure += ", or remove the file"
        yield objection("unindexed", entry.name, says, cure, f"{is_mtp} {entry.file}", severity)


def mtp_glue_is_complete(runtime: RuntimeView) -> Objections:
    """Each MTP layer has the modules that join embedding and hidden state, and their norms: R1; F2;
    M1.
    """
    layers = sorted(runtime.found.intersection(range(runtime.promised)))
    for name in runtime.view.required_mtp_modules(layers):
        if name not in runtime.placed:
            says = (
                "the MTP block cannot work without it, and it is in no indexed file: vLLM leaves "
                "it uninitialised in silence, the draft guesses"
            )
            yield objection("mtp-incomplete", name, says, _way_to_a_block(runtime), name)


def layers_are_complete(runtime: RuntimeView) -> Objections:
    """Every layer has what other layers of its kind have: projections, norms, router: R1; E2, E7,
    E8; M1, M2, M8.

    Decoder layers of one family differ. So a decoder layer lacks something only if another one has
    all that it has, and more; an MTP layer is compared with the decoder layer most like it.
    """
    view = runtime.view
    halves = _halves(runtime)
    backbone = {index for _, part, index in halves if part == "backbone"}
    depth = 1 + max(backbone, default=-1)
    for index in sorted({*range(view.num_layers)} - backbone):
        cure = "Download or quantize the checkpoint again"
        if index >= depth:
            cure += f"; if the release has {depth} layers, set num_hidden_layers to {depth}"
        says = (
            f"num_hidden_layers={view.num_layers} promises this layer, but no file has a "
            "tensor of it"
        )
        yield objection("layer-missing", f"{view.disk_stem('backbone', index)}*", says, cure)
    models: dict[str, set[frozenset[str]]] = defaultdict(set)
    for (half, part, _), paths in halves.items():
        if part == "backbone" and paths:
            models[half].add(frozenset(paths))
    for (half, part, index), paths in sorted(halves.items(), key=lambda item: item[0][0] == "ffn"):
        rule = "layer-incomplete"
        cure = _AGAIN
        lacks = ()
        gaps = [model - paths for model in models[half] if part == "mtp" or paths < model]
        if part == "mtp":
            rule = "mtp-incomplete"
            cure = _way_to_a_block(runtime)
            lacks = view.family.mtp_lacks
        for path in sorted(min(gaps, key=len, default=frozenset()).difference(lacks)):
            leaf = ".weight*"
            if path.endswith((".bias", "e_score_correction_bias", "tid2eid")):
                leaf = ""
            where = view.disk_stem(part, index) + path.replace("{e}", "0") + leaf
            says = (
                "is missing, though the decoder layers of this checkpoint have it: quantized, vLLM "
                "leaves the parameter uninitialised in silence"
            )
            yield objection(rule, where, says, cure, f"{part} {index} {half}")


def counted_layers_are_there(view: StoredView) -> Objections:
    """The layers that config.json counts have tensors; without a family."""
    count = view.text_config.get("num_hidden_layers")
    stem, held = view.decoder_layers
    if not held or type(count) is not int:
        return
    for number in range(min(count, _MOST_LAYERS)):
        if number not in held:
            says = f"num_hidden_layers={count} promises this layer, but no file has a tensor of it"
            cure = "Download or quantize the checkpoint again"
            yield objection("layer-missing", f"{stem}.{number}.*", says, cure, "layer")


def _halves(runtime: RuntimeView) -> Mapping[tuple[str, Part, int], set[str]]:
    """The parts of each layer's mixer, and of its feed-forward part, in any stored form."""
    family = runtime.view.family
    found = dict[tuple[str, Part, int], set[str]]()
    only_mtp = {row.path for row in family.mtp_block} - {row.path for row in family.block}
    for place in runtime.placed.values():
        row = place.row
        # Within one family some layers have a compressor or an indexer, and others have none.
        is_rare = not row.in_every_layer or ".compressor." in row.path or ".indexer." in row.path
        if place.layer is None or is_rare or (place.part == "mtp" and row.path in only_mtp):
            continue
        for half in ("mixer", "ffn"):
            found.setdefault((half, place.part, place.layer), set())
        half = "mixer"
        if place.role in _FFN_ROLES and not family.one_mixer:
            half = "ffn"
        paths = found[half, place.part, place.layer]
        if row.stacked:
            paths.update(row.unstacked)
        elif place.leaf in ("", *WEIGHT_LEAVES):
            paths.add(row.path)
        elif place.leaf in OTHER_LEAVES:
            paths.add(f"{row.path}.{place.leaf}")
    return found


def experts_are_complete(runtime: RuntimeView) -> Objections:
    """Routed experts 0 to n-1 have all projections, in the backbone and in the MTP layer: E2;
    M1.
    """
    config = runtime.view.text_config
    counts = (config[key] for key in _NUM_EXPERTS_KEYS if isinstance(config.get(key), int))
    expected = next(counts, 0)
    for module in runtime.modules:
        have: dict[str, set[int]] = defaultdict(set)
        for place, weight in module.members if expected and module.kind == "experts" else ():
            if place.row.stacked:
                # A stacked tensor without elements may say that it has a milliard experts: of those
                # beyond, the first is enough.
                have[place.row.path].update(range(min([*weight.shape[:1], expected + 1])))
            elif place.expert is not None:
                have[place.row.path].add(place.expert)
        for path, experts in have.items():
            lost = f"is missing from {expected} experts: vLLM leaves it uninitialised in silence"
            more = f"exists, but config.json counts {expected} experts: vLLM raises"
            first = {*range(expected)}
            for wrong, says in ((first - experts, lost), (experts - first, more)):
                if wrong:
                    stem = runtime.view.disk_stem(module.part, module.layer or 0)
                    where = stem + path.replace("{e}", str(min(wrong)))
                    cause = f"{module.part} {module.layer} {says is more}"
                    cure = f"{_AGAIN}: shards of some experts were lost"
                    yield objection("experts", where, says, cure, cause, times=len(wrong))


def scales_have_weights(view: StoredView) -> Objections:
    """A scale belongs to a weight."""
    for entry in view.others:
        leaf = view.leaf_of(entry.name)
        if "." in entry.name and _is_of_a_weight(leaf):
            says = (
                "is a scale without a weight beside it: vLLM raises, or drops it and leaves "
                "the weight uninitialised"
            )
            cure = f"{_AGAIN}, or take the weight from where it is from"
            yield objection("unknown-tensor", entry.name, says, cure, f"orphan {leaf}")


def _is_of_a_weight(leaf: str) -> bool:
    return leaf in _OF_WEIGHTS and not is_kv_scale(leaf)


def names_are_known(runtime: RuntimeView) -> Objections:
    """Every tensor has a parameter to go to: R7, R11, R12; F7, F37; E7, E9; M5, M9."""
    known = runtime.loader.mtp_leaves
    alike = dict[str, Objection]()
    for key, weight in runtime.weights.items():
        place = runtime.placed.get(key)
        name = weight.weight.name
        others = [leaf for leaf in weight.parts if known and leaf not in known]
        if _is_nested(runtime, name) or place is None or place.leaf != "weight":
            yield _unknown(runtime, name, alike)
        elif place.part == "mtp" and others:
            says = (
                "is not among the names that this draft's loader renames "
                f"({', '.join(known)}): vLLM raises KeyError"
            )
            cure = "Leave the MTP block plain"
            yield objection("unknown-tensor", f"{key}.{others[0]}", says, cure, "mtp leaf")
    for entry in runtime.others:
        leaf = runtime.leaf_of(entry.name)
        place = runtime.placed.get(entry.name)
        # What another rule judges, and what vLLM computes itself.
        is_known = is_kv_scale(leaf) or _is_of_a_weight(leaf) or _RECOMPUTED.search(entry.name)
        if place is not None:
            is_known = is_known or place.role == "vision" or leaf in OTHER_LEAVES
        if _is_nested(runtime, entry.name) or not is_known:
            yield _unknown(runtime, entry.name, alike)


def _is_nested(runtime: RuntimeView, name: HFName) -> bool:
    """Whether an MTP tensor carries a prefix that its family does not have."""
    return _NESTED_MTP.match(name) is not None and not runtime.is_mtp_name(name)


def _unknown(runtime: RuntimeView, name: HFName, alike: dict[str, Objection]) -> Objection:
    """Names that differ in numbers alone share an objection: they may be hundreds of thousands."""
    if _is_nested(runtime, name):
        says = (
            "carries the vision-language model's prefix, which the draft's loader does not strip: "
            "vLLM raises 'There is no module or parameter named language_model', or skips the block"
        )
        stem = runtime.view.mtp_stem(0).partition("layers.")[0]
        return objection(
            "mtp-prefix", name, says, f"Rename it to start with {stem or 'mtp.'}", "nested"
        )
    severity = "warning"
    cause = _DIGITS.sub("*", name)
    at = runtime.block_at
    effect = "vLLM raises on it unless the model's loader skips unknown names"
    if runtime.is_mtp_name(name):
        severity, cause = "error", f"MTP {cause}"
        effect = "the draft's loader raises KeyError or ValueError on names it does not know"
    elif at is not None and name.startswith(runtime.view.disk_stem("backbone", at)):
        cause = "counted as a decoder layer"
    if cause not in alike:
        cure = "Rename it to the original release's name, or remove it"
        says = f"has no place in this family: {effect}"
        alike[cause] = objection("unknown-tensor", name, says, cure, cause, severity)
    return alike[cause]


def aliases_are_present(runtime: RuntimeView) -> Objections:
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
                says = f"is missing: {alias.reason}; later ones take the target's instead"
                cure = f"Add a copy of {alias.source}, or require vLLM 0.32 or newer"
                yield objection("alias", name, says, cure, f"alias {index}", severity="warning")


def mtp_is_that_of_the_source(runtime: RuntimeView, source: RuntimeView) -> Objections:
    """MTP tensors against the release's: none lost, same shapes, dtypes kept: R13; F24, C3; E4, E8.

    A kept tensor may change its form (FP8 dequantized to BF16, a scale renamed), but never its
    logical shape, and a float32 tensor never its dtype. The writer's own test compares the bytes.
    """
    own = _every_weight(runtime)
    for name, theirs in _every_weight(source).items():
        place = source.placed.get(name)
        if place is None or place.part != "mtp" or place.row.stacked:
            continue
        # The checkpoint may have q, k and v apart where the source has them in one matrix.
        stem = place.module.removesuffix(place.row.path)
        interleaved = place.row.interleaved
        if interleaved and all(HFName(stem + path) in runtime.weights for path in interleaved.into):
            continue
        if name in own:
            yield from _changed(own[name], theirs)
        else:
            says = "is in the source's MTP block and not here: the draft runs without it"
            cure = "Quantize again, or graft the source's MTP block"
            yield objection("source", theirs.weight.name, says, cure, "lost")


def _every_weight(runtime: RuntimeView) -> dict[HFName, StoredWeight]:
    """The weights by module, and each other tensor described as one."""
    found = {}
    for entry in runtime.others:
        found[entry.name] = StoredWeight(
            module=entry.name, form="plain", parts={"": entry}, shape=entry.shape
        )
    return found | dict(runtime.weights)


def _changed(ours: StoredWeight, theirs: StoredWeight) -> Objections:
    """Another logical shape, or another dtype of a plain tensor.

    The shape of packed integers takes bits and group from the config.
    """
    name = ours.weight.name
    dtypes = (ours.weight.dtype, theirs.weight.dtype)
    are_known = True
    for each in (ours, theirs):
        are_known &= each.form != "unknown" and (each.form != "int_packed" or bool(each.scheme))
    if are_known and ours.shape != theirs.shape:
        says = f"has the logical shape {list(ours.shape)}, in the source {list(theirs.shape)}"
        yield objection("source", name, says, "Quantize again", "shape")
    elif ours.form == theirs.form == "plain" and dtypes[0] != dtypes[1]:
        effect = "digits are lost that the draft was trained with"
        if {*dtypes} <= {*FLOATS} and FLOATS.index(dtypes[0]) > FLOATS.index(dtypes[1]):
            effect = "twice the size for the same numbers"
        says = f"is {dtypes[0]}, in the source {dtypes[1]}: {effect}"
        cure = "Keep the source's dtype"
        yield objection("source", name, says, cure, " ".join(dtypes), severity="warning")


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
