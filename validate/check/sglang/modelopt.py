"""`quant_method: modelopt` and hf_quant_config.json: what SGLang builds for a module.

In: the quantization config, and what the model's class says of its names. Out: a dialect.

Easy to get wrong: which of four readers SGLang takes. FP8 and NVFP4 have one each; MIXED_PRECISION is `modelopt_mixed`
only if a layer of it is NVFP4, and else is read as W4AFP8, which is another thing. Other algorithms have no reader. Of
FP8 in blocks SGLang takes `weight_scale_inv`, which is not what vLLM takes there.

Source: SGLang 0.5.23 sglang/srt/configs/model_config.py (_parse_modelopt_quant_config) and
layers/quantization/modelopt_quant.py; compared with the real classes by tests/validate/check/test_sglang.py.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..dialects.given import ModelOptGiven, read_given
from ..dialects.modelopt import inverse_blocks, modelopt_built
from ..vllm_module import PLAIN, UNKNOWN, Resolution, VLLMModule
from .asked import AskedModule, Failing
from .classes import Packed, SglangClasses, WeightsMapper
from .matching import excluded, skipped

_BLOCKS = ("FP8_PB_WO", "FP8_BLOCK_SCALES")
_FOUR_BITS = ("NVFP4", "W4A16_NVFP4")
_READ = ("NVFP4", "NVFP4_AWQ", "W4A16_NVFP4")


@dataclass(frozen=True, slots=True, kw_only=True)
class SglangModelOpt:
    """modelopt's configs.

    Attributes:
        method: SGLang's name for the reader.
        algorithm: of every module; "" where `layers` names one for each.
        exclude: entries after renaming.
        layers: quantized_layers, after renaming.
    """

    method: str
    algorithm: str
    exclude: tuple[str, ...]
    layers: Mapping[str, str]
    group_size: int
    block: int
    packed: Packed

    def resolve(self, asked: AskedModule) -> Resolution:
        """`get_quant_method`."""
        entry, error = ("", "") if asked.kind == "experts" else skipped(asked.name, self.exclude, self.packed)
        entry = entry or ("" if error else excluded(asked.name, self.exclude))
        if entry or error:
            return Resolution(built=PLAIN, entry=entry, error=error)
        if self.algorithm:
            return Resolution(built=modelopt_built(self.algorithm, self.group_size, self.block))
        entry, algorithm, error = self._mixed(asked.name)
        if error:
            return Resolution(built=UNKNOWN, entry=entry, error=error)
        return Resolution(built=self._of(algorithm), entry=entry)

    def _of(self, algorithm: str) -> VLLMModule:
        if algorithm in _BLOCKS:
            return inverse_blocks(self.block, self.block)
        known = algorithm in ("FP8", "MXFP8", *_FOUR_BITS)
        return modelopt_built(algorithm, self.group_size, self.block) if known else PLAIN

    def _mixed(self, name: str) -> tuple[str, str, str]:
        """`_resolve_quant_algo`: the entry, its algorithm, and the exception."""
        for candidate in _candidates(name):
            if candidate in self.layers:
                return candidate, self.layers[candidate], ""
        base, _, last = name.rpartition(".")
        parts = self.packed.get(last, ())
        found = [f"{each}.{part}" for each in _candidates(base) for part in parts if f"{each}.{part}" in self.layers]
        if len({self.layers[each] for each in found}) > 1:
            return found[0], "", f"ValueError: Mixed quant_algo within fused layer {name}"
        if found:
            return found[0], self.layers[found[0]], ""
        for candidate in _candidates(name):
            for key, algorithm in self.layers.items():
                if key.startswith(f"{candidate}."):
                    return key, algorithm, ""
        return "", "", ""


def read_sglang_modelopt(raw: Mapping[str, Any], classes: SglangClasses) -> SglangModelOpt | Failing:
    """The config as SGLang reads it: that of config.json, or `quantization` of hf_quant_config.json.

    Raises:
        CheckpointError: a key has another type than is read.
    """
    given = read_given(ModelOptGiven, raw)
    holder = given.quantization or given
    algorithm = (holder.quant_algo or "").upper()
    listed = holder.exclude_modules if given.quantization else holder.ignore
    listed = listed if listed is not None else holder.exclude_modules or ()
    layers = {name: (row.quant_algo or "").upper() for name, row in (holder.quantized_layers or {}).items()}
    if algorithm == "MIXED_PRECISION":
        if not any(each in _FOUR_BITS for each in layers.values()):
            error = "ValueError: MIXED_PRECISION without an NVFP4 layer is read as W4AFP8"
            return Failing(method="w4afp8", error=error)
        sizes = {row.group_size or 128 for row in (holder.quantized_layers or {}).values() if _is_block(row.quant_algo)}
        if len(sizes) > 1:
            return Failing(method="modelopt_mixed", error="ValueError: all block-FP8 layers must use one group_size")
        return _dialect("modelopt_mixed", "", listed, layers, holder.group_size or 16, next(iter(sizes), 128), classes)
    if algorithm == "FP8":
        return _dialect("modelopt_fp8", "FP8", listed, {}, 0, 128, classes)
    if "FP4" in algorithm:
        if algorithm not in _READ:
            return Failing(method="modelopt_fp4", error=f"ValueError: ModelOpt currently only supports {_READ}")
        built = "NVFP4" if algorithm == "NVFP4_AWQ" else algorithm
        return _dialect("modelopt_fp4", built, listed, {}, holder.group_size or 16, 128, classes)
    error = f"ValueError: ModelOptFp8Config only supports regular FP8 quantization, but found {algorithm!r}"
    return Failing(method="modelopt", error=error)


def _dialect(
    method: str,
    algorithm: str,
    listed: Sequence[str],
    layers: Mapping[str, str],
    group_size: int,
    block: int,
    classes: SglangClasses,
) -> SglangModelOpt:
    mapper = classes.mapper
    renamed = [mapper.name(entry) for entry in listed] if mapper else [*listed]
    if mapper:
        renamed += [entry.removeprefix("language_model.") for entry in renamed if entry.startswith("language_model.")]
    return SglangModelOpt(
        method=method,
        algorithm=algorithm,
        exclude=tuple(dict.fromkeys(renamed)),
        layers={(mapper or WeightsMapper()).name(name): each for name, each in layers.items()},
        group_size=group_size,
        block=block,
        packed=classes.packed,
    )


def _is_block(algorithm: str | None) -> bool:
    return (algorithm or "").upper() in _BLOCKS


def _candidates(name: str) -> tuple[str, ...]:
    """`_quantized_layer_prefix_candidates`."""
    found = [name]
    if name.endswith(".lm_head"):
        found.append("lm_head")
    if name.startswith("language_model.model."):
        found.append("model.language_model." + name.removeprefix("language_model.model."))
    elif name.startswith("model.language_model."):
        rest = name.removeprefix("model.language_model.")
        found += ["language_model.model." + rest, "model." + rest]
    elif name.startswith("model."):
        found.append("model.language_model." + name.removeprefix("model."))
    return tuple(dict.fromkeys(found))
