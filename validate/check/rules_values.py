"""Rules on what the tensors hold: what loads without a word and answers nonsense.

In: a `RuntimeView` and the summaries of its tensors. Out: objections, each with the tensor and the element.

Easy to get wrong: a zero, and what is normal. A second-level scale is a divisor in compressed-tensors and a multiplier
in modelopt, so zero means infinity in one and nothing in the other. A block scale of zero is right for a block of
zeros. A bias of zeros is right, a norm of zeros is right where the model adds one to it.

Source: vLLM 0.32.0 quantization/compressed_tensors/schemes/compressed_tensors_w4a4_nvfp4.py and modelopt.py
(process_weights_after_loading), compressed_tensors_moe_w4a4_nvfp4.py.
"""

import math
import shlex
from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import partial
from typing import NamedTuple

from ...checkpoints.safetensors_file import Entry
from ...checkpoints.stored import KV_SCALE_LEAVES, Form
from ...recipes.family import HFName
from ...recipes.family_view import Place
from ..facts.findings import Objection, Severity, objection
from .reading import is_scale
from .rules_kv import attention_of_scale, is_kv_scale
from .runtime_view import RuntimeView
from .values_summary import Summary

_objection = partial(objection, origin="values")
_DIVISORS = ("weight_global_scale", "input_global_scale")
_INPUT_SCALES = ("input_scale", "input_global_scale")
_GLOBAL_SCALES = ("weight_global_scale", "weight_scale_2")
# AutoRound chooses the sign of a symmetric scale so that the largest weight gets the largest code.
_SIGNED = ("scales",)
# The largest magnitude of a code, before its scales.
_LARGEST_CODE: Mapping[Form, float] = {
    "fp8_block": 448.0,
    "fp8_sliced": 448.0,
    "fp8_channel": 448.0,
    "fp8_tensor": 448.0,
    "mxfp8": 448.0,
    "nvfp4": 6.0,
    "nvfp4_modelopt": 6.0,
    "mxfp4": 6.0,
    "int8": 127.0,
}
# Weights of released models are between these by orders of magnitude; a scale that should be its reciprocal is not.
_TOO_LARGE, _TOO_SMALL = 1e4, 1e-8
_NORM_TOO_SMALL, _NORM_TOO_LARGE = 1e-4, 1e4
# A matrix with so many block scales, or a model with so many input scales, does not have them all equal by chance.
_MANY = 16

_REQUANTIZE = "Quantize this module again from the release"
_RECALIBRATE = "Calibrate again with samples that reach this module, and keep its experts' input scales finite"


# What makes keys, in attention and in latent attention.
_KEYS = ("k_proj", "kv_b_proj")


class Tensor(NamedTuple):
    """One tensor that was read, and what it is."""

    entry: Entry
    place: Place
    summary: Summary

    @property
    def leaf(self) -> str:
        return self.entry.name.rpartition(".")[2]

    @property
    def cause(self) -> str:
        """Equal for tensors of one kind: all scales of one name in the backbone, or in the MTP block."""
        return f"{self.place.part} {self.place.role if self.leaf == 'weight' else ''} {self.leaf}"

    @property
    def is_single(self) -> bool:
        return math.prod(self.entry.shape) == 1

    @property
    def value(self) -> float:
        """The value of a tensor with one element, if it is finite."""
        return -self.summary.largest if self.summary.has_negative else self.summary.largest


def tensors_read(runtime: RuntimeView, summaries: Mapping[HFName, Summary]) -> list[Tensor]:
    """The tensors with a place in the family, vision and other opaque parts left out."""
    found = []
    for name, summary in summaries.items():
        module = HFName(name.rpartition(".")[0])
        place = runtime.placed.get(module if module in runtime.weights else name)
        place = place or runtime.view.place(name) or _of_cache(runtime, name)
        if place is not None and place.role != "vision":
            found.append(Tensor(runtime.source.entries[name], place, summary))
    return found


