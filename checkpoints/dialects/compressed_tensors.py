"""`quant_method: compressed-tensors`: what vLLM and SGLang build for a module, and the config that
keepmtp writes.

In: quantization_config. Out: a `CompressedTensors` as one of the servers reads it. And the way
back: the named modules of a plan or of a finished checkpoint -> `config_groups` whose targets cover
exactly the quantized modules, and an `ignore` list that covers exactly the others.

Easy to get wrong: a module that no target matches is plain in vLLM, without a message, and SGLang
raises on it. And every module has several names: the fused one, those of its shards, the routed
experts' projections (w1 or gate_proj, by vLLM's version), and the name on disk.

Source: vLLM 0.32.0 quantization/compressed_tensors/{compressed_tensors,utils}.py,
compressed_tensors_moe/compressed_tensors_moe.py, quantization/utils/config_utils.py; SGLang 0.5.23
layers/quantization/compressed_tensors and the files in recipes/runtimes/sglang.py; of the keys:
compressed-tensors 0.19.0 quantization/quant_config.py. Compared with the real functions by
tests/checkpoints/dialects/test_dialects.py and tests/validate/check/test_sglang.py.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from ...recipes.family import VLLMName
from ...recipes.family_view import FamilyView
from ...recipes.frozen import Json
from ...recipes.renamer import Renamer
from ...recipes.runtimes import Runtime
from ...recipes.runtimes.sglang import sglang_model
from ...recipes.schemes import SCHEMES
from .dialect import PLAIN, UNKNOWN, ConfigEntry, Exceptions, Kind, Resolution, VLLMModule
from .given import CompressedTensorsGiven, GivenArguments, GivenGroup, Raw, read_given
from .matching import (
    ENCODED,
    MXFP4,
    SCHEMES_DIFFER,
    OneAnswer,
    left_out,
    plain,
    raises,
    registers,
)
from .modules import NamedModule, Spellings, concrete, regexes
from .patterns import Entries, equal_or_regex
from .sglang import no_draft, sglang_asks, unnamed

_EXPERTS: Mapping[Runtime, str] = {"vllm": "RoutedExperts", "sglang": "FusedMoE"}
_PROJECTIONS_DIFFER = (
    "ValueError: All MoE projections need to have same quantization scheme but found multiple"
)
_PACKED = "pack-quantized"
_EMBEDDING = "VocabParallelEmbedding"
_NO_ROWS = "ValueError: compressed-tensors embeddings only support weight-only INT (WNA16)"
_FP8_FORMATS = ("float-quantized", "naive-quantized", "int-quantized", "nvfp4-pack-quantized")
# Refused since 0.30 (compressed_tensors.py, `from_config`).
_NO_ORDER = (
    "ValueError: Compressed-tensors group/dynamic activation ordering is no longer supported"
)
_NO_CLASS = "it has no class for these weights and inputs"
# SGLang's classes by the last part of a module's name.
_CLASSES = {
    "qkv_proj": "QKVParallelLinear",
    "gate_up_proj": "MergedColumnParallelLinear",
    **dict.fromkeys(("o_proj", "down_proj", "out_proj", "wo_b"), "RowParallelLinear"),
}
# SGLang's files that make an obstacle.
_CONFIG = "layers/quantization/compressed_tensors/compressed_tensors.py"
_WEIGHTS = "models/deepseek_common/deepseek_weight_loader.py"
_Arguments = dict[str, Any]
# What each target means after renaming, in their order.
_Builds = Mapping[str, Resolution]
ByScheme = dict[str, set[Spellings]]
"""Spellings by scheme, "" for plain."""


class CompressedTensors(NamedTuple):
    """`quant_method: compressed-tensors`.

    Attributes:
        ignore, targets: entries after renaming.
        builds: of each target, for linear modules.
        expert_builds: the same for routed experts.
        schemes: keepmtp's word for each target's group; "" where it has none.
        all_experts: what a server builds of routed experts, whatever the entries say; None where
            they decide.
    """

    ignore: Entries
    targets: Entries
    builds: _Builds
    expert_builds: _Builds
    schemes: Mapping[str, str]
    rename: Renamer
    entries: tuple[ConfigEntry, ...]
    runtime: Runtime
    all_experts: VLLMModule | None
    name: str = "compressed-tensors"

    # Expressions, from the start of a name; of routed experts each projection has a name.
    exceptions = Exceptions(("ignore",), "re:^{}$", of_stem="re:^{}", of_experts="re:^{}[.]")

    def reads(self, entry: str) -> ConfigEntry:
        """As the mapper of vLLM's class leaves it."""
        return ConfigEntry("ignore", entry, (self.rename.path(entry),))

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
        if kind == "linear" or self.runtime == "vllm":
            class_name = _class_of(self.runtime, module, shards, kind)
            return self._scheme(module, shards, class_name, self.builds)
        ignored = self._ignored(module, ())
        if ignored is not None:
            return ignored
        # A head is plain in SGLang unless a target names it.
        for target in self.builds:
            if _ends_in(Entries([target]), module):
                return _answer(self.builds, target)
        return plain()

    def hits(self, entry: ConfigEntry, name: str) -> bool:
        """Whole name, or `re:` from the start."""
        return equal_or_regex(name, entry.read[0])

    def _experts(self, projections: Sequence[str]) -> Resolution:
        if self.all_experts is not None:
            return Resolution(self.all_experts)
        # Both servers ask about the three projections of expert 0, and vLLM takes the last answer.
        last = plain()
        answers = []
        for name in projections:
            last = self._scheme(name, (), _EXPERTS[self.runtime], self.expert_builds)
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
        ignored = self._ignored(name, shards)
        if ignored is not None:
            return ignored
        target = self.targets.first(name)
        if target is None:
            target = self._target_of_parts(shards)
            of_class = self.targets.first_for_class(class_name)
            # A target `Linear` also reaches experts, but no head.
            if class_name in _EXPERTS.values() and "Linear" in builds:
                of_class = of_class or "Linear"
            # vLLM looks for the parts before it looks for the class, SGLang after it.
            if target is None or (self.runtime == "sglang" and of_class is not None):
                target = of_class
        if target is not None:
            return _answer(builds, target)
        if self.runtime == "vllm":
            return plain()
        config = "the compressed-tensors config."
        error = f"ValueError: Unable to find matching target for {name} in {config}"
        return raises(error, "", "target")

    def _target_of_parts(self, shards: Sequence[str]) -> str | None:
        """The target of the first part, where each part has one."""
        targets = [self.targets.first(shard) for shard in shards]
        if not targets or None in targets:
            return None
        return targets[0]

    def _ignored(self, name: str, shards: Sequence[str]) -> Resolution | None:
        """`should_ignore_layer`."""
        error = SCHEMES_DIFFER.format(name)
        if self.runtime == "vllm":
            # First the fused name, then its shards, of which all or none must be named.
            hit = self.ignore.first
            return left_out((name,), hit, "") or left_out(shards, hit, error)
        # SGLang asks about the parts, unless the list has the fused name word for word.
        if not shards or name in self.ignore.written:
            shards = (name,)
        return left_out(shards, partial(_ends_in, self.ignore), error)


