"""Matrices and their schemes -> what a quantization config must say to SGLang 0.5.23 too, and what it cannot say.

In: a family's view and the matrices of a checkpoint, each with its scheme. Out: the spellings that only SGLang asks
about, by scheme; or the obstacles: why SGLang cannot serve the checkpoint with its MTP block, whatever its config says.
Then nothing is added.

Easy to get wrong: SGLang raises for a module of the draft that neither a target nor an ignore entry names, so a plain
draft needs entries as much as a quantized one. A draft that it builds under the name of a backbone layer gets that
layer's scheme: an entry for it would change what vLLM reads.

Source: SGLang 0.5.23, layers/quantization/compressed_tensors/{compressed_tensors,utils}.py and the files in
recipes/runtimes/sglang.py.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from ...recipes.family_view import FamilyView, Place
from ...recipes.runtimes.sglang import VERSION, SglangModel, sglang_model, sglang_spelling, sglang_stem
from ...recipes.schemes import SCHEMES
from .spelled import Matrix, Spellings, concrete, path_regex, spell

_CONFIG = "layers/quantization/compressed_tensors/compressed_tensors.py"
_WEIGHTS = "models/deepseek_common/deepseek_weight_loader.py"


@dataclass(frozen=True, slots=True, kw_only=True)
class SglangFit:
    """What a quantization config says to SGLang.

    Attributes:
        added: scheme, "" for plain -> spellings that only SGLang asks about; none where there is an obstacle.
        obstacles: half a sentence each, with SGLang's file; () where it resolves every module.
    """

    added: Mapping[str, frozenset[Spellings]]
    obstacles: tuple[str, ...]

    @property
    def line(self) -> str:
        """The verdict in one line, for the plan."""
        for first in self.obstacles[:1]:
            return f"not SGLang {VERSION}: {first}"
        return f"SGLang {VERSION} too"


@dataclass(frozen=True, slots=True)
class SglangMatrix:
    """A matrix, once for all experts."""

    place: Place
    scheme: str
    spelled: Spellings


def fit_sglang(view: FamilyView, matrices: Iterable[Matrix]) -> SglangFit:
    """What compressed-tensors' config of these matrices must add for SGLang, and what stands against it."""
    modules = list(sglang_modules(view, matrices))
    model = sglang_model(view.config)
    if obstacle := no_draft(view):
        return SglangFit(added={}, obstacles=(obstacle,))
    if _borrows_a_layer(model) and not any(module.place.part == "backbone" for module in modules):
        return SglangFit(added={}, obstacles=(f"it gives the MTP layer the names of a decoder layer ({model.file})",))
    added, clashes = added_names(view, modules)
    obstacles = tuple(dict.fromkeys([*clashes, *unnamed(view, model, modules), *_without_kernel(modules)]))
    return SglangFit(added={} if obstacles else added, obstacles=obstacles)


def no_draft(view: FamilyView) -> str:
    """Why SGLang has no draft for the model under any config of ours; "" where it has one."""
    model = sglang_model(view.config)
    if model.own_config:
        return f"its classes read a quantization config of their own form alone ({model.file})"
    return "" if model.draft is not None else f"{model.no_draft} ({model.file})"


def _borrows_a_layer(model: SglangModel) -> bool:
    layer = re.escape(model.layers).replace(r"\{i\}", r"\d+")
    return model.draft is not None and re.fullmatch(layer, model.draft) is not None


def sglang_modules(view: FamilyView, matrices: Iterable[Matrix]) -> Iterator[SglangMatrix]:
    """The matrices that the family's table knows, once for all experts."""
    seen: set[tuple[str, str, int | None, str]] = set()
    for matrix in matrices:
        place = view.place(matrix.name)
        if place is not None:
            key = (place.row.path, place.part, place.layer, matrix.scheme)
            if key not in seen:
                seen.add(key)
                yield SglangMatrix(place, matrix.scheme, spell(view, matrix))


def added_names(view: FamilyView, modules: list[SglangMatrix]) -> tuple[dict[str, frozenset[Spellings]], list[str]]:
    """The spellings to add, by scheme, and that two modules of different schemes would have one name."""
    owner = {name: module for module in modules for name in concrete(module.spelled)}
    added: dict[str, set[Spellings]] = defaultdict(set)
    clashes: list[str] = []
    for module in modules:
        for spelled in _for_sglang(view, module.place):
            name = next(concrete(spelled))
            other = owner.setdefault(name, module)
            if name not in concrete(other.spelled) and other is module:
                added[module.scheme].add(spelled)
            elif other.scheme != module.scheme:
                clashes.append(clash(view, name, module, other))
    return {scheme: frozenset(found) for scheme, found in added.items()}, clashes


def clash(view: FamilyView, name: str, module: SglangMatrix, other: SglangMatrix) -> str:
    """That SGLang has one name for two modules of different schemes."""
    described = [f"{found.place.module} ({found.scheme or 'plain'})" for found in (module, other)]
    return f"it asks for {name} for both {' and '.join(described)} ({sglang_model(view.config).file})"


def _for_sglang(view: FamilyView, place: Place) -> Iterator[Spellings]:
    """One `Spellings` for each of SGLang's names of a module."""
    stem, paths = sglang_spelling(view, place)
    digits = str(place.layer)
    layer = place.layer if digits in stem else None
    cut = re.escape(stem if layer is None else "{}".join(stem.rsplit(digits, 1))).replace(r"\{\}", "{}")
    for path in paths:
        yield Spellings(stems=(cut,), layer=layer, paths=(path_regex(path),))


def unnamed(view: FamilyView, model: SglangModel, modules: list[SglangMatrix]) -> Iterator[str]:
    """Quantized modules that SGLang builds without a quantization config."""
    for module in modules:
        place = module.place
        if not module.scheme or place.role == "head":
            continue
        if place.part == "mtp" and model.plain_draft:
            yield f"it builds the MTP layer plain, and {place.module} is in {module.scheme} ({model.file})"
        elif not sglang_spelling(view, place)[1] and _is_built(view, place):
            yield f"it builds {place.module} plain, and it is in {module.scheme} ({model.file})"


def _is_built(view: FamilyView, place: Place) -> bool:
    return place.layer is None or sglang_stem(view, place.part, place.layer) is not None


def _without_kernel(modules: list[SglangMatrix]) -> Iterator[str]:
    """Schemes that SGLang has no class for, of experts, of linears, or of what it absorbs into attention."""
    schemes = {module.scheme for module in modules if module.scheme}
    for module in modules:
        place, scheme = module.place, module.scheme
        if scheme.startswith("MXFP4"):
            yield f"it has no class for {scheme} in a config of mixed precision ({_CONFIG})"
        elif scheme == "W8A8" and place.role == "experts":
            yield f"it has experts in W8A8 for NPUs only ({_CONFIG})"
        elif _is_packed_integer(scheme) and place.role == "experts" and len(_formats(schemes)) > 1:
            yield f"it takes experts in {scheme} only where all of the checkpoint is pack-quantized ({_CONFIG})"
        elif place.module.endswith(".kv_b_proj") and (scheme == "FP8_BLOCK" or "4" in scheme or scheme == "W8A16"):
            words = "its blocks' size from the target Linear alone" if scheme == "FP8_BLOCK" else "an unpacked weight"
            yield f"it reads {words} for kv_b_proj, which is in {scheme} ({_WEIGHTS})"


def _is_packed_integer(scheme: str) -> bool:
    return scheme.startswith(("W4A16", "W8A16"))


def _formats(schemes: Iterable[str]) -> set[str]:
    return {SCHEMES[scheme].format for scheme in schemes}
