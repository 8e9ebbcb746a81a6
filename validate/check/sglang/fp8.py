"""`quant_method: fp8`: what SGLang builds for a module.

In: quantization_config, and what the model's class says of its names. Out: a `SglangFp8`.

Easy to get wrong: each entry counts with and without `model.` before it. Heads are never quantized.

Source: SGLang 0.5.23 sglang/srt/layers/quantization/fp8.py (Fp8Config); compared with it by
tests/validate/check/test_sglang.py.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from ..dialects.fp8 import fp8_built
from ..dialects.given import Fp8Given, read_given
from ..vllm_module import PLAIN, UNKNOWN, Resolution, VLLMModule
from .asked import AskedModule, Failing
from .classes import Packed, SglangClasses
from .matching import skipped


@dataclass(frozen=True, slots=True, kw_only=True)
class SglangFp8:
    """`quant_method: fp8`.

    Attributes:
        ignored: entries, with and without `model.`.
        linear: what becomes of linear modules.
        experts: what becomes of routed experts.
    """

    ignored: tuple[str, ...]
    linear: VLLMModule
    experts: VLLMModule
    packed: Packed
    method: str = "fp8"

    def resolve(self, asked: AskedModule) -> Resolution:
        """`get_quant_method`."""
        if asked.kind == "head":
            return Resolution(built=PLAIN)
        entry, error = skipped(asked.name, self.ignored, self.packed)
        if entry or error:
            return Resolution(built=PLAIN, entry=entry, error=error)
        return Resolution(built=self.experts if asked.kind == "experts" else self.linear)


def read_sglang_fp8(raw: Mapping[str, Any], classes: SglangClasses, *, is_v4: bool) -> SglangFp8 | Failing:
    """The config as SGLang reads it; `is_v4`: DeepSeek-V4's loader renames `scale`, and its experts may be MXFP4.

    Raises:
        CheckpointError: a key has another type than is read.
    """
    given = read_given(Fp8Given, raw)
    listed = given.ignored_layers if given.ignored_layers is not None else given.modules_to_not_convert
    bare = [entry.removeprefix("model.") for entry in listed or ()]
    if given.activation_scheme not in ("static", "dynamic"):
        error = f"ValueError: Unsupported activation scheme {given.activation_scheme}"
        return Failing(method="fp8", error=error)
    if given.weight_block_size and given.activation_scheme != "dynamic":
        error = "ValueError: The block-wise quantization only supports dynamic activation scheme"
        return Failing(method="fp8", error=error)
    linear = fp8_built(given)
    if is_v4:
        linear = replace(linear, renames=MappingProxyType({"scale": "weight_scale_inv"}))
    return SglangFp8(
        ignored=tuple(name for entry in bare for name in (entry, f"model.{entry}")),
        linear=linear,
        experts=UNKNOWN if is_v4 else linear,
        packed=classes.packed,
    )
