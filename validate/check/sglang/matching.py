"""How SGLang's modelopt and FP8 configs compare names with their lists.

In: a name, entries, and what the model's class says of its fused modules. Out: the entry that hits, and the exception.

Easy to get wrong: these lists are compared by parts between dots, so `mlp.gate` does not reach `mlp.gate_up_proj`, but
`model.layers.1` reaches all below it and nothing of layer 10. qkv_proj and gate_up_proj are known to be fused although
no class says so.

Source: SGLang 0.5.23 sglang/srt/layers/quantization/utils.py (is_layer_skipped) and modelopt_quant.py
(is_layer_excluded); compared with the real functions by tests/validate/check/test_sglang.py.
"""

import re
from collections.abc import Sequence
from functools import cache

from ....recipes.errors import CheckpointError, shortened
from .classes import Packed

_FUSED: Packed = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
_LATENT = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj")


def skipped(name: str, entries: Sequence[str], packed: Packed) -> tuple[str, str]:
    """`is_layer_skipped`: the entry that skips the module (or ""), and the exception (or "")."""
    last = name.rpartition(".")[2]
    fused = packed if last in packed else _FUSED
    if last in fused:
        hits = [_path_hit(name.replace(last, part), entries) for part in fused[last]]
        if any(hits) and not all(hits):
            return "", f"ValueError: Detected some but not all shards of {name} are quantized"
        return hits[0], ""
    if hit := _path_hit(name, entries):
        return hit, ""
    if "experts" in name:
        return next((entry for entry in entries if "experts" in entry and name in entry), ""), ""
    return "", ""


def excluded(name: str, entries: Sequence[str]) -> str:
    """`is_layer_excluded`: a glob for the whole name, or for one part of it between dots."""
    names = [name, name.removeprefix("language_model.")]
    for entry in entries:
        pattern = _glob(entry)
        if any(pattern.fullmatch(each) or any(map(pattern.fullmatch, each.split("."))) for each in names):
            return entry
        tail = entry.rpartition(".")[2]
        if tail in _LATENT and tail in name.rpartition(".")[2]:
            return entry
    return ""


def _path_hit(name: str, entries: Sequence[str]) -> str:
    dotted = f".{name.rstrip('.')}."
    return next((entry for entry in entries if f".{entry.rstrip('.')}." in dotted), "")


@cache
def _glob(entry: str) -> re.Pattern[str]:
    try:
        return re.compile(entry.replace(".", r"\.").replace("*", ".*"))
    except (re.error, OverflowError, RecursionError) as error:
        rule = "must be a glob that SGLang can make a regular expression of, or SGLang raises"
        raise CheckpointError(shortened(entry), rule, got=str(error), cure="Mend it") from error
