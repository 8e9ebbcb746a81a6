"""`quant_method: awq`: what vLLM builds for a module.

In: quantization_config, and the modules on disk with and without integers. Out: an `Awq`.

Easy to get wrong: an entry is a part of a name. Without a list vLLM makes one of the headers: all modules that hold
floating-point numbers alone. Its names are those on disk, so one expert's name is no part of the name of all.
In groups that Marlin does not have, experts go to MoeWNA16, which takes the list as it is written, and makes none.

Source: vLLM 0.32.0 quantization/auto_awq.py, moe_wna16.py, quantization/utils/quant_utils.py (is_layer_skipped,
substring); compared with the real functions by tests/validate/check/test_dialects.py and test_foreign_schemes.py.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ....recipes.family import VLLMName
from ....recipes.renamer import Renamer
from ..vllm_module import PLAIN, UNKNOWN, ConfigEntry, Kind, Resolution, VLLMModule
from .given import AwqGiven, read_given
from .matching import MARLIN_GROUPS, Substrings, shards_agree


@dataclass(frozen=True, slots=True, kw_only=True)
class Awq:
    """`quant_method: awq`.

    Attributes:
        skipped: modules_to_not_convert, or what vLLM puts in its place.
        error: vLLM's exception as it reads the config; "" for none.
    """

    group_size: int
    has_zeros: bool
    has_quantized_head: bool
    skipped: Substrings
    entries: tuple[ConfigEntry, ...]
    error: str = ""
    name: str = "awq"

    def resolve(self, module: VLLMName, *, shards: Sequence[VLLMName], kind: Kind) -> Resolution:
        """`is_layer_skipped` by parts of names, first of the fused name; experts have no shards there."""
        if self.error:
            return Resolution(built=UNKNOWN, entry="quantization_config", error=self.error)
        if kind == "head" and not self.has_quantized_head:
            return Resolution(built=PLAIN)
        skipped = self.skipped
        if kind == "experts" and self.group_size not in MARLIN_GROUPS:
            skipped = Substrings(entry.written for entry in self.entries)
        if (entry := skipped.within(module)) is not None:
            return Resolution(built=PLAIN, entry=entry)
        if shards and kind == "linear":
            is_skipped, error = shards_agree(module, shards, lambda name: self.skipped.within(name) is not None)
            if is_skipped or error:
                entry = next(word for shard in shards if (word := self.skipped.within(shard)) is not None)
                return Resolution(built=PLAIN, entry=entry, error=error)
        return Resolution(built=awq_built(4, self.group_size, has_zeros=self.has_zeros))

    def covered(self, entry: ConfigEntry, names: frozenset[str]) -> Sequence[str]:
        """The names that an entry is a part of."""
        return [name for name in names if any(word in name for word in entry.read)]


def read_awq(raw: Mapping[str, Any], rename: Renamer, floats: Iterable[str]) -> Awq:
    """The config as vLLM reads it.

    Args:
        raw: quantization_config.
        rename: of the class that reads it.
        floats: modules on disk that hold floating-point numbers alone.

    Raises:
        CheckpointError: a key has another type than vLLM reads.
    """
    given = read_given(AwqGiven, raw)
    bits, group_size = given.w_bit or given.bits, given.q_group_size or given.group_size
    listed = given.modules_to_not_convert or ()
    needed = {"w_bit": bits, "q_group_size": group_size, "zero_point": given.zero_point}
    missing = next((key for key, value in needed.items() if value is None), "")
    error = "" if bits == 4 else f"ValueError: Unsupported num_bits = {bits}. Supported: 4"
    if missing:
        error = f"ValueError: Cannot find any of ['{missing}'] in the model's quantization config"
    return Awq(
        group_size=group_size or 0,
        has_zeros=bool(given.zero_point),
        has_quantized_head=bool(given.lm_head),
        skipped=Substrings(rename.name(word) for word in listed or floats),
        entries=tuple(
            ConfigEntry(where="modules_to_not_convert", written=word, read=(rename.name(word),)) for word in listed
        ),
        error=error,
    )


def awq_built(bits: int, group_size: int, *, has_zeros: bool) -> VLLMModule:
    """What AutoAWQMarlinLinearMethod and AutoAWQMoEMethod register."""
    zeros = frozenset({"qzeros"})
    return VLLMModule(
        form="awq",
        leaves=frozenset({"qweight", "scales"}) | (zeros if has_zeros else frozenset()),
        optional=frozenset() if has_zeros else zeros,
        group_size=group_size if group_size > 0 else None,
        bits=bits,
    )
