"""How vLLM compares names with the entries of a quantization config; `recipes/renamer.py` rewrites them before.

In: names and entries. Out: the entry that matched.

Easy to get wrong: these entries are whole names. patterns.py matches regexes.

Source: vLLM 0.32.0 quantization/utils/quant_utils.py, compressed_tensors/utils.py, modelopt.py; compared with the real
functions by tests/validate/check/test_dialects.py.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache

from ..vllm_module import PLAIN, Resolution

# The groups of Marlin's kernel for routed experts (quantization/utils/marlin_utils.py).
MARLIN_GROUPS = (-1, 32, 64, 128)
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


def left_out(names: Iterable[str], hit: Callable[[str], str | None], error: str) -> Resolution | None:
    """The answer for a module whose list has its name, or for a fused one that of its parts; None where it has none.

    Args:
        names: the module, or its parts.
        hit: the entry that names one of them.
        error: what the server raises where only some are named.
    """
    hits = [hit(name) for name in names]
    if not any(hits):
        return None
    return Resolution(built=PLAIN, entry=next(filter(None, hits)), error="" if all(hits) else error)


class Substrings:
    """Words of which one may be a part of a name: a checkpoint has a word for each of its modules."""

    def __init__(self, words: Iterable[str]) -> None:
        self._words = frozenset(words)
        self._lengths = sorted({len(word) for word in self._words})

    def __bool__(self) -> bool:
        return bool(self._words)

    def within(self, name: str) -> str | None:
        """The shortest word that is a part of the name."""
        for length in self._lengths:
            for start in range(len(name) - length + 1):
                if (part := name[start : start + length]) in self._words:
                    return part
        return None


def shards_agree(name: str, shards: Sequence[str], is_so: Callable[[str], bool]) -> tuple[bool, str]:
    """vLLM's answer for a fused module by those of its shards, or the exception that it raises if they differ."""
    answers = {is_so(shard) for shard in shards or (name,)}
    return answers == {True}, _MODELOPT_SHARD_ERROR.format(name) if len(answers) > 1 else ""


@lru_cache(maxsize=4)
def experts_among(names: frozenset[str]) -> tuple[str, ...]:
    """The names that a longer entry can skip."""
    return tuple(name for name in names if "experts" in name)


@lru_cache(maxsize=4)
def joined(names: frozenset[str]) -> str:
    """All names in one text: what is not in it is in none of them."""
    return "\n".join(names)
