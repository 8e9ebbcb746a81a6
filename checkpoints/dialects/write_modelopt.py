"""Modules and their schemes -> the quantization config in modelopt's dialect, for vLLM and for
SGLang.

In: the named modules of a checkpoint. Out: one algorithm, or MIXED_PRECISION with an algorithm for
each module, and the names of what stays plain.

Easy to get wrong: vLLM compares an entry as a whole name, as a substring and as a glob, so
`model.layers.1` also excludes layers 10 to 19, and `mtp.layers.0*` misses `mtp.fc` (vllm #38832).
Plain modules are therefore listed by whole names, and a block that is plain as a whole by one glob
that ends in `.*`. The mapper of the target's class rewrites entries, so a name is written in the
spelling that is vLLM's own afterwards; names on disk follow, for other readers. An entry for
SGLang, such as `self_attn.qkv_proj` for a draft that it builds without a prefix, may so exclude
every layer in vLLM. Under one NVFP4 algorithm most of SGLang's drafts are plain whatever the config
says, and need no entry.

Source: vLLM 0.32.0 quantization/modelopt.py: ModelOptQuantConfigBase.from_config and
is_layer_excluded, ModelOptMixedPrecisionConfig._resolve_quant_algo; model_loader/weight_utils.py
for the producer's name. SGLang 0.5.23, layers/quantization/modelopt_quant.py (is_layer_excluded,
ModelOptMixedPrecisionConfig), layers/quantization/utils.py (is_layer_skipped) and
configs/model_config.py (_parse_modelopt_quant_config).
"""

import re
from collections.abc import Iterable, Iterator, Sequence

from ... import __version__
from ...recipes.conventions import ALGORITHMS, MIXED_FOR_EXPERTS
from ...recipes.errors import RecipeError
from ...recipes.family_view import FamilyView
from ...recipes.frozen import Json, Raw
from ...recipes.renamer import Renamer, renamer
from ...recipes.runtimes.sglang import (
    container,
    is_excluded,
    sglang_model,
    sglang_stem,
)
from .modules import NamedModule, RuntimeModule, concrete, runtime_modules
from .sglang import no_draft, sglang_asks, unnamed

_MIXED = "MIXED_PRECISION"
_CONFIG = "layers/quantization/modelopt_quant.py"
_METHODS = "configs/model_config.py"


def modelopt_config(view: FamilyView, modules: Iterable[NamedModule]) -> tuple[Json, list[str]]:
    """The value of config.json's `quantization_config`, and what stands against SGLang.

    Args:
        view: the family's names.
        modules: quantized ones in schemes of `conventions.ALGORITHMS`.

    Raises:
        RecipeError: several algorithms, and vLLM's mapper turns every spelling of a module into
            another name.
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
    config: Json = {
        "quant_method": "modelopt",
        "quant_algo": _MIXED if is_mixed else ALGORITHMS[next(iter(schemes), "NVFP4")],
    }
    if schemes & {"NVFP4", "NVFP4A16"}:
        config["group_size"] = 16
    if is_mixed:
        config["quantized_layers"] = names.quantized_layers(fused)
    config |= {
        "ignore": names.excluded(fused),
        "kv_cache_scheme": None,
        **view.family.config_extras,
    }
    return config, _add_for_sglang(view, modules, config)


def hf_quant_config(config: Raw) -> Json:
    """hf_quant_config.json, which agrees with a `quantization_config` in modelopt's dialect.

    Readers know the file by its producer's name: vLLM refuses any other.
    """
    inner = {
        "quant_algo": config["quant_algo"],
        "kv_cache_quant_algo": "FP8" if config.get("kv_cache_scheme") else None,
        **{key: config[key] for key in ("group_size", "quantized_layers") if key in config},
        "exclude_modules": config["ignore"],
    }
    return {
        "producer": {"name": "modelopt", "version": f"keepmtp-{__version__}"},
        "quantization": inner,
    }


def _row(scheme: str) -> Json:
    """What MIXED_PRECISION's table says of a module."""
    row: Json = {"quant_algo": ALGORITHMS[scheme]}
    if scheme.startswith("NVFP4"):
        row["group_size"] = 16
    return row


# --- vLLM's names ---------------------------------------------------------------------------------


