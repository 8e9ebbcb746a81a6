"""`quant_method: auto-round`: what vLLM builds for a module.

In: quantization_config. Out: an `AutoRound`.

Easy to get wrong: a name in `extra_config` is also an exception for every module that ends in it. Routed experts are
asked about by the name of them all: an entry for one expert does not except them.

Source: vLLM 0.32.0 quantization/inc/{inc,config_parser}.py, quantization/inc/schemes; compared with the real functions
by tests/validate/check/test_dialects.py.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ....recipes.family import VLLMName
from ....recipes.renamer import Renamer
from ..vllm_module import PLAIN, UNKNOWN, ConfigEntry, Kind, Resolution, VLLMModule
from .awq import awq_built
from .given import AutoRoundException, AutoRoundGiven, read_given
from .gptq import gptq_built
from .patterns import matches_inside

_SPECIAL = frozenset("*+?^$()[]{}|\\")
_PLAIN_BITS = 16
_SHARD_ERROR = "ValueError: Fused module '{}' requires consistent quant config for its parts"


class _Choice(NamedTuple):
    """What vLLM resolves for a name, and the entry that decided."""

    bits: int
    group_size: Any
    is_symmetric: bool
    entry: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class AutoRound:
    """`quant_method: auto-round`.

    Attributes:
        usual: what holds for modules that no entry names.
        packing: gptq, awq, or another one, which is not judged.
        blocks: prefixes of what is quantized; () for everything but heads.
        extra: extra_config, after renaming.
    """

    usual: _Choice
    packing: str
    blocks: tuple[str, ...]
    extra: Mapping[str, AutoRoundException]
    entries: tuple[ConfigEntry, ...]
    name: str = "auto-round"

    def resolve(self, module: VLLMName, *, shards: Sequence[VLLMName], kind: Kind) -> Resolution:
        """`get_quant_method`: an exception by whole name, then INCConfigParser."""
        for name in (module, f"model.{module}"):
            if name in self.extra and (self.extra[name].bits or _PLAIN_BITS) >= _PLAIN_BITS:
                return Resolution(built=PLAIN, entry=name)
        choices = self._choices(module, () if kind == "experts" else shards, kind)
        if any(choice[:3] != choices[0][:3] for choice in choices):
            return Resolution(built=UNKNOWN, entry=choices[0].entry, error=_SHARD_ERROR.format(module))
        choice = choices[0]
        built = PLAIN if choice.bits >= _PLAIN_BITS else self._built(choice)
        return Resolution(built=built, entry=choice.entry)

    def covered(self, entry: ConfigEntry, names: frozenset[str]) -> Sequence[str]:
        """Whole names, ends of names, and expressions anywhere in them."""
        return [
            name
            for name in names
            for word in entry.read
            if name == word or name.endswith(f".{word}") or (_is_expression(word) and matches_inside(name, word))
        ]

    def _choices(self, module: str, shards: Sequence[str], kind: Kind) -> list[_Choice]:
        if module in self.extra:
            return [self._of(module, is_quantized=True)]
        if ending := next((key for key in self.extra if module.endswith(f".{key}")), ""):
            return [self._of(ending, is_quantized=True)]
        is_quantized = kind != "head"
        if self.blocks:
            is_quantized = module.startswith(self.blocks)
        if any(self._entry_of(shard) for shard in shards):
            return [self._of(shard, is_quantized=is_quantized) for shard in shards]
        return [self._of(module, is_quantized=is_quantized)]

    def _of(self, name: str, *, is_quantized: bool) -> _Choice:
        """`get_config`: what an entry leaves out is usual, or plain where the block is not quantized."""
        base = self.usual if is_quantized else _Choice(_PLAIN_BITS, -1, is_symmetric=True)
        entry = self._entry_of(name)
        if not entry:
            return base
        given = self.extra[entry]
        return _Choice(
            bits=base.bits if given.bits is None else given.bits,
            group_size=base.group_size if given.group_size is None else given.group_size,
            is_symmetric=base.is_symmetric if given.sym is None else given.sym,
            entry=entry,
        )

    def _entry_of(self, name: str) -> str:
        if name in self.extra:
            return name
        return next((key for key in self.extra if _is_expression(key) and matches_inside(name, key)), "")

    def _built(self, choice: _Choice) -> VLLMModule:
        if not isinstance(choice.group_size, int):
            return UNKNOWN
        if self.packing == "gptq" and (choice.bits, choice.is_symmetric) in ((4, True), (8, True)):
            return gptq_built(choice.bits, choice.group_size)
        if self.packing == "awq" and choice.bits == 4:
            return awq_built(4, choice.group_size, has_zeros=not choice.is_symmetric)
        return UNKNOWN


def read_autoround(raw: Mapping[str, Any], rename: Renamer) -> AutoRound:
    """The config as vLLM reads it, entries renamed.

    Raises:
        CheckpointError: a key has another type than vLLM reads.
    """
    given = read_given(AutoRoundGiven, raw)
    blocks = given.block_name_to_quantize or given.to_quant_block_names or ()
    blocks = tuple(blocks.split(",")) if isinstance(blocks, str) else blocks
    words = f"{given.packing_format or 'auto_round:auto_gptq'} {given.backend or ''}"
    packing = next((word for word in ("gptq", "awq") if word in words), "") if given.data_type in (None, "int") else ""
    extra = {rename.name(name): value for name, value in (given.extra_config or {}).items()}
    symmetric = True if given.sym is None else given.sym
    return AutoRound(
        usual=_Choice(given.bits or 0, given.group_size, symmetric),
        packing=packing,
        blocks=tuple(rename.name(block) for block in blocks),
        extra=extra,
        entries=tuple(
            ConfigEntry(where="extra_config", written=name, read=(rename.name(name),))
            for name, value in (given.extra_config or {}).items()
            if (value.bits or 0) >= _PLAIN_BITS
        ),
    )


def _is_expression(word: str) -> bool:
    return not _SPECIAL.isdisjoint(word)