def read_compressed_tensors(
    raw: Raw, rename: Renamer, runtime: Runtime = "vllm", *, rerouted: str = ""
) -> CompressedTensors | OneAnswer:
    """The config as a server reads it, entries renamed; `rerouted` is the family's
    `rerouted_format`.

    Raises:
        CheckpointError: a key has another type than is read, or an entry is no regular expression.
    """
    given = read_given(CompressedTensorsGiven, raw)
    is_vllm = runtime == "vllm"
    built = _built_by_vllm if is_vllm else _built_by_sglang
    renamed = rename.path if is_vllm else rename.name
    linear = dict[str, Resolution]()
    experts = dict[str, Resolution]()
    schemes = dict[str, str]()
    entries = list[ConfigEntry]()
    all_experts = None
    if given.format and given.format == rerouted:
        all_experts = MXFP4._replace(scales=ENCODED)
    elif not is_vllm and "mxfp4" in (given.format or ""):
        all_experts = MXFP4
    for key, group in (given.config_groups or {}).items():
        targets = group.targets or ()
        weights = _filled(group.weights)
        if is_vllm and len(targets) == 1 and targets[0].endswith("Attention"):
            continue  # KV-cache quantization; vLLM skips it
        if not is_vllm and weights is None:
            where = f"config_groups.{key}.weights"
            error = f"ValidationError: SGLang reads {where}, which is not there"
            return OneAnswer("compressed-tensors", raises(error))
        is_of_all = not {"Linear", "FusedMoE"}.isdisjoint(targets)
        if not is_vllm and is_of_all and _registered(weights, None) == MXFP4:
            all_experts = MXFP4
        of_linear = built(group, given.format, is_experts=False)
        of_experts = built(group, given.format, is_experts=True)
        if is_vllm and group.weights and group.weights.is_reordered:
            of_linear = of_linear._replace(error=_NO_ORDER, refusal="order")
            of_experts = of_experts._replace(error=_NO_ORDER, refusal="order")
        for target in targets:
            read = renamed(target)
            entries.append(ConfigEntry("targets", target, (read,)))
            linear[read] = of_linear
            experts[read] = of_experts
            schemes[read] = _scheme_of(group)
    ignored = [ConfigEntry("ignore", entry, (renamed(entry),)) for entry in given.ignore or ()]
    ignore = Entries(entry.read[0] for entry in ignored)
    targets = Entries(linear)
    targets.refuse_wrong()
    ignore.refuse_wrong()
    entries += ignored
    return CompressedTensors(
        ignore, targets, linear, experts, schemes, rename, tuple(entries), runtime, all_experts
    )


