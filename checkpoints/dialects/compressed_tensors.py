"""`quant_method: compressed-tensors`: what vLLM builds for a module, and the config that keepmtp
writes.

In: quantization_config. Out: a `CompressedTensors` as vLLM reads it. And the way back: the named
modules of a plan or of a finished checkpoint -> `config_groups` whose targets cover exactly the
quantized modules, and an `ignore` list that covers exactly the others.

Easy to get wrong: a module that no target matches is plain, without a message. And every module has
several names: the fused one, those of its shards, the routed experts' projections (w1 or gate_proj,
by vLLM's version), and the name on disk.

Source: vLLM 0.32.0 quantization/compressed_tensors/{compressed_tensors,utils}.py,
compressed_tensors_moe/compressed_tensors_moe.py, quantization/utils/config_utils.py; of the keys:
compressed-tensors 0.19.0 quantization/quant_config.py. Compared with the real functions by
tests/checkpoints/dialects/test_dialects.py.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from ...recipes.family import Family, VLLMName
from ...recipes.family_view import FamilyView
from ...recipes.forms import E8M0, Form
from ...recipes.frozen import Json, frozen
from ...recipes.renamer import Renamer
from ...recipes.schemes import SCHEMES
from .dialect import UNKNOWN, Dialect, Exceptions, Kind, Resolution, VLLMModule
from .given import CompressedTensorsGiven, GivenArguments, GivenGroup, Raw, read_given
from .matching import ENCODED, MXFP4, SCHEMES_DIFFER, named, plain, raises, registers
from .modules import NamedModule, Spellings, regexes
from .patterns import Entries, equal_or_regex

_EXPERTS = "RoutedExperts"
_PROJECTIONS_DIFFER = (
    "ValueError: All MoE projections need to have same quantization scheme but found multiple"
)
_PACKED = "pack-quantized"
_EMBEDDING = "VocabParallelEmbedding"
_NO_ROWS = "ValueError: compressed-tensors embeddings only support weight-only INT (WNA16)"
_OF_8_BITS = ("int8", "fp8_tensor", "fp8_channel", "fp8_block")
# Weights and inputs for which a linear module has a class, and those for which experts have one.
_ANY = (".*", ".*")
_FP4 = r".* no inputs|.* float4 tensor_group of 16 \w+ inputs"
_TAKES: Mapping[Form, tuple[str, str]] = {
    "nvfp4": (_FP4, _FP4),
    "mxfp4": _ANY,
    "mxfp8": _ANY,
    "int_packed": _ANY,
    "int8": (r".*8 (token dynamic|tensor static) .*", "channel .*8 token dynamic inputs"),
    "fp8_tensor": (".*", r".* float\d tensor (dynamic|static) inputs"),
    "fp8_channel": (".*", r".* float\d token dynamic inputs"),
    "fp8_block": (
        r".* (dynamic|local).*",
        r".* float\d (.* dynamic|.* local.*|tensor static) inputs",
    ),
}
_OF_GROUPS = ("group", "tensor_group")
_DYNAMIC = {
    "token": (True,),
    "channel": (False,),
    "block": (False,),
    "tensor_group": (False, True, "local"),
}
_FORMATS = ("float-quantized", "naive-quantized", "int-quantized", "nvfp4-pack-quantized")
# Refused since 0.30 (compressed_tensors.py, `from_config`).
_NO_ORDER = (
    "ValueError: Compressed-tensors group/dynamic activation ordering is no longer supported"
)
# What each target means after renaming, in their order.
_Builds = Mapping[str, Resolution]


@frozen
class CompressedTensors(Dialect):
    """`quant_method: compressed-tensors`.

    Attributes:
        ignore, targets: entries after renaming.
        builds: of each target, for linear modules.
        expert_builds: the same for routed experts.
        schemes: keepmtp's word for each target's group; "" where it has none.
        all_experts: what vLLM builds of routed experts, whatever the entries say; None where they
            decide.
    """

    ignore: Entries
    targets: Entries
    builds: _Builds
    expert_builds: _Builds
    schemes: Mapping[str, str]
    all_experts: VLLMModule | None
    name: str = "compressed-tensors"

    # Expressions, from the start of a name; of routed experts each projection has a name.
    exceptions = Exceptions(("ignore",), "re:^{}$", of_stem="re:^{}", of_experts="re:^{}[.]")

    def reads(self, word: str) -> tuple[str, ...]:
        """As the mapper of vLLM's class leaves it."""
        return (self.rename.path(word),)

    def scheme_of(self, answer: Resolution) -> str:
        """keepmtp's word for what a module becomes; "" where it has none."""
        return self.schemes.get(answer.entry, "")

    def resolve(self, module: VLLMName, *, shards: Sequence[VLLMName], kind: Kind) -> Resolution:
        """`get_scheme_dict` for linear modules and tables, `get_moe_method` for experts."""
        if kind == "experts":
            return self._experts(shards)
        if kind == "embedding":
            answer = self._scheme(module, shards, _EMBEDDING, self.builds)
            if answer.error or answer.built.form in ("plain", "int_packed"):
                # Its class has no parameter for zero points, whatever the group says.
                leaves = answer.built.leaves - {"weight_zero_point"}
                return answer._replace(built=answer.built._replace(leaves=leaves))
            return raises(_NO_ROWS, answer.entry)
        return self._scheme(module, shards, _class_of(module, shards, kind), self.builds)

    def hits(self, read: Sequence[str], name: str) -> bool:
        """Whole name, or `re:` from the start."""
        return equal_or_regex(name, read[0])

    def _experts(self, projections: Sequence[str]) -> Resolution:
        if self.all_experts is not None:
            return Resolution(self.all_experts)
        # It asks about the three projections of expert 0, and takes the last answer.
        last = plain()
        answers = []
        for name in projections:
            last = self._scheme(name, (), _EXPERTS, self.expert_builds)
            if last.error:
                return last
            answers.append(last)
        for answer in answers:
            if answer.built != last.built:
                return raises(_PROJECTIONS_DIFFER, answer.entry, "projections")
        return last

    def _scheme(
        self, name: str, shards: Sequence[str], class_name: str, builds: _Builds
    ) -> Resolution:
        # `should_ignore_layer`: first the fused name, then its shards, of which all or none must be
        # named.
        ignored = named(name, shards, self.ignore.first, SCHEMES_DIFFER)
        if ignored is not None:
            return ignored
        target = self.targets.first(name)
        if target is None:
            target = self.targets.first_for_class(class_name)
            # A target `Linear` also reaches experts, but no head.
            if target is None and class_name == _EXPERTS and "Linear" in builds:
                target = "Linear"
            of_parts = [self.targets.first(shard) for shard in shards]
            if of_parts and None not in of_parts:
                target = of_parts[0]
        if target is None:
            return plain()
        return builds[target]._replace(entry=target)