class _Names:
    """The names of a checkpoint's modules as vLLM's mappers leave them.

    Attributes:
        draft_stems: runtime prefixes of the MTP layers and of what is next to them, each with its
            last dot.
        draft_heads: heads that the draft builds with the quantization config: placeholders for the
            target's.
    """

    def __init__(self, view: FamilyView) -> None:
        first = 0 if view.layout.mtp else view.num_layers
        layers = [view.runtime_stem("mtp", first + index) for index in range(view.num_mtp_layers)]
        heads = [row.runtime or row.path for row in view.family.mtp_block if row.role == "head"]
        self.view = view
        self.draft_stems = tuple(
            dict.fromkeys(re.sub(r"^mtp\..*", "mtp.", stem) for stem in layers)
        )
        self.draft_heads = [stem + head for stem in layers for head in heads]
        self.draft_heads += filter(None, [view.layout.draft_head])
        self._mappers = (renamer(view.config), renamer(view.config, "mtp"))

    def mapper(self, name: str) -> Renamer:
        """The mapper that vLLM applies to entries for a module of this name."""
        return self._mappers[name.startswith(self.draft_stems)]

    def written(self, module: RuntimeModule, *, otherwise: str) -> list[str]:
        """A module by vLLM's name, as it must be written, and by its names on disk, where these say
        something else.
        """
        mapper = self.mapper(module.name)
        found = [mapper.before(module.name, module.asked) or otherwise]
        for name in module.members:
            if mapper.name(name) != module.name and name != found[0]:
                found.append(name)
        return found

    def surviving(self, entry: str) -> str:
        """How to write an entry of the exclude list, so that it is still itself after the
        mapper.
        """
        mapper = self.mapper(entry)
        if entry in mapper.modelopt(entry):
            return entry
        return mapper.before(entry) or f"*{entry}"

    def quantized_layers(self, modules: Iterable[RuntimeModule]) -> dict[str, Json]:
        """MIXED_PRECISION's table, which has whole names and no globs."""
        layers = dict[str, Json]()
        for module in modules:
            if not module.scheme:
                continue
            if self.mapper(module.name).before(module.name, module.asked) is None:
                raise RecipeError(
                    "format: modelopt",
                    "one algorithm must be enough for modelopt's config of a "
                    f"{self.view.family.model_type}",
                    got=f"several, and vLLM renames every entry that could name {module.name}",
                    cure="Use one scheme, or compressed-tensors",
                )
            layers |= dict.fromkeys(self.written(module, otherwise=""), _row(module.scheme))
        return layers

    def excluded(self, modules: Sequence[RuntimeModule]) -> list[str]:
        """Exactly the plain modules: an MTP block that is plain as a whole by glob, all others by
        name.
        """
        stems = self.draft_stems
        quantized = [module.name for module in modules if module.scheme]
        is_draft_plain = not any(name.startswith(stems) for name in quantized)
        entries = list[str]()
        for module in modules:
            if not module.scheme and not (is_draft_plain and module.name.startswith(stems)):
                entries += self.written(module, otherwise=f"*{module.name}")
        if is_draft_plain:
            entries += [self.surviving(f"{stem}*") for stem in stems]
        for head in self.draft_heads:
            # A substring is enough to exclude a quantized one.
            if not (is_draft_plain and head.startswith(stems)) and not any(
                head in name for name in quantized
            ):
                entries.append(self.surviving(head))
        entries += [f"{runtime}*" for _, runtime, _ in self.view.layout.opaque]
        if not any("lm_head" in name for name in quantized):
            entries.append("lm_head")
        return list(dict.fromkeys(entries))


# --- SGLang ---------------------------------------------------------------------------------------


