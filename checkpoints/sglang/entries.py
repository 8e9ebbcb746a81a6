"""The entries that a quantization config needs for SGLang, or why no entry can help.

In: a family's view, the named modules of a checkpoint, and its config as vLLM needs it. Out: the
config with entries for the names that SGLang alone asks about; or the config as it was, and
obstacles, half a sentence each with SGLang's file: why SGLang cannot serve the checkpoint with its
MTP block.

Easy to get wrong: both servers read the same lists. What is added is read as SGLang reads it, and
must give each module its scheme.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

from ...recipes.conventions import ALGORITHMS, FORMATS
from ...recipes.family_view import FamilyView
from ...recipes.frozen import Json
from ..dialects.compressed_tensors import CompressedTensors, compressed_tensors_config
from ..dialects.modelopt import ModelOpt, layer_row
from ..dialects.modules import NamedModule, Spellings, concrete, path_regex, without_number
from .names import container, sglang_model, sglang_spelling, sglang_stem
from .reading import is_excluded
from .view import SglangBuild

_FILE = "layers/quantization/modelopt_quant.py"
AskedFor = list[tuple[str, NamedModule]]
"""A name that SGLang asks for, and the module that it is of, spelled so."""


def with_entries(
    view: FamilyView, modules: Sequence[NamedModule], config: Json, *, stays: bool = False
) -> tuple[Json, tuple[str, ...]]:
    """The config with what SGLang asks about, and what stands against it; then the config is as it
    was.

    Args:
        view: the family's names.
        modules: what the config speaks of.
        config: the quantization config as vLLM needs it.
        stays: nothing is added to it.
    """
    model = sglang_model(view.config)
    known = [module for module in modules if module.place.is_known]
    method = config.get("quant_method")  # which hf_quant_config.json lacks
    if stays and (method not in FORMATS or model.own_config):
        return config, ("of this config it is not known before it is written: see `keepmtp check`",)
    if method == "fp8":
        return config, ()
    if model.own_config:
        why = f"its classes read a quantization config of their own form alone ({model.file})"
        return config, (why,)
    if model.draft is None:
        return config, (f"{model.no_draft} ({model.file})",)
    made = config
    obstacles = list[str]()
    if method == "modelopt" and not stays:
        made, obstacles = _modelopt(view, known, config)
    elif not stays:
        added, obstacles = added_names(view, known)
        made = compressed_tensors_config(view, [*modules, *added])
        made["kv_cache_scheme"] = config["kv_cache_scheme"]
    obstacles += _misbuilt(SglangBuild(view, made), known)
    if obstacles:
        return config, tuple(dict.fromkeys(obstacles))
    return made, ()


def added_names(
    view: FamilyView, known: Sequence[NamedModule]
) -> tuple[list[NamedModule], list[str]]:
    """The modules by the names that only SGLang asks compressed-tensors' config about; and names
    that it asks for modules of two schemes.
    """
    model = sglang_model(view.config)
    a_layer = re.escape(model.layers).replace(r"\{i\}", r"\d+")
    has_layers = any(module.place.part == "backbone" for module in known)
    # Such a draft gets that layer's scheme: an entry for it would change what vLLM reads.
    if not has_layers and re.fullmatch(a_layer, model.draft or ""):
        return [], [f"it gives the MTP layer the names of a decoder layer ({model.file})"]
    asked, obstacles = _asked(view, known)
    spelled_by_vllm = {name for module in known for name in concrete(module.spelled)}
    # A plain draft needs entries as much as a quantized one: SGLang raises for a module that no
    # entry names.
    added = list[NamedModule]()
    for name, module in asked:
        if name not in spelled_by_vllm:
            added.append(module)
    return added, obstacles


def _modelopt(view: FamilyView, known: list[NamedModule], config: Json) -> tuple[Json, list[str]]:
    model = sglang_model(view.config)
    quantized = list[NamedModule]()
    has_head = False  # a quantized one
    for module in known:
        if module.scheme:
            quantized.append(module)
            has_head |= module.place.role == "head"
    asked = known
    # Under one NVFP4 algorithm most of its drafts are plain whatever the config says, and need no
    # entry but for the draft's head.
    if SglangBuild(view, config).why_plain:
        asked = [module for module in known if module.place.part != "mtp"]
    names, obstacles = _asked(view, asked, container)
    ignore = config["ignore"]
    made = dict(config)
    wanted = [name for name, module in names if not module.scheme]
    if not has_head:
        wanted += (model.head, model.draft_head)
    plain_names = list[str]()
    for name in wanted:
        if name and not is_excluded(name, ignore):
            plain_names.append(name)
    entries = [*dict.fromkeys(_as_entries(view, asked, plain_names))]
    obstacles += _harm_of(entries, quantized)
    made["ignore"] = [*ignore, *entries]
    if "quantized_layers" in config:
        rows = dict(config["quantized_layers"])
        for name, module in names:
            if module.scheme and name not in rows:
                rows[name] = layer_row(ALGORITHMS[module.scheme])
                # To vLLM a row that begins with a dot is of a module below the one with an empty
                # prefix (modelopt.py: ModelOptMixedPrecisionConfig._resolve_quant_algo).
                if name.startswith("."):
                    obstacles.append(
                        f"it asks for {name}, and vLLM would quantize its draft's head by such a "
                        f"row ({_FILE})"
                    )
        made["quantized_layers"] = rows
    return made, obstacles


def _asked(
    view: FamilyView, modules: Sequence[NamedModule], rename: Callable[[str], str] = str
) -> tuple[AskedFor, list[str]]:
    """The names that SGLang asks for; and those that it asks for modules of two schemes.

    `rename` turns a name into that of the module that holds it, where the dialect asks so.
    """
    file = sglang_model(view.config).file
    owner = dict[str, NamedModule]()
    for module in modules:
        owner |= dict.fromkeys(concrete(module.spelled), module)
    asked = AskedFor()
    clashes = list[str]()
    for module in modules:
        place = module.place
        stem, paths = sglang_spelling(view, place)
        layer = None
        cut = re.escape(stem)
        if place.layer is not None and str(place.layer) in stem:
            layer = place.layer
            cut = without_number(stem, place.layer)
        for path in paths:
            spelled = Spellings((cut,), layer, (path_regex(path),))
            name = rename(next(concrete(spelled)))
            other = owner.setdefault(name, module)
            if other.scheme == module.scheme:
                asked.append((name, replace(module, spelled=spelled)))
                continue
            first = f"{place.module} ({module.scheme or 'plain'})"
            second = f"{other.place.module} ({other.scheme or 'plain'})"
            clashes.append(f"it asks for {name} for both {first} and {second} ({file})")
    return asked, clashes


def _misbuilt(build: SglangBuild, known: Iterable[NamedModule]) -> Iterator[str]:
    """Modules that SGLang does not build in their schemes: the first for each reason."""
    said = set[tuple[str, str]]()
    for module in known:
        place = module.place
        if not build.is_judged(place) and place.role != "embedding":
            continue
        _, answer = build.resolve(place)
        reader = build.readers[place.part].vllm
        why = ""
        if answer.error:
            why = f"fails ({answer.error}) as it builds"
        elif build.unsplit(place.module, answer.built, place.part):
            why = "cannot split after loading"
        elif "weight_scale_inv" in answer.built.leaves and place.role != "experts":
            why = "reads from weight_scale_inv alone the scales of"
        elif (
            not isinstance(reader, CompressedTensors | ModelOpt)
            or reader.scheme_of(answer) != module.scheme
        ):
            why = f"builds {answer.built.form} weights for"
        if why and (why, module.scheme) not in said:
            said.add((why, module.scheme))
            scheme = module.scheme or "BF16"
            yield f"it {why} {place.module}, which is in {scheme} ({build.model.file})"


def _harm_of(entries: Iterable[str], quantized: Iterable[NamedModule]) -> Iterator[str]:
    """Entries for SGLang's draft that would exclude a quantized module in vLLM."""
    # A draft that SGLang builds without a prefix asks for `self_attn.qkv_proj`, which to vLLM is a
    # part of the names of every layer.
    names = list[str]()
    for module in quantized:
        names += concrete(module.spelled)
    for entry in entries:
        for name in names:
            if entry.removesuffix("*") in name:
                yield f"an entry {entry} for its draft would exclude {name} in vLLM"
                break


def _as_entries(
    view: FamilyView, asked: Iterable[NamedModule], plain_names: Sequence[str]
) -> Iterator[str]:
    """The entries for plain names: a draft that is plain as a whole is one glob."""
    stems = set[str]()
    is_draft_plain = True
    for module in asked:
        place = module.place
        if place.part == "mtp" and place.layer is not None:
            stems.add(sglang_stem(view, "mtp", place.layer) or "")
            is_draft_plain &= not module.scheme
    globs = list[str]()
    for stem in sorted(filter(None, stems)):
        is_own = not re.match(r"model\.layers\.\d", stem)
        if is_draft_plain and is_own and any(name.startswith(stem) for name in plain_names):
            globs.append(stem)
            yield f"{stem}*"
    for name in plain_names:
        if not name.startswith(tuple(globs)):
            yield name
