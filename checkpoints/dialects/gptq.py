"""`quant_method: gptq` and `quant_method: awq`: what vLLM builds for a module.

In: quantization_config, and the modules on disk with and without integers. Out: a `Gptq` or an
`Awq`.

Easy to get wrong: under GPTQ linear modules and routed experts are asked differently. A linear
module is quantized if the name of a module with integers on disk is a part of its own; vLLM reads
those names from the headers. Routed experts are quantized unless `dynamic` has a `-:` expression
for them. `+:` expressions change bits and groups, and except nothing. AWQ's entries are parts of
names. Without a list vLLM makes one of the headers: all modules that hold floating-point numbers
alone. Its names are those on disk, so one expert's name is no part of the name of all. In groups
that Marlin does not have, experts go to MoeWNA16, which never looks at `dynamic`, and takes AWQ's
list as it is written.

Source: vLLM 0.32.0 quantization/auto_gptq.py, auto_awq.py, moe_wna16.py,
quantization/utils/{gptq_utils,marlin_utils, quant_utils}.py, models/qwen3_5_mtp.py; compared with
the real functions by tests/checkpoints/dialects/test_dialects.py and test_foreign_schemes.py.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from ...recipes.family import VLLMName
from ...recipes.renamer import Renamer
from .dialect import ConfigEntry, Kind, Resolution, VLLMModule
from .given import AwqGiven, GptqGiven, Raw, read_given
from .matching import (
    MARLIN_GROUPS,
    SHARDS_DIFFER,
    Substrings,
    entries_of,
    lacks,
    left_out,
    plain,
    raises,
    registers,
)
from .patterns import matches_start

ACT_ORDER = "ValueError: GPTQ group activation ordering (desc_act=True) is no longer supported"


class Gptq(NamedTuple):
    """`quant_method: gptq`.

    Attributes:
        dynamic: expressions in their order, with what each overrides; None for one that excepts.
        stored: modules that are quantized, by a part of their name; all if there are none.
        error: vLLM's exception as it reads the config; "" for none.
        excepts_draft: Qwen3.5's draft class builds its layers plain: an exception speaks of mtp.
    """

    bits: int
    group_size: int
    is_symmetric: bool
    has_quantized_head: bool
    dynamic: tuple[tuple[str, Raw | None], ...]
    stored: Substrings
    entries: tuple[ConfigEntry, ...]
    error: str
    excepts_draft: bool
    name: str = "gptq"

    def resolve(self, module: VLLMName, *, shards: Sequence[VLLMName], kind: Kind) -> Resolution:
        """`get_linear_quant_method` and `get_moe_quant_method`, then `override_config`."""
        if self.error:
            return raises(self.error)
        if kind == "head" and not self.has_quantized_head:
            return plain()
        dynamic = () if kind == "experts" and self.is_blind_to_experts else self.dynamic
        entry, override = next((row for row in dynamic if matches_start(module, row[0])), ("", {}))
        if kind != "experts" and self.stored:
            hits = [self.stored.within(name) for name in shards or (module,)]
            if all(hit is None for hit in hits):
                return plain()
            if None in hits:
                return raises(SHARDS_DIFFER.format(module), "")
        if override is None:
            return plain(f"-:{entry}")
        bits = _number(override, "bits", self.bits)
        is_symmetric = bool(override.get("sym", self.is_symmetric))
        if bits not in (4, 8) or not is_symmetric:
            error = f"ValueError: Unsupported quantization config: bits={bits}, sym={is_symmetric}"
            return raises(error, entry or "quantization_config")
        size = _number(override, "group_size", self.group_size)
        return Resolution(gptq_built(bits, size), entry)

    @property
    def is_blind_to_experts(self) -> bool:
        """Whether vLLM builds routed experts by MoeWNA16, which does not look at `dynamic`."""
        return self.group_size not in MARLIN_GROUPS

    def hits(self, entry: ConfigEntry, name: str) -> bool:
        """Whether its expression matches the name from the start."""
        return matches_start(name, entry.read[0])


class Awq(NamedTuple):
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
    error: str
    name: str = "awq"

    def resolve(self, module: VLLMName, *, shards: Sequence[VLLMName], kind: Kind) -> Resolution:
        """`is_layer_skipped` by parts of names, first of the fused name; experts have no shards
        there.
        """
        if self.error:
            return raises(self.error)
        if kind == "head" and not self.has_quantized_head:
            return plain()
        skipped = self.skipped
        if kind == "experts" and self.group_size not in MARLIN_GROUPS:
            skipped = Substrings(entry.written for entry in self.entries)
        parts = shards if kind == "linear" else ()
        for names in ((module,), parts):
            if found := left_out(names, skipped.within, SHARDS_DIFFER.format(module)):
                return found
        return Resolution(awq_built(self.group_size, has_zeros=self.has_zeros))

    def hits(self, entry: ConfigEntry, name: str) -> bool:
        """Whether it is a part of the name."""
        return entry.read[0] in name


def read_gptq(raw: Raw, rename: Renamer, integers: Iterable[str]) -> Gptq:
    """The config as vLLM reads it.

    Args:
        raw: quantization_config.
        rename: of the class that reads it; expressions are not renamed.
        integers: modules on disk with a tensor that holds no floating-point numbers.

    Raises:
        CheckpointError: a key has another type than vLLM reads.
    """
    given = read_given(GptqGiven, raw)
    dynamic = list[tuple[str, Raw | None]]()
    for key, value in (given.dynamic or {}).items():
        override = value if isinstance(value, Mapping) else {}
        dynamic.append(
            (key.removeprefix("-:").removeprefix("+:"), None if key.startswith("-:") else override)
        )
    excepted = [expression for expression, override in dynamic if override is None]
    needed = ("bits", "group_size", "desc_act", "sym")
    error = lacks({key: getattr(given, key) for key in needed})
    for override in ({}, *(override or {} for _, override in dynamic)):
        is_ordered = (
            override.get("desc_act", given.desc_act)
            and override.get("group_size", given.group_size) != -1
        )
        error = error or (ACT_ORDER if is_ordered else "")
    listed = given.modules_in_block_to_quantize or ()
    words = [word for item in listed for word in ((item,) if isinstance(item, str) else item)]
    return Gptq(
        bits=given.bits or 0,
        group_size=given.group_size or 0,
        is_symmetric=bool(given.sym),
        has_quantized_head=bool(given.lm_head),
        dynamic=tuple(dynamic),
        stored=Substrings(rename.name(word) for word in words or integers),
        entries=tuple(ConfigEntry("dynamic", f"-:{each}", (each,)) for each in excepted),
        error=error,
        excepts_draft=any(key.startswith("-:") and "mtp" in key for key in given.dynamic or {}),
    )


def read_awq(raw: Raw, rename: Renamer, floats: Iterable[str]) -> Awq:
    """The config as vLLM reads it.

    Args:
        raw: quantization_config.
        rename: of the class that reads it.
        floats: modules on disk that hold floating-point numbers alone.

    Raises:
        CheckpointError: a key has another type than vLLM reads.
    """
    given = read_given(AwqGiven, raw)
    bits = given.w_bit or given.bits
    group_size = given.q_group_size or given.group_size
    error = lacks({"w_bit": bits, "q_group_size": group_size, "zero_point": given.zero_point})
    if not error and bits != 4:
        error = f"ValueError: Unsupported num_bits = {bits}. Supported: 4"
    listed = given.modules_to_not_convert or ()
    return Awq(
        group_size=group_size or 0,
        has_zeros=bool(given.zero_point),
        has_quantized_head=bool(given.lm_head),
        skipped=Substrings(rename.name(word) for word in listed or floats),
        entries=entries_of("modules_to_not_convert", listed, rename.name),
        error=error,
    )


def gptq_built(bits: int, group_size: int) -> VLLMModule:
    """What AutoGPTQLinearMethod and AutoGPTQMoEMethod register; zero points of symmetric weights
    are not used.
    """
    unused = frozenset({"qzeros", "g_idx"})
    return registers(
        "gptq", "qweight", "scales", optional=unused, group_size=_group(group_size), bits=bits
    )


def awq_built(group_size: int, *, has_zeros: bool) -> VLLMModule:
    """What AutoAWQMarlinLinearMethod and AutoAWQMoEMethod register, in four bits."""
    zeros = frozenset({"qzeros"})
    built = registers("awq", "qweight", "scales", group_size=_group(group_size), bits=4)
    if has_zeros:
        return built._replace(leaves=built.leaves | zeros)
    return built._replace(optional=zeros)


def _group(size: int) -> int | None:
    return size if size > 0 else None


def _number(override: Raw, key: str, default: int) -> int:
    found = override.get(key, default)
    return found if isinstance(found, int) else default
