"""`quant_method: compressed-tensors`: what vLLM and SGLang build for a module.

In: quantization_config. Out: a `CompressedTensors` as one of the servers reads it.

Easy to get wrong: vLLM tries the fused name before its shards, and all shards must agree. For
routed experts both ask about the three projections of expert 0. A module that no target matches is
plain in vLLM, without a message, and SGLang raises on it. A target `Linear` also reaches experts,
but no head. In SGLang an entry that is no expression also matches the end of a name, and of a fused
module `ignore` is asked about the parts unless it has the fused name word for word.

Source: vLLM 0.32.0 quantization/compressed_tensors/{compressed_tensors,utils}.py,
compressed_tensors_moe/compressed_tensors_moe.py; SGLang 0.5.23
layers/quantization/compressed_tensors. Compared with the real functions by
tests/checkpoints/dialects/test_dialects.py and test_sglang.py.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ...recipes.family import VLLMName
from ...recipes.renamer import Renamer
from ...recipes.runtimes import Runtime
from .dialect import PLAIN, UNKNOWN, ConfigEntry, Kind, Resolution, VLLMModule
from .given import CompressedTensorsGiven, GivenArguments, GivenGroup, Raw, read_given
from .matching import SCHEMES_DIFFER, OneAnswer, entries_of, left_out, plain, raises, registers
from .patterns import Entries, equal_or_regex

MXFP4 = registers("mxfp4", "weight_packed", "weight_scale", group_size=32)
_EXPERTS: Mapping[Runtime, str] = {"vllm": "RoutedExperts", "sglang": "FusedMoE"}
_PROJECTIONS_DIFFER = (
    "ValueError: All MoE projections need to have same quantization scheme but found multiple"
)
_PACKED = "pack-quantized"
_EMBEDDING = "VocabParallelEmbedding"
_NO_ROWS = "ValueError: compressed-tensors embeddings only support weight-only INT (WNA16)"
_FP8_FORMATS = ("float-quantized", "naive-quantized", "int-quantized", "nvfp4-pack-quantized")
_NO_CLASS = "it has no class for these weights and inputs"
# SGLang's classes by the last part of a module's name.
_CLASSES = {
    "qkv_proj": "QKVParallelLinear",
    "gate_up_proj": "MergedColumnParallelLinear",
    **dict.fromkeys(("o_proj", "down_proj", "out_proj", "wo_b"), "RowParallelLinear"),
}
_Arguments = dict[str, Any]
# What each target means after renaming, in their order: what the server builds, or the exception it
# raises.
_Builds = Mapping[str, VLLMModule | str]


class CompressedTensors(NamedTuple):
    """`quant_method: compressed-tensors`.

    Attributes:
        ignore, targets: entries after renaming.
        builds: of each target, for linear modules.
        expert_builds: the same for routed experts.
        is_mxfp4: SGLang builds routed experts as MXFP4, whatever the entries say.
    """

    ignore: Entries
    targets: Entries
    builds: _Builds
    expert_builds: _Builds
    entries: tuple[ConfigEntry, ...]
    runtime: Runtime
    is_mxfp4: bool
    name: str = "compressed-tensors"

    def resolve(self, module: VLLMName, *, shards: Sequence[VLLMName], kind: Kind) -> Resolution:
        """`get_scheme_dict` for linear modules and tables, `get_moe_method` for experts."""
        if kind == "experts":
            return self._experts(shards)
        if kind == "embedding":
            answer = self._scheme(module, shards, _EMBEDDING, self.builds)
            is_looked_up = answer.built.form in ("plain", "int_packed")
            return answer if is_looked_up or answer.error else raises(_NO_ROWS, answer.entry)
        if kind == "linear" or self.runtime == "vllm":
            class_name = _class_of(self.runtime, module, shards, kind)
            return self._scheme(module, shards, class_name, self.builds)
        # A head is plain in SGLang unless a target names it.
        for target in self.builds:
            if _ends_in(Entries([target]), module):
                return self._ignored(module, ()) or _answer(self.builds, target)
        return self._ignored(module, ()) or plain()

    def hits(self, entry: ConfigEntry, name: str) -> bool:
        """Whole name, or `re:` from the start."""
        return equal_or_regex(name, entry.read[0])

    def _experts(self, projections: Sequence[str]) -> Resolution:
        if self.is_mxfp4:
            return Resolution(MXFP4)
        last = plain()
        answers = []
        for name in projections:
            last = self._scheme(name, (), _EXPERTS[self.runtime], self.expert_builds)
            if last.error:
                return last
            answers.append(last)
        for answer in answers:
            if answer.built != last.built:
                return raises(_PROJECTIONS_DIFFER, answer.entry)
        return last

    def _scheme(
        self, name: str, shards: Sequence[str], class_name: str, builds: _Builds
    ) -> Resolution:
        if found := self._ignored(name, shards):
            return found
        target = self.targets.first(name)
        if target is None:
            each = [self.targets.first(shard) for shard in shards]
            of_parts = each[0] if each and all(each) else None
            of_class = self.targets.first_for_class(class_name)
            if class_name in _EXPERTS.values() and "Linear" in builds:
                of_class = of_class or "Linear"
            target = (of_parts or of_class) if self.runtime == "vllm" else (of_class or of_parts)
        if target is not None:
            return _answer(builds, target)
        if self.runtime == "vllm":
            return plain()
        config = "the compressed-tensors config."
        return raises(f"ValueError: Unable to find matching target for {name} in {config}", "")

    def _ignored(self, name: str, shards: Sequence[str]) -> Resolution | None:
        """`should_ignore_layer`."""
        error = SCHEMES_DIFFER.format(name)
        if self.runtime == "vllm":
            hit = self.ignore.first
            return left_out((name,), hit, "") or left_out(shards, hit, error)
        asked = shards if shards and name not in self.ignore.written else (name,)
        return left_out(asked, lambda each: _ends_in(self.ignore, each), error)


def read_compressed_tensors(
    raw: Raw, rename: Renamer, runtime: Runtime = "vllm"
) -> CompressedTensors | OneAnswer:
    """The config as a server reads it, entries renamed.

    Raises:
        CheckpointError: a key has another type than is read, or an entry is no regular expression.
    """
    given = read_given(CompressedTensorsGiven, raw)
    is_vllm = runtime == "vllm"
    built, renamed = (_built_by_vllm, rename.path) if is_vllm else (_built_by_sglang, rename.name)
    linear = dict[str, VLLMModule | str]()
    experts = dict[str, VLLMModule | str]()
    entries = list[ConfigEntry]()
    is_mxfp4 = not is_vllm and "mxfp4" in (given.format or "")
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
        is_mxfp4 |= not is_vllm and is_of_all and _registered(weights, None) == MXFP4
        for entry in entries_of("targets", targets, renamed):
            entries.append(entry)
            linear[entry.read[0]] = built(group, given.format, is_experts=False)
            experts[entry.read[0]] = built(group, given.format, is_experts=True)
    ignored = entries_of("ignore", given.ignore or (), renamed)
    ignore = Entries(entry.read[0] for entry in ignored)
    targets = Entries(linear)
    targets.refuse_wrong()
    ignore.refuse_wrong()
    every = (*entries, *ignored)
    return CompressedTensors(ignore, targets, linear, experts, every, runtime, is_mxfp4)


def _answer(builds: _Builds, target: str) -> Resolution:
    """What a module becomes that this target matches."""
    built = builds[target]
    return raises(built, target) if isinstance(built, str) else Resolution(built, target)


def _registered(weights: _Arguments | None, inputs: _Arguments | None) -> VLLMModule:
    """The parameters of a config group's scheme; both servers name them as compressed-tensors
    does.
    """
    if weights is None:
        return PLAIN
    bits = weights["num_bits"]
    strategy = weights["strategy"]
    size = weights["group_size"]
    eight = ["weight", "weight_scale"]
    if inputs is not None and inputs["dynamic"] is False:
        eight.append("input_scale")
    ndim = 0 if strategy == "tensor" else 2
    match weights["type"], bits, strategy, size:
        case "float", 4, "tensor_group", 16:
            leaves = ["weight_packed", "weight_scale", "weight_global_scale"]
            return registers(
                "nvfp4", *leaves, *(["input_global_scale"] if inputs else []), group_size=16
            )
        case "float", 4, "group", 32:
            return MXFP4
        case "float", 8, "group", 32:
            return registers("mxfp8", "weight", "weight_scale", group_size=32)
        case "float", 8, "block", _:
            return registers(
                "fp8_block", *eight, block=weights["block_structure"] or (128, 128), scale_ndim=ndim
            )
        case "float", 8, "tensor" | "channel", _:
            return registers(
                "fp8_tensor" if strategy == "tensor" else "fp8_channel", *eight, scale_ndim=ndim
            )
        case "int", 8, "tensor" | "channel", _ if inputs and inputs["num_bits"] == 8:
            return registers("int8", *eight, scale_ndim=ndim)
        case "int", _, "group" | "channel", _ if inputs is None:
            leaves = ["weight_packed", "weight_scale", "weight_shape"]
            leaves += [] if weights["symmetric"] else ["weight_zero_point"]
            group = size if strategy == "group" and size and size > 0 else None
            return registers(
                "int_packed",
                *leaves,
                optional=frozenset({"weight_g_idx"}),
                group_size=group,
                bits=bits,
            )
    return UNKNOWN


def _built_by_vllm(group: GivenGroup, format_: str | None, *, is_experts: bool) -> VLLMModule | str:
    """`_get_scheme_from_parts` and `get_moe_method`: what a config group builds, or the exception
    it raises.
    """
    weights = _filled(group.weights)
    inputs = _filled(group.input_activations)
    built = _registered(weights, inputs)
    format_ = group.format or format_
    if (
        built.form == "nvfp4"
        and inputs
        and (inputs["num_bits"], inputs["strategy"]) != (4, "tensor_group")
    ):
        return (
            "ValueError: For NVFP4 weights, input quantization must also be NVFP4 format, None "
            "for NVFP4A16"
        )
    if built.form == "int_packed" and format_ != _PACKED:
        return UNKNOWN
    if not built.form.startswith("fp8"):
        return built
    if format_ not in _FP8_FORMATS:
        return (
            "NotImplementedError: No compressed-tensors compatible scheme was found (format "
            f"{format_!r})"
        )
    if inputs is None and is_experts and built.form == "fp8_block":
        return (
            "AttributeError: 'NoneType' object has no attribute 'num_bits' (input_activations: "
            "null)"
        )
    if inputs is None and is_experts:
        return (
            "ValueError: For Fused MoE layers, only format: pack-quantized is supported "
            "(input_activations: null)"
        )
    if inputs is None and built.form == "fp8_block":
        return (
            "AssertionError: assert self.is_static_input_scheme is False (input_activations: null)"
        )
    return built


def _built_by_sglang(
    group: GivenGroup, format_: str | None, *, is_experts: bool
) -> VLLMModule | str:
    """`_get_scheme_from_parts` and `get_moe_scheme`, with schemes/: what a config group builds, or
    why it raises.
    """
    own = group.format or format_
    weights = _filled(group.weights) or {}
    has_inputs = own in (*_FP8_FORMATS, _PACKED)
    inputs = _filled(group.input_activations) if has_inputs else None
    built = _registered(weights, inputs)
    if built.form == "int_packed":
        if is_experts and format_ != _PACKED:
            return (
                "it takes integers of routed experts only where all of the config is pack-quantized"
            )
        return built if own == _PACKED and built.bits in (4, 8) else _NO_CLASS
    is_packed = is_experts and format_ == _PACKED
    if (
        is_packed
        and inputs
        and (weights["type"], weights["num_bits"], inputs["num_bits"]) == ("int", 4, 8)
    ):
        return UNKNOWN
    has_class = _has_class(built, weights, inputs, is_experts=is_experts)
    return built if has_class and (has_inputs or is_experts) else _NO_CLASS


def _has_class(
    built: VLLMModule, weights: _Arguments, inputs: _Arguments | None, *, is_experts: bool
) -> bool:
    """Whether SGLang has a class for weights of this form and their inputs."""
    if not weights["symmetric"]:
        return False
    if built.form == "nvfp4":
        return inputs is None or (_registered(inputs, None).form == "nvfp4" and inputs["symmetric"])
    kind = (inputs["strategy"], bool(inputs["dynamic"])) if inputs else ("", False)
    if built.form == "int8":
        return not is_experts and kind in (("tensor", False), ("token", True))
    if weights["dynamic"] or (is_experts and inputs is None):
        return False
    if built.form == "fp8_block":
        return kind[1] or (kind[0] == "tensor" and inputs is not None and inputs["symmetric"])
    if built.form not in ("fp8_tensor", "fp8_channel"):
        return False
    return not is_experts or (weights["strategy"], kind[0]) in (
        ("tensor", "tensor"),
        ("channel", "token"),
    )


def _filled(given: GivenArguments | None) -> _Arguments | None:
    """compressed-tensors' QuantizationArgs with its defaults filled in."""
    if given is None or not given.model_fields_set:
        return None
    defaults = {"num_bits": 8, "type": "int", "symmetric": True, "dynamic": False}
    filled = {**defaults, "group_size": None, "block_structure": None, "strategy": None}
    filled |= given.model_dump(exclude_none=True)
    if not filled["strategy"] and filled["group_size"] is not None:
        filled["strategy"] = "group" if filled["group_size"] > 0 else "channel"
    elif not filled["strategy"] and filled["block_structure"]:
        filled["strategy"] = "block"
    elif not filled["strategy"]:
        filled["strategy"] = "token" if filled["dynamic"] else "tensor"
    return filled


def _ends_in(entries: Entries, name: str) -> str | None:
    """SGLang's `check_equal_or_regex_match`: an entry that is no expression may also be the end of
    a name.
    """
    parts = name.split(".")
    ends = (".".join(parts[start:]) for start in range(1, len(parts)))
    return entries.first(name) or next((end for end in ends if entries.has(end)), None)


def _class_of(runtime: Runtime, module: str, shards: Sequence[str], kind: Kind) -> str:
    """The class that targets such as `Linear` are compared with."""
    last = module.rpartition(".")[2]
    if kind == "head":
        return "ParallelLMHead"
    if runtime == "sglang":
        return _CLASSES.get(last, "ColumnParallelLinear")
    if last.endswith(("qkv", "qkv_proj")):
        return "QKVParallelLinear"
    return "MergedColumnParallelLinear" if shards else "RowParallelLinear"
