"""Dequantized values compared with the release's, module by module: is each weight the one it was
made from?

In: the `RuntimeView` of a checkpoint and of its release. Out: pairs of stored weights by name, all
or a sample of layers and experts; objections. A weight with the release's own bytes is not computed
with.

Easy to get wrong: a rounding error is expected, and each scheme has its own size of it. A transform
that moves scale between neighbours (AWQ, SmoothQuant) changes columns on purpose; a weight is
compared after the best factor a column then, and only what is left counts. And a release may hold
all experts in one tensor [experts, projections x N, K], and
its quantization a tensor an expert and projection, or the reverse: a slice of such a tensor is
described as if it were a tensor of its own, with the name of the whole in messages.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from ...checkpoints.dequantize import dequantize, refuse_other_order
from ...checkpoints.dialects.dialect import Resolution
from ...checkpoints.dialects.layouts import manner
from ...checkpoints.dialects.runtime_view import Member, RuntimeView, of_bits
from ...checkpoints.safetensors_file import Entry, total_bytes
from ...checkpoints.source import Source
from ...checkpoints.stored import StoredWeight
from ...checkpoints.values import read_parts, row_ranges
from ...recipes.errors import CheckpointError
from ...recipes.family import TABLE_ROLES, HFName
from ...recipes.family_view import Place
from ...recipes.forms import FORMS, TRANSPOSED
from ...recipes.frozen import Advance, nowhere, without
from ..facts.findings import Objections, objection
from .reading import is_remote
from .rules_mtp import BLOCK_AGAIN

# Elements of a weight in which a transform is looked for: a vocabulary is not turned into F32
# whole.
_DESCRIBED = 64 * 2**20
# Where a release is not compared whole: enough experts to tell what was done to each kind of
# module.
_SAMPLED_EXPERTS = (None, 0, 1)
# Pairs that are in memory at the same time, of folders and of a repository.
_AT_A_TIME = (2, 4)


_objection = partial(objection, origin="values")


class Pair(NamedTuple):
    """One weight of the checkpoint, and the release's of the same name."""

    weight: StoredWeight
    theirs: StoredWeight
    place: Place

    @property
    def num_bytes(self) -> int:
        """What is read of both."""
        return total_bytes((*self.weight.parts.values(), *self.theirs.parts.values()))


class Pairs(NamedTuple):
    """What is compared.

    Attributes:
        found: weights that both have by name, in a form that can be read.
        others: the weights that are not compared, by why not.
    """

    found: list[Pair]
    others: Mapping[str, list[StoredWeight]]


def pairs(runtime: RuntimeView, release: RuntimeView, *, whole: bool) -> Pairs:
    """Pair the weights of a checkpoint with the release's.

    Not whole: of the MTP block, and of the backbone's first, middle and last layer, with two
    experts each.
    """
    theirs = matrices(release)
    found = list[Pair]()
    others: dict[str, list[StoredWeight]] = defaultdict(list)
    for module, (place, weight) in matrices(runtime).items():
        if not (whole or _is_sampled(runtime, module, place)):
            continue
        original = theirs.get(module)
        if original is None:
            others["the release has none of the name"].append(weight)
        elif weight.form == "unknown":
            others["its form cannot be read"].append(weight)
        elif original.weight.form == "unknown":
            others["the form of the release's cannot be read"].append(weight)
        else:
            found.append(Pair(weight, original.weight, place))
    return Pairs(found, others)


