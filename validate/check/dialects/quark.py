"""`quant_method: quark`: what vLLM builds for a module.

In: quantization_config. Out: a `Quark`.

Easy to get wrong: an entry of `exclude` is a whole name or `re:` from the start, so a glob excludes nothing. Routed
experts are plain as soon as one entry is a name below theirs.

Source: vLLM 0.32.0 quantization/quark/{quark,quark_moe,utils}.py, quantization/utils/config_utils.py; compared with the
real functions by tests/validate/check/test_dialects.py.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from typing import Any

from ....recipes.family import VLLMName
from ....recipes.renamer import Renamer
from ..vllm_module import PLAIN, UNKNOWN, ConfigEntry, Kind, Resolution, VLLMModule
from .given import QuarkGiven, QuarkLayer, QuarkTensor, read_given
from .patterns import Entries, equal_or_regex

_SHARD_ERROR = "ValueError: Found different quantization schemes for the shards of {}"
_NO_EXPORT = "ValueError: The export key should be included in the configurations of Quark quantized model"
_MX_GROUP = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Quark:
    """`quant_method: quark`.

    Attributes:
        exclude: entries after renaming.
        layers: layer_quant_config, after renaming: what a module becomes.
        usual: what every other module becomes.
        error: vLLM's exception as it reads the config; "" for none.
    """

    exclude: Entries
    layers: Mapping[str, VLLMModule]
    usual: VLLMModule
    entries: tuple[ConfigEntry, ...]
    error: str = ""
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
        if hit := self.exclude.first(module):
            return Resolution(built=PLAIN, entry=hit)
        hits = [self.exclude.first(shard) for shard in parts]
        if any(hits):
            entry = next(hit for hit in hits if hit)
            error = "" if all(hits) else _SHARD_ERROR.format(module)
            return Resolution(built=PLAIN, entry=entry, error=error)
        choices = [self._layer(name) for name in parts or (module,)]
        if any(built != choices[0][1] for _, built in choices):
            return Resolution(built=UNKNOWN, entry=choices[0][0], error=_SHARD_ERROR.format(module))
        entry, built = choices[0]
        return Resolution(built=_of_experts(built) if kind == "experts" else built, entry=entry)

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

    def _layer(self, name: str) -> tuple[str, VLLMModule]:
        for pattern, built in self.layers.items():
            if fnmatch(name, pattern) if "*" in pattern else name in pattern:
                return pattern, built
        return "", self.usual


def read_quark(raw: Mapping[str, Any], rename: Renamer) -> Quark:
    """The config as vLLM reads it, entries renamed.

    Raises:
        CheckpointError: a key has another type than vLLM reads, or an entry is no regular expression.
    """
    given = read_given(QuarkGiven, raw)
    exclude = Entries(rename.name(entry) for entry in given.exclude or ())
    exclude.refuse_wrong()
    return Quark(
        exclude=exclude,
        layers={rename.name(name): _built(layer) for name, layer in (given.layer_quant_config or {}).items()},
        usual=_built(given.global_quant_config or QuarkLayer()),
        entries=tuple(
            ConfigEntry(where="exclude", written=entry, read=(read,))
            for entry, read in zip(given.exclude or (), exclude.written, strict=True)
        ),
        error="" if given.export is not None else _NO_EXPORT,
    )


def _built(layer: QuarkLayer) -> VLLMModule:
    """The schemes whose tensors the check knows: FP8, MXFP4 and INT8; each has a weight and its scale."""
    weight, inputs = _single(layer.weight), _single(layer.input_tensors)
    if weight is None:
        return UNKNOWN
    leaves = frozenset({"weight", "weight_scale"})
    is_static = inputs is not None and not inputs.is_dynamic
    if weight.dtype == "fp4" and weight.group_size == _MX_GROUP and weight.scale_format == "e8m0":
        return VLLMModule(form="mxfp4", leaves=leaves, optional=frozenset({"input_scale"}), group_size=_MX_GROUP)
    if inputs is None or weight.is_dynamic or weight.dtype != inputs.dtype:
        return UNKNOWN
    leaves |= {"input_scale"} if is_static else frozenset()
    match weight.dtype, weight.qscheme:
        case "fp8_e4m3", "per_tensor":
            return VLLMModule(form="fp8_tensor", leaves=leaves)
        case "fp8_e4m3", "per_channel":
            return VLLMModule(form="fp8_channel", leaves=leaves)
        case "fp8_e4m3", "per_block" if weight.block_size == (128, 128):
            return VLLMModule(form="fp8_block", leaves=leaves, block=(128, 128))
        case "int8", "per_channel":
            zeros = frozenset({"weight_zero_point", "input_zero_point"})
            return VLLMModule(form="int8", leaves=leaves, optional=zeros)
    return UNKNOWN


def _of_experts(built: VLLMModule) -> VLLMModule:
    """A static input scale of MXFP4 is loaded by experts alone."""
    return replace(built, optional=built.optional | {"input_scale"})


def _single(given: QuarkTensor | tuple[QuarkTensor, ...] | None) -> QuarkTensor | None:
    """A list of one is as good as the one; longer lists are schemes of two steps, which are not judged."""
    if isinstance(given, tuple):
        return given[0] if len(given) == 1 else None
    return given