def _of_cache(runtime: RuntimeView, name: HFName) -> Place | None:
    """The place of attention's projection, for a scale of its KV cache that is named after the attention itself."""
    if not is_kv_scale(name.rpartition(".")[2]):
        return None
    places = (runtime.view.place(HFName(f"{attention_of_scale(name)}.{each}.weight")) for each in _KEYS)
    return next(filter(None, places), None)


def values_are_finite(runtime: RuntimeView, tensors: list[Tensor]) -> Iterator[Objection]:
    """No element is infinite or NaN: vllm#45212, vllm#45320, compressed-tensors#595."""
    for tensor in tensors:
        summary = tensor.summary
        if not summary.num_not_finite:
            continue
        total = math.prod(tensor.entry.shape)
        yield _objection(
            rule="finite",
            severity="error",
            where=tensor.entry.name,
            says=f"element {_position(tensor)} is infinite or NaN, as are {summary.num_not_finite:,} of {total:,}: "
            "what vLLM computes from it is NaN, and one expert's NaN spoils every token that the expert sees",
            cure=_new_values(runtime, tensor),
            cause=tensor.cause,
        )


def scales_are_positive(runtime: RuntimeView, tensors: list[Tensor]) -> Iterator[Objection]:
    """No scale is negative, no divisor is zero, no matrix has scales of zero only: vllm#45320."""
    for tensor in tensors:
        if not is_scale(tensor.entry.name):
            continue
        summary = tensor.summary
        if summary.has_negative and not summary.is_zero and not _may_be_negative(runtime, tensor):
            says = "has an element below 0: a kernel reads it as positive, or turns the sign of its weights"
            yield _scale(runtime, tensor, says)
        elif summary.is_zero and tensor.leaf in (*_DIVISORS, *_INPUT_SCALES, *KV_SCALE_LEAVES):
            yield _scale(runtime, tensor, "is 0, and vLLM divides by it: everything behind it is infinite or NaN")
        elif summary.is_zero:
            yield _scale(runtime, tensor, "is 0: vLLM computes with a matrix of zeros")


def _may_be_negative(runtime: RuntimeView, tensor: Tensor) -> bool:
    """Scales of weights that are integers around 0, where activations are not rounded."""
    weight = runtime.weights.get(HFName(tensor.entry.name.rpartition(".")[0]))
    around_zero = weight is not None and weight.form == "int_packed" and "weight_zero_point" not in weight.parts
    return tensor.leaf in _SIGNED or (around_zero and tensor.leaf == "weight_scale")


def _scale(runtime: RuntimeView, tensor: Tensor, says: str) -> Objection:
    return _objection(
        rule="scale-sign",
        severity="error",
        where=tensor.entry.name,
        says=says,
        cure=_new_values(runtime, tensor),
        cause=f"{tensor.cause} {says}",
    )


def block_scales_vary(tensors: list[Tensor]) -> Iterator[Objection]:
    """Scales of many blocks or rows are not all equal: a placeholder that nobody filled."""
    for tensor in tensors:
        if not is_scale(tensor.entry.name) or math.prod(tensor.entry.shape) < _MANY or tensor.summary.is_zero:
            continue
        if tensor.summary.is_constant and not tensor.summary.num_not_finite:
            yield _objection(
                rule="scale-constant",
                severity="warning",
                where=tensor.entry.name,
                says=f"all {math.prod(tensor.entry.shape):,} scales are {tensor.summary.largest:g}: no real matrix has "
                "that, so they were never computed, or the weights under them are not the release's",
                cure=_REQUANTIZE,
                cause=tensor.cause,
            )


