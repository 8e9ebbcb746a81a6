"""`quant_method: quark`: what SGLang builds for a module.

In: quantization_config, and what the model's class says of its names. Out: a `SglangQuark`.

Easy to get wrong: the draft's class rewrites the config before it reads it (view.py). Routed experts are plain as soon
as one of them is excluded by name. A head is never quantized.

Source: SGLang 0.5.23 sglang/srt/layers/quantization/quark/{quark,utils}.py; compared with the real classes by
tests/validate/check/test_sglang.py.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import Any

from ..dialects.given import QuarkGiven, QuarkLayer, read_given
from ..dialects.matching import left_out
from ..dialects.patterns import Entries
from ..dialects.quark import quark_built
from ..vllm_module import PLAIN, UNKNOWN, Resolution, VLLMModule
from .asked import AskedModule
from .classes import Packed, SglangClasses, WeightsMapper

_FUSED: Packed = {
    "gate_up_proj": ("gate_proj", "up_proj"),
    "fused_qkv_a_proj_with_mqa": ("q_a_proj", "kv_a_proj_with_mqa"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SglangQuark:
    """`quant_method: quark`.

    Attributes:
        exclude: entries after renaming.
        schemes: layer_quant_config, after renaming: what becomes of a module.
        usual: what becomes of every other one.
    """

    exclude: Entries
    schemes: Mapping[str, VLLMModule]
    usual: VLLMModule
    packed: Packed
    method: str = "quark"

    def resolve(self, asked: AskedModule) -> Resolution:
        """`get_quant_method`."""
        if asked.kind == "head":
            return Resolution(built=PLAIN)
        if hit := self.exclude.first(asked.name) or self._below(asked.name):
            return Resolution(built=PLAIN, entry=hit)
        parts = [asked.name.replace(asked.last, part) for part in self.packed.get(asked.last, ())]
        error = f"ValueError: Found different quantization schemes in {asked.name}"
        if plain := left_out(parts, self.exclude.first, error):
            return plain
        choices = [self._layer(part) for part in parts or [asked.name]]
        if any(choice != choices[0] for choice in choices):
            error = f"ValueError: Found a different quantization configuration in {asked.name}"
            return Resolution(built=UNKNOWN, error=error)
        return Resolution(built=choices[0])

    def _below(self, name: str) -> str:
        stem = f"{name}." if name.endswith(".experts") else None
        return next((entry for entry in self.exclude.written if stem and entry.startswith(stem)), "")

    def _layer(self, name: str) -> VLLMModule:
        for pattern, built in self.schemes.items():
            if fnmatch(name, pattern) or (name.endswith(".experts") and pattern.startswith(f"{name}.")):
                return built
        return self.usual


def read_sglang_quark(raw: Mapping[str, Any], classes: SglangClasses) -> SglangQuark:
    """The config as SGLang reads it.

    Raises:
        CheckpointError: a key has another type than is read, or an entry is no regular expression.
    """
    given = read_given(QuarkGiven, raw)
    mapper = classes.mapper or WeightsMapper()
    renamed = [mapper.name(entry) for entry in given.exclude or ()]
    if classes.mapper:
        renamed += [entry.removeprefix("language_model.") for entry in renamed if entry.startswith("language_model.")]
    exclude = Entries(dict.fromkeys(renamed))
    exclude.refuse_wrong()
    return SglangQuark(
        exclude=exclude,
        schemes={mapper.name(name): quark_built(layer) for name, layer in (given.layer_quant_config or {}).items()},
        usual=quark_built(given.global_quant_config or QuarkLayer()),
        packed={**classes.packed, **_FUSED},
    )
