"""Modules and their schemes -> the quantization config in modelopt's dialect, for vLLM and for SGLang.

In: the named modules of a checkpoint. Out: one algorithm, or MIXED_PRECISION with an algorithm for each module, and the
names of what stays plain.

Easy to get wrong: vLLM compares an entry as a whole name, as a substring and as a glob, so `model.layers.1` also
excludes layers 10 to 19, and `mtp.layers.0*` misses `mtp.fc` (vllm #38832). Plain modules are therefore listed by whole
names, and a block that is plain as a whole by one glob that ends in `.*`. The mapper of the target's class rewrites
entries, so a name is written in the spelling that is vLLM's own afterwards; names on disk follow, for other readers.
An entry for SGLang, such as `self_attn.qkv_proj` for a draft that it builds without a prefix, may so exclude every
layer in vLLM. Under one NVFP4 algorithm most of SGLang's drafts are plain whatever the config says, and need no entry.

Source: vLLM 0.32.0 quantization/modelopt.py: ModelOptQuantConfigBase.from_config and is_layer_excluded,
ModelOptMixedPrecisionConfig._resolve_quant_algo; model_loader/weight_utils.py for the producer's name. SGLang 0.5.23,
layers/quantization/modelopt_quant.py (is_layer_excluded, ModelOptMixedPrecisionConfig), layers/quantization/utils.py
(is_layer_skipped) and configs/model_config.py (_parse_modelopt_quant_config).
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ... import __version__
from ...recipes.conventions import ALGORITHMS, MIXED_FOR_EXPERTS
from ...recipes.errors import CheckpointError, RecipeError
from ...recipes.family_view import FamilyView
from ...recipes.renamer import Renamer, renamer
from ...recipes.runtimes.sglang import SglangModel, container, sglang_model, sglang_names, sglang_stem
from .modules import NamedModule, RuntimeModule, concrete, runtime_modules
from .sglang import clash, no_draft, unnamed

_MIXED = "MIXED_PRECISION"
_CONFIG = "layers/quantization/modelopt_quant.py"
_METHODS = "configs/model_config.py"
# Parts of latent attention's projections, which to SGLang name those of every layer.
_PARTS = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj")


def modelopt_config(view: FamilyView, modules: Iterable[NamedModule]) -> tuple[dict[str, Any], list[str]]:
    """The value of config.json's `quantization_config`, and what stands against SGLang.

    Args:
        view: the family's names.
        modules: quantized ones in schemes of `conventions.ALGORITHMS`.

    Raises:
        RecipeError: several algorithms, and vLLM's mapper turns every spelling of a module into another name.
    """
    modules = list(modules)
    fused = runtime_modules(modules)
    schemes = {module.scheme for module in fused if module.scheme}
    is_mixed = (
        len(schemes) > 1
        or view.family.modelopt_by_module
        or any(module.scheme in MIXED_FOR_EXPERTS and not module.members for module in fused)
    )
    names = _Names(view)
    config: dict[str, Any] = {
        "quant_method": "modelopt",
        "quant_algo": _MIXED if is_mixed else ALGORITHMS[next(iter(schemes), "NVFP4")],
    }
    if any(scheme.startswith("NVFP4") for scheme in schemes):
        config["group_size"] = 16
    if is_mixed:
        config["quantized_layers"] = names.quantized_layers(fused)
    config |= {"ignore": names.excluded(fused), "kv_cache_scheme": None, **view.family.config_extras}
    added = entries_for_sglang(view, modules, config)
    return added.onto(config), list(added.obstacles)


def hf_quant_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """hf_quant_config.json, which agrees with a `quantization_config` in modelopt's dialect.

    Readers know the file by its producer's name: vLLM refuses any other.
    """
    inner = {
        "quant_algo": config["quant_algo"],
        "kv_cache_quant_algo": "FP8" if config.get("kv_cache_scheme") else None,
        **{key: config[key] for key in ("group_size", "quantized_layers") if key in config},
        "exclude_modules": config["ignore"],
    }
    return {"producer": {"name": "modelopt", "version": f"keepmtp-{__version__}"}, "quantization": inner}


def _row(scheme: str) -> dict[str, Any]:
    """What MIXED_PRECISION's table says of a module."""
    size = {"group_size": 16} if scheme.startswith("NVFP4") else {}
    return {"quant_algo": ALGORITHMS[scheme], **size}


