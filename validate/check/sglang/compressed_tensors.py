"""`quant_method: compressed-tensors`: what SGLang builds for a module.

In: quantization_config, and what the model's class says of its names. Out: a `SglangCompressedTensors`.

Easy to get wrong: a module that no target matches raises, where vLLM leaves it plain. Of a fused module that the class
knows, `ignore` is asked about the parts, and not about the fused name unless it is there word for word. An entry that
is no expression also matches the end of a name. Routed experts are always asked about as gate_proj, up_proj and
down_proj of expert 0. Whether integers of routed experts are packed is read from the format of the whole config.

Source: SGLang 0.5.23 sglang/srt/layers/quantization/compressed_tensors/{compressed_tensors,utils}.py and schemes/;
compared with the real classes by tests/validate/check/test_sglang.py.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from ..dialects.compressed_tensors import (
    FP8_FORMS,
    MXFP4,
    eight_bits_built,
    integers_built,
    nvfp4_built,
    read_arguments,
)
from ..dialects.given import CompressedTensorsGiven, GivenGroup, read_given
from ..dialects.matching import left_out
from ..dialects.patterns import Entries
from ..vllm_module import PLAIN, UNKNOWN, Resolution, VLLMModule
from .asked import AskedModule, Failing
from .classes import Packed, SglangClasses, WeightsMapper

_PACKED = "pack-quantized"
_WITH_INPUTS = ("naive-quantized", "int-quantized", "float-quantized", "nvfp4-pack-quantized", _PACKED)
_NO_SCHEME = "NotImplementedError: No compressed-tensors compatible scheme was found."
_NO_EXPERTS = "RuntimeError: Unsupported FusedMoe scheme"
_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True, slots=True, kw_only=True)
class SglangCompressedTensors:
    """`quant_method: compressed-tensors`.

    Attributes:
        ignore: entries after renaming.
        targets: what becomes of linear modules, in the config's order.
        expert_targets: the same for routed experts.
        packed: what the model's class says of its fused modules.
        is_mxfp4: routed experts are built as MXFP4, whatever the entries say.
    """

    ignore: Entries
    targets: Entries
    builds: Mapping[str, VLLMModule | str]
    expert_builds: Mapping[str, VLLMModule | str]
    packed: Packed
    is_mxfp4: bool
    method: str = "compressed-tensors"

    def resolve(self, asked: AskedModule) -> Resolution:
        """`get_quant_method`."""
        if asked.kind == "head":
            return self._head(asked.name)
        if asked.kind == "linear":
            return self._scheme(asked.name, asked.class_name, self.builds)
        if self.is_mxfp4:
            return Resolution(built=MXFP4)
        answers = [self._scheme(f"{asked.name}.0.{last}", "FusedMoE", self.expert_builds) for last in _PROJECTIONS]
        if failed := next((answer for answer in answers if answer.error), None):
            return failed
        if any(answer.built != answers[0].built for answer in answers):
            error = "ValueError: All MoE projections need to have same quantization scheme but found multiple"
            return Resolution(built=UNKNOWN, entry=answers[0].entry, error=error)
        return answers[0]

    def _head(self, name: str) -> Resolution:
        """A head is plain unless a target names it."""
        if plain := self._ignored(name):
            return plain
        target = next((each for each in self.targets.written if _hit(Entries([each]), name)), "")
        return self._built(target, self.builds) if target else Resolution(built=PLAIN)

    def _scheme(self, name: str, class_name: str, builds: Mapping[str, VLLMModule | str]) -> Resolution:
        if plain := self._ignored(name):
            return plain
        target = self.targets.first(name) or self.targets.first_for_class(class_name) or self._of_parts(name)
        if target is None and class_name == "FusedMoE" and "Linear" in builds:
            target = "Linear"  # SGLang adds a target FusedMoE with the scheme of Linear
        if target is None:
            error = f"ValueError: Unable to find matching target for {name} in the compressed-tensors config."
            return Resolution(built=UNKNOWN, error=error)
        return self._built(target, builds)

    def _built(self, target: str, builds: Mapping[str, VLLMModule | str]) -> Resolution:
        built = builds[target]
        if isinstance(built, str):
            return Resolution(built=UNKNOWN, entry=target, error=built)
        return Resolution(built=built, entry=target)

    def _ignored(self, name: str) -> Resolution | None:
        """`should_ignore_layer`."""
        last, names, parts = name.rpartition(".")[2], [name], []
        if last in self.packed and name not in self.ignore.written:
            parts = [*self.packed[last]]
            names = [name.replace(last, part) for part in parts]
        error = f"ValueError: Found different quantization schemes for {parts} in {name}"
        return left_out(names, partial(_hit, self.ignore), error)

    def _of_parts(self, name: str) -> str | None:
        """`_match_fused_layer`: the first part's target, if each part has one."""
        fused = next((key for key in self.packed if name.endswith(key)), None)
        if fused is None:
            return None
        each = [self.targets.first(name.replace(fused, part)) for part in self.packed[fused]]
        return each[0] if all(each) else None


