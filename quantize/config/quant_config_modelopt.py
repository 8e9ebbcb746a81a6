"""Modules and their schemes -> modelopt's quantization config, for config.json and for hf_quant_config.json.

In: the runtime modules of a checkpoint. Out: one algorithm, or MIXED_PRECISION with an algorithm for each module, and
the names of what stays plain.

Easy to get wrong: vLLM compares an entry as a whole name, as a substring and as a glob, so `model.layers.1` also
excludes layers 10 to 19, and `mtp.layers.0*` misses `mtp.fc` (vllm #38832). Plain modules are therefore listed by whole
names, and a block that is plain as a whole by one glob that ends in `.*`. The mapper of the target's class rewrites
entries, so a name is written in the spelling that is vLLM's own afterwards; names on disk follow, for other readers.

Source: vLLM 0.32.0 quantization/modelopt.py: ModelOptQuantConfigBase.from_config and is_layer_excluded,
ModelOptMixedPrecisionConfig._resolve_quant_algo; model_loader/weight_utils.py for the producer's name.
"""

from collections.abc import Collection, Iterable
from typing import Any

from ... import __version__
from ...recipes.conventions import ALGORITHMS, MIXED_FOR_EXPERTS
from ...recipes.errors import RecipeError
from ...recipes.family import Part
from ...recipes.family_view import FamilyView
from ...recipes.renamer import renamer
from .quant_config import RuntimeModule

_MIXED = "MIXED_PRECISION"


def modelopt_config(view: FamilyView, modules: Collection[RuntimeModule]) -> dict[str, Any]:
    """The value of config.json's `quantization_config`.

    Args:
        view: the family's names.
        modules: every runtime module, quantized ones in schemes of `conventions.ALGORITHMS`.
    """
    schemes = {module.scheme for module in modules if module.scheme}
    is_mixed = (
        len(schemes) > 1
        or view.family.modelopt_by_module
        or any(module.scheme in MIXED_FOR_EXPERTS and not module.members for module in modules)
    )
    config: dict[str, Any] = {
        "quant_method": "modelopt",
        "quant_algo": _MIXED if is_mixed else ALGORITHMS[next(iter(schemes), "NVFP4")],
    }
    if any(scheme.startswith("NVFP4") for scheme in schemes):
        config["group_size"] = 16
    if is_mixed:
        config["quantized_layers"] = _quantized_layers(view, modules)
    return config | {"ignore": _excluded(view, modules), "kv_cache_scheme": None, **view.family.config_extras}


def hf_quant_config(config: dict[str, Any]) -> dict[str, Any]:
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


def _quantized_layers(view: FamilyView, modules: Iterable[RuntimeModule]) -> dict[str, dict[str, Any]]:
    """MIXED_PRECISION's table, which has whole names and no globs.

    Raises:
        RecipeError: the mapper of the target's class turns every spelling of a module into another name.
    """
    layers: dict[str, dict[str, Any]] = {}
    for module in modules:
        if module.scheme:
            if renamer(view.config, _part(view, module.name)).before(module.name, module.asked) is None:
                rule = f"one algorithm must be enough for modelopt's config of a {view.family.model_type}"
                got = f"several, and vLLM renames every entry that could name {module.name}"
                raise RecipeError("format: modelopt", rule, got=got, cure="Use one scheme, or compressed-tensors")
            row: dict[str, Any] = {"quant_algo": ALGORITHMS[module.scheme]}
            if module.scheme.startswith("NVFP4"):
                row["group_size"] = 16
            layers |= dict.fromkeys(_names(view, module, otherwise=""), row)
    return layers


def _excluded(view: FamilyView, modules: Collection[RuntimeModule]) -> list[str]:
    """Exactly the plain modules: an MTP block that is plain as a whole by glob, all others by name."""
    stems = tuple(_draft_stems(view))
    of_draft = [module for module in modules if module.name.startswith(stems)]
    is_draft_plain = not any(module.scheme for module in of_draft)
    names: list[str] = []
    for module in modules:
        if not module.scheme and not (is_draft_plain and module in of_draft):
            names += _names(view, module, otherwise=f"*{module.name}")
    if is_draft_plain:
        names += [_surviving(view, f"{stem}*") for stem in stems]
    quantized = {str(module.name) for module in modules if module.scheme}
    heads = [head for head in _draft_heads(view) if not (is_draft_plain and head.startswith(stems))]
    names += [_surviving(view, head) for head in heads if not _is_in(head, quantized)]
    names += [f"{runtime}*" for _, runtime, _ in view.layout.opaque]
    names += ["lm_head"] if not _is_in("lm_head", quantized) else []
    return list(dict.fromkeys(names))


def _is_in(head: str, quantized: Collection[str]) -> bool:
    """Whether an entry for a head would exclude a quantized one: a substring is enough."""
    return any(head in name for name in quantized)


def _names(view: FamilyView, module: RuntimeModule, *, otherwise: str) -> list[str]:
    """A module by vLLM's name, as it must be written, and by its names on disk, where these say something else."""
    rename = renamer(view.config, _part(view, module.name))
    first = rename.before(module.name, module.asked) or otherwise
    return [first, *(name for name in module.members if rename.name(name) != module.name and name != first)]


def _surviving(view: FamilyView, entry: str) -> str:
    """How to write an entry of the exclude list, so that it is still itself after the mapper of the target's class."""
    rename = renamer(view.config, _part(view, entry))
    if entry in rename.modelopt(entry):
        return entry
    return rename.before(entry) or f"*{entry}"


def _part(view: FamilyView, name: str) -> Part:
    return "mtp" if name.startswith(tuple(_draft_stems(view))) else "backbone"


def _draft_stems(view: FamilyView) -> list[str]:
    """Runtime prefixes of the MTP layers and of what is next to them, each with its last dot."""
    first = 0 if view.layout.mtp else view.num_layers
    stems = [view.runtime_stem("mtp", first + index) for index in range(view.num_mtp_layers)]
    return list(dict.fromkeys("mtp." if stem.startswith("mtp.") else stem for stem in stems))


def _draft_heads(view: FamilyView) -> list[str]:
    """Heads that the draft builds with the quantization config: placeholders for the target's."""
    first = 0 if view.layout.mtp else view.num_layers
    rows = [row for row in view.family.mtp_block if row.role == "head"]
    own = [
        view.runtime_stem("mtp", first + index) + (row.runtime or row.path)
        for index in range(view.num_mtp_layers)
        for row in rows
    ]
    return [*own, *([view.layout.draft_head] if view.layout.draft_head else [])]
