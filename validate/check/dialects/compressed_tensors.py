"""`quant_method: compressed-tensors`: what vLLM builds for a module.

In: quantization_config. Out: a `CompressedTensors`.

Easy to get wrong: vLLM tries the fused name before its shards, and all shards must agree. For routed experts it asks
about the three projections of expert 0. A module that no target matches is plain, without a message. A target `Linear`
also reaches experts, but no head.

Source: vLLM 0.32.0 quantization/compressed_tensors/{compressed_tensors,utils}.py,
compressed_tensors_moe/compressed_tensors_moe.py; compared with the real functions by
tests/validate/check/test_dialects.py.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ....checkpoints.stored import Form
from ....recipes.family import VLLMName
from ....recipes.renamer import Renamer
from ..vllm_module import PLAIN, UNKNOWN, ConfigEntry, Kind, Resolution, VLLMModule
from .given import CompressedTensorsGiven, GivenArguments, GivenGroup, read_given
from .matching import left_out
from .patterns import Entries, equal_or_regex

FP8_FORMS: Mapping[str, Form] = {"tensor": "fp8_tensor", "channel": "fp8_channel", "block": "fp8_block"}
MXFP4 = VLLMModule(form="mxfp4", leaves=frozenset({"weight_packed", "weight_scale"}), group_size=32)
_SHARD_ERROR = "ValueError: Found different quantization schemes for the shards of {}"


class Targets:
    """Targets after renaming, in their order, and what vLLM builds for each, or the exception it raises."""

    def __init__(self, builds: Mapping[str, VLLMModule | str]) -> None:
        self.builds = builds
        self.entries = Entries(builds)


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressedTensors:
    """`quant_method: compressed-tensors`.

    Attributes:
        ignore: entries after renaming.
        targets: what vLLM builds for linear modules.
        expert_targets: the same for routed experts.
        experts_inherit: the target `RoutedExperts` among them was made of `Linear`, which reaches experts too.
    """

    ignore: Entries
    targets: Targets
    expert_targets: Targets
    experts_inherit: bool
    entries: tuple[ConfigEntry, ...]
    name: str = "compressed-tensors"

    def resolve(self, module: VLLMName, *, shards: Sequence[VLLMName], kind: Kind) -> Resolution:
        """`get_scheme_dict` for linear modules and heads, `get_moe_method` for experts."""
        if kind != "experts":
            class_name = "ParallelLMHead" if kind == "head" else _linear_class(module, shards)
            return self._scheme(module, shards, class_name, self.targets)
        answers = [self._scheme(name, (), "RoutedExperts", self.expert_targets) for name in shards]
        if self.experts_inherit:
            answers = [replace(a, entry="Linear") if a.entry == "RoutedExperts" else a for a in answers]
        for answer in answers:
            if answer.error:
                return answer
        if any(answer.built != answers[-1].built for answer in answers):
            return Resolution(
                built=UNKNOWN,
                entry=next(answer.entry for answer in answers if answer.built != answers[-1].built),
                error="ValueError: All MoE projections need to have same quantization scheme but found multiple",
            )
        return answers[-1]

    def covered(self, entry: ConfigEntry, names: frozenset[str]) -> Sequence[str]:
        """Whole name, or `re:` from the start."""
        return [name for name in names if any(equal_or_regex(name, pattern) for pattern in entry.read)]

    def _scheme(self, name: str, shards: Sequence[str], class_name: str, targets: Targets) -> Resolution:
        for names in ((name,), shards):
            if plain := left_out(names, self.ignore.first, _SHARD_ERROR.format(name)):
                return plain
        matched = targets.entries.first(name)
        if matched is None and shards:
            each = [targets.entries.first(shard) for shard in shards]
            matched = each[0] if all(each) else None
        matched = matched or targets.entries.first_for_class(class_name)
        if matched is None:
            return Resolution(built=PLAIN)
        built = targets.builds[matched]
        if isinstance(built, str):
            return Resolution(built=UNKNOWN, entry=matched, error=built)
        return Resolution(built=built, entry=matched)


def read_compressed_tensors(raw: Mapping[str, Any], rename: Renamer) -> CompressedTensors:
    """The config as vLLM reads it, entries renamed.

    Raises:
        CheckpointError: a key has another type than vLLM reads, or an entry is no regular expression.
    """
    given = read_given(CompressedTensorsGiven, raw)
    targets: dict[str, VLLMModule | str] = {}
    expert_targets: dict[str, VLLMModule | str] = {}
    entries: list[ConfigEntry] = []
    for group in (given.config_groups or {}).values():
        names = group.targets or ()
        if len(names) == 1 and names[0].endswith("Attention"):
            continue  # KV-cache quantization; vLLM skips it
        for target in names:
            read = rename.path(target)
            targets[read] = _compressed_tensors_built(group, given.format, is_experts=False)
            expert_targets[read] = _compressed_tensors_built(group, given.format, is_experts=True)
            entries.append(ConfigEntry(where="targets", written=target, read=(read,)))
    inherits = "Linear" in targets and "RoutedExperts" not in targets
    if inherits:
        expert_targets["RoutedExperts"] = expert_targets["Linear"]
    ignore = Entries(rename.path(entry) for entry in given.ignore or ())
    entries += [
        ConfigEntry(where="ignore", written=written, read=(read,))
        for written, read in zip(given.ignore or (), ignore.written, strict=True)
    ]
    found = CompressedTensors(
        ignore=ignore,
        targets=Targets(targets),
        expert_targets=Targets(expert_targets),
        experts_inherit=inherits,
        entries=tuple(entries),
    )
    for each in (found.targets.entries, ignore):
        each.refuse_wrong()
    return found


def _compressed_tensors_built(group: GivenGroup, format_: str | None, *, is_experts: bool) -> VLLMModule | str:
    """`_get_scheme_from_parts` and `get_moe_method`: what a config group builds, or the exception it raises."""
    weights, inputs = read_arguments(group.weights), read_arguments(group.input_activations)
    format_ = group.format or format_
    if weights is None:
        return PLAIN
    bits, strategy, is_float = weights["num_bits"], weights["strategy"], weights["type"] == "float"
    size = weights["group_size"]
    static = inputs is not None and inputs["dynamic"] is False
    if is_float and bits == 4 and strategy == "tensor_group" and size == 16:
        if inputs is not None and (inputs["num_bits"], inputs["strategy"]) != (4, "tensor_group"):
            return "ValueError: For NVFP4 weights, input quantization must also be NVFP4 format, None for NVFP4A16"
        return nvfp4_built(has_inputs=bool(inputs))
    if is_float and strategy == "group" and size == 32 and bits == 4:
        return MXFP4
    if is_float and strategy == "group" and size == 32 and bits == 8:
        return VLLMModule(form="mxfp8", leaves=frozenset({"weight", "weight_scale"}), group_size=32)
    if is_float and bits == 8 and strategy in FP8_FORMS:
        if format_ not in ("float-quantized", "naive-quantized", "int-quantized", "nvfp4-pack-quantized"):
            return f"NotImplementedError: No compressed-tensors compatible scheme was found (format {format_!r})"
        if inputs is None and is_experts:
            return (
                "AttributeError: 'NoneType' object has no attribute 'num_bits' (input_activations: null)"
                if strategy == "block"
                else "ValueError: For Fused MoE layers, only format: pack-quantized is supported "
                "(input_activations: null)"
            )
        if inputs is None and strategy == "block":
            return "AssertionError: assert self.is_static_input_scheme is False (input_activations: null)"
        return eight_bits_built(FP8_FORMS[strategy], weights, is_static=static)
    if not is_float and inputs is None and format_ == "pack-quantized" and strategy in ("group", "channel"):
        return integers_built(weights)
    if not is_float and bits == 8 and inputs and inputs["num_bits"] == 8 and strategy in ("channel", "tensor"):
        return eight_bits_built("int8", weights, is_static=static)
    return UNKNOWN


def nvfp4_built(*, has_inputs: bool) -> VLLMModule:
    """What NVFP4 registers, in vLLM and in SGLang."""
    leaves = {"weight_packed", "weight_scale", "weight_global_scale"}
    if has_inputs:
        leaves.add("input_global_scale")
    return VLLMModule(form="nvfp4", leaves=frozenset(leaves), group_size=16)


def eight_bits_built(form: Form, weights: Mapping[str, Any], *, is_static: bool) -> VLLMModule:
    """What FP8 and INT8 register, in vLLM and in SGLang; `is_static`: with a scale of the inputs."""
    leaves, block = {"weight", "weight_scale"}, None
    if is_static:
        leaves.add("input_scale")
    if weights["strategy"] == "block":
        block = weights["block_structure"] or (128, 128)
    scale_ndim = 0 if weights["strategy"] == "tensor" else 2
    return VLLMModule(form=form, leaves=frozenset(leaves), block=block, scale_ndim=scale_ndim)


def integers_built(weights: Mapping[str, Any]) -> VLLMModule:
    """What packed integers register, in vLLM and in SGLang."""
    leaves, size = {"weight_packed", "weight_scale", "weight_shape"}, weights["group_size"]
    if not weights["symmetric"]:
        leaves.add("weight_zero_point")
    return VLLMModule(
        form="int_packed",
        leaves=frozenset(leaves),
        optional=frozenset({"weight_g_idx"}),
        group_size=size if weights["strategy"] == "group" and size and size > 0 else None,
        bits=weights["num_bits"],
    )


def read_arguments(given: GivenArguments | None) -> dict[str, Any] | None:
    """compressed-tensors' QuantizationArgs with its defaults filled in."""
    if given is None or not given.model_fields_set:
        return None
    filled = {
        "num_bits": 8,
        "type": "int",
        "symmetric": True,
        "dynamic": False,
        "group_size": None,
        "block_structure": None,
    } | given.model_dump(exclude_none=True)
    if not filled.get("strategy"):
        size = filled["group_size"]
        grouped = None if size is None else ("group" if size > 0 else "channel")
        filled["strategy"] = grouped or ("block" if filled["block_structure"] else None)
        filled["strategy"] = filled["strategy"] or ("token" if filled["dynamic"] else "tensor")
    return filled


def _linear_class(module: str, shards: Sequence[str]) -> str:
    if module.endswith("qkv_proj"):
        return "QKVParallelLinear"
    return "MergedColumnParallelLinear" if shards else "RowParallelLinear"