def read_compressed_tensors(
    raw: Raw, rename: Renamer, family: Family | None = None
) -> CompressedTensors:
    """The config as vLLM reads it, entries renamed.

    Raises:
        CheckpointError: a key has another type than is read, or an entry is no regular expression.
    """
    given = read_given(CompressedTensorsGiven, raw)
    linear = dict[str, Resolution]()
    experts = dict[str, Resolution]()
    schemes = dict[str, str]()
    written = list[str]()
    all_experts = None
    if family and given.format and given.format == family.rerouted_format:
        all_experts = MXFP4._replace(scales=ENCODED)
    for group in given.config_groups.values():
        targets = group.targets
        if len(targets) == 1 and targets[0].endswith("Attention"):
            continue  # KV-cache quantization; vLLM skips it
        of_linear = _built(group, given.format, is_experts=False)
        of_experts = _built(group, given.format, is_experts=True)
        if family and family.fp8_class and of_experts.built == MXFP4:
            # Its loader takes the bytes of E8M0 (vLLM 0.33.0 models/deepseek_v4/nvidia/model.py).
            of_experts = of_experts._replace(built=MXFP4._replace(scales=E8M0))
        if group.weights and group.weights.is_reordered:
            of_linear = of_linear._replace(error=_NO_ORDER, refusal="order")
            of_experts = of_experts._replace(error=_NO_ORDER, refusal="order")
        written += targets
        for target in targets:
            read = rename.path(target)
            linear[read] = of_linear
            experts[read] = of_experts
            schemes[read] = _scheme_of(group)
    return CompressedTensors(
        targets=Entries(linear),
        ignore=Entries(map(rename.path, given.ignore)),
        builds=linear,
        expert_builds=experts,
        schemes=schemes,
        rename=rename,
        listed={"targets": written, "ignore": given.ignore},
        all_experts=all_experts,
    )


