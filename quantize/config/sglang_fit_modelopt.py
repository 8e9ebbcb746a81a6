"""modelopt's quantization config -> the same for SGLang 0.5.23 too, or why that cannot be.

In: a config in modelopt's dialect, and the matrices with their schemes. Out: entries to add to `ignore` and rows to add
to `quantized_layers`; or obstacles, and nothing is added.

Easy to get wrong: vLLM takes an exclude entry for a substring too, so `self_attn.qkv_proj` for a draft that SGLang
builds without a prefix would exclude every layer. Under one NVFP4 algorithm most of SGLang's drafts are plain whatever
the config says, and need no entry.

Source: SGLang 0.5.23, layers/quantization/modelopt_quant.py (is_layer_excluded, ModelOptMixedPrecisionConfig),
layers/quantization/utils.py (is_layer_skipped) and configs/model_config.py (_parse_modelopt_quant_config).
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ...recipes.conventions import ALGORITHMS
from ...recipes.errors import CheckpointError
from ...recipes.family_view import FamilyView
from ...recipes.runtimes.sglang import SglangModel, container, sglang_model, sglang_names, sglang_stem
from .sglang_fit import SglangFit, SglangMatrix, clash, no_draft, sglang_modules, unnamed
from .spelled import Matrix, concrete

_CONFIG = "layers/quantization/modelopt_quant.py"
_PARTS = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj")
_METHODS = "configs/model_config.py"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModeloptFit:
    """What is added to a config in modelopt's dialect."""

    ignore: tuple[str, ...] = ()
    quantized_layers: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    obstacles: tuple[str, ...] = ()

    @property
    def line(self) -> str:
        """The verdict in one line, for the plan."""
        return SglangFit(added={}, obstacles=self.obstacles).line

    def onto(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """The config with what is added."""
        added: dict[str, Any] = {"ignore": [*config["ignore"], *self.ignore]}
        if self.quantized_layers:
            added["quantized_layers"] = {**config["quantized_layers"], **self.quantized_layers}
        return {**config, **added}


def fit_modelopt(view: FamilyView, matrices: Iterable[Matrix], config: Mapping[str, Any]) -> ModeloptFit:
    """What a config in modelopt's dialect must add for SGLang, and what stands against it."""
    model = sglang_model(view.config)
    if obstacle := no_draft(view):
        return ModeloptFit(obstacles=(obstacle,))
    modules = list(sglang_modules(view, matrices))
    method = _method(config)
    if not method:
        algorithm = str(config["quant_algo"])
        return ModeloptFit(obstacles=(f"it has no method for {algorithm} without NVFP4 ({_METHODS})",))
    # What SGLang builds plain by itself is not asked about, but for the draft's head.
    is_plain = method in model.plain_under
    asked = [module for module in modules if not (is_plain and module.place.part == "mtp")]
    plain, rows, clashes = _missing(view, asked, config)
    heads = [head for head in (model.head, model.draft_head) if head and not _is_excluded(head, config["ignore"])]
    is_head_plain = not any(module.scheme for module in modules if module.place.role == "head")
    entries = _entries(view, asked, [*plain, *(heads if is_head_plain else ())])
    obstacles = [*clashes, *unnamed(view, model, modules), *_without_method(modules), *_reached(entries, modules)]
    obstacles += _swallowed(view, asked, [*config["ignore"], *entries])
    obstacles += _without_a_stem(rows)
    if method == "modelopt_fp4":
        obstacles += _forced_plain(model, modules)
    if obstacles:
        return ModeloptFit(obstacles=tuple(dict.fromkeys(obstacles)))
    return ModeloptFit(ignore=tuple(dict.fromkeys(entries)), quantized_layers=rows)


def _forced_plain(model: SglangModel, modules: list[SglangMatrix]) -> Iterator[str]:
    """Quantized modules that SGLang builds plain where all is NVFP4."""
    is_draft_plain = "modelopt_fp4" in model.plain_under
    for module in modules:
        place = module.place
        is_forced = (is_draft_plain and place.part == "mtp") or place.runtime.endswith(model.plain_in_fp4 or ("\0",))
        if module.scheme and is_forced:
            what = f"{place.module} is in {module.scheme}"
            yield f"it builds the module plain where all is NVFP4, and {what} ({model.file})"


def _method(config: Mapping[str, Any]) -> str:
    """SGLang's name of the quantization method; "" where it has none, or takes it for another."""
    algorithm = config["quant_algo"]
    if algorithm == "MIXED_PRECISION":
        rows = config["quantized_layers"].values()
        return "modelopt_mixed" if any("NVFP4" in row["quant_algo"] for row in rows) else ""
    return "modelopt_fp4" if "NVFP4" in algorithm else "modelopt_fp8" if algorithm == "FP8" else ""


def _missing(
    view: FamilyView, modules: list[SglangMatrix], config: Mapping[str, Any]
) -> tuple[list[str], dict[str, Mapping[str, Any]], list[str]]:
    """Names of plain modules that no entry excludes, rows for quantized ones, and names with two schemes."""
    owner = {name: module for module in modules for name in concrete(module.spelled)}
    listed = config.get("quantized_layers")
    plain: list[str] = []
    rows: dict[str, Mapping[str, Any]] = {}
    clashes: list[str] = []
    for module in modules:
        for name in map(container, sglang_names(view, module.place)):
            other = owner.setdefault(name, module)
            if other.scheme != module.scheme:
                clashes.append(clash(view, name, module, other))
            elif not module.scheme and not _is_excluded(name, config["ignore"]):
                plain.append(name)
            elif module.scheme and listed is not None and name not in listed:
                algorithm = ALGORITHMS[module.scheme]
                size = {"group_size": 16} if "NVFP4" in algorithm else {}
                rows[name] = {"quant_algo": algorithm, **size}
    return list(dict.fromkeys(plain)), rows, clashes


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
        # A part of latent attention's projections names those of every layer.
        last = entry.rpartition(".")[2]
        if last in _PARTS and last in name.rpartition(".")[2]:
            return True
    return False


def _swallowed(view: FamilyView, modules: list[SglangMatrix], entries: list[str]) -> Iterator[str]:
    """Quantized modules that SGLang's comparison takes away, though vLLM's does not."""
    for module in modules:
        for name in map(container, sglang_names(view, module.place)):
            if module.scheme and _is_excluded(name, entries):
                yield f"an entry for a plain module excludes {name} too, which is in {module.scheme} ({_CONFIG})"


def _entries(view: FamilyView, asked: list[SglangMatrix], plain: list[str]) -> list[str]:
    """The entries for plain names: a draft that is plain as a whole is one glob."""
    drafted = [module for module in asked if module.place.part == "mtp" and module.place.layer is not None]
    stems = {sglang_stem(view, "mtp", module.place.layer or 0) or "" for module in drafted}
    is_plain = not any(module.scheme for module in drafted)
    globs = [f"{stem}*" for stem in sorted(stems) if is_plain and stem and not re.match(r"model\.layers\.\d", stem)]
    globs = [glob for glob in globs if any(name.startswith(glob[:-1]) for name in plain)]
    return [*globs, *(name for name in plain if not name.startswith(tuple(glob[:-1] for glob in globs)))]


def _reached(entries: list[str], modules: list[SglangMatrix]) -> Iterator[str]:
    """Entries that vLLM would find in the name of a quantized module."""
    names = [name for module in modules if module.scheme for name in concrete(module.spelled)]
    for entry in entries:
        if hit := next((name for name in names if entry.removesuffix("*") in name), None):
            yield f"an entry {entry} for its draft would exclude {hit} in vLLM"


def _without_a_stem(rows: Iterable[str]) -> Iterator[str]:
    """Rows that begin with a dot: to vLLM they are below the module with an empty prefix, a draft's head.

    Source: vLLM 0.32.0, quantization/modelopt.py (ModelOptMixedPrecisionConfig._resolve_quant_algo).
    """
    if name := next((row for row in rows if row.startswith(".")), None):
        yield f"it asks for {name}, and vLLM would quantize its draft's head by such a row ({_CONFIG})"


def _without_method(modules: list[SglangMatrix]) -> Iterator[str]:
    for module in modules:
        if module.scheme == "FP8_DYNAMIC":
            yield f"it has no class for {ALGORITHMS[module.scheme]} ({_CONFIG})"
        elif module.scheme == "FP8_BLOCK" and module.place.role != "experts":
            yield f"it reads the scales of {ALGORITHMS[module.scheme]} from weight_scale_inv alone ({_CONFIG})"
        elif module.scheme and module.place.module.endswith(".kv_b_proj") and module.scheme.startswith("NVFP4"):
            yield f"it reads an unpacked weight for kv_b_proj, which is in {module.scheme} ({_CONFIG})"