def _add_for_sglang(view: FamilyView, modules: Iterable[NamedModule], config: Json) -> list[str]:
    """Add to a config in modelopt's dialect what SGLang asks about; or what stands against it,
    half a sentence each with SGLang's file, and nothing is added.
    """
    if obstacle := no_draft(view):
        return [obstacle]
    method = _method(config)
    if not method:
        return [f"it has no method for {config['quant_algo']} without NVFP4 ({_METHODS})"]
    model = sglang_model(view.config)
    known = [module for module in modules if module.place.is_known]
    asked = known
    if method in model.plain_under:
        # What SGLang builds plain by itself is not asked about, but for the draft's head.
        asked = [module for module in known if module.place.part != "mtp"]
    names, clashes = sglang_asks(view, asked, container)
    listed = config.get("quantized_layers")
    ignore = config["ignore"]
    plain = list[str]()
    rows = dict[str, Json]()
    for name, module, _ in names:
        if module.scheme:
            if listed is not None and name not in listed:
                rows[name] = _row(module.scheme)
        elif not is_excluded(name, ignore):
            plain.append(name)
    if not any(module.scheme for module in known if module.place.role == "head"):
        for head in (model.head, model.draft_head):
            if head and not is_excluded(head, ignore):
                plain.append(head)
    entries = [*dict.fromkeys(_as_entries(view, asked, plain))]
    obstacles = [*clashes, *unnamed(view, known), *_without_method(known)]
    names_in_vllm = [name for each in known if each.scheme for name in concrete(each.spelled)]
    for entry in entries:
        if hit := next((n for n in names_in_vllm if entry.removesuffix("*") in n), None):
            obstacles.append(f"an entry {entry} for its draft would exclude {hit} in vLLM")
    for name, module, _ in names:
        if module.scheme and is_excluded(name, [*ignore, *entries]):
            obstacles.append(
                f"an entry for a plain module excludes {name} too, which is in {module.scheme} "
                f"({_CONFIG})"
            )
    # vLLM 0.32.0, quantization/modelopt.py (ModelOptMixedPrecisionConfig._resolve_quant_algo): to
    # it such a row is of a module below the one with an empty prefix.
    if name := next((row for row in rows if row.startswith(".")), None):
        obstacles.append(
            f"it asks for {name}, and vLLM would quantize its draft's head by such a row "
            f"({_CONFIG})"
        )
    for module in known if method == "modelopt_fp4" else ():  # where all is NVFP4
        place = module.place
        is_in_draft = place.part == "mtp" and method in model.plain_under
        if module.scheme and (is_in_draft or place.runtime.endswith(model.plain_in_fp4)):
            what = f"{place.module} is in {module.scheme}"
            says = f"it builds the module plain where all is NVFP4, and {what} ({model.file})"
            obstacles.append(says)
    if not obstacles:
        ignore += entries
        if listed is not None:
            listed |= rows
    return [*dict.fromkeys(obstacles)]


def _method(config: Raw) -> str:
    """SGLang's name of the quantization method; "" where it has none, or takes it for another."""
    algorithm = config["quant_algo"]
    if algorithm == _MIXED:
        rows = config["quantized_layers"].values()
        return "modelopt_mixed" if any("NVFP4" in row["quant_algo"] for row in rows) else ""
    if "NVFP4" in algorithm:
        return "modelopt_fp4"
    return "modelopt_fp8" if algorithm == "FP8" else ""


def _as_entries(view: FamilyView, asked: list[NamedModule], plain: list[str]) -> list[str]:
    """The entries for plain names: a draft that is plain as a whole is one glob."""
    drafted = [
        module for module in asked if module.place.part == "mtp" and module.place.layer is not None
    ]
    stems = set[str]()
    if not any(module.scheme for module in drafted):
        stems = {sglang_stem(view, "mtp", module.place.layer or 0) or "" for module in drafted}
    globs = tuple(
        stem
        for stem in sorted(filter(None, stems))
        if not re.match(r"model\.layers\.\d", stem) and any(name.startswith(stem) for name in plain)
    )
    return [
        *(f"{stem}*" for stem in globs),
        *(name for name in plain if not name.startswith(globs)),
    ]


def _without_method(modules: list[NamedModule]) -> Iterator[str]:
    for module in modules:
        scheme = module.scheme
        place = module.place
        if scheme == "FP8_DYNAMIC":
            yield f"it has no class for {ALGORITHMS[scheme]} ({_CONFIG})"
        elif scheme == "FP8_BLOCK" and place.role != "experts":
            yield (
                f"it reads the scales of {ALGORITHMS[scheme]} from weight_scale_inv alone "
                f"({_CONFIG})"
            )
        elif scheme.startswith("NVFP4") and place.module.endswith(".kv_b_proj"):
            yield f"it reads an unpacked weight for kv_b_proj, which is in {scheme} ({_CONFIG})"
