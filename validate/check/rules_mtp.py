"""Rules on the MTP block: config.json promises it, it is there, it is whole, and the draft's loader
finds it.

In: a `RuntimeView`, and that of the release where it is given. Out: objections. Each rule names its
sources by their numbers in docs/tables/failures.md.

Easy to get wrong: what a block needs. There is no list of modules for each family here. A rule
compares an MTP layer with the decoder layers of the same checkpoint: its mixer and its feed-forward
part must each have all that some decoder layer has.
"""

import re
from collections import defaultdict
from collections.abc import Mapping
from itertools import chain

from ...checkpoints.companions import INDEX
from ...checkpoints.dialects.choose import UNQUANTIZED
from ...checkpoints.dialects.fp8 import Fp8
from ...checkpoints.dialects.runtime_view import RuntimeView, StoredView
from ...checkpoints.stored import (
    OTHER_LEAVES,
    SCALE_LEAVES,
    TRANSPOSED_LEAVES,
    WEIGHT_LEAVES,
    StoredWeight,
)
from ...recipes.errors import counted
from ...recipes.family import HFName, Part, Row
from ...recipes.family_view import FamilyView
from ...recipes.forms import FLOATS
from ..facts.findings import Objection, Objections, objection
from .rules_kv import is_kv_scale

ALONE = "draft-alone"
_NUM_EXPERTS_KEYS = ("n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts")
_NUM_STAGE_EXPERTS_KEYS = ("dspark_n_routed_experts", *_NUM_EXPERTS_KEYS)  # of DSpark's stages
_NESTED_MTP = re.compile(r"^(?:model\.)?language_model\.(?:model\.)?mtp\.|^model\.mtp\.")
_RECOMPUTED = re.compile(r"rotary_(?:pos_)?emb\.(?:inv_freq|cos_cached|sin_cached)$")
_DIGITS = re.compile(r"[0-9]+")
_FFN_ROLES = ("dense_mlp", "experts", "shared_experts", "router")
_ENDS = ("embedding", "norm", "state")
_WHOLE_ROLES = ("dense_mlp", "shared_experts")
_OTHERS = "others"
_HALVES = ("mixer", "ffn", _OTHERS)
_PARTLY = (".compressor", ".indexer")
_MOST_LAYERS = 1000
_OF_WEIGHTS = {*SCALE_LEAVES, *TRANSPOSED_LEAVES}
_AGAIN = "Quantize the checkpoint again"
_NO_LAYER = "num_hidden_layers={} promises this layer, but no file has a tensor of it"
BLOCK_AGAIN = "Put the release's block in"
_DOWNLOAD = "Download or quantize the checkpoint again"


