"""Rules on what the tensors hold: what loads without a word and answers nonsense.

In: a `RuntimeView` and the summaries of its tensors. Out: objections, each with the tensor and the
element; warnings about an MTP block that was never trained.

The largest singular value of a matrix [N, K] of independent numbers of size s is near s (sqrt(N) +
sqrt(K)), whatever their distribution: the edge of Marchenko and Pastur. Training leaves directions
that are larger. Measured: 0.97 to 0.98 of the edge for normal and uniform noise from 256 x 512 to
5120 x 10240; 1.28 to 2.62 for the MTP matrices of the two shipped models, which were trained for
minutes.

Easy to get wrong: a zero, and what is normal. A second-level scale is a divisor in
compressed-tensors and a multiplier in modelopt, so zero means infinity in one and nothing in the
other. A block scale of zero is right for a block of zeros. A bias of zeros is right, a norm of
zeros is right where the model adds one to it.

Source: vLLM 0.32.0 quantization/compressed_tensors/schemes/compressed_tensors_w4a4_nvfp4.py and
modelopt.py (process_weights_after_loading), compressed_tensors_moe_w4a4_nvfp4.py.
"""

import math
import shlex
from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import partial
from typing import NamedTuple

import torch

from ...checkpoints.dequantize import dequantize
from ...checkpoints.safetensors_file import Entry
from ...checkpoints.stored import KV_SCALE_LEAVES, NOT_COMPUTED, Form, StoredWeight
from ...checkpoints.values import read_tensor
from ...recipes.family import HFName
from ...recipes.family_view import Place
from ..facts.findings import Objection, objection
from .reading import Summary, is_scale
from .rules_kv import attention_of_scale, is_kv_scale
from .runtime_view import RuntimeView

_objection = partial(objection, origin="values")
_DIVISORS = ("weight_global_scale", "input_global_scale")
_INPUT_SCALES = ("input_scale", "input_global_scale")
_GLOBAL_SCALES = ("weight_global_scale", "weight_scale_2")
_FIRST_SCALES = ("weight_scale", "weight_scale_inv", "scale")
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
# Weights of released models are between these by orders of magnitude; a scale that should be its
# reciprocal is not.
_TOO_LARGE, _TOO_SMALL = 1e4, 1e-8
_NORM_TOO_SMALL, _NORM_TOO_LARGE = 1e-4, 1e4
# A matrix with so many block scales, or a model with so many input scales, does not have them all
# equal by chance.
_MANY = 16
# Of the spectrum: the smallest matrix that tells chance from training, the share of the edge, steps
# of the iteration.
_SMALLEST_SIDE, _EDGE, _STEPS = 512, 1.05, 12

_REQUANTIZE = "Quantize this module again from the release"
_MEASURE = "Measure its acceptance before it is served"


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
        return f"{self.place.part} {self.place.role if self.leaf == 'weight' else ''} {self.leaf}"


def objections(runtime: RuntimeView, read: Mapping[HFName, Summary]) -> Iterator[Objection]:
    """Everything that the rules on values object to.

    Args:
        runtime: the checkpoint.
        read: the summaries of some of its tensors. Vision and other opaque parts are not judged.
    """
    tensors = {
        name: Tensor(runtime.source.entries[name], place, summary)
        for name, summary in read.items()
        if (place := runtime.view.place(name) or _of_cache(runtime, name)) is not None
        and place.role != "vision"
    }
    for tensor in tensors.values():
        if tensor.summary.num_not_finite:
            yield _not_finite(runtime, tensor)
        elif is_scale(tensor.name):
            yield from _scale(runtime, tensor)
        elif tensor.place.role == "norm":
            yield from _norm(runtime, tensor)
        else:
            yield from _empty(runtime, tensor, tensors)
    yield from magnitudes_are_those_of_weights(runtime, tensors)
    yield from fused_scales_agree(tensors)
    yield from input_scales_are_measured(tensors)
    yield from norms_have_learned(runtime, tensors)


def _of_cache(runtime: RuntimeView, name: HFName) -> Place | None:
    """The place of attention's projection, for a scale of its KV cache that is named after the
    attention itself.
    """
    if not is_kv_scale(name.rpartition(".")[2]):
        return None
    keys = (HFName(f"{attention_of_scale(name)}.{path}.weight") for path in ("k_proj", "kv_b_proj"))
    return next(filter(None, map(runtime.view.place, keys)), None)


