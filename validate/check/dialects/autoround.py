"""`quant_method: auto-round`: what vLLM builds for a module.

In: quantization_config. Out: an `AutoRound`.

Easy to get wrong: a name in `extra_config` is also an exception for every module that ends in it. Routed experts are
asked about by the name of them all: an entry for one expert does not except them. Of FP8 in blocks vLLM has no experts.

Source: vLLM 0.32.0 quantization/inc/{inc,config_parser}.py, quantization/inc/schemes; compared with the real functions
by tests/validate/check/test_dialects.py and test_foreign_schemes.py.
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
_MX_GROUP = 32
_BITS, _TYPES = (2, 3, 4, 5, 6, 7, 8), ("int", "mx_fp", "fp")
_BACKENDS = ("auto", "gptq", "gptq:marlin", "awq", "awq:marlin", "marlin")
_FORMATS = {
    "int": "auto_round:auto_gptq",
    "awq": "auto_round:auto_awq",
    "fp": "auto_round:fp8",
    "mx_fp": "auto_round:llm_compressor",
}
_NO_EXPERTS = "NotImplementedError: INCFp8Scheme does not support MoE layers"
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
        packing: gptq, awq, fp8 or mx; "" for another one, which is not judged.
        blocks: prefixes of what is quantized; () for everything but heads.
        extra: extra_config, after renaming.
        error: vLLM's exception as it reads the config; "" for none.
    """

    usual: _Choice
    packing: str
    blocks: tuple[str, ...]
    extra: Mapping[str, AutoRoundException]
    entries: tuple[ConfigEntry, ...]
    error: str = ""
    name: str = "auto-round"

    def resolve(self, module: VLLMName, *, shards: Sequence[VLLMName], kind: Kind) -> Resolution:
        """`get_quant_method`: an exception by whole name, then INCConfigParser."""
        if self.error:
            return Resolution(built=UNKNOWN, entry="quantization_config", error=self.error)
        for name in (module, f"model.{module}"):
            if name in self.extra and (self.extra[name].bits or _PLAIN_BITS) >= _PLAIN_BITS:
                return Resolution(built=PLAIN, entry=name)
        choices = self._choices(module, () if kind == "experts" else shards, kind)
        if any(choice[:3] != choices[0][:3] for choice in choices):
            return Resolution(built=UNKNOWN, entry=choices[0].entry, error=_SHARD_ERROR.format(module))
        choice = choices[0]
        if choice.bits >= _PLAIN_BITS:
            return Resolution(built=PLAIN, entry=choice.entry)
        built = self._built(choice)
        error = _NO_EXPERTS if kind == "experts" and built.form == "fp8_block" else ""
        return Resolution(built=built, entry=choice.entry, error=error)

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
        size = choice.group_size
        if self.packing == "fp8" and choice.bits == 8 and choice.is_symmetric and isinstance(size, list | tuple):
            leaves = frozenset({"weight", "weight_scale_inv"})
            return VLLMModule(form="fp8_block", leaves=leaves, block=(size[0], size[1]))
        if self.packing == "mx" and choice.bits in (4, 8):
            weight, form = ("weight_packed", "mxfp4") if choice.bits == 4 else ("weight", "mxfp8")
            return VLLMModule(form=form, leaves=frozenset({weight, "weight_scale"}), group_size=_MX_GROUP)
        if not isinstance(size, int):
            return UNKNOWN
        if self.packing == "gptq" and (choice.bits, choice.is_symmetric) in ((4, True), (8, True)):
            return gptq_built(choice.bits, size)
        if self.packing == "awq" and choice.bits == 4:
            return awq_built(4, size, has_zeros=not choice.is_symmetric)
        return UNKNOWN


def read_autoround(raw: Mapping[str, Any], rename: Renamer) -> AutoRound:
    """The config as vLLM reads it, entries renamed.

    Raises:
        CheckpointError: a key has another type than vLLM reads.
    """
    given = read_given(AutoRoundGiven, raw)
    blocks = given.block_name_to_quantize or given.to_quant_block_names or ()
    blocks = tuple(blocks.split(",")) if isinstance(blocks, str) else blocks
    extra = {rename.name(name): value for name, value in (given.extra_config or {}).items()}
    symmetric = True if given.sym is None else given.sym
    return AutoRound(
        usual=_Choice(given.bits or 0, given.group_size, symmetric),
        packing=_packing(given),
        blocks=tuple(rename.name(block) for block in blocks),
        extra=extra,
        entries=tuple(
            ConfigEntry(where="extra_config", written=name, read=(rename.name(name),))
            for name, value in (given.extra_config or {}).items()
            if (value.bits or 0) >= _PLAIN_BITS
        ),
        error=_refusal(given),
    )