def magnitudes_are_those_of_weights(runtime: RuntimeView, summaries: Mapping[HFName, Summary]) -> Iterator[Objection]:
    """The scales of a weight give values that weights have: a reciprocal in the wrong convention does not."""
    for weight in runtime.weights.values():
        place = runtime.placed.get(weight.module)
        scale = next(
            (entry for leaf, entry in weight.parts.items() if leaf in ("weight_scale", "weight_scale_inv", "scale")),
            None,
        )
        if place is None or place.role == "vision" or scale is None or scale.name not in summaries:
            continue
        largest = summaries[scale.name].largest * _LARGEST_CODE.get(weight.form, math.nan)
        for leaf in _GLOBAL_SCALES:
            if leaf in weight.parts and weight.parts[leaf].name in summaries:
                common = summaries[weight.parts[leaf].name].largest
                factor = 1 / common if common and leaf in _DIVISORS else common
                largest = largest * factor if common else math.nan
        if _TOO_SMALL <= largest <= _TOO_LARGE or not math.isfinite(largest) or not largest:
            continue
        yield _objection(
            rule="scale-magnitude",
            severity="error",
            where=scale.name,
            says=f"its weights reach {largest:.3g}, where a model's are near 1: a scale is its reciprocal, or belongs "
            "to another weight",
            cure="Write the scale in this dialect's convention: compressed-tensors divides by weight_global_scale, "
            "modelopt multiplies by weight_scale_2",
            cause=f"{place.part} {place.row.path} {largest > 1}",
        )


def fused_scales_agree(runtime: RuntimeView, summaries: Mapping[HFName, Summary]) -> Iterator[Objection]:
    """Weights that vLLM fuses have one global scale: vllm#54150."""
    groups: dict[tuple[str, str], list[tuple[Entry, Place, float]]] = defaultdict(list)
    for weight in runtime.weights.values():
        place = runtime.placed.get(weight.module)
        if place is None or not place.shares:
            continue
        for leaf in (*_GLOBAL_SCALES, "input_global_scale"):
            entry = weight.parts.get(leaf)
            if entry is not None and entry.name in summaries:
                groups[place.shares, leaf].append((entry, place, summaries[entry.name].largest))
    for (_, leaf), members in groups.items():
        values = [value for _, _, value in members]
        if min(values) == max(values) or not all(0 < value < math.inf for value in values):
            continue
        yield _disagreement(runtime, leaf, members)


def _disagreement(runtime: RuntimeView, leaf: str, members: list[tuple[Entry, Place, float]]) -> Objection:
    used = members[0] if members[0][1].expert is not None else max(members, key=lambda member: member[2])
    entry, place, value = max(members, key=lambda member: abs(math.log(member[2] / used[2])))
    factor = value / used[2] if leaf in _DIVISORS else used[2] / value
    others = ", ".join(member[0].name.rpartition(".")[0].rpartition(".")[2] for member in members)
    is_weight = leaf in _GLOBAL_SCALES
    severity: Severity = "error" if is_weight else "warning"
    happens = (
        f"these weights are then {factor:.3g} times what they should be"
        if is_weight
        else "inputs are then rounded on another grid than the calibrated one"
    )
    return _objection(
        rule="fused-scales",
        severity=severity,
        where=entry.name,
        says=f"is {value:.6g}, but {others} are one fused module with one {leaf}, and vLLM takes "
        f"{used[2]:.6g} of {used[0].name}: {happens}",
        cure=_one_scale(runtime, leaf) + f"quantize {others} together, with one {leaf}",
        cause=f"{place.part} {place.row.path} {leaf}",
    )


def _one_scale(runtime: RuntimeView, leaf: str) -> str:
    """The command for what can be cured without the release, before an "or"."""
    if leaf not in _GLOBAL_SCALES:
        return "Calibrate again: "
    folder = shlex.quote(runtime.source.where)
    return f"Run `keepmtp fix {folder} --values --out NEW`, which cures what can be cured exactly, or "