def _scheme_of(group: GivenGroup) -> str:
    """The scheme whose arguments a group has; "" for none, as with an order of channels."""
    if group.weights is not None and group.weights.is_reordered:
        return ""
    given = [_filled(group.weights), _filled(group.input_activations)]
    for name, scheme in SCHEMES.items():
        weights = GivenArguments.model_validate(scheme.weights)
        inputs = GivenArguments.model_validate(scheme.inputs or {})
        if given == [_filled(weights), _filled(inputs)]:
            return name
    return ""


def _answer(builds: _Builds, target: str) -> Resolution:
    """What a module becomes that this target matches."""
    return builds[target]._replace(entry=target)


def _registered(weights: _Arguments | None, inputs: _Arguments | None) -> VLLMModule:
    """The parameters of a config group's scheme; both servers name them as compressed-tensors
    does.
    """
    if weights is None:
        return PLAIN
    bits = weights["num_bits"]
    strategy = weights["strategy"]
    size = weights["group_size"]
    ndim = 0 if strategy == "tensor" else 2
    eight = ["weight", "weight_scale"]
    if inputs is not None and inputs["dynamic"] is False:
        eight.append("input_scale")
    match weights["type"], bits, strategy, size:
        case "float", 4, "tensor_group", 16:
            leaves = ["weight_packed", "weight_scale", "weight_global_scale"]
            if inputs:
                leaves.append("input_global_scale")
            return registers("nvfp4", *leaves, group_size=16)
        case "float", 4, "group", 32:
            return MXFP4
        case "float", 8, "group", 32:
            return registers("mxfp8", "weight", "weight_scale", group_size=32)
        case "float", 8, "block", _:
            block = weights["block_structure"] or (128, 128)
            return registers("fp8_block", *eight, block=block, scale_ndim=ndim)
        case "float", 8, "tensor", _:
            return registers("fp8_tensor", *eight, scale_ndim=ndim)
        case "float", 8, "channel", _:
            return registers("fp8_channel", *eight, scale_ndim=ndim)
        case "int", 8, "tensor" | "channel", _ if inputs and inputs["num_bits"] == 8:
            return registers("int8", *eight, scale_ndim=ndim)
        case "int", _, "group" | "channel", _ if inputs is None:
            leaves = ["weight_packed", "weight_scale", "weight_shape"]
            if not weights["symmetric"]:
                leaves.append("weight_zero_point")
            if strategy == "channel" or not size or size < 0:
                size = None
            order = frozenset({"weight_g_idx"})
            return registers("int_packed", *leaves, optional=order, group_size=size, bits=bits)
    return UNKNOWN


