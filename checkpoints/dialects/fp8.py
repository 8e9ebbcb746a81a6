"""`quant_method: fp8`, the native form of DeepSeek, Qwen and others: what vLLM builds for a module.

In: quantization_config and config.json. Out: an `Fp8` as vLLM reads it.

Easy to get wrong: DeepSeek-V4 has a class of its own (`Family.fp8_class`), whose routed experts
have another form than the config says.

Source: vLLM 0.32.0 quantization/fp8.py, models/deepseek_v41/quant_config.py (which CUDA uses for V4
as well), models/deepseek_v4/nvidia/{model,mtp}.py for the names. Compared with the real functions
by tests/checkpoints/dialects/test_dialects.py.
"""

import re
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Any

from ...recipes.families import family_of
from ...recipes.family import VLLMName
from ...recipes.family_view import language_config
from ...recipes.forms import E8M0
from ...recipes.frozen import Json, frozen
from ...recipes.renamer import Renamer
from .dialect import Dialect, Exceptions, Kind, Resolution, VLLMModule
from .given import Fp8Given, Raw, read_given
from .matching import ENCODED, plain, registers, skipped
from .modelopt import inverse_blocks, modelopt_built
from .modules import NamedModule, concrete

_EXPERTS_ON_DISK = re.compile(r"(?:^|\.)layers\.(\d+)\.ffn\.experts$")
_SCALE = "scale"
_MXFP4_EXPERTS = registers(
    "mxfp4",
    leaves=frozenset({"weight", "weight_scale"}),
    scales=ENCODED,
    renames={_SCALE: "weight_scale"},
)
# modelopt's MXFP8, whose loader repeats each scale for the 32 rows of its block.
_MXFP8 = registers(
    "fp8_block",
    block=(32, 32),
    scale_ndim=2,
    scales=E8M0,
    renames={_SCALE: "weight_scale"},
)


@frozen
class Fp8(Dialect):
    """`quant_method: fp8`, also in DeepSeek-V4's class, where routed experts have a form of their
    own.

    Attributes:
        linear: what a linear module becomes.
        experts: what routed experts become.
        keeps_mxfp4: for DeepSeek-V4 with NVFP4 experts: names on disk of the experts that stay
            MXFP4.
        num_layers: num_hidden_layers; later layers are MTP layers.
    """

    linear: VLLMModule
    experts: VLLMModule
    keeps_mxfp4: tuple[str, ...]
    num_layers: int

    # Whole names.
    exceptions = Exceptions(("ignored_layers", "modules_to_not_convert"), may_be_on_disk=True)

    def resolve(self, module: VLLMName, *, shards: Sequence[VLLMName], kind: Kind) -> Resolution:
        """`is_layer_skipped`; heads are never quantized."""
        if kind == "head":
            return plain()
        if kind == "experts":
            shards = ()
        # vLLM's list has whole names, never patterns.
        answer = skipped(module, shards, self.words)
        if answer is not None:
            return answer
        if kind == "linear":
            return Resolution(self.linear)
        match = _EXPERTS_ON_DISK.search(module)
        if match is not None:
            stem = f"layers.{match[1]}"
            after = int(match[1]) - self.num_layers
            if after >= 0:
                stem = f"mtp.{after}"
            for pattern in self.keeps_mxfp4:
                if fnmatchcase(f"{stem}.ffn.experts", pattern):
                    return Resolution(_MXFP4_EXPERTS, pattern)
        return Resolution(self.experts)

    def hits(self, read: Sequence[str], name: str) -> bool:
        """Whole name; for experts every entry that contains it."""
        return skipped(name, (), read) is not None


def has_blocks(dialect: Dialect) -> bool:
    """Whether it is of blocks of 128 for every module, which are FP8_BLOCK's."""
    blocks = inverse_blocks(128, 128)
    return isinstance(dialect, Fp8) and (dialect.linear, dialect.experts) == (blocks, blocks)


def fp8_config(modules: Iterable[NamedModule]) -> Json:
    """The config of FP8 blocks, for a draft alone: most of its classes read the target's."""
    plain_names = dict[str, None]()
    for module in modules:
        if not module.scheme:
            plain_names |= dict.fromkeys(concrete(module.spelled))
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": [*plain_names],
    }


def read_fp8(raw: Raw, config: Raw, rename: Renamer) -> Fp8:
    """The config as vLLM reads it; DeepSeek-V4 by its own class.

    Raises:
        CheckpointError: a key has another type than vLLM reads.
    """
    given = read_given(Fp8Given, raw)
    listed = given.ignored_layers or given.modules_to_not_convert
    family = family_of(config)
    own_class = ""  # for this model's FP8; "" for the usual one
    if family is not None:
        own_class = family.fp8_class
    linear = experts = _built(given, own_class)
    keeps_mxfp4 = ()
    if own_class and _expert_dtype(config) == "fp4":
        if given.weight_block_size == (32, 32):
            linear = _MXFP8
        # Experts are MXFP4 even if the config says blocks.
        experts = _MXFP4_EXPERTS
        if given.moe_quant_algo == "NVFP4":
            experts = modelopt_built("NVFP4", 16, 128)
            keeps_mxfp4 = given.ignore
    return Fp8(
        name=own_class or "fp8",
        linear=linear,
        experts=experts,
        keeps_mxfp4=keeps_mxfp4,
        num_layers=language_config(config).get("num_hidden_layers") or 0,
        rename=rename,
        listed={"ignored_layers": listed},
    )


def _expert_dtype(config: Raw) -> Any:
    """What vLLM finds first: DeepSeek-V4.1 says it in the quantization config."""
    for holder in (config, language_config(config), config.get("quantization_config") or {}):
        if "expert_dtype" in holder:
            return holder["expert_dtype"]
    return "fp4"


def _built(given: Fp8Given, own_class: str) -> VLLMModule:
    """What a linear module registers; DeepSeek-V4's loaders rename `.scale`."""
    built = registers("fp8_tensor")
    if given.activation_scheme == "static":
        built = registers("fp8_tensor", "input_scale")
    if given.weight_block_size:
        built = inverse_blocks(*given.weight_block_size)
    if own_class:
        built = built._replace(renames={_SCALE: "weight_scale_inv"})
    return built
