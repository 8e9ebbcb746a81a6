"""`quant_method: quark`: what vLLM and SGLang build for a module.

In: quantization_config. Out: a `Quark` as one of the servers reads it.

Easy to get wrong: an entry of `exclude` is a whole name or `re:` from the start, so a glob excludes
nothing. Routed experts are plain as soon as one entry is a name below theirs. What nothing excludes
has the scheme of its layer, and quark_schemes.py says which that is. SGLang's draft classes look at
the list before it is read (sglang/choose.py).

Source: vLLM 0.32.0 quantization/quark/{quark,quark_moe,utils}.py,
quantization/utils/config_utils.py; SGLang 0.5.23 layers/quantization/quark/{quark,utils}.py.
Compared with the real functions by tests/validate/check/test_dialects.py, test_foreign_schemes.py
and test_sglang.py.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatch, fnmatchcase
from typing import Any

from ....recipes.family import VLLMName
from ....recipes.renamer import Renamer
from ...facts.findings import Runtime
from ..vllm_module import UNKNOWN, ConfigEntry, Kind, Resolution
from .given import QuarkExport, QuarkGiven, QuarkLayer, read_given
from .matching import SCHEMES_DIFFER, entries_of, left_out, plain, raises, read_by_sglang
from .patterns import Entries, equal_or_regex
from .quark_schemes import scheme_of

_NO_EXPORT = (
    "ValueError: The export key should be included in the configurations of Quark quantized model"
)
_NO_LAYER_TYPES = (
    "AttributeError: 'NoneType' object has no attribute 'get' (layer_type_quant_config is missing)"
)
# Modules that SGLang knows to be fused although no class says so.
_FUSED = {
    "gate_up_proj": ("gate_proj", "up_proj"),
    "fused_qkv_a_proj_with_mqa": ("q_a_proj", "kv_a_proj_with_mqa"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Quark:
    """`quant_method: quark`.

    Attributes:
        exclude: entries after renaming.
        layers: layer_quant_config, after renaming.
        usual: what holds for every other module.
        pack_method: how integers of four bits are packed.
        error: vLLM's exception as it reads the config; "" for none.
        error_unless_excluded: its exception as it builds a module that nothing excludes; "" for
            none.
    """

    exclude: Entries
    layers: Mapping[str, QuarkLayer]
    usual: QuarkLayer
    entries: tuple[ConfigEntry, ...] = ()
    pack_method: str = "reorder"
    error: str = ""
    error_unless_excluded: str = ""
    runtime: Runtime = "vllm"
    name: str = "quark"

    def resolve(self, module: VLLMName, *, shards: Sequence[VLLMName], kind: Kind) -> Resolution:
        """`should_ignore_layer`, then the config of the layer; heads are never quantized."""
        if self.error:
            return raises(self.error)
        if kind == "head":
            return plain()
        if kind == "experts" and (below := self._below(module)):
            return plain(below)
        parts = self._parts(module, shards, kind)
        for names in ((module,), parts):
            if found := left_out(names, self.exclude.first, SCHEMES_DIFFER.format(module)):
                return found
        if self.error_unless_excluded:
            return raises(self.error_unless_excluded)
        choices = [self._layer(name) for name in parts or (module,)]
        entry, layer = choices[0]
        if any(other != layer for _, other in choices):
            return raises(SCHEMES_DIFFER.format(module), entry)
        return self._scheme(entry, layer, is_experts=kind == "experts")

    def covered(self, entry: ConfigEntry, names: frozenset[str]) -> Sequence[str]:
        """Whole name, `re:` from the start, or a name below that of routed experts."""
        return [
            name
            for name in names
            for word in entry.read
            if equal_or_regex(name, word)
            or (name.endswith(".experts") and word.startswith(f"{name}."))
        ]

    def _parts(self, module: str, shards: Sequence[str], kind: Kind) -> Sequence[str]:
        last = module.rpartition(".")[2]
        if kind == "experts":
            return ()
        if self.runtime == "sglang" and last in _FUSED:
            return [module.replace(last, part) for part in _FUSED[last]]
        return shards

    def _below(self, experts: str) -> str:
        return next(
            (e for e in self.exclude.written if e == experts or e.startswith(f"{experts}.")), ""
        )

    def _layer(self, name: str) -> tuple[str, QuarkLayer]:
        for pattern, layer in self.layers.items():
            is_of_experts = name.endswith(".experts") and pattern.startswith(f"{name}.")
            is_part = name in pattern and "*" not in pattern
            if fnmatch(name, pattern) or (is_part if self.runtime == "vllm" else is_of_experts):
                return pattern, layer
        return "", self.usual

    def _scheme(self, entry: str, layer: QuarkLayer, *, is_experts: bool) -> Resolution:
        if (
            self.runtime == "sglang"
        ):  # its schemes are those of linear modules; what it raises is not known
            built = scheme_of(layer, "reorder", is_experts=False)
            return Resolution(built=UNKNOWN if isinstance(built, str) else built)
        built = scheme_of(layer, self.pack_method, is_experts=is_experts)
        if isinstance(built, str):
            return raises(built, entry)
        if (
            is_experts and built.form == "mxfp4"
        ):  # they load a scale of their inputs, if there is one
            built = replace(built, optional=built.optional | {"input_scale"})
        return Resolution(built=built, entry=entry)


def read_quark(raw: Mapping[str, Any], rename: Renamer, runtime: Runtime = "vllm") -> Quark:
    """The config as a server reads it, entries renamed.

    Raises:
        CheckpointError: a key has another type than is read, or an entry is no regular expression.
    """
    given = read_given(QuarkGiven, raw)
    export, listed = given.export or QuarkExport(), given.exclude or ()
    layers = (given.layer_quant_config or {}).items()
    found = Quark(
        exclude=Entries(rename.name(entry) for entry in listed),
        layers={rename.name(name): _without_cache(name, layer, export) for name, layer in layers},
        usual=given.global_quant_config or QuarkLayer(),
        entries=entries_of("exclude", listed, rename.name),
        pack_method=export.pack_method or "",
        error=_NO_EXPORT * (given.export is None),
        error_unless_excluded=_NO_LAYER_TYPES * (given.layer_type_quant_config is None),
    )
    if runtime == "sglang":
        exclude = Entries(read_by_sglang(listed, rename))
        found = Quark(exclude=exclude, layers=found.layers, usual=found.usual, runtime="sglang")
    found.exclude.refuse_wrong()
    return found


def _without_cache(name: str, layer: QuarkLayer, export: QuarkExport) -> QuarkLayer:
    """Outputs of the layers of the cache are not those of the layer: vLLM takes them out of its
    config.
    """
    group = export.kv_cache_group or ()
    is_cache = any(fnmatchcase(name, pattern) for pattern in group) or (
        bool(group) and name == "*q_proj"
    )
    return layer.model_copy(update={"output_tensors": None}) if is_cache else layer
