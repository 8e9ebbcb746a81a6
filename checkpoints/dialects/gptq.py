"""`quant_method: gptq` and `quant_method: awq`: what vLLM builds for a module.

In: quantization_config, and the modules on disk with and without integers. Out: a `Gptq` or an
`Awq`.

Easy to get wrong: what is quantized is said by the headers as much as by the config, and differs
for linear modules and routed experts.

Source: vLLM 0.32.0 quantization/auto_gptq.py, auto_awq.py, moe_wna16.py,
quantization/utils/{gptq_utils,marlin_utils, quant_utils}.py, models/qwen3_5_mtp.py; compared with
the real functions by tests/checkpoints/dialects/test_dialects.py and test_foreign_schemes.py.
"""

from collections.abc import Iterable, Mapping, Sequence

from ...recipes.family import VLLMName
from ...recipes.frozen import frozen
from ...recipes.renamer import Renamer
from ...recipes.schemes import SCHEMES
from ..stored import StoredWeight
from .dialect import Dialect, Exceptions, Kind, Resolution, VLLMModule
from .given import AwqGiven, GptqGiven, GptqModules, Raw, read_given
from .matching import (
    MARLIN_GROUPS,
    SHARDS_DIFFER,
    Substrings,
    lacks,
    named,
    plain,
    raises,
    registers,
)
from .patterns import matches_start

_LEAVES = frozenset({"qweight", "scales"})
ACT_ORDER = "ValueError: GPTQ group activation ordering (desc_act=True) is no longer supported"


@frozen
class Gptq(Dialect):
    """`quant_method: gptq`.

    Attributes:
        usual: what holds for all modules that `dynamic` does not match.
        dynamic: expression for the start of a name -> what holds for these modules, None where they
            are left alone; in their order.
        stored: modules that are quantized, by a part of their name; all if there are none.
    """

    usual: GptqGiven
    dynamic: Mapping[str, GptqModules | None]
    stored: Substrings
    name: str = "gptq"

    # `-:` expressions. The first of `dynamic` that matches decides.
    exceptions = Exceptions(("dynamic",), of_name="-:^{}$", of_stem="-:^{}", value={})

    def reads(self, word: str) -> tuple[str, ...]:
        """The expression without its sign; vLLM renames none."""
        return (word.removeprefix("-:"),)

    def resolve(self, module: VLLMName, *, shards: Sequence[VLLMName], kind: Kind) -> Resolution:
        """`get_linear_quant_method` and `get_moe_quant_method`, then `override_config`."""
        if self.answer.error:
            return self.answer
        if kind == "head" and not self.usual.lm_head:
            return plain()
        entry = ""
        given: GptqModules | None = self.usual
        is_blind = kind == "experts" and self.is_blind_to_experts
        for expression in self.dynamic:  # `get_dynamic_override`: the first that matches
            if not is_blind and matches_start(module, expression):
                entry = expression
                given = self.dynamic[expression]
                break
        # A linear module is quantized if the name of one with integers on disk is a part of its
        # own. Experts are quantized unless `dynamic` excepts them.
        if kind != "experts" and self.stored:
            hits = [self.stored.within(name) for name in shards or (module,)]
            if hits.count(None) == len(hits):
                return plain(f"-:{entry}" if given is None else "")  # older vLLM reads no headers
            if None in hits:
                return raises(SHARDS_DIFFER.format(module), "", "shards")
        if given is None:
            return plain(f"-:{entry}")
        if given.bits not in (4, 8) or not given.sym:
            error = f"ValueError: Unsupported quantization config: bits={given.bits}, "
            return raises(f"{error}sym={given.sym}", entry or "quantization_config")
        return Resolution(gptq_built(given.bits, given.group_size), entry)

    @property
    def is_blind_to_experts(self) -> bool:
        """Whether vLLM builds routed experts by MoeWNA16, which does not look at `dynamic`."""
        return self.usual.group_size not in MARLIN_GROUPS

    def hits(self, read: Sequence[str], name: str) -> bool:
        """Whether its expression matches the name from the start."""
        return matches_start(name, read[0])