def promised_layers_exist(runtime: RuntimeView) -> Objections:
    """config.json's count of MTP layers and the tensors agree: R1; F1-F6, F8-F10; C1; M4, M7,
    M9.
    """
    view = runtime.view
    promised = runtime.promised
    key = view.mtp_count_key
    where = f"config.json: {key}"
    effect = "quantized, vLLM loads this without a word and drafts from uninitialised memory"
    if runtime.loader.refuses_missing_mtp:
        effect = "vLLM raises 'MTP speculative decoding layer ... weights missing from checkpoint'"
    # Layers that are there, and that other rules object to.
    elsewhere = view.mtp_layers_of(runtime.source.unindexed)
    if any(_is_nested(runtime, name) for name in runtime.source.entries):
        elsewhere.add(0)
    for index in sorted({*range(promised)} - runtime.found - elsewhere):
        place = f"{view.mtp_stem(index)}*"
        cure = way_to_a_block(runtime)
        cured_by = "block"
        at = runtime.block_at
        if at is not None:
            place = f"{view.disk_stem('backbone', at)}*"
            cured_by = "edit"
            cure = (
                f"Set {view.family.num_layers_key} to {at}: layer {at} has the modules of an MTP "
                "layer, and is counted as a decoder layer"
            )
        elif view.is_number_wrong(runtime.found):
            cured_by = "edit"
            count = len(runtime.found) // view.num_mtp_parts
            cure = f"Set {key} to {count}, or put the release's whole block in"
            if 0 not in runtime.found:
                cure = f"Rename {view.mtp_stem(min(runtime.found) + index)}* to {place}"
        yield objection(
            "mtp-missing",
            place,
            f"{key}={promised} promises MTP layer {index}, but no file has a tensor of it: "
            f"{effect}",
            cure,
            cured_by=cured_by,
        )
    extra = [index for index in runtime.found if index >= promised]
    first = f"{view.mtp_stem(min(extra, default=0))}*"
    if extra and promised:
        effect = "the draft's loader meets a name it does not know and raises"
        if view.layout.mtp is None:
            layers = f"num_hidden_layers={view.num_layers}"
            effect = f"with {layers} the target model itself fails to load it"
        yield objection(
            "mtp-not-promised",
            first,
            f"exists beyond {key}={promised}: {effect}",
            f"Correct {key}, or num_hidden_layers, to what the files hold",
        )
    elif extra:
        says = f"is missing, but {first} exists: with method=mtp vLLM raises "
        error = runtime.loader.missing_count
        if {*view.text_config, *view.config}.intersection(view.family.mtp_count_keys):
            says = says.replace("missing", "0", 1)
            error = "ZeroDivisionError"
        yield objection("mtp-not-promised", where, says + error, f"Set {key} to {len(extra)}")
    elif not promised:
        says = "no MTP block is promised and none is there: method=mtp has nothing to draft with"
        yield objection("mtp-missing", where, says, way_to_a_block(runtime))


def way_to_a_block(runtime: RuntimeView) -> str:
    """What brings a block back."""
    # A release cannot give what it has not.
    if runtime.dialect is UNQUANTIZED and not runtime.mtp_names:
        return (
            "If this is the original release, it has none, and `keepmtp quantize` needs "
            "--mtp-source with the place of "
            "a block that is published apart; else put the release's in"
        )
    return BLOCK_AGAIN


def files_are_indexed(view: StoredView) -> Objections:
    """Files that the index does not list are not read: R6; F4, F9. Without one vLLM reads all."""
    if not view.source.has_index:
        count = len({entry.file for entry in view.source.entries.values()})
        says = f"is missing: vLLM reads all {count} files, transformers finds none of them"
        yield objection("unindexed", INDEX, says, "Write it", "index", "warning")
    for entry in view.source.unindexed.values():
        says = (
            f"lies in {entry.file}, which model.safetensors.index.json does not list: vLLM "
            "does not read it"
        )
        cure = f"Add the tensors of {entry.file} to the index"
        if view.is_mtp_name(entry.name):
            says += ", so the draft is missing"
            yield objection("unindexed", entry.name, says, cure, f"MTP {entry.file}")
        else:
            cure += ", or remove the file"
            yield objection(
                "unindexed", entry.name, says, cure, entry.file, "warning", cured_by="none"
            )


def mtp_glue_is_complete(runtime: RuntimeView) -> Objections:
    """Each MTP layer has the modules that join embedding and hidden state, and their norms: R1; F2;
    M1.
    """
    layers = sorted(runtime.found.intersection(range(runtime.promised)))
    cured_by = "block"
    if max(runtime.found, default=0) > max(layers, default=0):
        cured_by = "edit"  # of the number of layers, by which another one is the block
    for name in runtime.view.required_mtp_modules(layers):
        if name not in runtime.placed:
            yield objection(
                "mtp-incomplete",
                name,
                "the MTP block cannot work without it, and it is in no indexed file: vLLM leaves "
                "it uninitialised in silence, the draft guesses",
                way_to_a_block(runtime),
                name,
                cured_by=cured_by,
            )