def _scheme_of(group: GivenGroup) -> str:
    """The scheme whose arguments a group has; "" for none, as with an order of channels."""
    if group.weights is not None and group.weights.is_reordered:
        return ""
    given = _arguments(group)
    for name, scheme in SCHEMES.items():
        if given == _arguments(GivenGroup.model_validate(scheme.config_group())):
            return name
    return ""


def registered(weights: GivenArguments, inputs: GivenArguments | None) -> VLLMModule:
    """The parameters of a config group's scheme."""
    bits = weights.num_bits
    strategy = weights.strategy
    size = weights.group_size
    ndim = 2
    if strategy == "tensor":
        ndim = 0
    of_inputs = list[str]()
    if inputs is not None and inputs.dynamic is False:
        of_inputs.append("input_scale")
    match weights.type, bits, strategy, size:
        case "float", 4, "tensor_group", 16:
            if inputs:
                return registers("nvfp4", "input_global_scale")
            return registers("nvfp4")
        case "float", 4, "group", 32:
            return MXFP4
        case "float", 8, "group", 32:
            return registers("mxfp8")
        case "float", 8, "block", _:
            block = weights.block_structure
            return registers("fp8_block", *of_inputs, block=block, scale_ndim=ndim)
        case "float", 8, "tensor", _:
            return registers("fp8_tensor", *of_inputs, scale_ndim=ndim)
        case "float", 8, "channel", _:
            return registers("fp8_channel", *of_inputs, scale_ndim=ndim)
        case "int", 8, "tensor" | "channel", _ if inputs:
            return registers("int8", *of_inputs, scale_ndim=ndim)
        case "int", 4 | 8, "group" | "channel", _ if inputs is None:
            leaves = ["weight_shape"]
            if not weights.symmetric:
                leaves.append("weight_zero_point")
            if strategy == "channel":
                size = None
            order = frozenset({"weight_g_idx"})
            return registers("int_packed", *leaves, optional=order, group_size=size, bits=bits)
    return UNKNOWN


def _built(group: GivenGroup, format_: str | None, *, is_experts: bool) -> Resolution:
    """`_get_scheme_from_parts` and `get_moe_method`: what a config group builds, or the exception
    it raises.
    """
    weights, inputs = _arguments(group)
    if group.weights is None or weights is None:
        return plain()
    wrong = _wrong(weights) or _wrong(inputs)
    if wrong:
        return raises(wrong)
    built = registered(weights, inputs)
    format_ = group.format or format_
    form = built.form
    if form == "unknown" or (form == "int8" and format_ == _PACKED and not is_experts):
        return Resolution(UNKNOWN)
    takes = re.fullmatch(_TAKES[form][is_experts], f"{weights.strategy} {_in_words(inputs)}")
    has_class = takes is not None
    if form == "int_packed":
        has_class &= format_ == _PACKED and not weights.dynamic
    else:
        has_class &= weights.symmetric
    if form == "mxfp8":
        has_class &= group.weights.scale_dtype == "torch.uint8"
    if form in _OF_8_BITS:
        has_class &= not weights.dynamic
        has_class &= is_experts or format_ in _FORMATS
    if has_class:
        return Resolution(built)
    if inputs is None and form.startswith("fp8") and format_ in _FORMATS:
        error = "AssertionError: assert self.is_static_input_scheme is False"
        if is_experts:
            error = "ValueError: For Fused MoE layers, only format: pack-quantized is supported"
            if form != "fp8_channel":
                error = "AttributeError: 'NoneType' object has no attribute 'num_bits'"
        return raises(f"{error} (input_activations: null)", refusal="inputs")
    return raises(
        f"no class takes weights by {weights.strategy} in {format_} with {_in_words(inputs)}"
    )