@frozen
class Awq(Dialect):
    """`quant_method: awq`.

    Attributes:
        group_size: by either of its two keys.
        skipped: modules_to_not_convert, or what vLLM puts in its place.
    """

    given: AwqGiven
    group_size: int
    skipped: Substrings
    name: str = "awq"

    # Parts of names.
    exceptions = Exceptions(("modules_to_not_convert",), of_stem="{}")

    def resolve(self, module: VLLMName, *, shards: Sequence[VLLMName], kind: Kind) -> Resolution:
        """`is_layer_skipped` by parts of names, first of the fused name; experts have no shards
        there.
        """
        if self.answer.error:
            return self.answer
        if kind == "head" and not self.given.lm_head:
            return plain()
        skipped = self.skipped
        # In groups that Marlin does not have, experts go to MoeWNA16, which takes the list as it is
        # written.
        if kind == "experts" and self.group_size not in MARLIN_GROUPS:
            skipped = Substrings(self.listed["modules_to_not_convert"])
        if kind != "linear":
            shards = ()
        answer = named(module, shards, skipped.within, SHARDS_DIFFER)
        return answer or Resolution(
            awq_built(self.group_size, has_zeros=bool(self.given.zero_point))
        )

    def hits(self, read: Sequence[str], name: str) -> bool:
        """Whether it is a part of the name."""
        return read[0] in name


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
    dynamic = dict[str, GptqModules | None]()
    excepting = list[str]()
    for key, value in given.dynamic.items():
        # `+:` changes bits and groups, and excepts nothing.
        expression = key.removeprefix("-:").removeprefix("+:")
        modules = None
        if key.startswith("-:"):
            excepting.append(key)
        else:
            changes = (value or GptqModules()).model_dump(exclude_none=True)
            modules = given.model_copy(update=changes)
        dynamic.setdefault(expression, modules)
    answer = lacks({key: getattr(given, key) for key in GptqModules.model_fields})
    for modules in (given, *dynamic.values()):
        is_ordered = modules is not None and modules.desc_act and modules.group_size != -1
        if is_ordered and not answer.error:
            answer = raises(ACT_ORDER, refusal="order")
    stored = list[str]()
    for item in given.modules_in_block_to_quantize:
        if isinstance(item, str):
            stored.append(item)
        else:
            stored += item
    return Gptq(
        usual=given,
        dynamic=dynamic,
        stored=Substrings(map(rename.name, stored or integers)),
        listed={"dynamic": excepting},
        answer=answer,
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
    answer = lacks({"w_bit": bits, "q_group_size": group_size, "zero_point": given.zero_point})
    if not answer.error and bits != 4:
        answer = raises(f"ValueError: Unsupported num_bits = {bits}. Supported: 4")
    # Without a list vLLM makes one of the headers, in the names on disk: so one expert's name is no
    # part of the name of all.
    listed = given.modules_to_not_convert
    return Awq(
        given=given,
        group_size=group_size or 0,
        skipped=Substrings(map(rename.name, listed or floats)),
        rename=rename,
        listed={"modules_to_not_convert": listed},
        answer=answer,
    )


def gptq_built(bits: int, group_size: int | None) -> VLLMModule:
    """What AutoGPTQLinearMethod and AutoGPTQMoEMethod register; zero points of symmetric weights
    are not used.
    """
    unused = frozenset({"qzeros", "g_idx"})
    size = _group(group_size)
    return registers("gptq", leaves=_LEAVES, optional=unused, group_size=size, bits=bits)


def scheme_of(weight: StoredWeight, built: VLLMModule) -> str:
    """The scheme that has the codes of GPTQ, which count from the middle, or of AWQ, which count
    from zero points; "" where none has as many bits and scales. Where vLLM builds a plain module,
    the zero points say how many bits there are.
    """
    if built.form == "plain" and "qzeros" in weight.parts:
        built = _as_stored(weight)
    has_zeros = "qzeros" in built.leaves
    if has_zeros != (weight.form == "awq") or not built.leaves <= weight.parts.keys():
        return ""
    for name, scheme in SCHEMES.items():
        is_same = (scheme.bits, scheme.group_size) == (built.bits, built.group_size)
        is_packed = scheme.form == "int_packed" and scheme.has_zero_point == has_zeros
        if is_same and is_packed and weight.has_sizes_of(name):
            return name
    return ""


def _as_stored(weight: StoredWeight) -> VLLMModule:
    """What would read the tensors as they are."""
    num_inputs = weight.shape[1]
    num_groups = weight.parts["scales"].shape[0]
    group_size = None
    if num_groups > 1:
        group_size = num_inputs // num_groups
    if weight.form == "awq":
        return awq_built(group_size, has_zeros=True)
    return gptq_built(32 * weight.weight.shape[0] // num_inputs, group_size)


def awq_built(group_size: int | None, *, has_zeros: bool) -> VLLMModule:
    """What AutoAWQMarlinLinearMethod and AutoAWQMoEMethod register, in four bits."""
    zeros = frozenset({"qzeros"})
    built = registers("awq", leaves=_LEAVES, group_size=_group(group_size), bits=4)
    if has_zeros:
        return built._replace(leaves=built.leaves | zeros)
    return built._replace(optional=zeros)


def _group(size: int | None) -> int | None:
    if size is None or size > 0:
        return size
    return None
