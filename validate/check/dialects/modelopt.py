"""`quant_method: modelopt` and hf_quant_config.json: what vLLM builds for a module.

In: the quantization config. Out: a `ModelOpt`, or an `UnknownDialect` for algorithms that vLLM 0.32 does not load.

Easy to get wrong: vLLM compares an entry as a whole name, then as a substring, then as a glob. So `model.layers.1` also
excludes layers 10 to 19. Heads are quantized unless an entry excludes them; the draft's head too.

Source: vLLM 0.32.0 quantization/modelopt.py; compared with the real functions by tests/validate/check/test_dialects.py.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cached_property, lru_cache
from typing import Any

from ....recipes.family import VLLMName
from ....recipes.renamer import Renamer
from ..vllm_module import PLAIN, UNKNOWN, ConfigEntry, Kind, Resolution, UnknownDialect, VLLMModule
from .given import ModelOptGiven, read_given
from .matching import experts_among, is_layer_skipped, joined


@dataclass(frozen=True, kw_only=True)
class ModelOpt:
    """`quant_method: modelopt`, or hf_quant_config.json.

    Attributes:
        algorithm: quant_algo, upper case.
        exclude: entries after renaming.
        quantized_layers: module -> quant_algo, for MIXED_PRECISION.
        group_size: of NVFP4.
    """

    algorithm: str
    exclude: tuple[str, ...]
    quantized_layers: Mapping[str, str]
    group_size: int
    entries: tuple[ConfigEntry, ...]
    block: int = 128
    name: str = "modelopt"

    def resolve(self, module: VLLMName, *, shards: Sequence[VLLMName], kind: Kind) -> Resolution:
        """vLLM's `is_layer_excluded`, then the one algorithm, or `_resolve_quant_algo` for MIXED_PRECISION."""
        parts = () if kind == "experts" else shards
        skipped, error = is_layer_skipped(module, parts, self.exclude)
        if error:
            return Resolution(built=UNKNOWN, entry=skipped, error=error)
        if skipped:
            return Resolution(built=PLAIN, entry=skipped)
        if (pattern := _modelopt_pattern(module, self.exclude)) is not None:
            return Resolution(built=PLAIN, entry=pattern)
        if self.algorithm != "MIXED_PRECISION":
            # Routed experts have one FP8 method, with one scale a tensor, whatever the algorithm is.
            is_fp8_experts = kind == "experts" and self.algorithm in ("FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO")
            algorithm = "FP8" if is_fp8_experts else self.algorithm
            return Resolution(built=modelopt_built(algorithm, self.group_size, self.block))
        entry, algorithm, error = self._mixed(module, parts)
        if error:
            return Resolution(built=UNKNOWN, entry=entry, error=error)
        if algorithm is None:
            return Resolution(built=PLAIN)
        built = _mixed_experts_built if kind == "experts" else _mixed_linear_built
        return Resolution(built=built(algorithm, self.group_size, self.block), entry=entry)

    def covered(self, entry: ConfigEntry, names: frozenset[str]) -> Sequence[str]:
        """As `resolve` does, with this entry only."""
        if entry.where == "quantized_layers":
            asked = _asked_as(names)
            found = {name: None for word in entry.read for name in asked.get(word, ())}
            found |= {stem: None for word in entry.read for stem in _stems(word) if stem in names}
            return [*found]
        return [
            name
            for name in _perhaps_excluded(entry.read, names)
            if is_layer_skipped(name, (), entry.read)[0] or _modelopt_pattern(name, entry.read) is not None
        ]

    def _mixed(self, module: str, shards: Sequence[str]) -> tuple[str, str | None, str]:
        layers = self.quantized_layers
        for candidate in _prefix_candidates(module):
            if candidate in layers:
                return candidate, layers[candidate], ""
        found = [(name, layers[name]) for shard in shards for name in _prefix_candidates(shard) if name in layers]
        if len({algorithm for _, algorithm in found}) > 1:
            return found[0][0], None, f"ValueError: Mixed quant_algo within fused layer {module}"
        if found:
            return *found[0], ""
        for candidate in _prefix_candidates(module):
            if candidate in self._first_below:
                return *self._first_below[candidate], ""
        if module.endswith(".experts") and (parent := module.removesuffix(".experts")) in self._first_below:
            return *self._first_below[parent], ""
        return "", None, ""

    @cached_property
    def _first_below(self) -> Mapping[str, tuple[str, str]]:
        """The first of quantized_layers below each module, with its algorithm: a list may have an entry an expert."""
        first: dict[str, tuple[str, str]] = {}
        for row in self.quantized_layers.items():
            for stem in _stems(row[0]):
                first.setdefault(stem, row)
        return first


def read_modelopt(
    raw: Mapping[str, Any], hf_quant_config: Mapping[str, Any], rename: Renamer
) -> ModelOpt | UnknownDialect:
    """The config as vLLM reads it: in the form of config.json, or under `quantization` as in hf_quant_config.json.

    Raises:
        CheckpointError: a key has another type than vLLM reads.
    """
    if reads_other_file(raw) and hf_quant_config:
        raw = {"quant_method": "modelopt", **hf_quant_config}
    given = read_given(ModelOptGiven, raw)
    inner = given.quantization
    holder = inner or given
    listed = (holder.exclude_modules if inner else holder.ignore) or holder.ignored_layers or ()
    default = "MXFP8" if given.quant_method == "mxfp8" else ""
    algorithm = (holder.quant_algo or default).upper()
    layers = holder.quantized_layers or {}
    groups = (given.config_groups or {}).values()
    if algorithm == "NVFP4" and groups and all(group.input_activations is None for group in groups):
        algorithm = "W4A16_NVFP4"
    if algorithm not in ALGORITHMS:
        return UnknownDialect(name=f"modelopt {algorithm or 'without quant_algo'}")
    exclude = [rename.modelopt(entry) for entry in listed]
    entries = [
        ConfigEntry(where="exclude", written=entry, read=read) for entry, read in zip(listed, exclude, strict=True)
    ]
    read_layers = {rename.name(name): (row.quant_algo or "").upper() for name, row in layers.items()}
    entries += [ConfigEntry(where="quantized_layers", written=name, read=(rename.name(name),)) for name in layers]
    blocks = {
        row.group_size or 128
        for row in layers.values()
        if (row.quant_algo or "").upper() in ("FP8_PB_WO", "FP8_BLOCK_SCALES")
    }
    return ModelOpt(
        algorithm=algorithm,
        exclude=tuple(word for read in exclude for word in read),
        quantized_layers=read_layers,
        group_size=holder.group_size or 16,
        entries=tuple(entries),
        block=min(blocks, default=128),
    )