# --- vLLM's names -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Names:
    """The names of a checkpoint's modules as vLLM's mappers leave them."""

    view: FamilyView

    @cached_property
    def draft_layers(self) -> list[str]:
        """Runtime prefixes of the MTP layers."""
        first = 0 if self.view.layout.mtp else self.view.num_layers
        return [self.view.runtime_stem("mtp", first + index) for index in range(self.view.num_mtp_layers)]

    @cached_property
    def draft_stems(self) -> tuple[str, ...]:
        """Runtime prefixes of the MTP layers and of what is next to them, each with its last dot."""
        return tuple(dict.fromkeys("mtp." if stem.startswith("mtp.") else stem for stem in self.draft_layers))

    @cached_property
    def draft_heads(self) -> list[str]:
        """Heads that the draft builds with the quantization config: placeholders for the target's."""
        rows = [row for row in self.view.family.mtp_block if row.role == "head"]
        own = [stem + (row.runtime or row.path) for stem in self.draft_layers for row in rows]
        return [*own, *filter(None, [self.view.layout.draft_head])]

    @cached_property
    def _mappers(self) -> tuple[Renamer, Renamer]:
        return renamer(self.view.config), renamer(self.view.config, "mtp")

    def mapper(self, name: str) -> Renamer:
        """The mapper that vLLM applies to entries for a module of this name."""
        return self._mappers[name.startswith(self.draft_stems)]

    def written(self, module: RuntimeModule, *, otherwise: str) -> list[str]:
        """A module by vLLM's name, as it must be written, and by its names on disk, where these say something else."""
        mapper = self.mapper(module.name)
        first = mapper.before(module.name, module.asked) or otherwise
        return [first, *(name for name in module.members if mapper.name(name) != module.name and name != first)]

    def surviving(self, entry: str) -> str:
        """How to write an entry of the exclude list, so that it is still itself after the mapper."""
        mapper = self.mapper(entry)
        if entry in mapper.modelopt(entry):
            return entry
        return mapper.before(entry) or f"*{entry}"

    def quantized_layers(self, modules: Iterable[RuntimeModule]) -> dict[str, dict[str, Any]]:
        """MIXED_PRECISION's table, which has whole names and no globs."""
        layers: dict[str, dict[str, Any]] = {}
        for module in modules:
            if not module.scheme:
                continue
            if self.mapper(module.name).before(module.name, module.asked) is None:
                rule = f"one algorithm must be enough for modelopt's config of a {self.view.family.model_type}"
                got = f"several, and vLLM renames every entry that could name {module.name}"
                raise RecipeError("format: modelopt", rule, got=got, cure="Use one scheme, or compressed-tensors")
            layers |= dict.fromkeys(self.written(module, otherwise=""), _row(module.scheme))
        return layers

    def excluded(self, modules: Sequence[RuntimeModule]) -> list[str]:
        """Exactly the plain modules: an MTP block that is plain as a whole by glob, all others by name."""
        stems = self.draft_stems
        quantized = [module.name for module in modules if module.scheme]
        is_draft_plain = not any(name.startswith(stems) for name in quantized)
        entries: list[str] = []
        for module in modules:
            if not module.scheme and not (is_draft_plain and module.name.startswith(stems)):
                entries += self.written(module, otherwise=f"*{module.name}")
        if is_draft_plain:
            entries += [self.surviving(f"{stem}*") for stem in stems]
        for head in self.draft_heads:
            # A substring is enough to exclude a quantized one.
            if not (is_draft_plain and head.startswith(stems)) and not any(head in name for name in quantized):
                entries.append(self.surviving(head))
        entries += [f"{runtime}*" for _, runtime, _ in self.view.layout.opaque]
        if not any("lm_head" in name for name in quantized):
            entries.append("lm_head")
        return list(dict.fromkeys(entries))