def _built_by_vllm(group: GivenGroup, format_: str | None, *, is_experts: bool) -> Resolution:
    """`_get_scheme_from_parts` and `get_moe_method`: what a config group builds, or the exception
    it raises.
    """
    weights = _filled(group.weights)
    inputs = _filled(group.input_activations)
    built = _registered(weights, inputs)
    format_ = group.format or format_
    is_of_nvfp4 = inputs is None or (inputs["num_bits"], inputs["strategy"]) == (4, "tensor_group")
    if built.form == "nvfp4" and not is_of_nvfp4:
        return raises(
            "ValueError: For NVFP4 weights, input quantization must also be NVFP4 format, None "
            "for NVFP4A16"
        )
    if built.form == "int_packed" and format_ != _PACKED:
        return Resolution(UNKNOWN)
    if not built.form.startswith("fp8"):
        return Resolution(built)
    if format_ not in _FP8_FORMATS:
        return raises(
            "NotImplementedError: No compressed-tensors compatible scheme was found (format "
            f"{format_!r})"
        )
    are_blocks = built.form == "fp8_block"
    if inputs is not None or not (is_experts or are_blocks):
        return Resolution(built)
    error = "AssertionError: assert self.is_static_input_scheme is False"
    if is_experts and are_blocks:
        error = "AttributeError: 'NoneType' object has no attribute 'num_bits'"
    elif is_experts:
        error = "ValueError: For Fused MoE layers, only format: pack-quantized is supported"
    return raises(f"{error} (input_activations: null)", refusal="inputs")


def _built_by_sglang(group: GivenGroup, format_: str | None, *, is_experts: bool) -> Resolution:
    """`_get_scheme_from_parts` and `get_moe_scheme`, with schemes/: what a config group builds, or
    why it raises.
    """
    own = group.format or format_
    weights = _filled(group.weights) or {}
    has_inputs = own in (*_FP8_FORMATS, _PACKED)
    inputs = _filled(group.input_activations) if has_inputs else None
    built = _registered(weights, inputs)
    is_packed = format_ == _PACKED
    if built.form == "int_packed" and is_experts and not is_packed:
        return raises(
            "it takes integers of routed experts only where all of the config is pack-quantized"
        )
    if built.form == "int_packed":
        if own == _PACKED and built.bits in (4, 8):
            return Resolution(built)
        return raises(_NO_CLASS)
    if is_experts and is_packed and inputs:
        kind = (weights["type"], weights["num_bits"], inputs["num_bits"])
        if kind == ("int", 4, 8):
            return Resolution(UNKNOWN)
    has_class = _has_class(built, weights, inputs, is_experts=is_experts)
    if has_class and (has_inputs or is_experts):
        return Resolution(built)
    return raises(_NO_CLASS)


def _has_class(
    built: VLLMModule, weights: _Arguments, inputs: _Arguments | None, *, is_experts: bool
) -> bool:
    """Whether SGLang has a class for weights of this form and their inputs."""
    if not weights["symmetric"]:
        return False
    if built.form == "nvfp4":
        return inputs is None or (_registered(inputs, None).form == "nvfp4" and inputs["symmetric"])
    of_inputs = ""
    is_dynamic = False
    if inputs:
        of_inputs = inputs["strategy"]
        is_dynamic = bool(inputs["dynamic"])
    if built.form == "int8":
        kinds = (("tensor", False), ("token", True))
        return not is_experts and (of_inputs, is_dynamic) in kinds
    if weights["dynamic"] or (is_experts and inputs is None):
        return False
    if built.form == "fp8_block":
        is_symmetric = inputs is not None and inputs["symmetric"]
        return is_dynamic or (of_inputs == "tensor" and is_symmetric)
    if built.form not in ("fp8_tensor", "fp8_channel"):
        return False
    pairs = (("tensor", "tensor"), ("channel", "token"))
    return not is_experts or (weights["strategy"], of_inputs) in pairs


def _filled(given: GivenArguments | None) -> _Arguments | None:
    """compressed-tensors' QuantizationArgs with its defaults filled in."""
    if given is None or not given.model_fields_set:
        return None
    defaults = {"num_bits": 8, "type": "int", "symmetric": True, "dynamic": False}
    filled = {**defaults, "group_size": None, "block_structure": None, "strategy": None}
    filled |= given.model_dump(exclude_none=True, exclude={"actorder"})
    if filled["strategy"]:
        return filled
    size = filled["group_size"]
    if size is not None and size > 0:
        filled["strategy"] = "group"
    elif size is not None:
        filled["strategy"] = "channel"
    elif filled["block_structure"]:
        filled["strategy"] = "block"
    elif filled["dynamic"]:
        filled["strategy"] = "token"
    else:
        filled["strategy"] = "tensor"
    return filled


