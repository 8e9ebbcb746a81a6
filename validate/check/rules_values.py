"""Rules on what the tensors hold: what loads without a word and answers nonsense.

In: a `RuntimeView` and the summaries of its tensors. Out: objections, each with the tensor and the
element; warnings about an MTP block that was never trained.

Easy to get wrong: a zero, and what is normal. A second-level scale is a divisor in
compressed-tensors and a multiplier in modelopt, so zero means infinity in one and nothing in the
other. A block scale of zero is right for a block of zeros. A bias of zeros is right, a norm of
zeros is right where the model adds one to it.

Source: vLLM 0.32.0 quantization/compressed_tensors/schemes/compressed_tensors_w4a4_nvfp4.py and
modelopt.py (process_weights_after_loading), compressed_tensors_moe_w4a4_nvfp4.py.
"""

import math
from collections import defaultdict
from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

from ...checkpoints.dialects.runtime_view import RuntimeView
from ...checkpoints.safetensors_file import Entry
from ...checkpoints.stored import KV_SCALE_LEAVES
from ...recipes.family import HFName
from ...recipes.family_view import Place
from ...recipes.forms import (
    DIVISORS,
    FIRST_SCALES,
    FORMS,
    GLOBAL_SCALE,
    IN_MODELOPT,
    INPUT_GLOBAL_SCALE,
)
from ..facts.findings import Objection, Objections, objection
from .reading import Summary, is_scale
from .rules_kv import attention_of_scale, is_kv_scale
from .rules_mtp import BLOCK_AGAIN

_objection = partial(objection, origin="values")
_warning = partial(objection, origin="values", severity="warning")
_INTEGERS = ("int_packed", "int8")
_INPUT_SCALES = ("input_scale", INPUT_GLOBAL_SCALE)
_GLOBAL_SCALES = (GLOBAL_SCALE, IN_MODELOPT[GLOBAL_SCALE])
# Weights of released models are between these by orders of magnitude; a scale that should be its
# reciprocal is not.
_TOO_LARGE = 1e4
_TOO_SMALL = 1e-8
_NORM_TOO_LARGE = 1e4
_NORM_TOO_SMALL = 1e-4
# A matrix with so many block scales, or a model with so many input scales, does not have them all
# equal by chance.
_MANY = 16
_REQUANTIZE = "Quantize this module again from the release"


class Tensor(NamedTuple):
    """One tensor that was read, and what it is."""

    entry: Entry
    place: Place
    summary: Summary

    @property
    def name(self) -> HFName:
        return self.entry.name

    @property
    def module(self) -> HFName:
        return HFName(self.name.rpartition(".")[0])

    @property
    def leaf(self) -> str:
        return self.name.rpartition(".")[2]

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.entry.shape)

    @property
    def is_mtp(self) -> bool:
        return self.place.part == "mtp"

    @property
    def cause(self) -> str:
        """Equal for tensors of one kind: all scales of one name in the backbone, or in the MTP
        block.
        """
        role = self.place.role if self.leaf == "weight" else ""
        return f"{self.place.part} {role} {self.leaf}"


_Tensors = Mapping[HFName, Tensor]


def objections(runtime: RuntimeView, read: Mapping[HFName, Summary]) -> Objections:
    """Everything that the rules on values object to.

    Args:
        runtime: the checkpoint.
        read: the summaries of some of its tensors. Vision and other opaque parts are not judged.
    """
    tensors = dict[HFName, Tensor]()
    for name, summary in read.items():
        names = [name]
        if is_kv_scale(name):
            # A scale of the KV cache may be named after the attention itself.
            for path in ("k_proj", "kv_b_proj"):
                names.append(HFName(f"{attention_of_scale(name)}.{path}.weight"))
        place = next(filter(None, map(runtime.view.place, names)), None)
        if place is not None and place.role != "vision":
            tensors[name] = Tensor(runtime.source.entries[name], place, summary)
    for tensor in tensors.values():
        cure = _REQUANTIZE
        if tensor.is_mtp:
            cure = BLOCK_AGAIN
        if tensor.leaf in _INPUT_SCALES:
            cure = (
                "Calibrate again with samples that reach this module, and keep its experts' "
                "input scales finite"
            )
        largest = tensor.summary.largest
        # Norms of the MTP block are neither near zero nor huge.
        is_small = largest < _NORM_TOO_SMALL and not runtime.view.family.norms_add_one
        if tensor.summary.num_not_finite:
            yield _not_finite(tensor, cure)
        elif tensor.leaf in ("qzeros", "weight_zero_point"):
            yield from _zero_points(runtime, tensor, cure)
        elif is_scale(tensor.name):
            yield from _scale(runtime, tensor, cure)
        elif tensor.place.role != "norm":
            yield from _empty(tensor, tensors)
        elif tensor.is_mtp and (is_small or largest > _NORM_TOO_LARGE):
            says = (
                f"its largest value is {largest:.3g}: the draft's hidden state becomes "
                "nothing or huge, and nearly nothing is accepted"
            )
            yield _objection("norm", tensor.name, says, BLOCK_AGAIN, f"{tensor.cause} {is_small}")
    yield from magnitudes_are_those_of_weights(runtime, tensors)
    yield from fused_scales_agree(tensors)
    yield from input_scales_are_measured(tensors)
    yield from norms_have_learned(runtime, tensors)


