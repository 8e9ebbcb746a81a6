"""`quant_method: gptq`: what vLLM builds for a module.

In: quantization_config, and the names of the modules that are stored as integers. Out: a `Gptq`.

Easy to get wrong: linear modules and routed experts are asked differently. A linear module is quantized if the name of
a module with integers on disk is a part of its own; vLLM reads those names from the headers. Routed experts are
quantized unless `dynamic` has a `-:` expression for them. `+:` expressions change bits and groups, and except nothing.
In groups that Marlin does not have, experts go to MoeWNA16, which never looks at `dynamic`.

Source: vLLM 0.32.0 quantization/auto_gptq.py, moe_wna16.py, quantization/utils/{gptq_utils,marlin_utils}.py,
models/qwen3_5_mtp.py; compared with the real functions by tests/validate/check/test_dialects.py and
test_foreign_schemes.py.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ....recipes.family import VLLMName
from ....recipes.renamer import Renamer
from ..vllm_module import PLAIN, UNKNOWN, ConfigEntry, Kind, Resolution, VLLMModule
from .given import GptqGiven, read_given
from .matching import MARLIN_GROUPS, Substrings, shards_agree
from .patterns import matches_start

_LOADED = ((4, True), (8, True))
_NEEDED = ("bits", "group_size", "desc_act", "sym")
ACT_ORDER = "ValueError: GPTQ group activation ordering (desc_act=True) is no longer supported"


@dataclass(frozen=True, slots=True, kw_only=True)
class Gptq:
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
    dynamic: tuple[tuple[str, Mapping[str, Any] | None], ...]
    stored: Substrings
    entries: tuple[ConfigEntry, ...]
    error: str = ""
    excepts_draft: bool = False
    name: str = "gptq"

    def resolve(self, module: VLLMName, *, shards: Sequence[VLLMName], kind: Kind) -> Resolution:
        """`get_linear_quant_method` and `get_moe_quant_method`, then `override_config`."""
        if self.error:
            return Resolution(built=UNKNOWN, entry="quantization_config", error=self.error)
        if kind == "head" and not self.has_quantized_head:
            return Resolution(built=PLAIN)
        dynamic = () if kind == "experts" and self.is_blind_to_experts else self.dynamic
        entry, override = next(((e, o) for e, o in dynamic if matches_start(module, e)), ("", {}))
        if kind != "experts" and self.stored:
            is_stored, error = shards_agree(module, shards, lambda name: self.stored.within(name) is not None)
            if error or not is_stored:
                return Resolution(built=PLAIN, error=error)
        if override is None:
            return Resolution(built=PLAIN, entry=f"-:{entry}")
        bits, is_symmetric = _number(override, "bits", self.bits), bool(override.get("sym", self.is_symmetric))
        if (bits, is_symmetric) not in _LOADED:
            error = f"ValueError: Unsupported quantization config: bits={bits}, sym={is_symmetric}"
            return Resolution(built=UNKNOWN, entry=entry or "quantization_config", error=error)
        group = _number(override, "group_size", self.group_size)
        return Resolution(built=gptq_built(bits, group), entry=entry)

    @property
    def is_blind_to_experts(self) -> bool:
        """Whether vLLM builds routed experts by MoeWNA16, which does not look at `dynamic`."""
        return self.group_size not in MARLIN_GROUPS

    def covered(self, entry: ConfigEntry, names: frozenset[str]) -> Sequence[str]:
        """The names that an expression matches from the start."""
        return [name for name in names if any(matches_start(name, expression) for expression in entry.read)]


def read_gptq(raw: Mapping[str, Any], rename: Renamer, integers: Iterable[str]) -> Gptq:
    """The config as vLLM reads it.

    Args:
        raw: quantization_config.
        rename: of the class that reads it; expressions are not renamed.
        integers: modules on disk with a tensor that holds no floating-point numbers.

    Raises:
        CheckpointError: a key has another type than vLLM reads.
    """
    given = read_given(GptqGiven, raw)
    dynamic = tuple(
        (key.removeprefix("-:").removeprefix("+:"), None if key.startswith("-:") else _overrides(value))
        for key, value in (given.dynamic or {}).items()
    )
    words = [word for item in given.modules_in_block_to_quantize or () for word in _flat(item)]
    return Gptq(
        bits=given.bits or 0,
        group_size=given.group_size or 0,
        is_symmetric=bool(given.sym),
        has_quantized_head=bool(given.lm_head),
        dynamic=dynamic,
        stored=Substrings(rename.name(word) for word in words or integers),
        entries=tuple(
            ConfigEntry(where="dynamic", written=f"-:{expression}", read=(expression,))
            for expression, override in dynamic
            if override is None
        ),
        error=_refusal(given, dynamic),
        excepts_draft=any(key.startswith("-:") and "mtp" in key for key in given.dynamic or {}),
    )


def gptq_built(bits: int, group_size: int) -> VLLMModule:
    """What AutoGPTQLinearMethod and AutoGPTQMoEMethod register; zero points of symmetric weights are not used."""
    return VLLMModule(
        form="gptq",
        leaves=frozenset({"qweight", "scales"}),
        optional=frozenset({"qzeros", "g_idx"}),
        group_size=group_size if group_size > 0 else None,
        bits=bits,
    )


def _refusal(given: GptqGiven, dynamic: Iterable[tuple[str, Mapping[str, Any] | None]]) -> str:
    missing = next((key for key in _NEEDED if getattr(given, key) is None), "")
    if missing:
        return f"ValueError: Cannot find any of ['{missing}'] in the model's quantization config"
    overrides = [{}, *(override for _, override in dynamic if override is not None)]
    for override in overrides:
        group_size = override.get("group_size", given.group_size)
        if override.get("desc_act", given.desc_act) and group_size != -1:
            return ACT_ORDER
    return ""


def _overrides(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _number(override: Mapping[str, Any], key: str, default: int) -> int:
    found = override.get(key, default)
    return found if isinstance(found, int) else default


def _flat(item: str | tuple[str, ...]) -> tuple[str, ...]:
    return (item,) if isinstance(item, str) else item