def _in_words(inputs: GivenArguments | None) -> str:
    """Such as `float8 token dynamic inputs`."""
    if inputs is None:
        return "no inputs"
    manner = {True: "dynamic", False: "static", "local": "local"}[inputs.dynamic]
    if manner != "dynamic" and not inputs.symmetric:
        manner += " asymmetric"
    strategy = inputs.strategy
    if strategy == "tensor_group":
        strategy += f" of {inputs.group_size}"
    return f"{inputs.type}{inputs.num_bits} {strategy} {manner} inputs"


def _wrong(given: GivenArguments | None) -> str:
    """What compressed-tensors' QuantizationArgs refuses; "" for nothing, and for no arguments."""
    if given is None:
        return ""
    strategy = given.strategy
    has_groups = (given.group_size or 0) > 0
    has_blocks = given.block_structure is not None
    is_right = has_groups == (strategy in _OF_GROUPS) and has_blocks == (strategy == "block")
    if is_right and given.dynamic in _DYNAMIC.get(strategy, (False, True)):
        return ""
    return f"ValidationError: QuantizationArgs({given})"


def _arguments(group: GivenGroup) -> tuple[GivenArguments | None, GivenArguments | None]:
    """How weights and inputs are quantized."""
    return _filled(group.weights), _filled(group.input_activations)


def _filled(given: GivenArguments | None) -> GivenArguments | None:
    """Arguments with their strategy; of an order of channels they say nothing any more."""
    if given is None or not given.model_fields_set:
        return None
    strategy = "tensor"
    if given.group_size is not None:
        strategy = "channel"
        if given.group_size > 0:
            strategy = "group"
    if given.strategy:
        strategy = given.strategy
    return given.model_copy(update={"strategy": strategy, "actorder": None, "scale_dtype": None})


def _class_of(module: str, shards: Sequence[str], kind: Kind) -> str:
    """The class that targets such as `Linear` are compared with."""
    last = module.rpartition(".")[2]
    if kind == "head":
        return "ParallelLMHead"
    if last.endswith(("qkv", "qkv_proj")):
        return "QKVParallelLinear"
    if shards:
        return "MergedColumnParallelLinear"
    return "RowParallelLinear"


# --- what is written ------------------------------------------------------------------------------


def compressed_tensors_config(view: FamilyView, modules: Iterable[NamedModule]) -> Json:
    """The value of config.json's `quantization_config`. A module may be there by several names."""
    modules = list(modules)
    by_scheme: dict[str, set[Spellings]] = defaultdict(set)
    for module in modules:
        by_scheme[module.scheme].add(module.spelled)
    ignored = by_scheme.pop("", set())
    # transformers 5.17 (integrations/compressed_tensors.get_experts_scheme) takes the first group
    # whose targets mention "experts" for the routed ones; a group with shared experts alone must
    # not come before it.
    routed = {module.scheme for module in modules if module.place.role == "experts"}
    schemes = sorted(by_scheme.keys() & routed) + sorted(by_scheme.keys() - routed)
    groups = Json()
    formats = set[str]()
    for number, name in enumerate(schemes):
        targets = {"targets": regexes(by_scheme[name])}
        groups[f"group_{number}"] = targets | SCHEMES[name].config_group()
        formats.add(SCHEMES[name].format)
    if len(formats) != 1 or view.family.rerouted_format in formats:
        formats = {"mixed-precision"}
    # `re:` is matched from the start only, and `model.layers.1` would be layers 10 to 19 too: so
    # every entry is anchored at both ends, and numbers of layers are exact ranges.
    ignore = regexes(ignored)
    for disk, runtime, _ in view.layout.opaque:
        ignore.append(f"re:^(?:{re.escape(runtime)}|{re.escape(disk)})")
    return {
        "quant_method": "compressed-tensors",
        "format": formats.pop(),
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": ignore,
        "kv_cache_scheme": None,
        **view.family.config_extras,
    }
