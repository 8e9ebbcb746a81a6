"""The names under which it asks the quantization config, model by model.

In: a family's view of one config.json, and a module's place in it. Out: the names under which
SGLang constructs the module in its target and in its draft, with a quantization config; and why its
draft cannot be served, if so.

Easy to get wrong: SGLang builds one MTP layer, mostly as `model.decoder`, so its names have no
layer number; a few draft classes build it under the name of a backbone layer. Glue that is a plain
nn.Linear is never asked about. A class that joins an empty prefix with a dot asks for names that
start with a dot.

Source: SGLang 0.5.23, sglang/srt/configs/model_config.py (_config_draft_model) and the file of each
model.
"""

import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

from ...recipes.family import Part, Renames
from ...recipes.family_view import FamilyView, Place
from ...recipes.frozen import Raw
from ...recipes.renamer import Renamer
from ...recipes.yaml_file import load_shipped
from ..dialects.modules import table_paths

Packed = Mapping[str, Sequence[str]]
_NONE: Raw = {}
DECODER = "model.decoder."
SHARED_HEAD = "model.shared_head.head"


class SglangModel(NamedTuple):
    """How SGLang names the modules of one architecture.

    Attributes:
        file: SGLang's file of the draft, or of the target where it has no draft, under sglang/srt.
        layers: prefix of a decoder layer, `{i}` its index; "" where SGLang has no class for the
            model.
        draft: prefix of the MTP layer that it builds: `{i}` its index on disk; None where it has no
            draft class.
        renames: path in the family's table -> path in SGLang, for the first parts of a path; the
            first that fits.
        draft_renames: the same for the MTP layer, tried first.
        also: path in the family's table -> further paths in SGLang: of a module that it fuses with
            more than vLLM does.
        glue: modules of the MTP layer or block that join it to the target -> SGLang's full name.
            Those that are not here are plain nn.Linear, about which SGLang never asks.
        head: the target's head.
        draft_head: the draft's.
        unasked: paths, in SGLang's names, that it constructs without a quantization config.
        plain_draft: it constructs the MTP layer without a quantization config.
        plain_under: its names of quantization methods under which it does so.
        plain_in_fp4: modules by vLLM's path that it constructs so where all is NVFP4 in modelopt's
            dialect.
        no_draft: why it has no draft for the model.
        own_config: its classes read a quantization config of their own form alone.
        packed: what the target's class says of its fused modules: last part of the name -> those of
            its parts.
        draft_packed: the same of the draft's class; None where it says the same.
        entry_renames: how the target's class rewrites entries: a part of a name -> another, `{n}`
            the number of decoder layers; after `^` it must be the start. Each that fits is
            replaced, once: the longest stand first.
        draft_entry_renames: the same for the draft's class.
        renames_under: quantization methods under which the draft's class rewrites entries; () for
            any.
        excluded_by: how Quark's list leaves the whole block alone: by "experts" of it, by the
            "block", or "".
        asserts_one_layer: its loader asserts that there is one MTP layer.
        other_linear_attention: it is fused with more than vLLM fuses, or has another name in some
            layers.
        remade: path in the family's table -> the form on disk that a loader of its own makes over.
        plain_where_disabled: the word in config.json's disable_quant_module by which it constructs
            the MTP layer without a quantization config.
    """

    file: str
    layers: str = "model.layers.{i}."
    draft: str | None = DECODER
    renames: Mapping[str, str] = _NONE
    draft_renames: Mapping[str, str] = _NONE
    also: Mapping[str, tuple[str, ...]] = _NONE
    glue: Mapping[str, str] = _NONE
    head: str = "lm_head"
    draft_head: str = SHARED_HEAD
    unasked: tuple[str, ...] = ()
    plain_draft: bool = False
    plain_under: tuple[str, ...] = ()
    plain_in_fp4: tuple[str, ...] = ()
    no_draft: str = ""
    own_config: bool = False
    packed: Packed = _NONE
    draft_packed: Packed | None = None
    entry_renames: Mapping[str, str] = _NONE
    draft_entry_renames: Mapping[str, str] = _NONE
    renames_under: tuple[str, ...] = ()
    excluded_by: str = ""
    asserts_one_layer: bool = False
    other_linear_attention: bool = False
    remade: Mapping[str, str] = _NONE
    plain_where_disabled: str = ""


_UNKNOWN = SglangModel(
    file="models", layers="", draft=None, no_draft="it has no class for the model"
)
_EXPERT = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}


