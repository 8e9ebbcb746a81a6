"""What SGLang's model classes tell its quantization configs: fused modules, and how names are rewritten.

In: config.json and a part. Out: `SglangClasses`.

Easy to get wrong: most classes say nothing. GLM-4's does not say of what qkv_proj is made, so an entry for q_proj does
not reach it. DeepSeek's rewrites `model.layers.61`, whatever the depth of the model; it is a plain part of a name, so a
regular expression with `\\.` in it is not rewritten, and a draft at another layer is not reached.

Source: SGLang 0.5.23 sglang/srt/models/ (packed_modules_mapping, hf_to_sglang_mapper, get_hf_to_sglang_mapper) and
model_loader/loader.py (_get_quantization_config); compared with them by tests/validate/check/test_sglang.py.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from ....recipes.family import Part

Packed = Mapping[str, tuple[str, ...]]
_Pairs = tuple[tuple[str, str], ...]

_QKV = {"qkv_proj": ("q_proj", "k_proj", "v_proj")}
_GATE_UP = {"gate_up_proj": ("gate_proj", "up_proj")}
_LATENT = {"fused_qkv_a_proj_with_mqa": ("q_a_proj", "kv_a_proj_with_mqa")}
_BOTH = _QKV | _GATE_UP
_QWEN_3_5 = _BOTH | {"in_proj_qkvz": ("in_proj_qkv", "in_proj_z"), "in_proj_ba": ("in_proj_b", "in_proj_a")}


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsMapper:
    """SGLang's `WeightsMapper`: of each kind the longest part that fits is replaced, once."""

    substrings: _Pairs = ()
    prefixes: _Pairs = ()
    suffixes: _Pairs = ()

    def name(self, entry: str) -> str:
        """One name, rewritten: by a part, then by its start, then by its end."""
        for old, new in _longest(self.substrings):
            if old in entry:
                entry = entry.replace(old, new, 1)
                break
        for old, new in _longest(self.prefixes):
            if entry.startswith(old):
                entry = new + entry[len(old) :]
                break
        for old, new in _longest(self.suffixes):
            if entry.endswith(old):
                entry = entry[: -len(old)] + new
                break
        return entry


@dataclass(frozen=True, slots=True, kw_only=True)
class SglangClasses:
    """What one class says.

    Attributes:
        packed: last part of a fused module's name -> of what it is made.
        mapper: how entries are rewritten; None where the class has no mapper.
    """

    packed: Packed = field(default_factory=lambda: MappingProxyType({}))
    mapper: WeightsMapper | None = None


_LAYER_61 = WeightsMapper(substrings=(("model.layers.61", "model.decoder"),))
_NEMOTRON = WeightsMapper(prefixes=(("backbone.", "model."),))
_QWEN = SglangClasses(packed=_QWEN_3_5)
_SAME: Mapping[str, SglangClasses] = {
    "DeepseekV3ForCausalLM": SglangClasses(packed=_LATENT),
    "DeepseekV32ForCausalLM": SglangClasses(packed=_LATENT),
    "GlmMoeDsaForCausalLM": SglangClasses(packed=_LATENT),
    "HYV4ForCausalLM": SglangClasses(packed=_GATE_UP),
    "LongcatFlashForCausalLM": SglangClasses(packed=_LATENT),
    "NemotronHForCausalLM": SglangClasses(packed=_QKV, mapper=_NEMOTRON),
    "Qwen3NextForCausalLM": SglangClasses(packed=_BOTH),
    "Qwen3_5ForCausalLM": _QWEN,
    "Qwen3_5MoeForCausalLM": _QWEN,
    "Qwen3_5ForConditionalGeneration": _QWEN,
    "Qwen3_5MoeForConditionalGeneration": _QWEN,
    "InternS2PreviewForConditionalGeneration": _QWEN,
    "Qwen4ExpForConditionalGeneration": _QWEN,
}
_DENSE = ("attention.dense", "attention.o_proj")
_BAILING_DRAFT = SglangClasses(packed=_LATENT | _GATE_UP, mapper=WeightsMapper(substrings=(_DENSE,)))

# By the first architecture of config.json: the target's class, and the draft's. Those not here say nothing.
TARGETS: Mapping[str, SglangClasses] = {
    **_SAME,
    "BailingMoeV2_5ForCausalLM": SglangClasses(
        packed=_LATENT | _GATE_UP, mapper=WeightsMapper(substrings=(("attention.dense", "attention.out_proj"),))
    ),
    "Ernie4_5_MoeForCausalLM": SglangClasses(packed=_BOTH),
}
DRAFTS: Mapping[str, SglangClasses] = {
    **_SAME,
    "BailingMoeV2_5ForCausalLM": _BAILING_DRAFT,
    "BailingMoeV3ForCausalLM": _BAILING_DRAFT,
    "DeepseekV3ForCausalLM": SglangClasses(packed=_LATENT, mapper=_LAYER_61),
    "DeepseekV32ForCausalLM": SglangClasses(packed=_LATENT, mapper=_LAYER_61),
    "NemotronHForCausalLM": SglangClasses(
        packed=_QKV, mapper=WeightsMapper(prefixes=(*_NEMOTRON.prefixes, ("language_model.mtp.", "mtp.")))
    ),
}


def sglang_classes(config: Mapping[str, Any], part: Part) -> SglangClasses:
    """What the class of a part says of its names."""
    architecture = (config.get("architectures") or [""])[0]
    return (DRAFTS if part == "mtp" else TARGETS).get(architecture, SglangClasses())


def _longest(pairs: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    return sorted(pairs, key=lambda pair: len(pair[0]), reverse=True)
