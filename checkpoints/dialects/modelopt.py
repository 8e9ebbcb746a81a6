"""`quant_method: modelopt` and hf_quant_config.json: what vLLM and SGLang build for a module.

In: the quantization config. Out: a `ModelOpt` as one of the servers reads it; or, of algorithms
that it does not load, an `UnknownDialect` for vLLM and one exception for SGLang.

Easy to get wrong: vLLM compares an entry as a whole name, then as a substring, then as a glob. So
`model.layers.1` also excludes layers 10 to 19. Heads are quantized unless an entry excludes them;
the draft's head too. SGLang has one reader for FP8 and one for NVFP4. MIXED_PRECISION is
`modelopt_mixed` only if a layer of it is NVFP4, and else is read as W4AFP8, which is another thing.
Of FP8 in blocks it takes `weight_scale_inv`, which is not what vLLM takes there.

Source: vLLM 0.32.0 quantization/modelopt.py; SGLang 0.5.23 configs/model_config.py
(_parse_modelopt_quant_config) and layers/quantization/modelopt_quant.py. Compared with the real
functions by tests/checkpoints/dialects/test_dialects.py and test_sglang.py.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cache, cached_property

from ...recipes.family import VLLMName
from ...recipes.renamer import Renamer
from ...recipes.runtimes import Runtime
from ...recipes.runtimes.sglang import excluding_entry
from ...recipes.runtimes.vllm import holds
from .dialect import PLAIN, UNKNOWN, ConfigEntry, Kind, Resolution, UnknownDialect, VLLMModule
from .given import ModelOptGiven, ModelOptInner, Raw, read_given
from .matching import (
    OneAnswer,
    plain,
    raises,
    read_by_sglang,
    registers,
    skipped,
)

_MIXED = "MIXED_PRECISION"
_BLOCKS = ("FP8_PB_WO", "FP8_BLOCK_SCALES")
_FOUR_BITS = ("NVFP4", "W4A16_NVFP4")
_OF_MODULES = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", *_FOUR_BITS, "MXFP8")
ALGORITHMS = (*_OF_MODULES, _MIXED)
_CODECS = ("IQ2_XS", "IQ2_XXS", "Q8_0")
# What one algorithm of all modules, or one of a module in MIXED_PRECISION, is for others than
# linear modules of vLLM.
_OF_ONE = {"FP8_PER_CHANNEL_PER_TOKEN": "FP8", "FP8_PB_WO": "FP8"}
_OF_MIXED = {**dict.fromkeys(_BLOCKS, "inverse blocks"), "FP8_PER_CHANNEL_PER_TOKEN": "plain"}
_WITHOUT_BLOCKS = dict.fromkeys(_OF_MIXED, "plain")
# Parts that vLLM looks for in quantized_layers where the class of the model names none.
_PARTS = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
# Prefixes that a server tries in the place of others as it looks for a module in quantized_layers.
_ALIKE: Mapping[Runtime, Mapping[str, tuple[str, ...]]] = {
    "vllm": {
        "language_model.model.": ("model.language_model.",),
        "model.language_model.": ("language_model.model.",),
    },
    "sglang": {
        "language_model.model.": ("model.language_model.",),
        "model.language_model.": ("language_model.model.", "model."),
        "model.": ("model.language_model.",),
    },
}


@dataclass(frozen=True, kw_only=True)
class ModelOpt:
    """`quant_method: modelopt`, or hf_quant_config.json.

    Attributes:
        algorithm: quant_algo, upper case.
        exclude: entries after renaming.
        quantized_layers: module -> quant_algo, for MIXED_PRECISION.
        group_size: of NVFP4.
        name: the server's name for its reader.
        codecs: algorithms of blocks that are packed as GGML's, whose tensors the check does not
            know.
        mixed: what an algorithm of MIXED_PRECISION is for experts, where it is another.
    """

    algorithm: str
    exclude: tuple[str, ...]
    quantized_layers: Mapping[str, str]
    group_size: int
    entries: tuple[ConfigEntry, ...]
    block: int = 128
    runtime: Runtime = "vllm"
    name: str = "modelopt"
    codecs: tuple[str, ...] = ()
    mixed: Mapping[str, str]

    def resolve(self, module: VLLMName, *, shards: Sequence[VLLMName], kind: Kind) -> Resolution:
        """`is_layer_excluded`, then the one algorithm, or `_resolve_quant_algo` for
        MIXED_PRECISION.
        """
        is_vllm = self.runtime == "vllm"
        is_experts = kind == "experts"
        parts = () if is_experts else shards
        if (is_vllm or not is_experts) and (
            found := skipped(self.runtime, module, parts, self.exclude)
        ):
            return found
        excluding = _excluded_by_vllm if is_vllm else excluding_entry
        if (pattern := excluding(self.exclude, module)) is not None:
            return plain(pattern)
        if self.algorithm != _MIXED:
            algorithm = self.algorithm
            if (
                is_experts
            ):  # vLLM's have one FP8 method, with one scale a tensor, whatever the algorithm is
                algorithm = _OF_ONE.get(algorithm, algorithm)
            return Resolution(modelopt_built(algorithm, self.group_size, self.block))
        entry, algorithm = self._named(module, parts)
        if algorithm is None:
            return raises(f"ValueError: Mixed quant_algo within fused layer {module}", entry)
        if not entry:
            return plain()
        if is_experts or not is_vllm:
            algorithm = self.mixed.get(algorithm, algorithm)
        built = modelopt_built(algorithm, self.group_size, self.block)
        is_known = is_vllm and (is_experts or algorithm in self.codecs)
        if built == UNKNOWN and not is_known:
            built = PLAIN
        return Resolution(built, entry)

    def hits(self, entry: ConfigEntry, name: str) -> bool:
        """As `resolve` does in vLLM, with this entry only."""
        found = skipped("vllm", name, (), entry.read) or _excluded_by_vllm(entry.read, name)
        return found is not None

    def _named(self, module: str, shards: Sequence[str]) -> tuple[str, str | None]:
        """The entry of quantized_layers for a module, "" for none, and its algorithm: None where
        shards differ.
        """
        layers = self.quantized_layers
        spellings = _spellings(self.runtime, module)
        for name in spellings:
            if name in layers:
                return name, layers[name]
        if self.runtime == "vllm" and not shards:
            parent, _, last = module.rpartition(".")
            shards = [f"{parent}.{part}" for part in _PARTS.get(last, ())]
        found = [
            name for shard in shards for name in _spellings(self.runtime, shard) if name in layers
        ]
        if found:
            algorithms = {layers[name] for name in found}
            return found[0], layers[found[0]] if len(algorithms) == 1 else None
        if self.runtime == "vllm" and module.endswith(".experts"):
            spellings = (*spellings, module.removesuffix(".experts"))
        below = filter(None, map(self._first_below.get, spellings))
        return next(below, ("", ""))

    @cached_property
    def _first_below(self) -> Mapping[str, tuple[str, str]]:
        """The first of quantized_layers below each module, with its algorithm: a list may have an
        entry an expert.
        """
        first = dict[str, tuple[str, str]]()
        for row in self.quantized_layers.items():
            at = row[0].find(".")
            while at >= 0:
                first.setdefault(row[0][:at], row)
                at = row[0].find(".", at + 1)
        return first


def read_modelopt(
    raw: Raw, hf_quant_config: Raw, rename: Renamer, vllm: str
) -> ModelOpt | UnknownDialect:
    """The config as a version of vLLM reads it: in the form of config.json, or under `quantization`
    as in hf_quant_config.json.

    Raises:
        CheckpointError: a key has another type than vLLM reads.
    """
    if reads_other_file(raw) and hf_quant_config:
        raw = {"quant_method": "modelopt", **hf_quant_config}
    given = read_given(ModelOptGiven, raw)
    holder = given.quantization or given
    listed = holder.exclude_modules if given.quantization else holder.ignore
    if listed is None and holds(">=0.33", vllm):
        listed = holder.exclude_modules
    listed = listed or holder.ignored_layers or ()
    algorithm = holder.quant_algo or ("MXFP8" if given.quant_method == "mxfp8" else "")
    groups = (given.config_groups or {}).values()
    if algorithm == "NVFP4" and groups and all(group.input_activations is None for group in groups):
        algorithm = "W4A16_NVFP4"
    if algorithm not in ALGORITHMS:
        return UnknownDialect(f"modelopt {algorithm or 'without quant_algo'}")
    excluded = [ConfigEntry("exclude", entry, rename.modelopt(entry)) for entry in listed]
    return ModelOpt(
        algorithm=algorithm,
        exclude=tuple(word for entry in excluded for word in entry.read),
        quantized_layers=_layers(holder, rename),
        group_size=holder.group_size or 16,
        entries=tuple(excluded),
        block=min(_block_sizes(holder), default=128),
        codecs=_CODECS if holds(">=0.32", vllm) else (),
        mixed=_OF_MIXED if holds(">=0.30", vllm) else _WITHOUT_BLOCKS,
    )


def read_sglang_modelopt(raw: Raw, rename: Renamer) -> ModelOpt | OneAnswer:
    """The config as SGLang reads it: that of config.json, or `quantization` of
    hf_quant_config.json.

    Raises:
        CheckpointError: a key has another type than is read, or an entry is no glob.
    """
    given = read_given(ModelOptGiven, raw)
    holder = given.quantization or given
    algorithm = holder.quant_algo or ""
    layers = _layers(holder, rename)
    listed = (
        holder.exclude_modules if given.quantization or holder.ignore is None else holder.ignore
    )
    name = "modelopt"
    error = ""
    sizes = _block_sizes(holder)
    if algorithm == _MIXED and {*_FOUR_BITS}.isdisjoint(layers.values()):
        name = "w4afp8"
        error = "ValueError: MIXED_PRECISION without an NVFP4 layer is read as W4AFP8"
    elif algorithm == _MIXED:
        name = "modelopt_mixed"
        if len(sizes) > 1:
            error = "ValueError: all block-FP8 layers must use one group_size"
    elif algorithm == "FP8":
        name = "modelopt_fp8"
    elif "FP4" in algorithm:
        name = "modelopt_fp4"
        algorithm = algorithm.replace("NVFP4_AWQ", "NVFP4")
        if algorithm not in _FOUR_BITS:
            error = f"ValueError: ModelOpt currently only supports {_FOUR_BITS}"
    else:
        error = (
            "ValueError: ModelOptFp8Config only supports regular FP8 quantization, but found "
            f"{algorithm!r}"
        )
    if error:
        return OneAnswer(name, raises(error))
    return ModelOpt(
        algorithm=algorithm,
        exclude=read_by_sglang(listed or (), rename),
        quantized_layers=layers,
        group_size=holder.group_size or 16,
        entries=(),
        block=min(sizes, default=128),
        runtime="sglang",
        name=name,
        mixed=_OF_MIXED,
    )


def reads_other_file(raw: Raw) -> bool:
    """Whether vLLM reads hf_quant_config.json, its exclusions too, in place of config.json's
    quantization_config.

    vLLM 0.32.0 model_loader/weight_utils.py, get_quant_config.
    """
    given = read_given(ModelOptGiven, raw)
    return (given.quantization or given).quant_algo == _MIXED and "quantized_layers" not in raw


@cache
def modelopt_built(algorithm: str, group_size: int, block: int) -> VLLMModule:
    """What a quant_algo builds."""
    two = ("weight", "weight_scale")
    inputs = frozenset({"input_scale"})
    match algorithm:
        case "NVFP4":
            return registers(
                "nvfp4_modelopt", *two, "weight_scale_2", *inputs, group_size=group_size
            )
        case "W4A16_NVFP4":
            return registers(
                "nvfp4_modelopt", *two, "weight_scale_2", optional=inputs, group_size=group_size
            )
        case "FP8":
            return registers("fp8_tensor", *two, *inputs)
        case "FP8_PER_CHANNEL_PER_TOKEN":
            return registers("fp8_channel", *two, scale_ndim=1)
        case "FP8_PB_WO":
            return registers("fp8_block", *two, block=(block, block), scale_ndim=4)
        case "inverse blocks":
            return inverse_blocks(block, block)
        case "MXFP8":
            return registers("mxfp8", *two, group_size=32)
        case "plain":
            return PLAIN
    return UNKNOWN


def inverse_blocks(rows: int, columns: int) -> VLLMModule:
    """FP8 in blocks under the names of native FP8."""
    return registers("fp8_block", "weight", "weight_scale_inv", block=(rows, columns), scale_ndim=2)


def _layers(holder: ModelOptInner, rename: Renamer) -> dict[str, str]:
    return {
        rename.name(name): row.quant_algo or ""
        for name, row in (holder.quantized_layers or {}).items()
    }


def _block_sizes(holder: ModelOptInner) -> set[int]:
    rows = (holder.quantized_layers or {}).values()
    return {row.group_size or 128 for row in rows if row.quant_algo in _BLOCKS}


def _excluded_by_vllm(entries: Sequence[str], module: str) -> str | None:
    """The first entry that excludes a module by substring or glob; an empty entry excludes
    everything.
    """
    stripped = module.removeprefix("language_model.")
    for entry in entries:
        if entry != module and (entry in module or entry in stripped):
            return entry
    return next((entry for entry in entries if fnmatch(module, entry)), None)


def _spellings(runtime: Runtime, name: str) -> tuple[str, ...]:
    """The names by which a server looks for a module in quantized_layers."""
    found = [name, "lm_head"] if name.endswith(".lm_head") else [name]
    for prefix, others in _ALIKE[runtime].items():
        if name.startswith(prefix):
            found += [other + name.removeprefix(prefix) for other in others]
            break
    return tuple(dict.fromkeys(found))