def _not_finite(runtime: RuntimeView, tensor: Tensor) -> Objection:
    """vllm#45212, vllm#45320, compressed-tensors#595."""
    index, position = tensor.summary.first_not_finite, []
    for size in reversed(tensor.entry.shape):
        index, at = divmod(index, size)
        position.insert(0, at)
    return _objection(
        "finite",
        tensor.name,
        says=(
            f"element {position} is infinite or NaN, as are {tensor.summary.num_not_finite:,} of "
            f"{tensor.size:,}: what vLLM computes from it is NaN, and one expert's NaN spoils "
            "every token that the expert sees"
        ),
        cure=_new_values(runtime, tensor),
        cause=tensor.cause,
    )


def _scale(runtime: RuntimeView, tensor: Tensor) -> Iterator[Objection]:
    """No scale is negative, no divisor is zero, no matrix has scales of zero only, or scales that
    are all equal.
    """
    summary, says = tensor.summary, ""
    if summary.is_zero and tensor.leaf in (*_DIVISORS, *_INPUT_SCALES, *KV_SCALE_LEAVES):
        says = "is 0, and vLLM divides by it: everything behind it is infinite or NaN"
    elif summary.is_zero:
        says = "is 0: vLLM computes with a matrix of zeros"
    elif summary.has_negative and not _may_be_negative(runtime, tensor):
        says = (
            "has an element below 0: a kernel reads it as positive, or turns the sign of its "
            "weights"
        )
    if says:
        cause = f"{tensor.cause} {says}"
        yield _objection(
            "scale-sign", tensor.name, says=says, cure=_new_values(runtime, tensor), cause=cause
        )
    elif summary.is_constant and tensor.size >= _MANY:
        yield _objection(
            "scale-constant",
            tensor.name,
            severity="warning",
            says=(
                f"all {tensor.size:,} scales are {summary.largest:g}: no real matrix has that, so "
                "they were never computed, or the weights under them are not the release's"
            ),
            cure=_REQUANTIZE,
            cause=tensor.cause,
        )


def _may_be_negative(runtime: RuntimeView, tensor: Tensor) -> bool:
    """Scales of weights that are integers around 0, where activations are not rounded.

    AutoRound chooses the sign of a symmetric scale so that the largest weight gets the largest
    code.
    """
    weight = runtime.weights.get(tensor.module)
    around_zero = (
        weight is not None
        and weight.form == "int_packed"
        and "weight_zero_point" not in weight.parts
    )
    return tensor.leaf == "scales" or (around_zero and tensor.leaf == "weight_scale")


def _norm(runtime: RuntimeView, tensor: Tensor) -> Iterator[Objection]:
    """Norms of the MTP block are neither near zero nor huge."""
    largest = tensor.summary.largest
    is_small = largest < _NORM_TOO_SMALL and not runtime.view.family.norms_add_one
    if tensor.is_mtp and (is_small or largest > _NORM_TOO_LARGE):
        yield _objection(
            "norm",
            tensor.name,
            says=f"its largest value is {largest:.3g}: the draft's hidden state becomes "
            f"{'nothing' if is_small else 'huge'}, and nearly nothing is accepted",
            cure=_graft(runtime),
            cause=f"{tensor.cause} {is_small}",
        )


def _empty(
    runtime: RuntimeView, tensor: Tensor, tensors: Mapping[HFName, Tensor]
) -> Iterator[Objection]:
    """A matrix of the language model that is all zeros or one repeated value.

    A release may hold a matrix of zeros. Packed, its block scales are all alike; scales that differ
    are those of other values, which were lost.
    """
    summary = tensor.summary
    if not (summary.is_zero or summary.is_constant) or tensor.place.role == "state":
        return
    if len(tensor.entry.shape) < 2 or tensor.size < _MANY:
        return
    own_scales = [
        tensors[name]
        for leaf in _FIRST_SCALES
        if (name := HFName(f"{tensor.module}.{leaf}")) in tensors
    ]
    is_lost = any(each.size > 1 and not each.summary.is_constant for each in own_scales)
    what = "zeros" if summary.is_zero else "one repeated value"
    happens = (
        "its scales are those of other values, which were lost"
        if is_lost
        else "it was never trained"
    )
    cure = _REQUANTIZE if is_lost else "Take this tensor from the release"
    if tensor.is_mtp:
        happens += ", or never written, so the draft guesses and nearly nothing is accepted"
        cure = _graft(runtime)
    yield _objection(
        "empty-weight",
        tensor.name,
        severity="error" if tensor.is_mtp or is_lost else "warning",
        says=f"holds {what} only: {happens}",
        cure=cure,
        cause=f"{tensor.cause} {what} {is_lost}",
    )


