"""`quant_method: fp8`, the native form of DeepSeek, Qwen and others: what vLLM builds for a module.

In: quantization_config and config.json. Out: an `Fp8`.

Easy to get wrong: exceptions are whole names, never patterns. DeepSeek-V4 has a class of its own. Its experts are MXFP4
even if the config says blocks, or NVFP4 with `moe_quant_algo`. Its scales have the name `.scale` on disk.

Source: vLLM 0.32.0 quantization/fp8.py, models/deepseek_v41/quant_config.py (which CUDA uses for V4 as well),
models/deepseek_v4/nvidia/{model,mtp}.py for the names; compared with the real functions by
tests/validate/check/test_dialects.py.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import Any

from ....recipes.family import VLLMName
from ....recipes.renamer import Renamer
from ..vllm_module import PLAIN, ConfigEntry, Kind, Resolution, VLLMModule
from .given import Fp8Given, read_given
from .matching import experts_among, is_layer_skipped
from .modelopt import inverse_blocks, modelopt_built


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8:
    """`quant_method: fp8`, also in DeepSeek-V4's class, where routed experts have a form of their own.

    Attributes:
        ignored: ignored_layers or modules_to_not_convert, after renaming.
        linear: what a linear module becomes.
        experts: what routed experts become.
        keeps_mxfp4: for DeepSeek-V4 with NVFP4 experts: names on disk of the experts that stay MXFP4.
        num_layers: num_hidden_layers; later layers are MTP layers.
    """

    ignored: tuple[str, ...]
    linear: VLLMModule
    experts: VLLMModule
    entries: tuple[ConfigEntry, ...]
    keeps_mxfp4: tuple[str, ...] = ()
    num_layers: int = 0
    name: str = "fp8"

    def resolve(self, module: VLLMName, *, shards: Sequence[VLLMName], kind: Kind) -> Resolution:
        """`is_layer_skipped` by whole names; heads are never quantized."""
        if kind == "head":
            return Resolution(built=PLAIN)
        skipped, error = is_layer_skipped(module, () if kind == "experts" else shards, self.ignored)
        if skipped or error:
            return Resolution(built=PLAIN, entry=skipped, error=error)
        if kind == "linear":
            return Resolution(built=self.linear)
        if self.keeps_mxfp4 and (match := re.search(r"(?:^|\.)layers\.(\d+)\.ffn\.experts$", module)):
            index = int(match[1])
            on_disk = f"layers.{index}" if index < self.num_layers else f"mtp.{index - self.num_layers}"
            for pattern in self.keeps_mxfp4:
                if fnmatchcase(f"{on_disk}.ffn.experts", pattern):
                    return Resolution(built=_DSV4_MXFP4, entry=pattern)
        return Resolution(built=self.experts)

    def covered(self, entry: ConfigEntry, names: frozenset[str]) -> Sequence[str]:
        """Whole name; for experts every entry that contains it."""
        if entry.by_disk:
            return [name for name in names if any(fnmatchcase(name, pattern) for pattern in entry.read)]
        whole = [word for word in entry.read if word in names and "experts" not in word]
        return [*whole, *(name for name in experts_among(names) if is_layer_skipped(name, (), entry.read)[0])]


_SCALE_IS_INVERSE = MappingProxyType({"scale": "weight_scale_inv"})
_SCALE_IS_SCALE = MappingProxyType({"scale": "weight_scale"})
_DSV4_MXFP4 = VLLMModule(
    form="mxfp4", leaves=frozenset({"weight", "weight_scale"}), group_size=32, renames=_SCALE_IS_SCALE
)


def fp8_built(given: Fp8Given) -> VLLMModule:
    """What a linear module registers, in vLLM and in SGLang."""
    if block := given.weight_block_size:
        return inverse_blocks(*block)
    leaves = {"weight", "weight_scale"}
    if given.activation_scheme == "static":
        leaves.add("input_scale")
    return VLLMModule(form="fp8_tensor", leaves=frozenset(leaves))


def read_fp8(raw: Mapping[str, Any], config: Mapping[str, Any], rename: Renamer) -> Fp8:
    """The config as vLLM reads it; DeepSeek-V4 by its own class.

    Raises:
        CheckpointError: a key has another type than vLLM reads.
    """
    given = read_given(Fp8Given, raw)
    listed = given.ignored_layers or given.modules_to_not_convert or ()
    ignored = tuple(rename.name(entry) for entry in listed)
    entries = [
        ConfigEntry(where="ignored_layers", written=written, read=(read,))
        for written, read in zip(listed, ignored, strict=True)
    ]
    linear = fp8_built(given)
    if config.get("model_type") != "deepseek_v4":
        return Fp8(ignored=ignored, linear=linear, experts=linear, entries=tuple(entries))
    # DeepSeek-V4's loaders rename `.scale` to `.weight_scale_inv`, and for FP4 experts to `.weight_scale`.
    linear = replace(linear, renames=_SCALE_IS_INVERSE)
    experts, keeps = linear, ()
    if config.get("expert_dtype", "fp4") == "fp4":
        experts = _DSV4_MXFP4
        if (given.moe_quant_algo or "").upper() == "NVFP4":
            experts = modelopt_built("NVFP4", 16, 128)
            keeps = given.ignore or ()
            entries += [ConfigEntry(where="ignore", written=entry, read=(entry,), by_disk=True) for entry in keeps]
    return Fp8(
        ignored=ignored,
        linear=linear,
        experts=experts,
        entries=tuple(entries),
        keeps_mxfp4=keeps,
        num_layers=config.get("num_hidden_layers") or 0,
        name="deepseek_v4_fp8",
    )
