"""How vLLM compares names with the lists of a quantization config, and the answers that follow.

In: names, and entries that `recipes/renamer.py` has rewritten. Out: a `Resolution`, or None where
no entry names them.

Easy to get wrong: lists here are whole names.

Source: vLLM 0.32.0 quantization/utils/quant_utils.py, compressed_tensors/utils.py, modelopt.py.
Compared with the real functions by tests/checkpoints/dialects/test_dialects.py.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from ...recipes.family import VLLMName
from ...recipes.forms import E8M0, FLOATS, FORMS, FP8
from ..stored import Form
from .dialect import PLAIN, UNKNOWN, Kind, Refusal, Resolution, VLLMModule

# The groups of Marlin's kernel for routed experts (quantization/utils/marlin_utils.py).
MARLIN_GROUPS = (-1, 32, 64, 128)
SHARDS_DIFFER = "ValueError: Detected some but not all shards of {} are quantized"
SCHEMES_DIFFER = "ValueError: Found different quantization schemes for the shards of {}"
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
"""Parts of modules that a server knows to be fused though no class of the model says so."""


ENCODED = (*E8M0, *FLOATS, *FP8)
"""What vLLM's own method for MXFP4 experts makes E8M0 of (quantization/mxfp4.py,
_encode_mxfp4_weight_scale)."""


def plain(entry: str = "") -> Resolution:
    """A module that the server leaves plain."""
    return Resolution(PLAIN, entry)


def raises(error: str, entry: str = "quantization_config", refusal: Refusal = "") -> Resolution:
    """A module that the server raises on."""
    return Resolution(UNKNOWN, entry, error, refusal)


def registers(form: Form, *more: str, **others: Any) -> VLLMModule:
    """A module with a form's own parameters, and `more`; `others` as in `VLLMModule`."""
    storage = FORMS[form]
    leaves = {storage.leaf, "weight_scale", storage.common or storage.leaf}
    own = {"leaves": leaves.union(more), "group_size": storage.group or None}
    return VLLMModule(form=form, **(own | others))


MXFP4 = registers("mxfp4", scales=("U8",))


def lacks(needed: Mapping[str, object]) -> Resolution:
    """The answer for every module where one of the keys that vLLM wants is absent; without an error
    where none is.
    """
    for key, value in needed.items():
        if value is None:
            error = f"ValueError: Cannot find any of ['{key}'] in the model's quantization config"
            return raises(error)
    return Resolution(UNKNOWN)


def left_out(
    names: Iterable[str], hit: Callable[[str], str | None], error: str
) -> Resolution | None:
    """The answer for a module whose list has its name, or for a fused one that of its parts; None
    where it has none.

    Args:
        names: the module, or its parts.
        hit: the entry that names one of them.
        error: what the server raises where only some are named.
    """
    asked = [hit(name) for name in names]
    hits = [entry for entry in asked if entry is not None]
    if not hits:
        return None
    if len(hits) < len(asked):
        return raises(error, hits[0], "shards")
    return plain(hits[0])


def named(
    module: str, shards: Iterable[str], hit: Callable[[str], str | None], error: str
) -> Resolution | None:
    """The answer for a module by its own name, else for a fused one by those of its parts; see
    `left_out`.
    """
    return left_out((module,), hit, "") or left_out(shards, hit, error.format(module))


def parts_of(
    name: str, kind: Kind, fused: Mapping[str, Sequence[str]], projections: Sequence[str]
) -> tuple[VLLMName, ...]:
    """The parts of a fused module, by those of its last component; of experts those of the first,
    which a server asks about for all of them.
    """
    stem, dot, last = name.rpartition(".")
    if kind == "experts":
        return tuple(VLLMName(f"{name}.0.{projection}") for projection in projections)
    return tuple(VLLMName(stem + dot + part) for part in fused.get(last, ()))


def skipped(module: str, shards: Sequence[str], entries: Sequence[str]) -> Resolution | None:
    """vLLM's `is_layer_skipped`; routed experts have no shards there."""
    if not shards and "experts" in module:
        for entry in entries:
            if "experts" in entry and module in entry:
                return plain(entry)
        return None
    # Of the parts a list must name all or none.
    return named(module, shards, partial(_whole, entries), SHARDS_DIFFER)


def _whole(entries: Sequence[str], name: str) -> str | None:
    if name in entries:
        return name
    return None


class Substrings:
    """Words of which one may be a part of a name: a checkpoint has a word for each of its
    modules.
    """

    def __init__(self, words: Iterable[str]) -> None:
        self._words = frozenset(words)
        self._lengths = sorted({len(word) for word in self._words})

    def __bool__(self) -> bool:
        return bool(self._words)

    def within(self, name: str) -> str | None:
        """The shortest word that is a part of the name."""
        for length in self._lengths:
            for start in range(len(name) - length + 1):
                part = name[start : start + length]
                if part in self._words:
                    return part
        return None
