"""`quant_method: auto-round`: what vLLM builds for a module.

In: quantization_config. Out: an `AutoRound`.

Easy to get wrong: a name in `extra_config` is also an exception for every module that ends in it.

Source: vLLM 0.32.0 quantization/inc/{inc,config_parser}.py, quantization/inc/schemes; compared with
the real functions by tests/checkpoints/dialects/test_dialects.py and test_foreign_schemes.py.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ...recipes.family import VLLMName
from ...recipes.frozen import frozen, without_none
from ...recipes.renamer import Renamer
from .dialect import UNKNOWN, Dialect, Exceptions, Kind, Resolution, VLLMModule
from .given import AutoRoundException, AutoRoundGiven, Raw, read_given
from .gptq import awq_built, gptq_built
from .matching import MXFP4, lacks, plain, raises, registers
from .modelopt import inverse_blocks
from .patterns import matches_inside

_SPECIAL = frozenset("*+?^$()[]{}|\\")
_PLAIN_BITS = 16
_MX_GROUP = 32
_BACKENDS = ("auto", "gptq", "gptq:marlin", "awq", "awq:marlin", "marlin")
# Packings by `packing_format`.
_PACKINGS = {
    "auto_round:auto_gptq": "gptq",
    "auto_round:auto_awq": "awq",
    "auto_round:fp8": "fp",
    "auto_round:llm_compressor": "mx_fp",
}
# What the config must say of the inputs, if it says anything.
_INPUTS = {"act_bits": 8, "act_data_type": "mx_fp", "act_sym": True, "act_dynamic": True}
_FP8_INPUTS = {**_INPUTS, "act_data_type": "fp", "fmt": "e4m3", "activation_scheme": "dynamic"}
_NO_EXPERTS = "NotImplementedError: INCFp8Scheme does not support MoE layers"
_SHARD_ERROR = "ValueError: Fused module '{}' requires consistent quant config for its parts"


class _Choice(NamedTuple):
    """What vLLM resolves for a name, and the entry that decided."""

    bits: int
    group_size: Any
    is_symmetric: bool
    entry: str = ""


@frozen
class AutoRound(Dialect):
    """`quant_method: auto-round`.

    Attributes:
        usual: what holds for modules that no entry names.
        packing: gptq, awq, fp or mx_fp; "" for another one, which is not judged.
        blocks: prefixes of what is quantized; () for everything but heads.
        extra: extra_config, after renaming.
    """

    usual: _Choice
    packing: str
    blocks: tuple[str, ...]
    extra: Mapping[str, AutoRoundException]
    name: str = "auto-round"

    # Expressions, with the bits of a plain weight.
    exceptions = Exceptions(
        ("extra_config",),
        of_name="^{}$",
        of_stem="^{}.*",
        value={"bits": _PLAIN_BITS, "data_type": "float"},
    )

    def resolve(self, module: VLLMName, *, shards: Sequence[VLLMName], kind: Kind) -> Resolution:
        """`get_quant_method`: an exception by whole name, then INCConfigParser."""
        if self.answer.error:
            return self.answer
        for name in (module, f"model.{module}"):
            if name in self.extra and (self.extra[name].bits or _PLAIN_BITS) >= _PLAIN_BITS:
                return plain(name)
        # Experts are asked about by the name of them all: an entry for one does not except them.
        if kind == "experts":
            shards = ()
        choices = self._choices(module, shards, kind)
        choice = choices[0]
        for other in choices[1:]:
            if other._replace(entry=choice.entry) != choice:
                return raises(_SHARD_ERROR.format(module), choice.entry, "parts")
        if choice.bits >= _PLAIN_BITS:
            return plain(choice.entry)
        built = self._built(choice)
        if kind == "experts" and built.form == "fp8_block":
            return raises(_NO_EXPERTS, choice.entry)
        return Resolution(built, choice.entry)

    def hits(self, read: Sequence[str], name: str) -> bool:
        """A whole name, the end of one, or an expression anywhere in it."""
        (word,) = read
        if f".{name}".endswith(f".{word}"):
            return True
        return _is_in(name, word)

    def _choices(self, module: str, shards: Sequence[str], kind: Kind) -> list[_Choice]:
        """What vLLM resolves for a module by an entry that it ends in, else for its parts, else for
        itself.
        """
        if module in self.extra:
            return [self._of(module, is_quantized=True)]
        for key in self.extra:
            if module.endswith(f".{key}"):
                return [self._of(key, is_quantized=True)]
        is_quantized = kind != "head"
        if self.blocks:
            is_quantized = module.startswith(self.blocks)
        names: Sequence[str] = (module,)
        if any(map(self._entry_of, shards)):
            names = shards
        return [self._of(name, is_quantized=is_quantized) for name in names]

    def _of(self, name: str, *, is_quantized: bool) -> _Choice:
        """`get_config`: what an entry leaves out is usual, or plain where the block is not
        quantized.
        """
        base = self.usual
        if not is_quantized:
            base = _Choice(_PLAIN_BITS, -1, is_symmetric=True)
        entry = self._entry_of(name)
        if not entry:
            return base
        given = self.extra[entry]
        said = {"bits": given.bits, "group_size": given.group_size, "is_symmetric": given.sym}
        return base._replace(entry=entry, **without_none(said))

    def _entry_of(self, name: str) -> str:
        if name in self.extra:
            return name
        for key in self.extra:
            if _is_in(name, key):
                return key
        return ""

    def _built(self, choice: _Choice) -> VLLMModule:
        size = choice.group_size
        is_one = isinstance(choice.group_size, int)
        match self.packing, choice.bits, choice.is_symmetric:
            case "fp", 8, True if isinstance(size, list | tuple):
                return inverse_blocks(size[0], size[1])
            case "mx_fp", 4, _:
                return MXFP4
            case "mx_fp", 8, _:
                return registers("mxfp8")
            case "gptq", 4 | 8, True if is_one:
                return gptq_built(choice.bits, size)
            case "awq", 4, _ if is_one:
                return awq_built(size, has_zeros=not choice.is_symmetric)
        return UNKNOWN


def read_autoround(raw: Raw, rename: Renamer) -> AutoRound:
    """The config as vLLM reads it, entries renamed.

    Raises:
        CheckpointError: a key has another type than vLLM reads.
    """
    given = read_given(AutoRoundGiven, raw)
    data_type = given.data_type
    backend = given.backend or given.vllm_backend
    if data_type == "fp8":
        data_type = "fp"
    packed = _PACKINGS.get(given.packing_format or "", "")
    if given.packing_format is None:
        packed = "gptq"
        if "mx_fp" in data_type:
            packed = "mx_fp"
        if data_type == "fp" and given.bits == 8 and not isinstance(given.group_size, int):
            packed = "fp"
    packing = packed
    for word in ("mx_fp", "gptq", "awq"):
        if word in f"{data_type} {packed} {backend}":
            packing = word
            break
    answer = lacks({"bits": given.bits, "group_size": given.group_size})
    if not (answer.error or _is_supported(raw, given, data_type, packed, backend)):
        size = f"{given.bits} bits in groups of {given.group_size}"
        answer = raises(
            f"INC supports no {data_type} of {size} (packing_format {given.packing_format}, "
            f"backend {backend})"
        )
    blocks = given.block_name_to_quantize or given.to_quant_block_names
    if isinstance(blocks, str):
        blocks = blocks.split(",")
    extra = dict[str, AutoRoundException]()
    excepting = list[str]()
    for name, exception in given.extra_config.items():
        extra[rename.name(name)] = exception
        if (exception.bits or 0) >= _PLAIN_BITS:
            excepting.append(name)
    return AutoRound(
        usual=_Choice(given.bits or 0, given.group_size, is_symmetric=given.sym is not False),
        packing=packing,
        blocks=tuple(map(rename.name, blocks)),
        extra=extra,
        rename=rename,
        listed={"extra_config": excepting},
        answer=answer,
    )


def _is_supported(
    raw: Raw, given: AutoRoundGiven, data_type: str, packed: str, backend: str
) -> bool:
    """What INCConfig demands of each type of data; of the inputs, as far as the config says it."""
    if not packed or backend not in _BACKENDS or given.bits not in range(2, 9):
        return False
    size = given.group_size
    is_one = isinstance(size, int)
    is_pair = False
    of_groups = size
    if isinstance(size, list | tuple) and len(size) == 2:
        of_groups = size[0]
        is_pair = isinstance(size[0], int) and isinstance(size[1], int)
    if data_type == "int":
        return is_one and packed in ("gptq", "awq")
    if not is_one and not is_pair:
        return False
    inputs = _INPUTS
    if data_type == "fp":
        inputs = _FP8_INPUTS
    wanted = {**inputs, "act_group_size": of_groups}
    has_inputs = all(raw.get(key) in (None, value) for key, value in wanted.items())
    is_usual = given.sym is not False and backend == "auto" and packed == data_type
    if data_type == "fp":
        return given.bits == 8 and is_pair and is_usual and has_inputs
    if data_type == "mx_fp" and not (given.bits in (4, 8) and size == _MX_GROUP and is_usual):
        return False
    return "mx_fp" in data_type and (given.bits != 8 or has_inputs)


def _is_in(name: str, word: str) -> bool:
    """Whether a word is an expression, and matches somewhere in a name."""
    return not _SPECIAL.isdisjoint(word) and matches_inside(name, word)