@cache
def sglang_models() -> Mapping[str, SglangModel]:
    """The table, by the first architecture of config.json."""
    rows = load_shipped(Path(__file__).with_suffix(".yaml"))
    return {architecture: SglangModel(**row) for architecture, row in rows.items()}


def sglang_model(config: Raw) -> SglangModel:
    """The names of the model of this config.json; one without classes where SGLang does not know
    the architecture.
    """
    model = sglang_models().get((config.get("architectures") or [""])[0], _UNKNOWN)
    if config.get("dspark_target_layer_ids"):
        why = "keepmtp does not compare the names of its DSpark stages"
        return model._replace(draft=None, no_draft=why, file="models/deepseek_v4_dspark.py")
    return model


def entry_renames(view: FamilyView, part: Part, method: str) -> Renamer:
    """How the class of a part rewrites the entries of a quantization config, by its
    `quant_method`.
    """
    model = sglang_model(view.config)
    renames = model.entry_renames
    if part == "mtp":
        renames = model.draft_entry_renames
        if model.renames_under and method not in model.renames_under:
            return Renamer()
    if not renames:
        return Renamer()
    substrings: dict[str, str] = {}
    prefixes: dict[str, str] = {}
    for written, new in renames.items():
        old = written.replace("{n}", str(view.num_layers))
        if old.startswith("^"):
            prefixes[old[1:]] = new
        else:
            substrings[old] = new
    return Renamer(renames=Renames(substrings=substrings, prefixes=prefixes), of_regexes=True)


def sglang_stem(view: FamilyView, part: Part, layer: int) -> str | None:
    """SGLang's prefix of the block with index `layer` on disk; None where it builds none for it."""
    model = sglang_model(view.config)
    if part == "mtp":
        is_further = layer > view.first_mtp_index
        if model.draft is None or (is_further and "{i}" not in model.draft):
            return None
        return model.draft.replace("{i}", str(layer))
    return model.layers.replace("{i}", str(layer)) or None


def sglang_spelling(view: FamilyView, place: Place) -> tuple[str, tuple[str, ...]]:
    """SGLang's prefix of the module's block, "" outside blocks, and its spellings below it; ()
    where it never asks.

    The spellings are the module's shards, the fused module, and projections of routed experts,
    `{e}` their index.
    """
    model = sglang_model(view.config)
    if place.role == "head":
        heads = {"backbone": model.head, "mtp": model.draft_head}
        return "", tuple(filter(None, (heads[place.part],)))
    if name := model.glue.get(place.row.path):
        return "", (name.replace("{i}", str(place.layer)),)
    is_plain_glue = place.role == "glue" and place.row in view.family.mtp_block
    if place.layer is None or place.role in ("router", "embedding", "table") or is_plain_glue:
        return "", ()
    if place.part == "mtp" and model.plain_draft:
        return "", ()
    stem = sglang_stem(view, place.part, place.layer)
    if stem is None:
        return "", ()
    spelled: list[str] = []
    for path in table_paths(view, place):
        path = _renamed(model, place.part, path)
        # A routed expert's projection has the name that SGLang asks for, whatever the disk says.
        outer, dot, leaf = path.rpartition(".")
        if outer.endswith("experts.{e}"):
            path = outer + dot + _EXPERT.get(leaf, leaf)
        spelled.append(path)
    spelled += model.also.get(place.row.path, ())
    return stem, tuple(path for path in dict.fromkeys(spelled) if path not in model.unasked)


def sglang_module(view: FamilyView, place: Place) -> str:
    """The prefix of the module that SGLang constructs, fused where its parts share one; "" where it
    never asks.
    """
    stem, paths = sglang_spelling(view, place)
    if not paths:
        return ""
    if place.role == "experts":
        return container(stem + paths[0].replace("{e}", "0"))
    path = place.row.path
    if place.shares:
        path = place.runtime.removeprefix(view.runtime_stem(place.part, place.layer or 0))
    named = _renamed(sglang_model(view.config), place.part, path)
    return stem + (named if named in paths else paths[0])


def container(name: str) -> str:
    """The name of the module that holds all routed experts, for a projection of expert 0; any other
    name as it is.
    """
    return re.sub(r"(experts)\.0\.(?:gate|up|down)_proj$", r"\1", name)


def _renamed(model: SglangModel, part: Part, path: str) -> str:
    """A path of the family's table in SGLang."""
    renames = [*model.renames.items()]
    if part == "mtp":
        renames = [*model.draft_renames.items(), *renames]
    for ours, theirs in renames:
        if path == ours or path.startswith(f"{ours}."):
            return (theirs + path[len(ours) :]).lstrip(".")
    return path