def layers_are_complete(runtime: RuntimeView) -> Objections:
    """Every layer has what other layers of its kind have: projections, norms, router: R1; E2, E7,
    E8; M1, M2, M8.
    """
    view = runtime.view
    layers = _layers(runtime)
    family = view.family
    rows = (*family.block, *family.linear_block, *family.mtp_block)
    # Parameters without a module: where no layer has one, a state is.
    bare = {row.path for row in rows if row.role == "state"}
    bare.update(f"{row.path}.bias" for row in rows)
    for place in runtime.placed.values():
        if place.leaf in OTHER_LEAVES:
            bare.add(f"{place.row.path}.{place.leaf}".rstrip("."))
        elif place.leaf == "weight":
            bare.discard(place.row.path)
    held = {index for part, index in layers if part == "backbone"}
    depth = 1 + max(held, default=-1)
    lost = sorted({*range(view.num_layers)} - held)
    if lost and runtime.is_draft_alone:
        where = f"{view.disk_stem('backbone', 0)}*"
        says = "no file has a decoder layer: it is a draft alone, which is no model to serve"
        yield objection(ALONE, where, says, "Check it as the --draft of its target")
        lost = []
    if runtime.strange_layers:
        lost = []  # `layers_have_known_names` objects
    for index in lost:
        cure = _DOWNLOAD
        if index >= depth:
            whole = counted(depth, "layer")
            cure += f"; if the release has {whole}, set num_hidden_layers to {depth}"
        says = _NO_LAYER.format(view.num_layers)
        yield objection("layer-missing", f"{view.disk_stem('backbone', index)}*", says, cure)
    units = defaultdict[str, set[str]](set)
    for row in rows:
        units[_unit(row)].add(row.path)
    for halves in layers.values():
        for path, unit in halves[_OTHERS].items():
            units[unit].add(path)
    said = defaultdict[tuple[Part, int], set[str]](set)
    for half in _HALVES:
        # The last layers first: an MTP layer that is as like an early one is of their kind.
        held_by = [layers["backbone", index][half].keys() for index in sorted(held, reverse=True)]
        models = dict.fromkeys(frozenset(paths) for paths in held_by if paths)
        drafts = [halves[half].keys() for (part, _), halves in layers.items() if part == "mtp"]
        if half == _OTHERS:
            models.clear()
            drafts.clear()
        for (part, index), halves in layers.items():
            paths = halves[half].keys()
            # Decoder layers of one family differ: one lacks something only if another one has all
            # that it has, and more.
            is_mtp = part == "mtp"
            gaps = [frozenset(model - paths) for model in models if is_mtp or paths < model]
            if not is_mtp:
                gaps += [frozenset(model - paths) for model in drafts if paths and paths < model]
            whole = set[str]().union(*[units[unit] for unit in halves[half].values() if unit])
            if half == _OTHERS and not is_mtp:
                whole |= _needed_by_config(view, index, halves)
            rest = frozenset(whole.difference(*halves.values()))
            if rest:
                gaps.append(rest)
            lacking = min(gaps, key=len, default=frozenset()) - said[part, index]
            said[part, index] |= lacking
            rule = "layer-incomplete"
            cure = _AGAIN
            if part == "mtp":
                rule = "mtp-incomplete"
                cure = way_to_a_block(runtime)
                lacking = lacking.difference(view.family.mtp_lacks)
            for path in sorted(lacking):
                where = view.disk_stem(part, index) + path.replace("{e}", "0")
                if path not in bare:
                    where += ".weight*"
                yield objection(
                    rule,
                    where,
                    "is missing, though such layers have it: quantized, "
                    "vLLM leaves the parameter uninitialised in silence",
                    cure,
                    f"{part} {index} {half}",
                )


def _needed_by_config(
    view: FamilyView, index: int, halves: Mapping[str, Mapping[str, str]]
) -> set[str]:
    """What a decoder layer needs by `Row.where` and `Row.bias`."""
    needed = set[str]()
    held = [*chain(*halves.values())]
    for row in view.family.block:
        parent = row.path.rpartition(".")[0] + "."
        if view.has(row, index) and any(path.startswith(parent) for path in held):
            needed.add(row.path)
        if row.path in held and view.text_config.get(row.bias):
            needed.add(f"{row.path}.bias")
    return needed


