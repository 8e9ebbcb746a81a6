"""How vLLM compares names with the entries of a quantization config, and how it rewrites those entries before.

In: names and entries. Out: which entry matched. `Renamer` is the mapper of the target's model class, by architecture.

Easy to get wrong: a regex is matched from the start but not to the end, and is never renamed; a name is compared
whole. The mapper also drops what it would not load, but not here: vLLM keeps such entries since 0.32.

Source: vLLM 0.32.0 quantization/utils/{config_utils,quant_utils}.py, compressed_tensors/utils.py, modelopt.py,
model_executor/models/{utils,qwen3_vl,qwen3_5,qwen3_next,mimo}.py, models/deepseek_v4/nvidia/model.py; compared with the
real functions by tests/test_dialects.py.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Any

_MODELOPT_SHARD_ERROR = "ValueError: Detected some but not all shards of {} are quantized"


def first_match(name: str, patterns: Iterable[str], *, contains: bool = False) -> str | None:
    """The first pattern that matches; `contains` as vLLM compares class names."""
    return next((pattern for pattern in patterns if equal_or_regex(name, pattern, contains=contains)), None)


def equal_or_regex(name: str, pattern: str, *, contains: bool = False) -> bool:
    """compressed-tensors' comparison of one name with one pattern."""
    if pattern.startswith("re:"):
        return _compiled(pattern[3:]).match(name) is not None
    return pattern.lower() in name.lower() if contains else pattern == name


@cache
def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error:
        return re.compile(r"(?!)")  # vLLM would raise; the rule on entries reports what matches nothing


def is_layer_skipped(module: str, shards: Sequence[str], entries: Sequence[str]) -> tuple[str, str]:
    """vLLM's `is_layer_skipped` in exact mode: the entry that skips (or ""), and the exception it raises (or "")."""
    if shards:
        if module in entries:
            return module, ""
        hits = [shard for shard in shards if shard in entries]
        if hits and len(hits) < len(shards):
            return hits[0], _MODELOPT_SHARD_ERROR.format(module)
        return (hits[0] if hits else ""), ""
    if "experts" in module:
        return next((entry for entry in entries if "experts" in entry and module in entry), ""), ""
    return (module if module in entries else ""), ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Renamer:
    """`hf_to_vllm_mapper.get_rename_mapper()` of the target's class, as far as module names go."""

    is_applied: bool = False
    substrings: tuple[tuple[str, str], ...] = ()
    prefixes: tuple[tuple[str, str], ...] = ()

    def name(self, entry: str) -> str:
        """One name, in the mapper's order: substrings, then prefixes."""
        for old, new in self.substrings:
            entry = entry.replace(old, new, 1)
        for old, new in self.prefixes:
            if entry.startswith(old):
                entry = entry.replace(old, new, 1)
        return entry

    def path(self, entry: str) -> str:
        """compressed-tensors renames paths only, neither regexes nor class names."""
        return self.name(entry) if "." in entry and not entry.startswith("re:") else entry

    def modelopt(self, entry: str) -> tuple[str, ...]:
        """modelopt splits `x*` into `x` and `x.*` first, but only where a mapper is applied at all."""
        if self.is_applied and len(entry) >= 2 and entry[-1] == "*" and entry[-2] != ".":
            return self.name(entry[:-1]), self.name(entry[:-1] + ".*")
        return (self.name(entry),)


_DEEPSEEK_V4 = Renamer(
    is_applied=True,
    substrings=((".shared_experts.w2", ".shared_experts.down_proj"),),
    prefixes=(("layers.", "model.layers."), ("embed.", "model.embed."), ("norm.", "model.norm."),
              ("hc_head", "model.hc_head"), ("mtp.", "model.mtp.")),
)  # fmt: skip
_QWEN_VISION = Renamer(
    is_applied=True,
    prefixes=(("model.visual.", "visual."), ("lm_head.", "language_model.lm_head."),
              ("model.language_model.", "language_model.model.")),
)  # fmt: skip
_QWEN_TEXT = Renamer(is_applied=True, prefixes=(("model.language_model.", "model."),))
_RENAMERS: Mapping[str, Renamer] = MappingProxyType({
    "deepseek_v4": _DEEPSEEK_V4, "mimo": Renamer(is_applied=True), "qwen3_next": Renamer(is_applied=True),
    "qwen3_5": _QWEN_TEXT, "qwen3_5_text": _QWEN_TEXT, "qwen3_5_moe": _QWEN_TEXT, "qwen3_5_moe_text": _QWEN_TEXT,
})  # fmt: skip


def renamer(config: Mapping[str, Any]) -> Renamer:
    """The mapper of the class that vLLM serves this architecture with."""
    architecture = str(next(iter(config.get("architectures") or ()), ""))
    if architecture.startswith("Qwen3_5") and architecture.endswith("ForConditionalGeneration"):
        return _QWEN_VISION
    return _RENAMERS.get(str(config.get("model_type", "")), Renamer())