def input_scales_are_measured(tensors: list[Tensor]) -> Iterator[Objection]:
    """Input scales are not all one constant: no batch gave them."""
    for leaf in _INPUT_SCALES:
        found = [tensor for tensor in tensors if tensor.leaf == leaf and tensor.is_single]
        values = {tensor.value for tensor in found}
        if len(found) >= _MANY and len(values) == 1:
            yield _objection(
                rule="input-scale-constant",
                severity="warning",
                where=found[0].entry.name,
                says=f"all {len(found):,} scales named {leaf} are {found[0].value:g}: no batch gave them, and inputs "
                "that are larger are cut off",
                cure="Calibrate, or use a scheme with dynamic input scales",
            )


def weights_are_not_empty(runtime: RuntimeView, tensors: list[Tensor]) -> Iterator[Objection]:
    """No matrix of the language model is all zeros or one repeated value.

    A release may hold a matrix of zeros. Packed, its block scales are all alike; scales that differ are those of other
    values, which were lost.
    """
    varied = {
        tensor.entry.name.rpartition(".")[0]
        for tensor in tensors
        if is_scale(tensor.entry.name)
        and not (tensor.is_single or tensor.summary.is_zero or tensor.summary.is_constant)
    }
    for tensor in tensors:
        if is_scale(tensor.entry.name) or len(tensor.entry.shape) < 2 or math.prod(tensor.entry.shape) < _MANY:
            continue
        if tensor.place.role not in ("state", "norm") and (tensor.summary.is_zero or tensor.summary.is_constant):
            in_draft = tensor.place.part == "mtp"
            what = "zeros" if tensor.summary.is_zero else "one repeated value"
            is_lost = tensor.entry.name.rpartition(".")[0] in varied
            happens = "its scales are those of other values, which were lost" if is_lost else "it was never trained"
            yield _objection(
                rule="empty-weight",
                severity="error" if in_draft or is_lost else "warning",
                where=tensor.entry.name,
                says=f"holds {what} only: {happens}, or never written"
                + (", so the draft guesses and nearly nothing is accepted" if in_draft else ""),
                cure=_graft(runtime) if in_draft else _REQUANTIZE if is_lost else "Take this tensor from the release",
                cause=f"{tensor.cause} {what} {is_lost}",
            )


def norms_are_those_of_a_model(runtime: RuntimeView, tensors: list[Tensor]) -> Iterator[Objection]:
    """Norms of the MTP block are neither near zero nor huge."""
    adds_one = runtime.view.family.norms_add_one
    for tensor in tensors:
        if tensor.place.role != "norm" or tensor.place.part != "mtp" or tensor.summary.num_not_finite:
            continue
        largest = tensor.summary.largest
        if largest > _NORM_TOO_LARGE or (largest < _NORM_TOO_SMALL and not adds_one):
            yield _objection(
                rule="norm",
                severity="error",
                where=tensor.entry.name,
                says=f"its largest value is {largest:.3g}: the draft's hidden state becomes "
                + ("nothing" if largest < 1 else "huge")
                + ", and nearly nothing is accepted",
                cure=_graft(runtime),
                cause=f"{tensor.cause} {largest < 1}",
            )


def _new_values(runtime: RuntimeView, tensor: Tensor) -> str:
    """Where the right values of a tensor come from."""
    if tensor.leaf in _INPUT_SCALES:
        return _RECALIBRATE
    return _graft(runtime) if tensor.place.part == "mtp" else _REQUANTIZE


def _graft(runtime: RuntimeView) -> str:
    """The command that takes the MTP block of the release; graft reads headers, which have nothing wrong."""
    return f"Run `keepmtp graft {shlex.quote(runtime.source.where)} --from RELEASE --replace --out NEW`"


def _position(tensor: Tensor) -> str:
    """The first element that is not finite, as indices."""
    index, position = tensor.summary.first_not_finite, []
    for size in reversed(tensor.entry.shape):
        index, at = divmod(index, size)
        position.append(at)
    return str(position[::-1])