def _not_finite(tensor: Tensor, cure: str) -> Objection:
    """vllm#45212, vllm#45320, compressed-tensors#595."""
    index = tensor.summary.first_not_finite
    position = []
    for size in reversed(tensor.entry.shape):
        index, at = divmod(index, size)
        position.insert(0, at)
    return _objection(
        "finite",
        tensor.name,
        f"element {position} is infinite or NaN, as are {tensor.summary.num_not_finite:,} of "
        f"{tensor.size:,}: what "
        "vLLM computes from it is NaN, and one expert's NaN spoils every token that the expert "
        "sees",
        cure,
        tensor.cause,
    )


def _scale(runtime: RuntimeView, tensor: Tensor, cure: str) -> Objections:
    """No scale is negative, no divisor is zero, no matrix has scales of zero only, or scales that
    are all equal.

    A weight of integers around 0 may have negative scales: AutoRound chooses the sign of a
    symmetric scale so that the largest weight gets the largest code, and vLLM multiplies by it.
    """
    summary = tensor.summary
    weight = runtime.weights.get(tensor.module)
    may_be_negative = tensor.leaf == "scales"
    if tensor.leaf == "weight_scale" and weight is not None and weight.form in _INTEGERS:
        may_be_negative = "weight_zero_point" not in weight.parts
    if summary.is_zero and tensor.leaf in (*DIVISORS, *_INPUT_SCALES, *KV_SCALE_LEAVES):
        says = "is 0, and vLLM divides by it: everything behind it is infinite or NaN"
    elif summary.is_zero:
        says = "is 0: vLLM computes with a matrix of zeros"
    elif summary.has_negative and not may_be_negative:
        says = (
            "has an element below 0: a kernel reads it as positive, or turns the sign of its "
            "weights"
        )
    else:
        if summary.is_constant and tensor.size >= _MANY:
            yield _warning(
                "scale-constant",
                tensor.name,
                f"all {tensor.size:,} scales are {summary.largest:g}: no real matrix has that, so "
                "they were never computed, or the weights under them are not the release's",
                _REQUANTIZE,
                tensor.cause,
            )
        return
    yield _objection("scale-sign", tensor.name, says, cure, f"{tensor.cause} {says}")


def _zero_points(runtime: RuntimeView, tensor: Tensor, cure: str) -> Objections:
    """The codes that mean 0 may all be one. Of GPTQ's symmetric integers they are the middle, which
    servers take without a look: as it is, or less one, as the first version of its files has them.
    """
    weight = runtime.weights.get(tensor.module)
    summary = tensor.summary
    if weight is None or weight.form != "gptq" or runtime.given.raw.get("sym") is False:
        return
    middles = (0x77, 0x88)  # two codes of four bits
    if weight.shape[1] == 4 * weight.weight.shape[0]:
        middles = (0x7F, 0x80)
    if not summary.is_constant or summary.largest not in middles:
        says = (
            "holds zero points that are not those of symmetric integers: vLLM does not look at "
            "them, and computes with other weights than were stored"
        )
        yield _objection("zero-points", tensor.name, says, cure, tensor.cause)


def _empty(tensor: Tensor, tensors: _Tensors) -> Objections:
    """A matrix of the language model that is all zeros or one repeated value.

    A release may hold a matrix of zeros. Packed, its block scales are all alike; scales that differ
    are those of other values, which were lost.
    """
    summary = tensor.summary
    if not (summary.is_zero or summary.is_constant) or tensor.place.role == "state":
        return
    if len(tensor.entry.shape) < 2 or tensor.size < _MANY:
        return
    scales = [tensors.get(HFName(f"{tensor.module}.{leaf}")) for leaf in FIRST_SCALES]
    is_lost = any(scale.size > 1 and not scale.summary.is_constant for scale in scales if scale)
    what = "one repeated value"
    if summary.is_zero:
        what = "zeros"
    happens = "it was never trained"
    cure = "Take this tensor from the release"
    if is_lost:
        happens = "its scales are those of other values, which were lost"
        cure = _REQUANTIZE
    severity = "warning"
    if tensor.is_mtp or is_lost:
        severity = "error"
    if tensor.is_mtp:
        happens += ", or never written, so the draft guesses and nearly nothing is accepted"
        cure = BLOCK_AGAIN
    says = f"holds {what} only: {happens}"
    cause = f"{tensor.cause} {what} {is_lost}"
    yield _objection("empty-weight", tensor.name, says, cure, cause, severity)