def reads_other_file(raw: Mapping[str, Any]) -> bool:
    """Whether vLLM reads hf_quant_config.json, its exclusions too, in place of config.json's quantization_config.

    vLLM 0.32.0 model_loader/weight_utils.py, get_quant_config.
    """
    given = read_given(ModelOptGiven, raw)
    algorithm = (given.quantization or given).quant_algo or ""
    return algorithm.upper() == "MIXED_PRECISION" and "quantized_layers" not in raw


_OF_MODULES = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "NVFP4", "W4A16_NVFP4", "MXFP8")
ALGORITHMS = (*_OF_MODULES, "MIXED_PRECISION")


def modelopt_built(algorithm: str, group_size: int, block: int) -> VLLMModule:
    """What a quant_algo builds."""
    weight_and_scale = frozenset({"weight", "weight_scale"})
    match algorithm:
        case "NVFP4":
            return VLLMModule(
                form="nvfp4_modelopt",
                leaves=weight_and_scale | {"weight_scale_2", "input_scale"},
                group_size=group_size,
            )
        case "W4A16_NVFP4":
            return VLLMModule(
                form="nvfp4_modelopt",
                leaves=weight_and_scale | {"weight_scale_2"},
                optional=frozenset({"input_scale"}),
                group_size=group_size,
            )
        case "FP8":
            return VLLMModule(form="fp8_tensor", leaves=weight_and_scale | {"input_scale"})
        case "FP8_PER_CHANNEL_PER_TOKEN":
            return VLLMModule(form="fp8_channel", leaves=weight_and_scale, scale_ndim=1)
        case "FP8_PB_WO":
            return VLLMModule(form="fp8_block", leaves=weight_and_scale, block=(block, block), scale_ndim=4)
        case "MXFP8":
            return VLLMModule(form="mxfp8", leaves=weight_and_scale, group_size=32)
        case _:
            return UNKNOWN


def inverse_blocks(rows: int, columns: int) -> VLLMModule:
    """FP8 in blocks under the names of native FP8."""
    leaves = frozenset({"weight", "weight_scale_inv"})
    return VLLMModule(form="fp8_block", leaves=leaves, block=(rows, columns), scale_ndim=2)


def _mixed_linear_built(algorithm: str, group_size: int, block: int) -> VLLMModule:
    """MIXED_PRECISION's linear modules and heads: another algorithm leaves them plain."""
    return modelopt_built(algorithm, group_size, block) if algorithm in _OF_MODULES else PLAIN


def _mixed_experts_built(algorithm: str, group_size: int, block: int) -> VLLMModule:
    """MIXED_PRECISION's routed experts: FP8 in blocks has the names of native FP8; FP8 by channel stays plain."""
    if algorithm in ("FP8_PB_WO", "FP8_BLOCK_SCALES"):
        return inverse_blocks(block, block)
    return PLAIN if algorithm == "FP8_PER_CHANNEL_PER_TOKEN" else modelopt_built(algorithm, group_size, block)


def _modelopt_pattern(module: str, patterns: Sequence[str]) -> str | None:
    """The first entry that excludes a module by substring or glob; an empty entry excludes everything."""
    stripped = module.removeprefix("language_model.")
    for pattern in patterns:
        if pattern != module and (pattern in module or pattern in stripped):
            return pattern
    return next((pattern for pattern in patterns if fnmatch(module, pattern)), None)


def _perhaps_excluded(patterns: Sequence[str], names: frozenset[str]) -> Iterable[str]:
    """All names, or those of experts alone where no pattern has a wildcard or is part of a name."""
    text = joined(names)
    is_possible = any(pattern in text or set("*?[").intersection(pattern) for pattern in patterns)
    return names if is_possible else experts_among(names)


@lru_cache(maxsize=4)
def _asked_as(names: frozenset[str]) -> Mapping[str, tuple[str, ...]]:
    """Names by each of the words that vLLM looks for in quantized_layers."""
    asked: dict[str, tuple[str, ...]] = {}
    for name in names:
        for word in _prefix_candidates(name):
            asked[word] = (*asked.get(word, ()), name)
    return asked


def _stems(name: str) -> Iterator[str]:
    """The modules that a module is in, the outermost first."""
    at = name.find(".")
    while at >= 0:
        yield name[:at]
        at = name.find(".", at + 1)


def _prefix_candidates(name: str) -> tuple[str, ...]:
    candidates = [name]
    if name.endswith(".lm_head"):
        candidates.append("lm_head")
    for here, there in (
        ("language_model.model.", "model.language_model."),
        ("model.language_model.", "language_model.model."),
    ):
        if name.startswith(here):
            candidates.append(there + name.removeprefix(here))
            break
    return tuple(candidates)
