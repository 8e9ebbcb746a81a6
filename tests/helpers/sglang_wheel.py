"""SGLang's own functions for names in compressed-tensors' config, without its kernels.

In: an unpacked wheel of SGLang 0.5.23, in build/sglang or where SGLANG_WHEEL says. Out: the module
layers/quantization/compressed_tensors/utils.py, which needs nothing of SGLang.
"""

import importlib.util
import os
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

WHEEL = Path(os.environ.get("SGLANG_WHEEL", Path(__file__).parents[2] / "build" / "sglang"))
UTILS = WHEEL / "sglang/srt/layers/quantization/compressed_tensors/utils.py"
MISSING = "no unpacked wheel of SGLang in build/sglang"
# What SGLang's classes say of their fused modules; most draft classes say nothing.
FUSED = {
    "qkv_proj": ["q_proj", "k_proj", "v_proj"],
    "gate_up_proj": ["gate_proj", "up_proj"],
    "fused_qkv_a_proj_with_mqa": ["q_a_proj", "kv_a_proj_with_mqa"],
}
FUSED_IN_QWEN35 = FUSED | {
    "in_proj_qkvz": ["in_proj_qkv", "in_proj_z"],
    "in_proj_ba": ["in_proj_b", "in_proj_a"],
}


@cache
def functions() -> ModuleType:
    """The module with should_ignore_layer and find_matched_target."""
    spec = importlib.util.spec_from_file_location("sglang_compressed_tensors_utils", UTILS)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class QKVParallelLinear(nn.Module):
    """A module by whose class no target is meant."""


def group_of(
    config: dict[str, Any], name: str, fused: dict[str, list[str]]
) -> dict[str, Any] | None:
    """The group that SGLang gives to a module; None for an ignored one.

    Raises:
        ValueError: SGLang finds none, or shards of a fused module differ.
    """
    if functions().should_ignore_layer(name, ignore=config["ignore"], fused_mapping=fused):
        return None
    groups = {
        target: group for group in config["config_groups"].values() for target in group["targets"]
    }
    return groups[functions().find_matched_target(name, QKVParallelLinear(), groups, fused)]