def layers_have_what_config_gives(runtime: RuntimeView) -> Objections:
    """No decoder layer has what config.json takes from it: experts in a dense layer, biases, norms,
    a layer after the last.

    vLLM 0.33.0 models/deepseek_v2.py and glm4_moe.py: load_weights.
    """
    for name, place in runtime.placed.items():
        key = runtime.view.unbuilt_by(place)
        if key:
            where = f"config.json: {key}"
            says = f"leaves out {name}, which the files hold: vLLM raises, or does not read it"
            cure = f"Take {key} from the original release's config.json"
            yield objection("config", where, says, cure, key)


def layers_have_known_names(runtime: RuntimeView) -> Objections:
    """The decoder layers have the names that the class of config.json gives them."""
    stem = runtime.strange_layers
    if not stem:
        return
    known = runtime.view.layout.layers.disk.partition("{i}")[0]
    says = f"no file has a {known}*, where vLLM looks for decoder layers: they are {stem}.*"
    where = f"{stem}.*"
    cure = f"Rename them to {known}*, as in the release"
    if runtime.fitting_class:
        where = "config.json: architectures"
        cure = f'Set it to ["{runtime.fitting_class}"], whose layers have these names'
    yield objection("names", where, says, cure)


def _unit(row: Row) -> str:
    """What a layer has all of, or nothing; "" for a module of which that is not known."""
    stem = row.path.rpartition(".")[0]
    if row.unit or not row.in_every_layer:
        return row.unit
    if row.role in _WHOLE_ROLES and not row.stacked:
        return f"{stem} {row.role}"
    if stem.endswith(_PARTLY):
        return stem
    return ""


def ends_are_complete(runtime: RuntimeView) -> Objections:
    """The embedding, the final norm and the head are there: E8."""
    view = runtime.view
    if runtime.is_draft_alone or runtime.strange_layers:
        return  # another rule says that
    for row in view.layout.top:
        is_needed = row.role in _ENDS or (row.role == "head" and not view.is_tied)
        if is_needed and row.in_every_layer and row.path not in runtime.placed:
            yield objection(
                "layer-incomplete",
                row.path,
                "is missing: vLLM raises, or leaves it uninitialised in silence",
                _DOWNLOAD,
                row.path,
            )


def counted_layers_are_there(view: StoredView) -> Objections:
    """The layers that config.json counts have tensors; without a family."""
    count = view.source.text_config.get("num_hidden_layers")
    stem, held = view.decoder_layers
    if held and type(count) is int:
        for number in range(min(count, _MOST_LAYERS)):
            if number not in held:
                says = _NO_LAYER.format(count)
                yield objection("layer-missing", f"{stem}.{number}.*", says, _DOWNLOAD, "layer")


def _layers(runtime: RuntimeView) -> dict[tuple[Part, int], dict[str, dict[str, str]]]:
    """The parts of each layer's mixer, of its feed-forward part, and of what only some layers have,
    in any stored form; each with the unit that it is of.
    """
    family = runtime.view.family
    only_mtp = {row.path for row in family.mtp_block} - {row.path for row in family.block}
    # A layer that has one half has the others, with nothing in it.
    layers = defaultdict[tuple[Part, int], dict[str, dict[str, str]]](
        lambda: {half: {} for half in _HALVES}
    )
    for place in runtime.placed.values():
        row = place.row
        if place.layer is None or (place.part == "mtp" and row.path in only_mtp):
            continue
        half = _HALVES[place.role in _FFN_ROLES and not family.one_mixer]
        # Within one family some layers have a compressor or an indexer, and others have none.
        if not row.in_every_layer or row.path.rpartition(".")[0].endswith(_PARTLY):
            half = _OTHERS
        parts = layers[place.part, place.layer][half]
        if row.stacked:
            parts.update(dict.fromkeys(row.unstacked, ""))
        elif place.leaf in ("", *WEIGHT_LEAVES):
            parts[row.path] = _unit(row)
        elif place.leaf in OTHER_LEAVES:
            parts[f"{row.path}.{place.leaf}"] = _unit(row) if half == _OTHERS else ""
    return layers