def _type_of(given: AutoRoundGiven) -> str:
    return "fp" if given.data_type == "fp8" else given.data_type or "int"


def _format_of(given: AutoRoundGiven) -> str:
    """`packing_format`, or what vLLM puts in its place."""
    if given.packing_format is not None:
        return given.packing_format
    data_type = _type_of(given)
    if data_type == "fp" and given.bits == 8 and not isinstance(given.group_size, int):
        return _FORMATS["fp"]
    return _FORMATS["mx_fp" if "mx_fp" in data_type else "int"]


def _packing(given: AutoRoundGiven) -> str:
    data_type, format_ = _type_of(given), _format_of(given)
    if "mx_fp" in data_type:
        return "mx"
    if data_type == "fp":
        return "fp8" if format_ == _FORMATS["fp"] else ""
    words = f"{format_} {given.backend or given.vllm_backend or ''}"
    return next((word for word in ("gptq", "awq") if word in words), "")


def _refusal(given: AutoRoundGiven) -> str:
    """INCConfig's own exceptions, in its order."""
    data_type, format_, backend = _type_of(given), _format_of(given), given.backend or given.vllm_backend or "auto"
    size = given.group_size
    missing = next((key for key in ("bits", "group_size") if getattr(given, key) is None), "")
    if missing:
        return f"ValueError: Cannot find any of ['{missing}'] in the model's quantization config"
    if not _is_size(size):
        return f"ValueError: INC group_size must be an int or a 2-D integer sequence, but found {size!r}"
    if given.bits not in _BITS:
        return f"ValueError: Unsupported weight_bits: {given.bits}"
    if data_type not in _TYPES and "mx_fp" not in data_type:
        return f"ValueError: Unsupported data_type: {data_type}"
    if format_ not in _FORMATS.values():
        return f"ValueError: Unsupported packing_format: {format_}"
    if backend not in _BACKENDS:
        return f"ValueError: Unsupported backend: {backend}"
    return _assertion(given, data_type, format_, backend)


def _is_size(size: Any) -> bool:
    if isinstance(size, list | tuple):
        return len(size) == 2 and all(isinstance(each, int) for each in size)
    return isinstance(size, int)


def _assertion(given: AutoRoundGiven, data_type: str, format_: str, backend: str) -> str:
    """What INCConfig asserts of one type of data."""
    is_one, is_symmetric = isinstance(given.group_size, int), given.sym is not False
    if data_type == "int":
        is_right = is_one and format_ in (_FORMATS["int"], _FORMATS["awq"])
    elif data_type == "fp":
        rest = is_symmetric and format_ == _FORMATS["fp"] and backend == "auto"
        is_right = given.bits == 8 and not is_one and rest and _has_inputs(given, "fp", fmt="e4m3", scheme="dynamic")
    else:
        rest = is_symmetric and format_ == _FORMATS["mx_fp"] and backend == "auto"
        is_right = data_type != "mx_fp" or (given.bits in (4, 8) and given.group_size == _MX_GROUP and rest)
        is_right = is_right and (given.bits != 8 or _has_inputs(given, "mx_fp"))
    return "" if is_right else f"AssertionError: INC {data_type} quantization, of which vLLM supports one form only"


def _has_inputs(given: AutoRoundGiven, data_type: str, *, fmt: str = "", scheme: str = "") -> bool:
    """Whether the inputs are quantized as vLLM wants them, as far as the config says it."""
    size = given.group_size if isinstance(given.group_size, int) else given.group_size[0]
    wanted = {"act_bits": 8, "act_group_size": size, "act_data_type": data_type, "act_sym": True, "act_dynamic": True}
    wanted |= {"fmt": fmt, "activation_scheme": scheme} if fmt else {}
    said = ((getattr(given, key), value) for key, value in wanted.items())
    return all(is_said is None or is_said == value for is_said, value in said)


def _is_expression(word: str) -> bool:
    return not _SPECIAL.isdisjoint(word)