def magnitudes_are_those_of_weights(
    runtime: RuntimeView, tensors: Mapping[HFName, Tensor]
) -> Iterator[Objection]:
    """The scales of a weight give values that weights have: a reciprocal in the wrong convention
    does not.
    """
    for weight in runtime.weights.values():
        parts = {
            leaf: tensors[entry.name]
            for leaf, entry in weight.parts.items()
            if entry.name in tensors
        }
        scale = next((parts[leaf] for leaf in _FIRST_SCALES if leaf in parts), None)
        if scale is None:
            continue
        largest = scale.summary.largest * _LARGEST_CODE.get(weight.form, math.nan)
        for leaf in _GLOBAL_SCALES:
            common = parts[leaf].summary.largest if leaf in parts else 1.0
            largest *= (1 / common if leaf in _DIVISORS else common) if common else math.nan
        if math.isfinite(largest) and largest and not _TOO_SMALL <= largest <= _TOO_LARGE:
            yield _objection(
                "scale-magnitude",
                scale.name,
                says=(
                    f"its weights reach {largest:.3g}, where a model's are near 1: a scale is its "
                    "reciprocal, or belongs to another weight"
                ),
                cure="Write the scale in this dialect's convention: compressed-tensors divides by "
                "weight_global_scale, modelopt multiplies by weight_scale_2",
                cause=f"{scale.place.part} {scale.place.row.path} {largest > 1}",
            )


def fused_scales_agree(tensors: Mapping[HFName, Tensor]) -> Iterator[Objection]:
    """Weights that vLLM fuses have one global scale: vllm#54150."""
    groups: dict[tuple[str, str], list[Tensor]] = defaultdict(list)
    for tensor in tensors.values():
        if tensor.place.shares and tensor.leaf in (*_GLOBAL_SCALES, "input_global_scale"):
            groups[tensor.place.shares, tensor.leaf].append(tensor)
    for (_, leaf), members in groups.items():
        values = [member.summary.largest for member in members]
        if min(values) != max(values) and all(0 < value < math.inf for value in values):
            yield _disagreement(leaf, members)


def _disagreement(leaf: str, members: list[Tensor]) -> Objection:
    used = members[0]
    if used.place.expert is None:
        used = max(members, key=lambda member: member.summary.largest)
    worst = max(
        members, key=lambda member: abs(math.log(member.summary.largest / used.summary.largest))
    )
    others = ", ".join(member.module.rpartition(".")[2] for member in members)
    happens = "inputs are then rounded on another grid than the calibrated one"
    if leaf in _GLOBAL_SCALES:
        factor = worst.summary.largest / used.summary.largest
        factor = factor if leaf in _DIVISORS else 1 / factor
        happens = f"these weights are then {factor:.3g} times what they should be"
    return _objection(
        "fused-scales",
        worst.name,
        severity="error" if leaf in _GLOBAL_SCALES else "warning",
        says=(
            f"is {worst.summary.largest:.6g}, but {others} are one fused module with one {leaf}, "
            f"and vLLM takes {used.summary.largest:.6g} of {used.name}: {happens}"
        ),
        cure=f"Quantize {others} together, with one {leaf}",
        cause=f"{worst.place.part} {worst.place.row.path} {leaf}",
    )


def input_scales_are_measured(tensors: Mapping[HFName, Tensor]) -> Iterator[Objection]:
    """Input scales are not all one constant: no batch gave them."""
    for leaf in _INPUT_SCALES:
        found = [tensor for tensor in tensors.values() if tensor.leaf == leaf and tensor.size == 1]
        if len(found) >= _MANY and len({tensor.summary.largest for tensor in found}) == 1:
            yield _objection(
                "input-scale-constant",
                found[0].name,
                severity="warning",
                says=(
                    f"all {len(found):,} scales named {leaf} are {found[0].summary.largest:g}: no "
                    "batch gave them, and inputs that are larger are cut off"
                ),
                cure="Calibrate, or use a scheme with dynamic input scales",
            )