def magnitudes_are_those_of_weights(runtime: RuntimeView, tensors: _Tensors) -> Objections:
    """The scales of a weight give values that weights have: a reciprocal in the wrong convention
    does not.
    """
    for weight in runtime.weights.values():
        parts = {leaf: tensors.get(entry.name) for leaf, entry in weight.parts.items()}
        scale = next(filter(None, map(parts.get, FIRST_SCALES)), None)
        if scale is None:
            continue
        storage = FORMS[weight.form]
        largest = scale.summary.largest * storage.largest
        common = parts.get(storage.common)
        # Another rule objects to a scale of 0.
        if common is not None and common.summary.largest:
            largest *= common.summary.largest ** (-1 if storage.divides else 1)
        is_wrong = math.isfinite(largest) and not _TOO_SMALL <= largest <= _TOO_LARGE
        if largest and is_wrong and (common is None or common.summary.largest):
            yield _objection(
                "scale-magnitude",
                scale.name,
                f"its weights reach {largest:.3g}, where a model's are near 1: a scale is its "
                "reciprocal, or belongs to another weight",
                "Write the scale in this dialect's convention: compressed-tensors divides by "
                f"{GLOBAL_SCALE}, modelopt multiplies by {IN_MODELOPT[GLOBAL_SCALE]}",
                f"{scale.place.part} {scale.place.row.path} {largest > 1}",
            )


def fused_scales_agree(tensors: _Tensors) -> Objections:
    """Weights that vLLM fuses have one global scale: vllm#54150."""
    groups: dict[tuple[str, str], list[Tensor]] = defaultdict(list)
    for tensor in tensors.values():
        if tensor.place.shares and tensor.leaf in (*_GLOBAL_SCALES, INPUT_GLOBAL_SCALE):
            groups[tensor.place.shares, tensor.leaf].append(tensor)
    for (_, leaf), members in groups.items():
        values = [member.summary.largest for member in members]
        # What is 0, infinite or NaN is another rule's; here its logarithm is asked for.
        is_usable = min(values) > 0 and math.isfinite(sum(values))
        if not is_usable or min(values) == max(values):
            continue
        used = values[0]  # of routed experts, that of the first projection
        if members[0].place.expert is None:
            used = max(values)
        factors = [value / used for value in values]
        furthest = [abs(math.log(factor)) for factor in factors]
        at = furthest.index(max(furthest))
        worst = members[at]
        factor = factors[at]
        if leaf not in DIVISORS:
            factor = 1 / factor
        others = ", ".join(member.module.rpartition(".")[2] for member in members)
        severity = "warning"
        happens = "inputs are then rounded on another grid than the calibrated one"
        if leaf in _GLOBAL_SCALES:
            severity = "error"
            happens = f"these weights are then {factor:.3g} times what they should be"
        yield _objection(
            "fused-scales",
            worst.name,
            f"is {values[at]:.6g}, but {others} are one fused module with one {leaf}, and "
            f"vLLM takes {used:.6g} of {members[values.index(used)].name}: {happens}",
            f"Quantize {others} together, with one {leaf}",
            f"{worst.place.part} {worst.place.row.path} {leaf}",
            severity,
        )


def input_scales_are_measured(tensors: _Tensors) -> Objections:
    """Input scales are not all one constant: no batch gave them."""
    for leaf in _INPUT_SCALES:
        scales = [each for each in tensors.values() if each.leaf == leaf and each.size == 1]
        values = {scale.summary.largest for scale in scales}
        if len(scales) >= _MANY and len(values) == 1:
            yield _warning(
                "input-scale-constant",
                scales[0].name,
                f"all {len(scales):,} scales named {leaf} are {values.pop():g}: no batch gave "
                "them, and inputs that are larger are cut off",
                "Calibrate, or use a scheme with dynamic input scales",
            )


def norms_have_learned(runtime: RuntimeView, tensors: _Tensors) -> Objections:
    """The norms of an MTP layer are not all as they were made: ones, or zeros where the model adds
    one.
    """
    initial = 1.0 - runtime.view.family.norms_add_one
    layers: dict[int | None, list[Tensor]] = defaultdict(list)
    for tensor in tensors.values():
        if tensor.is_mtp and tensor.place.role == "norm":
            layers[tensor.place.layer].append(tensor)
    for norms in layers.values():
        held = {(norm.summary.is_constant, norm.summary.largest) for norm in norms}
        is_negative = any(norm.summary.has_negative for norm in norms)
        if len(norms) > 1 and held == {(True, initial)} and not is_negative:
            yield _warning(
                "mtp-untrained",
                norms[0].name,
                f"all {len(norms)} norms of this MTP layer hold {initial:g} only, as before "
                "training: the draft then guesses, and nearly nothing is accepted",
                "Measure its acceptance before it is served",
            )