def _is_sampled(runtime: RuntimeView, module: HFName, place: Place) -> bool:
    """Whether a matrix is compared where not all are."""
    last = runtime.view.num_layers - 1
    if place.part != "mtp" and place.layer not in (0, last // 2, last):
        return False
    expert = place.expert
    if place.row.stacked:  # then its number is in the name that it has apart
        expert = int(module.rpartition(".")[0].rpartition(".")[2])
    return place.role not in TABLE_ROLES and expert in _SAMPLED_EXPERTS


def not_compared(paired: Pairs) -> Objections:
    """What is said of weights that no comparison is of."""
    total = len(paired.found) + sum(map(len, paired.others.values()))
    for why, weights in paired.others.items():
        weight = weights[0]
        yield _objection(
            "not-compared",
            weight.weight.name,
            f"{len(paired.found):,} of {total:,} weights are compared with the release; "
            f"{len(weights):,} are not: {why} ({manner(weight)})",
            "Name the release that it was made from, or measure: `keepmtp eval --only closeness`",
            why,
            "warning",
            len(weights),
        )


def compared(
    runtime: RuntimeView,
    release: RuntimeView,
    found: list[Pair],
    progress: Advance = nowhere,
) -> Objections:
    """Compare weight by weight.

    Args:
        runtime: the checkpoint.
        release: what it was made from.
        found: from `pairs`.
        progress: called with the bytes that were read.
    """
    sources = (runtime.source, release.source)
    is_ordered = not runtime.given.raw.get("desc_act")
    with ThreadPoolExecutor(_AT_A_TIME[any(map(is_remote, sources))]) as pool:
        results = pool.map(lambda pair: [*_compared(pair, *sources, is_ordered=is_ordered)], found)
        for pair, objected in zip(found, results, strict=True):
            yield from objected
            progress(pair.num_bytes)


def _compared(pair: Pair, own: Source, release: Source, *, is_ordered: bool) -> Objections:
    weight, theirs, place = pair
    severity = "error"
    name = weight.weight.name
    kind = f"{place.part} {place.row.path}"
    if weight.shape != theirs.shape:
        # A vocabulary may be padded; another shape of a layer's weight is another model.
        if place.role in ("embedding", "head"):
            severity = "warning"
        yield _objection(
            "release",
            name,
            f"is {list(weight.shape)}, where the release has {list(theirs.shape)}: it is "
            "another model's",
            "Name the release that it was made from",
            f"{kind} shape",
            severity,
        )
        return
    parts = read_parts(own, weight.parts)
    others = read_parts(release, theirs.parts)
    if weight.form == theirs.form and _are_same(parts, others):
        return
    place_of_theirs = f"{release.where}: {theirs.module}"
    original = dequantize(
        theirs.form, others, shape=theirs.shape, block=theirs.block, where=place_of_theirs
    )
    try:
        ours = dequantize(weight.form, parts, shape=weight.shape, block=weight.block)
        if is_ordered:
            refuse_other_order(weight.form, parts)
    except CheckpointError as error:
        says = f"{error.rule}; got {error.got}"
        where = f"{weight.module}.{error.where}"
        yield _objection("release", where, says, error.cure, f"{kind} {error.where}")
        return
    error = relative_error(ours, original)
    bound = max(FORMS[weight.form].error, FORMS[theirs.form].error)
    words = "it is another version, or another weight"
    if error <= bound:
        return
    if not torch.isfinite(ours).all():
        words = "it has values that are infinite or NaN"
    elif ours.numel() <= _DESCRIBED and has_column_factors(ours.float(), original.float(), bound):
        severity = "warning"
        words = "each input channel has a factor of its own, as after AWQ or SmoothQuant"
    cure = "Quantize this module again from the release"
    if place.part == "mtp":
        cure = BLOCK_AGAIN
    yield _objection(
        "release",
        name,
        f"differs from the release by {error:.1%}, of which {weight.form} explains less than "
        f"{bound:.0%}: {words}",
        cure,
        f"{kind} {words}",
        severity,
    )


def _are_same(parts: Mapping[str, Tensor], others: Mapping[str, Tensor]) -> bool:
    """Whether the bytes are the same; a NaN is equal to itself."""
    if parts.keys() != others.keys():
        return False
    for leaf, part in parts.items():
        raw, other = [each.reshape(-1).view(torch.uint8) for each in (part, others[leaf])]
        if part.dtype != others[leaf].dtype or not torch.equal(raw, other):
            return False
    return True


def relative_error(ours: Tensor, original: Tensor) -> float:
    """The norm of the difference by the norm of the original, [N, K] each; 0 for two matrices of
    zeros.
    """
    off = norm = 0.0
    for first, last in row_ranges(original):
        theirs = original[first:last].float()
        off += (ours[first:last].float() - theirs).square().sum().item()
        norm += theirs.square().sum().item()
    return math.sqrt(off / norm) if norm else float(off > 0)


def has_column_factors(ours: Tensor, original: Tensor, bound: float) -> bool:
    """Whether factors of input channels, and none of rows, leave only rounding of a difference
    [N, K].
    """
    product = ours * original
    square = original.square()
    rows = product.sum(1, keepdim=True) / square.sum(1, keepdim=True).clamp_min(1e-30)
    columns = product.sum(0) / square.sum(0).clamp_min(1e-30)
    if relative_error(ours, original * rows) <= bound:
        return False
    return relative_error(ours, original * columns) <= bound


def matrices(runtime: RuntimeView) -> dict[HFName, Member]:
    """Every weight [N, K] of the language model, by the name that it has where experts are not
    stacked.
    """
    found = dict[HFName, Member]()
    for module in runtime.modules:
        for member in module.members:
            num_dims = len(member.weight.shape)
            if member.place.row.stacked and member.weight.form == "plain" and num_dims == 3:
                found |= _unstacked(member.weight.weight, member.place)
            elif (num_dims == 2 or member.weight.form == "unknown") and module.role != "vision":
                weight = as_built(member.weight, module.resolution)
                found[member.weight.module] = member._replace(weight=weight)
    return found


def as_built(weight: StoredWeight, answer: Resolution) -> StoredWeight:
    """A weight of which the config says what its headers leave open: the bits of integers, and how
    those of GPTQ and AWQ are read; of form "unknown" where they are not what it says.
    """
    built = answer.built
    if weight.form in TRANSPOSED and answer.refusal != "order":
        has_zeros = "qzeros" in weight.parts
        reads_zeros = "qzeros" in built.leaves
        is_other = built.form != weight.form or (reads_zeros and not has_zeros)
        if built.form == "plain":
            is_other = not has_zeros
        if is_other:
            return replace(weight, form="unknown")
        if built.form == "awq" and not reads_zeros:
            weight = replace(weight, parts=without(weight.parts, "qzeros"))
    if built.block and weight.form == built.form == "fp8_block":
        return replace(weight, block=built.block)
    if weight.form == built.form == "gptq":
        words, num_rows = weight.weight.shape
        return replace(weight, shape=(num_rows, words * 32 // built.bits))
    return of_bits(weight, built)


def _unstacked(entry: Entry, place: Place) -> Iterator[tuple[HFName, Member]]:
    """The experts and projections of a tensor [experts, projections x N, K], as weights of their
    own.
    """
    num_experts, num_rows, num_columns = entry.shape
    count = num_experts * len(place.row.stacked)
    shape = (num_rows // len(place.row.stacked), num_columns)
    if math.prod(shape) * count != math.prod(entry.shape):
        return
    start = entry.start
    num_bytes = entry.num_bytes // max(1, count)
    for module in place.unstacked(num_experts):
        parts = {"weight": replace(entry, shape=shape, start=start, num_bytes=num_bytes)}
        weight = StoredWeight(module=module, form="plain", parts=parts, shape=shape)
        yield module, Member(place, weight)
        start += num_bytes