def norms_have_learned(
    runtime: RuntimeView, tensors: Mapping[HFName, Tensor]
) -> Iterator[Objection]:
    """The norms of an MTP layer are not all as they were made: ones, or zeros where the model adds
    one.
    """
    initial = 0.0 if runtime.view.family.norms_add_one else 1.0
    layers: dict[int | None, list[Tensor]] = defaultdict(list)
    for tensor in tensors.values():
        if tensor.is_mtp and tensor.place.role == "norm":
            layers[tensor.place.layer].append(tensor)
    for norms in layers.values():
        summaries = [norm.summary for norm in norms]
        is_new = all(
            each.is_constant and each.largest == initial and not each.has_negative
            for each in summaries
        )
        if len(norms) > 1 and is_new:
            yield _objection(
                "mtp-untrained",
                norms[0].name,
                severity="warning",
                says=(
                    f"all {len(norms)} norms of this MTP layer hold {initial:g} only, as before "
                    "training: the draft then guesses, and nearly nothing is accepted"
                ),
                cure=_MEASURE,
            )


def glue(runtime: RuntimeView) -> list[StoredWeight]:
    """The matrices that join embedding and hidden state in the MTP block; wide enough to tell
    chance from training.
    """
    found = []
    for module, weight in runtime.weights.items():
        place = runtime.placed.get(module)
        is_glue = place is not None and place.part == "mtp" and place.role == "glue"
        is_wide = len(weight.shape) == 2 and min(weight.shape) >= _SMALLEST_SIDE
        if is_glue and is_wide and weight.form not in NOT_COMPUTED:
            found.append(weight)
    return found


def matrices_are_not_chance(runtime: RuntimeView) -> Iterator[Objection]:
    """No matrix of the MTP block's glue has the spectrum of independent random numbers:
    MiniMax-M2#47.

    Nothing here is proof. A block with trained directions may still be another model's; only its
    acceptance says how good it is.
    """
    for weight in glue(runtime):
        parts = {leaf: read_tensor(runtime.source, entry) for leaf, entry in weight.parts.items()}
        share = edge_share(dequantize(weight.form, parts, shape=weight.shape, block=weight.block))
        if math.isfinite(share) and 0 < share < _EDGE:
            yield _objection(
                "mtp-noise",
                weight.weight.name,
                severity="warning",
                says=(
                    f"looks like random numbers: its largest singular value is {share:.2f} of what "
                    "chance gives, and training leaves larger ones. The draft then guesses, and "
                    "nearly nothing is accepted"
                ),
                cure=_MEASURE,
            )


def edge_share(matrix: torch.Tensor) -> float:
    """The largest singular value of a matrix [N, K], of the one that independent numbers of its
    size would have.

    From power iteration, so a little below the true share; NaN for a matrix of zeros, or with
    values that are not finite.
    """
    values = matrix.float()
    num_rows, num_columns = values.shape
    vector = torch.randn(num_columns, generator=torch.Generator().manual_seed(0))
    square = vector.norm()
    for _ in range(_STEPS):
        vector = values.T @ (values @ (vector / square))
        square = vector.norm()
    size = values.square().mean().sqrt()
    return (square.sqrt() / (size * (math.sqrt(num_rows) + math.sqrt(num_columns)))).item()


def _new_values(runtime: RuntimeView, tensor: Tensor) -> str:
    """Where the right values of a tensor come from."""
    if tensor.leaf in _INPUT_SCALES:
        return (
            "Calibrate again with samples that reach this module, and keep its experts' input "
            "scales finite"
        )
    return _graft(runtime) if tensor.is_mtp else _REQUANTIZE


def _graft(runtime: RuntimeView) -> str:
    """The command that takes the MTP block of the release; graft reads headers, which have nothing
    wrong.
    """
    return (
        f"Run `keepmtp graft {shlex.quote(runtime.source.where)} --from RELEASE --replace --out "
        "NEW`"
    )