def experts_are_complete(runtime: RuntimeView) -> Objections:
    """Routed experts 0 to n-1 have all projections, in the backbone and in the MTP layer: E2;
    M1.
    """
    text = runtime.view.text_config
    cure = f"{_AGAIN}: shards of some experts were lost"
    for module in runtime.modules:
        keys = _NUM_STAGE_EXPERTS_KEYS if module.part == "mtp" else _NUM_EXPERTS_KEYS
        # A stage without a count of its own, or with none, has as many as the backbone.
        counts = [text.get(key) for key in keys]
        expected = next((count for count in counts if isinstance(count, int) and count), 0)
        if not expected:
            continue
        all_of_them = counted(expected, "expert")
        lost = f"is missing from {all_of_them}: vLLM leaves it uninitialised in silence"
        more = f"exists, but config.json counts {all_of_them}: vLLM raises"
        numbers = {*range(expected)}
        held: dict[str, set[int]] = defaultdict(set)
        for place, weight in module.members:
            if place.row.stacked:
                # A stacked tensor without elements may say that it has a milliard experts: of those
                # beyond, the first is enough.
                num_experts = min([*weight.shape[:1], expected + 1])
                held[place.row.path].update(range(num_experts))
            elif place.role == "experts" and place.expert is not None:
                held[place.row.path].add(place.expert)
        stem = runtime.view.disk_stem(module.part, module.layer or 0)
        for path, experts in held.items():
            for wrong, says in ((numbers - experts, lost), (experts - numbers, more)):
                if wrong:
                    where = stem + path.replace("{e}", str(min(wrong)))
                    cause = f"{module.part} {module.layer} {says}"
                    yield objection("experts", where, says, cure, cause, times=len(wrong))


def scales_have_weights(view: StoredView) -> Objections:
    """A scale belongs to a weight."""
    for name in [entry.name for entry in view.others]:
        leaf = view.leaf_of(name)
        if "." in name and leaf in _OF_WEIGHTS:
            yield objection(
                "unknown-tensor",
                name,
                "is a scale without a weight beside it: vLLM raises, or drops it and leaves "
                "the weight uninitialised",
                f"{_AGAIN}, or take the weight from where it is from",
                f"orphan {leaf}",
            )


def names_are_known(runtime: RuntimeView) -> Objections:
    """Every tensor has a parameter to go to: R7, R11, R12; F7, F37; E7, E9; M5, M9."""
    if runtime.strange_layers:
        return  # then nearly none has
    known = runtime.loader.mtp_leaves
    for key, weight in runtime.weights.items():
        place = runtime.placed.get(key)
        name = weight.weight.name
        # A place whose leaf is another belongs to a parameter that has no weight.
        if _is_nested(runtime, name) or place is None or place.leaf != "weight":
            yield _unknown(runtime, name)
            continue
        others = [leaf for leaf in weight.parts if leaf not in known]
        if known and others and place.part == "mtp":
            yield objection(
                "unknown-tensor",
                f"{key}.{others[0]}",
                "is not among the names that this draft's loader renames "
                f"({', '.join(known)}): vLLM raises KeyError",
                "Leave the MTP block plain",
                "mtp leaf",
            )
    for name in [entry.name for entry in runtime.others]:
        leaf = runtime.leaf_of(name)
        place = runtime.placed.get(name)
        is_known = place is not None and (place.role == "vision" or leaf in OTHER_LEAVES)
        # Other rules judge those, or vLLM computes it.
        is_known |= leaf in _OF_WEIGHTS or is_kv_scale(name) or bool(_RECOMPUTED.search(name))
        if not is_known or _is_nested(runtime, name):
            yield _unknown(runtime, name)


def _is_nested(runtime: RuntimeView, name: HFName) -> bool:
    """Whether an MTP tensor carries a prefix that its family does not have."""
    return _NESTED_MTP.match(name) is not None and not runtime.is_mtp_name(name)