def _ends_in(entries: Entries, name: str) -> str | None:
    """SGLang's `check_equal_or_regex_match`: an entry that is no expression may also be the end of
    a name.
    """
    entry = entries.first(name)
    end = name
    while entry is None and "." in end:
        _, _, end = end.partition(".")
        if entries.has(end):
            return end
    return entry


def _class_of(runtime: Runtime, module: str, shards: Sequence[str], kind: Kind) -> str:
    """The class that targets such as `Linear` are compared with."""
    last = module.rpartition(".")[2]
    if kind == "head":
        return "ParallelLMHead"
    if runtime == "sglang":
        return _CLASSES.get(last, "ColumnParallelLinear")
    if last.endswith(("qkv", "qkv_proj")):
        return "QKVParallelLinear"
    if shards:
        return "MergedColumnParallelLinear"
    return "RowParallelLinear"


# --- what is written ------------------------------------------------------------------------------


def compressed_tensors_config(
    view: FamilyView, modules: Iterable[NamedModule]
) -> tuple[Json, list[str]]:
    """The value of config.json's `quantization_config`, and what stands against SGLang."""
    modules = list(modules)
    by_scheme: ByScheme = defaultdict(set)
    for module in modules:
        by_scheme[module.scheme].add(module.spelled)
    added, obstacles = added_names(view, modules)
    for scheme, spelled in added.items():
        by_scheme[scheme] |= spelled
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
    config = {
        "quant_method": "compressed-tensors",
        "format": formats.pop(),
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": ignore,
        "kv_cache_scheme": None,
        **view.family.config_extras,
    }
    return config, obstacles


# --- SGLang ---------------------------------------------------------------------------------------


def added_names(view: FamilyView, modules: Iterable[NamedModule]) -> tuple[ByScheme, list[str]]:
    """The spellings that only SGLang asks about, by scheme; or what stands against it, and nothing
    is added.
    """
    obstacle = no_draft(view)
    if obstacle:
        return {}, [obstacle]
    known = [module for module in modules if module.place.is_known]
    model = sglang_model(view.config)
    a_layer = re.escape(model.layers).replace(r"\{i\}", r"\d+")
    has_layers = any(module.place.part == "backbone" for module in known)
    # Such a draft gets that layer's scheme: an entry for it would change what vLLM reads.
    if not has_layers and re.fullmatch(a_layer, model.draft or ""):
        return {}, [f"it gives the MTP layer the names of a decoder layer ({model.file})"]
    spelled_by_vllm = {name for module in known for name in concrete(module.spelled)}
    asked, clashes = sglang_asks(view, known)
    obstacles = [*dict.fromkeys([*clashes, *unnamed(view, known), *_without_kernel(known)])]
    # A plain draft needs entries as much as a quantized one: SGLang raises for a module that no
    # entry names.
    added: ByScheme = defaultdict(set)
    for name, module, spelled in asked:
        if name not in spelled_by_vllm and not obstacles:
            added[module.scheme].add(spelled)
    return added, obstacles


def _without_kernel(modules: Iterable[NamedModule]) -> Iterator[str]:
    """Schemes that SGLang has no class for, of experts, of linears, or of what it absorbs into
    attention.
    """
    modules = list(modules)
    is_mixed = len({SCHEMES[module.scheme].format for module in modules if module.scheme}) > 1
    for module in modules:
        place = module.place
        scheme = module.scheme
        if scheme.startswith("MXFP4"):
            yield f"it has no class for {scheme} in a config of mixed precision ({_CONFIG})"
        elif scheme == "W8A8" and place.role == "experts":
            yield f"it has experts in W8A8 for NPUs only ({_CONFIG})"
        elif is_mixed and scheme.startswith(("W4A16", "W8A16")) and place.role == "experts":
            yield (
                f"it takes experts in {scheme} only where all of the checkpoint is "
                f"pack-quantized ({_CONFIG})"
            )
        elif place.module.endswith(".kv_b_proj"):
            if "4" in scheme or scheme == "W8A16":
                what = "an unpacked weight"
            elif scheme == "FP8_BLOCK":
                what = "its blocks' size from the target Linear alone"
            else:
                continue
            yield f"it reads {what} for kv_b_proj, which is in {scheme} ({_WEIGHTS})"
