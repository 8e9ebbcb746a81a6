"""`quant_method: fp8`, the native form of DeepSeek, Qwen and others: what vLLM and SGLang build for
a module.

In: quantization_config and config.json. Out: an `Fp8` as one of the servers reads it.

Easy to get wrong: vLLM's exceptions are whole names, never patterns; in SGLang each counts with and
without `model.` before it. DeepSeek-V4 has a class of its own. Its experts are MXFP4 even if the
config says blocks, or NVFP4 with `moe_quant_algo`. Its scales have the name `.scale` on disk.

Source: vLLM 0.32.0 quantization/fp8.py, models/deepseek_v41/quant_config.py (which CUDA uses for V4
as well), models/deepseek_v4/nvidia/{model,mtp}.py for the names; SGLang 0.5.23
layers/quantization/fp8.py (Fp8Config). Compared with the real functions by
tests/checkpoints/dialects/test_dialects.py and test_sglang.py.
"""

import re
from collections.abc import Sequence
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import NamedTuple

from ...recipes.family import VLLMName
from ...recipes.renamer import Renamer
from ...recipes.runtimes import Runtime
from .dialect import UNKNOWN, ConfigEntry, Kind, Resolution, VLLMModule
from .given import Fp8Given, Raw, read_given
from .matching import OneAnswer, entries_of, plain, raises, registers, skipped
from .modelopt import inverse_blocks, modelopt_built

_DSV4_MXFP4 = registers(
    "mxfp4",
    "weight",
    "weight_scale",
    group_size=32,
    renames=MappingProxyType({"scale": "weight_scale"}),
)


class Fp8(NamedTuple):
    """`quant_method: fp8`, also in DeepSeek-V4's class, where routed experts have a form of their
    own.

    Attributes:
        ignored: ignored_layers or modules_to_not_convert, after renaming.
        linear: what a linear module becomes.
        experts: what routed experts become.
        keeps_mxfp4: for DeepSeek-V4 with NVFP4 experts: names on disk of the experts that stay
            MXFP4.
        num_layers: num_hidden_layers; later layers are MTP layers.
    """

    ignored: tuple[str, ...]
    linear: VLLMModule
    experts: VLLMModule
    entries: tuple[ConfigEntry, ...] = ()
    keeps_mxfp4: tuple[str, ...] = ()
    num_layers: int = 0
    runtime: Runtime = "vllm"
    name: str = "fp8"

    def resolve(self, module: VLLMName, *, shards: Sequence[VLLMName], kind: Kind) -> Resolution:
        """`is_layer_skipped`; heads are never quantized."""
        if kind == "head":
            return plain()
        if found := skipped(
            self.runtime, module, () if kind == "experts" else shards, self.ignored
        ):
            return found
        if kind == "linear":
            return Resolution(self.linear)
        if self.keeps_mxfp4 and (
            match := re.search(r"(?:^|\.)layers\.(\d+)\.ffn\.experts$", module)
        ):
            index = int(match[1])
            on_disk = (
                f"layers.{index}" if index < self.num_layers else f"mtp.{index - self.num_layers}"
            )
            for pattern in self.keeps_mxfp4:
                if fnmatchcase(f"{on_disk}.ffn.experts", pattern):
                    return Resolution(_DSV4_MXFP4, pattern)
        return Resolution(self.experts)

    def hits(self, entry: ConfigEntry, name: str) -> bool:
        """Whole name; for experts every entry that contains it."""
        return skipped("vllm", name, (), entry.read) is not None


def read_fp8(raw: Raw, config: Raw, rename: Renamer) -> Fp8:
    """The config as vLLM reads it; DeepSeek-V4 by its own class.

    Raises:
        CheckpointError: a key has another type than vLLM reads.
    """
    given = read_given(Fp8Given, raw)
    entries = entries_of(
        "ignored_layers", given.ignored_layers or given.modules_to_not_convert or (), rename.name
    )
    linear = _built(given, config)
    found = Fp8(
        ignored=tuple(entry.read[0] for entry in entries),
        linear=linear,
        experts=linear,
        entries=entries,
    )
    if not _is_v4(config):
        return found
    found = found._replace(num_layers=config.get("num_hidden_layers") or 0, name="deepseek_v4_fp8")
    if config.get("expert_dtype", "fp4") != "fp4":
        return found
    if given.moe_quant_algo != "NVFP4":
        return found._replace(experts=_DSV4_MXFP4)
    return found._replace(experts=modelopt_built("NVFP4", 16, 128), keeps_mxfp4=given.ignore or ())


def read_sglang_fp8(raw: Raw, config: Raw) -> Fp8 | OneAnswer:
    """The config as SGLang reads it; DeepSeek-V4's experts may be MXFP4.

    Raises:
        CheckpointError: a key has another type than is read.
    """
    given = read_given(Fp8Given, raw)
    if given.activation_scheme not in ("static", "dynamic"):
        error = f"ValueError: Unsupported activation scheme {given.activation_scheme}"
        return OneAnswer("fp8", raises(error))
    if given.weight_block_size and given.activation_scheme != "dynamic":
        error = "ValueError: The block-wise quantization only supports dynamic activation scheme"
        return OneAnswer("fp8", raises(error))
    listed = given.modules_to_not_convert if given.ignored_layers is None else given.ignored_layers
    bare = [entry.removeprefix("model.") for entry in listed or ()]
    linear = _built(given, config)
    return Fp8(
        ignored=tuple(name for entry in bare for name in (entry, f"model.{entry}")),
        linear=linear,
        experts=UNKNOWN if _is_v4(config) else linear,
        runtime="sglang",
    )


def _is_v4(config: Raw) -> bool:
    return config.get("model_type") == "deepseek_v4"


def _built(given: Fp8Given, config: Raw) -> VLLMModule:
    """What a linear module registers; DeepSeek-V4's loaders rename `.scale`."""
    leaves = ["weight", "weight_scale"]
    if given.activation_scheme == "static":
        leaves.append("input_scale")
    built = registers("fp8_tensor", *leaves)
    if block := given.weight_block_size:
        built = inverse_blocks(*block)
    if _is_v4(config):
        built = built._replace(renames=MappingProxyType({"scale": "weight_scale_inv"}))
    return built