def read_sglang_compressed_tensors(raw: Mapping[str, Any], classes: SglangClasses) -> SglangCompressedTensors | Failing:
    """The config as SGLang reads it.

    Raises:
        CheckpointError: a key has another type than is read, or an entry is no regular expression.
    """
    given = read_given(CompressedTensorsGiven, raw)
    groups = dict(given.config_groups or {})
    for name, group in groups.items():
        if read_arguments(group.weights) is None:
            error = f"ValidationError: SGLang reads config_groups.{name}.weights, which is not there"
            return Failing(method="compressed-tensors", error=error)
    mapper = classes.mapper or WeightsMapper()
    builds = {mapper.name(t): _linear(g, given.format) for g in groups.values() for t in g.targets or ()}
    experts = {mapper.name(t): _experts(g, given.format) for g in groups.values() for t in g.targets or ()}
    ignore = Entries(mapper.name(entry) for entry in given.ignore or ())
    targets = Entries(builds)
    for each in (ignore, targets):
        each.refuse_wrong()
    linear = next(
        (g for g in groups.values() if "Linear" in (g.targets or ()) or "FusedMoE" in (g.targets or ())), None
    )
    return SglangCompressedTensors(
        ignore=ignore,
        targets=targets,
        builds=builds,
        expert_builds=experts,
        packed=classes.packed,
        is_mxfp4="mxfp4" in (given.format or "") or (linear is not None and _is_mxfp4(linear)),
    )


def _hit(entries: Entries, name: str) -> str | None:
    """`check_equal_or_regex_match`: an entry that is no expression may also be the end of a name."""
    found = entries.first(name)
    parts = name.split(".")
    ends = (".".join(parts[start:]) for start in range(1, len(parts)))
    return found or next((end for end in ends if end in _plain(entries.written)), None)


def _plain(written: Iterable[str]) -> frozenset[str]:
    return frozenset(entry for entry in written if not entry.startswith("re:"))


def _is_mxfp4(group: GivenGroup) -> bool:
    weights = read_arguments(group.weights) or {}
    return (weights["num_bits"], weights["type"], weights["strategy"], weights["group_size"]) == (
        4,
        "float",
        "group",
        32,
    )


def _inputs(group: GivenGroup, format_: str | None) -> dict[str, Any] | None:
    """Activations are read only where the format is one of those that have them."""
    return read_arguments(group.input_activations) if (group.format or format_) in _WITH_INPUTS else None


def _linear(group: GivenGroup, format_: str | None) -> VLLMModule | str:
    """`_get_scheme_from_parts`."""
    weights, inputs = read_arguments(group.weights) or {}, _inputs(group, format_)
    format_ = group.format or format_
    if weights["type"] == "int" and inputs is None and weights["strategy"] in ("channel", "group"):
        if format_ != _PACKED or weights["num_bits"] not in (4, 8):
            return "ImportError: Other method (CompressedTensorsW4A16Sparse24) is not supported now"
        return integers_built(weights)
    if format_ not in _WITH_INPUTS:
        return _NO_SCHEME
    if weights["type"] == "int":
        return _int8(weights, inputs) or _NO_SCHEME
    if weights["num_bits"] == 4:
        return _nvfp4(weights, inputs)
    return _fp8(weights, inputs) or _NO_SCHEME


def _experts(group: GivenGroup, format_: str | None) -> VLLMModule | str:
    """`get_moe_scheme`."""
    weights, inputs = read_arguments(group.weights) or {}, _inputs(group, format_)
    if weights["type"] == "int" and inputs is None and weights["strategy"] in ("channel", "group"):
        if format_ != _PACKED or weights["num_bits"] not in (4, 8):
            return f"ValueError: For Fused MoE layers, only pack-quantized is supported (format {format_!r})"
        return integers_built(weights)
    if weights["type"] == "int":
        if inputs and weights["num_bits"] == 4 and format_ == _PACKED and inputs["num_bits"] == 8:
            return UNKNOWN
        return "NotImplementedError: The W8A8Int8 Fused MoE scheme is implemented only for NPU for now."
    if weights["num_bits"] == 4:
        built = _nvfp4(weights, inputs)
        return _NO_EXPERTS if isinstance(built, str) else built
    if inputs is None:
        return _NO_EXPERTS
    strategies = weights["strategy"], inputs["strategy"]
    if strategies not in (("tensor", "tensor"), ("channel", "token")) and weights["strategy"] != "block":
        return "AssertionError: FP8 of routed experts is per tensor, per channel and token, or per block"
    return _fp8(weights, inputs) or _NO_EXPERTS


def _nvfp4(weights: Mapping[str, Any], inputs: Mapping[str, Any] | None) -> VLLMModule | str:
    fields = ("strategy", "num_bits", "type", "group_size", "symmetric")
    expected = ["tensor_group", 4, "float", 16, True]
    if any([given[key] for key in fields] != expected for given in (weights, inputs) if given is not None):
        if inputs is None:
            return _NO_SCHEME
        return "NotImplementedError: Activation-quantized float4 is only supported in the NVFP4 layout"
    return nvfp4_built(has_inputs=bool(inputs))


def _fp8(weights: Mapping[str, Any], inputs: Mapping[str, Any] | None) -> VLLMModule | None:
    strategy = weights["strategy"]
    if strategy not in FP8_FORMS or not weights["symmetric"] or weights["dynamic"]:
        return None
    is_static = inputs is not None and not inputs["dynamic"]
    is_plain_static = is_static and inputs is not None and inputs["strategy"] == "tensor" and inputs["symmetric"]
    if strategy == "block" and (inputs is None or (is_static and not is_plain_static)):
        return None
    return eight_bits_built(FP8_FORMS[strategy], weights, is_static=is_static)


def _int8(weights: Mapping[str, Any], inputs: Mapping[str, Any] | None) -> VLLMModule | None:
    if inputs is None or (weights["num_bits"], inputs["num_bits"]) != (8, 8) or not weights["symmetric"]:
        return None
    if weights["strategy"] not in ("tensor", "channel"):
        return None
    static = inputs["strategy"] == "tensor" and not inputs["dynamic"]
    if not static and not (inputs["strategy"] == "token" and inputs["dynamic"]):
        return None
    return eight_bits_built("int8", weights, is_static=static)