def _unknown(runtime: RuntimeView, name: HFName) -> Objection:
    """A tensor without a place; names that differ in numbers alone have one cause."""
    if _is_nested(runtime, name):
        stem = runtime.view.mtp_stem(0).partition("layers.")[0]
        return objection(
            "mtp-prefix",
            name,
            "carries the vision-language model's prefix, which the draft's loader does not strip: "
            "vLLM raises 'There is no module or parameter named language_model', or skips the "
            "block",
            f"Rename it to start with {stem or 'mtp.'}",
            "nested",
        )
    severity = "warning"
    cured_by = "none"
    cause = _DIGITS.sub("*", name)
    at = runtime.block_at
    effect = "vLLM raises on it unless the model's loader skips unknown names"
    if runtime.is_mtp_name(name):
        severity = "error"
        cured_by = "quantize"
        cause = f"MTP {cause}"
        effect = "the draft's loader raises KeyError or ValueError on names it does not know"
    elif at is not None and name.startswith(runtime.view.disk_stem("backbone", at)):
        cured_by = "edit"
        cause = "counted as a decoder layer"
    cure = "Rename it to the original release's name, or remove it"
    says = f"has no place in this family: {effect}"
    return objection("unknown-tensor", name, says, cure, cause, severity, cured_by=cured_by)


def aliases_are_present(runtime: RuntimeView) -> Objections:
    """Copies that older vLLM reads the draft's embedding and head from: R10; E10 (vllm #43456,
    #43459); M14.
    """
    # The original releases have no such copies either, and vLLM serves them.
    if isinstance(runtime.dialect, Fp8) or runtime.dialect is UNQUANTIZED:
        return
    for index in sorted(runtime.found):
        for alias in runtime.view.family.aliases:
            name = HFName(runtime.view.mtp_stem(index) + alias.path)
            if name not in runtime.source.entries:
                yield objection(
                    "alias",
                    name,
                    f"is missing: {alias.reason}; later ones take the target's instead",
                    f"Add a copy of {alias.source}, or require vLLM 0.32 or newer",
                    f"alias {index}",
                    "warning",
                )


def mtp_is_that_of_the_source(runtime: RuntimeView, source: RuntimeView) -> Objections:
    """MTP tensors and the release's: none lost, shapes and dtypes kept: R13; F24, C3; E4, E8."""
    # A kept tensor may change its form (FP8 dequantized to BF16, a scale renamed), but never its
    # logical shape, and a float32 tensor never its dtype.
    own = runtime.tensors
    for name, theirs in source.tensors.items():
        place = source.placed.get(name)
        if place is None or place.part != "mtp" or place.row.stacked:
            continue
        # The checkpoint may have q, k and v apart where the source has them in one matrix.
        if place.row.interleaved:
            apart = {HFName(place.stem + path) for path in place.row.interleaved}
            if apart <= runtime.weights.keys():
                continue
        if name not in own:
            says = "is in the source's MTP block and not here: the draft runs without it"
            cure = "Quantize again, or `keepmtp fix PATH --from RELEASE --out NEW`"
            yield objection("source", theirs.weight.name, says, cure, "lost")
            continue
        ours = own[name]
        where = ours.weight.name
        dtypes = (ours.weight.dtype, theirs.weight.dtype)
        if is_shape_known(ours) and is_shape_known(theirs) and ours.shape != theirs.shape:
            says = f"has the logical shape {list(ours.shape)}, in the source {list(theirs.shape)}"
            yield objection("source", where, says, "Quantize again", "shape")
        elif ours.form == theirs.form == "plain" and dtypes[0] != dtypes[1]:
            effect = "digits are lost that the draft was trained with"
            if {*dtypes} <= {*FLOATS} and FLOATS.index(dtypes[0]) > FLOATS.index(dtypes[1]):
                effect = "twice the size for the same numbers"
            says = f"is {dtypes[0]}, in the source {dtypes[1]}: {effect}"
            cure = "Keep the source's dtype"
            yield objection("source", where, says, cure, f"{dtypes}", "warning")


def is_shape_known(weight: StoredWeight) -> bool:
    """Integers without a scheme take their width and group from the config."""
    return weight.form != "unknown" and (weight.form != "int_packed" or bool(weight.scheme))


RULES = (
    promised_layers_exist,
    files_are_indexed,
    mtp_glue_is_complete,
    layers_are_complete,
    layers_have_what_config_gives,
    layers_have_known_names,
    ends_are_complete,
    experts_are_complete,
    scales_have_weights,
    names_are_known,
    aliases_are_present,
)
