"""How vLLM compares names with the entries of a quantization config; `recipes/renamer.py` rewrites them before.

In: names and entries. Out: the entry that matched.

Easy to get wrong: these entries are whole names. patterns.py matches regexes.

Source: vLLM 0.32.0 quantization/utils/quant_utils.py, compressed_tensors/utils.py, modelopt.py; compared with the real
functions by tests/validate/check/test_dialects.py.
"""

from collections.abc import Sequence
from functools import lru_cache

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
