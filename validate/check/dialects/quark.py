"""`quant_method: quark`: what vLLM builds for a module.

In: quantization_config. Out: a `Quark`.

Easy to get wrong: an entry of `exclude` is a whole name or `re:` from the start, so a glob excludes nothing. Routed
experts are plain as soon as one entry is a name below theirs. What nothing excludes has the scheme of its layer, and
quark_schemes.py says which that is.

Source: vLLM 0.32.0 quantization/quark/{quark,quark_moe,utils}.py, quantization/utils/config_utils.py; compared with the
real functions by tests/validate/check/test_dialects.py and test_foreign_schemes.py.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatch, fnmatchcase
from typing import Any

from ....recipes.family import VLLMName
from ....recipes.renamer import Renamer
from ..vllm_module import PLAIN, UNKNOWN, ConfigEntry, Kind, Resolution, VLLMModule
from .given import QuarkExport, QuarkGiven, QuarkLayer, read_given
from .matching import left_out
from .patterns import Entries, equal_or_regex
from .quark_schemes import scheme_of

_SHARD_ERROR = "ValueError: Found different quantization schemes for the shards of {}"
_NO_EXPORT = "ValueError: The export key should be included in the configurations of Quark quantized model"
_NO_LAYER_TYPES = "AttributeError: 'NoneType' object has no attribute 'get' (layer_type_quant_config is missing)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Quark:
    """`quant_method: quark`.

    Attributes:
        exclude: entries after renaming.
        layers: layer_quant_config, after renaming.
        usual: what holds for every other module.
        pack_method: how integers of four bits are packed.
        error: vLLM's exception as it reads the config; "" for none.
        error_unless_excluded: its exception as it builds a module that nothing excludes; "" for none.
    """

    exclude: Entries
    layers: Mapping[str, QuarkLayer]
    usual: QuarkLayer
    entries: tuple[ConfigEntry, ...]
    pack_method: str = "reorder"
    error: str = ""
    error_unless_excluded: str = ""
    name: str = "quark"

    def resolve(self, module: VLLMName, *, shards: Sequence[VLLMName], kind: Kind) -> Resolution:
        """`should_ignore_layer`, then the config of the layer; heads are never quantized."""
        if self.error:
            return Resolution(built=UNKNOWN, entry="quantization_config", error=self.error)
        if kind == "head":
            return Resolution(built=PLAIN)
        parts = () if kind == "experts" else shards
        if kind == "experts" and (below := self._below(module)):
            return Resolution(built=PLAIN, entry=below)
        for names in ((module,), parts):
            if plain := left_out(names, self.exclude.first, _SHARD_ERROR.format(module)):
                return plain
        if self.error_unless_excluded:
            return Resolution(built=UNKNOWN, entry="quantization_config", error=self.error_unless_excluded)
        choices = [self._layer(name) for name in parts or (module,)]
        if any(layer != choices[0][1] for _, layer in choices):
            return Resolution(built=UNKNOWN, entry=choices[0][0], error=_SHARD_ERROR.format(module))
        entry, layer = choices[0]
        scheme = scheme_of(layer, self.pack_method, is_experts=kind == "experts")
        return Resolution(built=_of_experts(scheme.built, kind), entry=entry, error=scheme.error)

    def covered(self, entry: ConfigEntry, names: frozenset[str]) -> Sequence[str]:
        """Whole name, `re:` from the start, or a name below that of routed experts."""
        return [
            name
            for name in names
            for word in entry.read
            if equal_or_regex(name, word) or (name.endswith(".experts") and word.startswith(f"{name}."))
        ]

    def _below(self, experts: str) -> str:
        plain = (entry for entry in self.exclude.written if not entry.startswith("re:"))
        return next((entry for entry in plain if entry == experts or entry.startswith(f"{experts}.")), "")

    def _layer(self, name: str) -> tuple[str, QuarkLayer]:
        for pattern, layer in self.layers.items():
            if fnmatch(name, pattern) if "*" in pattern else name in pattern:
                return pattern, layer
        return "", self.usual


def read_quark(raw: Mapping[str, Any], rename: Renamer) -> Quark:
    """The config as vLLM reads it, entries renamed.

    Raises:
        CheckpointError: a key has another type than vLLM reads, or an entry is no regular expression.
    """
    given = read_given(QuarkGiven, raw)
    exclude = Entries(rename.name(entry) for entry in given.exclude or ())
    exclude.refuse_wrong()
    export = given.export or QuarkExport()
    layers = (given.layer_quant_config or {}).items()
    return Quark(
        exclude=exclude,
        layers={rename.name(name): _without_cache(name, layer, export) for name, layer in layers},
        usual=given.global_quant_config or QuarkLayer(),
        entries=tuple(
            ConfigEntry(where="exclude", written=entry, read=(read,))
            for entry, read in zip(given.exclude or (), exclude.written, strict=True)
        ),
        pack_method=export.pack_method or "",
        error="" if given.export is not None else _NO_EXPORT,
        error_unless_excluded="" if given.layer_type_quant_config is not None else _NO_LAYER_TYPES,
    )


def quark_built(layer: QuarkLayer) -> VLLMModule:
    """What a linear module registers by a layer's config; unknown where vLLM raises."""
    return scheme_of(layer, "reorder", is_experts=False).built


def _without_cache(name: str, layer: QuarkLayer, export: QuarkExport) -> QuarkLayer:
    """Outputs of the layers of the cache are not those of the layer: vLLM takes them out of its config."""
    group = export.kv_cache_group or ()
    is_cache = any(fnmatchcase(name, pattern) for pattern in group) or (bool(group) and name == "*q_proj")
    return layer.model_copy(update={"output_tensors": None}) if is_cache else layer


def _of_experts(built: VLLMModule, kind: Kind) -> VLLMModule:
    """Routed experts of MXFP4 load a scale of their inputs, if there is one."""
    if kind != "experts" or built.form != "mxfp4":
        return built
    return replace(built, optional=built.optional | {"input_scale"})
