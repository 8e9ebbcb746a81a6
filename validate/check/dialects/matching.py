"""How vLLM compares names with the entries of a quantization config, and how it rewrites those entries before.

In: names and entries. Out: the entry that matched. `Renamer` applies the mapper of the target's model class; the family
file holds that mapper.

Easy to get wrong: vLLM never renames a regex (patterns.py matches those). Other entries are
whole names. The mapper also drops names that the model does not load, but vLLM keeps such entries since 0.32.

Source: vLLM 0.32.0 quantization/utils/{config_utils,quant_utils}.py, compressed_tensors/utils.py, modelopt.py,
model_executor/models/{utils,qwen3_vl,qwen3_5,qwen3_next,mimo}.py, models/deepseek_v4/nvidia/model.py; compared with the
real functions by tests/validate/check/test_dialects.py.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from ....recipes.families import families
from ....recipes.family import Part, Renames
from ....recipes.family_view import FamilyView

_MODELOPT_SHARD_ERROR = "ValueError: Detected some but not all shards of {} are quantized"


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


@lru_cache(maxsize=4)
def experts_among(names: frozenset[str]) -> tuple[str, ...]:
    """The names that a longer entry can skip."""
    return tuple(name for name in names if "experts" in name)


@lru_cache(maxsize=4)
def joined(names: frozenset[str]) -> str:
    """All names in one text: what is not in it is in none of them."""
    return "\n".join(names)


@dataclass(frozen=True, slots=True, kw_only=True)
class Renamer:
    """The mapper of a model class, applied to entries; `renames` is None where the class has no mapper."""

    renames: Renames | None = None

    def name(self, entry: str) -> str:
        """One name, in the mapper's order: substrings, then prefixes."""
        if self.renames is not None:
            for old, new in self.renames.substrings:
                entry = entry.replace(old, new, 1)
            for old, new in self.renames.prefixes:
                if entry.startswith(old):
                    entry = entry.replace(old, new, 1)
        return entry

    def path(self, entry: str) -> str:
        """compressed-tensors renames paths, but no regexes and no class names."""
        return self.name(entry) if "." in entry and not entry.startswith("re:") else entry

    def modelopt(self, entry: str) -> tuple[str, ...]:
        """modelopt splits `x*` into `x` and `x.*` first, but only for classes with a mapper."""
        if self.renames is not None and len(entry) >= 2 and entry[-1] == "*" and entry[-2] != ".":
            return self.name(entry[:-1]), self.name(entry[:-1] + ".*")
        return (self.name(entry),)


def renamer(config: Mapping[str, Any], part: Part = "backbone") -> Renamer:
    """The mapper of the class that vLLM serves this config.json with, from its family's table.

    Most drafts get the quantization config that the target's class has already mapped.
    """
    architecture = (config.get("architectures") or [""])[0]
    family = families().get(str(architecture)) or families().get(str(config.get("model_type", "")))
    if family is None:
        return Renamer()
    layout = FamilyView(family=family, config=config).layout
    return Renamer(renames=layout.draft_renames if part == "mtp" and layout.draft_reads_afresh else layout.renames)