# --- SGLang -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class SglangEntries:
    """What a config must say to SGLang too, or what stands against it; then nothing is added.

    Attributes:
        ignore: names and globs of plain modules.
        quantized_layers: rows of MIXED_PRECISION's table.
        obstacles: half a sentence each, with SGLang's file.
    """

    ignore: tuple[str, ...] = ()
    quantized_layers: Mapping[str, Mapping[str, Any]] | None = None
    obstacles: tuple[str, ...] = ()

    def onto(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """The config with what is added."""
        made = {**config, "ignore": [*config["ignore"], *self.ignore]}
        if self.quantized_layers:
            made["quantized_layers"] = {**config["quantized_layers"], **self.quantized_layers}
        return made


def entries_for_sglang(view: FamilyView, modules: Iterable[NamedModule], config: Mapping[str, Any]) -> SglangEntries:
    """What a config in modelopt's dialect must add for SGLang, and what stands against it."""
    if obstacle := no_draft(view):
        return SglangEntries(obstacles=(obstacle,))
    method = _method(config)
    if not method:
        return SglangEntries(obstacles=(f"it has no method for {config['quant_algo']} without NVFP4 ({_METHODS})",))
    model, known = sglang_model(view.config), [module for module in modules if module.place.is_known]
    # What SGLang builds plain by itself is not asked about, but for the draft's head.
    asked = [module for module in known if not (method in model.plain_under and module.place.part == "mtp")]
    plain, rows, clashes = _missing(view, asked, config)
    if not any(module.scheme for module in known if module.place.role == "head"):
        heads = filter(None, (model.head, model.draft_head))
        plain += [head for head in heads if not _is_excluded(head, config["ignore"])]
    entries = _entries(view, asked, plain)
    obstacles = [*clashes, *unnamed(view, known), *_without_method(known), *_reached(entries, known)]
    obstacles += _swallowed(view, asked, [*config["ignore"], *entries])
    # vLLM 0.32.0, quantization/modelopt.py (ModelOptMixedPrecisionConfig._resolve_quant_algo): to it such a row is of a
    # module below the one with an empty prefix.
    if name := next((row for row in rows if row.startswith(".")), None):
        obstacles.append(f"it asks for {name}, and vLLM would quantize its draft's head by such a row ({_CONFIG})")
    if method == "modelopt_fp4":
        obstacles += _forced_plain(model, known)
    if obstacles:
        return SglangEntries(obstacles=tuple(dict.fromkeys(obstacles)))
    return SglangEntries(ignore=tuple(dict.fromkeys(entries)), quantized_layers=rows)


def _method(config: Mapping[str, Any]) -> str:
    """SGLang's name of the quantization method; "" where it has none, or takes it for another."""
    algorithm = config["quant_algo"]
    if algorithm == _MIXED:
        rows = config["quantized_layers"].values()
        return "modelopt_mixed" if any("NVFP4" in row["quant_algo"] for row in rows) else ""
    if "NVFP4" in algorithm:
        return "modelopt_fp4"
    return "modelopt_fp8" if algorithm == "FP8" else ""


def _missing(
    view: FamilyView, modules: list[NamedModule], config: Mapping[str, Any]
) -> tuple[list[str], dict[str, Mapping[str, Any]], list[str]]:
    """Names of plain modules that no entry excludes, rows for quantized ones, and names with two schemes."""
    owner = {name: module for module in modules for name in concrete(module.spelled)}
    listed = config.get("quantized_layers")
    plain: dict[str, None] = {}
    rows: dict[str, Mapping[str, Any]] = {}
    clashes: list[str] = []
    for module in modules:
        for name in map(container, sglang_names(view, module.place)):
            other = owner.setdefault(name, module)
            if other.scheme != module.scheme:
                clashes.append(clash(view, name, module, other))
            elif not module.scheme and not _is_excluded(name, config["ignore"]):
                plain[name] = None
            elif module.scheme and listed is not None and name not in listed:
                rows[name] = _row(module.scheme)
    return list(plain), rows, clashes


def _is_excluded(name: str, entries: Iterable[str]) -> bool:
    bare = name.removeprefix("language_model.")
    for entry in entries:
        pattern = entry.replace(".", r"\.").replace("*", ".*")
        try:
            is_hit = any(re.fullmatch(pattern, spelled) for spelled in (name, bare))
        except re.error as error:
            rule, cure = "SGLang reads each entry as a regular expression", "Take the entry away"
            raise CheckpointError("config.json: quantization_config.ignore", rule, got=entry, cure=cure) from error
        if is_hit or f".{entry}." in f".{name}.":
            return True
        last = entry.rpartition(".")[2]
        if last in _PARTS and last in name.rpartition(".")[2]:
            return True
    return False


def _entries(view: FamilyView, asked: list[NamedModule], plain: list[str]) -> list[str]:
    """The entries for plain names: a draft that is plain as a whole is one glob."""
    drafted = [module for module in asked if module.place.part == "mtp" and module.place.layer is not None]
    globs: list[str] = []
    if not any(module.scheme for module in drafted):
        stems = {sglang_stem(view, "mtp", module.place.layer or 0) or "" for module in drafted}
        globs = [stem for stem in sorted(stems) if stem and not re.match(r"model\.layers\.\d", stem)]
        globs = [stem for stem in globs if any(name.startswith(stem) for name in plain)]
    return [*(f"{stem}*" for stem in globs), *(name for name in plain if not name.startswith(tuple(globs)))]


def _swallowed(view: FamilyView, modules: list[NamedModule], entries: list[str]) -> Iterator[str]:
    """Quantized modules that SGLang's comparison takes away, though vLLM's does not."""
    for module in modules:
        if module.scheme:
            for name in map(container, sglang_names(view, module.place)):
                if _is_excluded(name, entries):
                    yield f"an entry for a plain module excludes {name} too, which is in {module.scheme} ({_CONFIG})"


def _reached(entries: list[str], modules: list[NamedModule]) -> Iterator[str]:
    """Entries that vLLM would find in the name of a quantized module."""
    names = [name for module in modules if module.scheme for name in concrete(module.spelled)]
    for entry in entries:
        if hit := next((name for name in names if entry.removesuffix("*") in name), None):
            yield f"an entry {entry} for its draft would exclude {hit} in vLLM"


def _forced_plain(model: SglangModel, modules: list[NamedModule]) -> Iterator[str]:
    """Quantized modules that SGLang builds plain where all is NVFP4."""
    is_draft_plain = "modelopt_fp4" in model.plain_under
    for module in modules:
        place = module.place
        is_forced = place.runtime.endswith(model.plain_in_fp4) or (is_draft_plain and place.part == "mtp")
        if module.scheme and is_forced:
            what = f"{place.module} is in {module.scheme}"
            yield f"it builds the module plain where all is NVFP4, and {what} ({model.file})"


def _without_method(modules: list[NamedModule]) -> Iterator[str]:
    for module in modules:
        if module.scheme == "FP8_DYNAMIC":
            yield f"it has no class for {ALGORITHMS[module.scheme]} ({_CONFIG})"
        elif module.scheme == "FP8_BLOCK" and module.place.role != "experts":
            yield f"it reads the scales of {ALGORITHMS[module.scheme]} from weight_scale_inv alone ({_CONFIG})"
        elif module.scheme.startswith("NVFP4") and module.place.module.endswith(".kv_b_proj"):
            yield f"it reads an unpacked weight for kv_b_proj, which is in {module.scheme} ({_CONFIG})"
