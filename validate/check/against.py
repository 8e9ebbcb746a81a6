"""Dequantized values compared with the release's, module by module: is each weight the one it was made from?

In: the `RuntimeView` of a checkpoint and of its release. Out: pairs of stored weights by name, all or a sample of
layers and experts; the error of each weight, and objections. A large weight is read and compared by bands of
rows; a band with the release's own bytes is not computed with.

Easy to get wrong: a rounding error is expected, and each scheme has its own size of it. A transform that moves scale
between neighbours (AWQ, SmoothQuant) changes columns on purpose; a weight is compared after the best factor a column
then, and only what is left counts. And a release may hold all experts in one tensor [experts, projections x N, K], and
its quantization a tensor an expert and projection, or the reverse: a slice of such a tensor is described as if it were
a tensor of its own, with the name of the whole in messages.
"""

import itertools
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from ...checkpoints.dequantize import dequantize
from ...checkpoints.hub import AT_A_TIME
from ...checkpoints.safetensors_file import Entry
from ...checkpoints.source import Source
from ...checkpoints.stored import NOT_COMPUTED, Form, StoredWeight
from ...checkpoints.values import read_bytes, read_tensor, typed
from ...recipes.family import HFName
from ...recipes.family_view import Place
from ..facts.findings import Objection, objection
from .reading import BytesRead, is_remote
from .runtime_view import RuntimeView

# The relative error (of the Frobenius norm) that a scheme never reaches: two to three times what it has on a normal
# distribution, since GPTQ moves weights further than rounding does.
BOUND: Mapping[Form, float] = {
    "plain": 0.01,
    "fp8_block": 0.08,
    "fp8_sliced": 0.08,
    "fp8_channel": 0.08,
    "fp8_tensor": 0.1,
    "mxfp8": 0.08,
    "int8": 0.05,
    "nvfp4": 0.3,
    "nvfp4_modelopt": 0.3,
    "mxfp4": 0.35,
    "int_packed": 0.35,
}
Parts = Mapping[str, Tensor]
# A row's factor that is no rounding; a cosine above which two matrices were once the same.
_FACTOR, _ALIKE = 0.2, 0.5
# Elements that are compared at a time, and those of a weight for which words are still looked for in all of it.
_BAND, _WHOLE = 4 * 2**20, 64 * 2**20
# Rows whose zero points may share a word: of 4 bits and of 8.
_SHARED = (8, 4)
# What is compared of a release that is not compared whole: enough to tell what was done to each kind of module.
_SAMPLED_LAYERS, _SAMPLED_EXPERTS = 3, 2


class Pair(NamedTuple):
    """One weight of the checkpoint, and the release's of the same name."""

    weight: StoredWeight
    theirs: StoredWeight
    place: Place

    @property
    def entries(self) -> tuple[list[Entry], list[Entry]]:
        """The tensors that are read of the checkpoint, and of the release."""
        return list(self.weight.parts.values()), list(self.theirs.parts.values())


class WeightError(NamedTuple):
    """One weight and its original.

    Attributes:
        error: relative error of the Frobenius norm.
        bound: what its scheme never reaches.
    """

    weight: StoredWeight
    place: Place
    error: float
    bound: float


def pairs(runtime: RuntimeView, release: RuntimeView, *, whole: bool) -> list[Pair]:
    """Weights that both have by name, in a form that can be read.

    Not whole: of the MTP block, and of the backbone's first, last and some layers between, with some experts each.
    """
    own, theirs = dict(_matrices(runtime)), dict(_matrices(release))
    layers = _some_of(runtime.view.num_layers, _SAMPLED_LAYERS)
    indices = [_expert(module, place) or 0 for module, (_, place) in own.items()]
    experts = _some_of(max(indices, default=0) + 1, _SAMPLED_EXPERTS)
    found = []
    for module, (weight, place) in own.items():
        other, _ = theirs.get(module, (None, None))
        if other is None or not can_be_read(weight) or not can_be_read(other):
            continue
        is_near = place.part == "mtp" or place.layer in layers
        is_sampled = is_near and place.role not in ("embedding", "head") and _expert(module, place) in (None, *experts)
        if whole or is_sampled:
            found.append(Pair(weight, other, place))
    return found


def can_be_read(weight: StoredWeight) -> bool:
    """Groups in another order are not what `dequantize` knows."""
    return weight.form not in NOT_COMPUTED and "weight_g_idx" not in weight.parts


def compared(
    runtime: RuntimeView, release: RuntimeView, found: list[Pair], progress: BytesRead = lambda _bytes: None
) -> Iterator[tuple[WeightError, Objection | None]]:
    """Compare weight by weight; a few are read at the same time, and one is computed with.

    Args:
        runtime: the checkpoint.
        release: what it was made from.
        found: from `pairs`.
        progress: called with the bytes that were read.
    """
    at_a_time = AT_A_TIME // 2 if is_remote(runtime.source) or is_remote(release.source) else 2

    def read(band: _Band) -> _Read:
        sides = (runtime.source, band.pair.weight), (release.source, band.pair.theirs)
        own, theirs = ({} if band.last == 0 else _parts(*side, band) for side in sides)
        return _Read(band, own, theirs)

    with ThreadPoolExecutor(at_a_time) as pool:
        bands = (band for pair in found for band in bands_of(pair))
        for _, of_pair in itertools.groupby(_ahead(pool, read, bands, at_a_time), key=lambda each: id(each.band.pair)):
            result, objected, pair = _compared(of_pair, read)
            yield result, objected
            progress(sum(entry.num_bytes for side in pair.entries for entry in side))


class _Band(NamedTuple):
    """Rows of a pair that are read and compared at once; none where the two have different shapes."""

    pair: Pair
    first: int
    last: int


class _Read(NamedTuple):
    """The tensors of a band's rows."""

    band: _Band
    own: Parts
    theirs: Parts

    @property
    def is_same(self) -> bool:
        """Whether both have the same bytes in the same form."""
        if self.band.pair.weight.form != self.band.pair.theirs.form or self.own.keys() != self.theirs.keys():
            return False
        both = [(part, self.theirs[leaf]) for leaf, part in self.own.items()]
        return all(one.dtype == other.dtype and torch.equal(_raw(one), _raw(other)) for one, other in both)

    @property
    def values(self) -> tuple[Tensor, Tensor]:
        """F32, of both."""
        pair, num_rows = self.band.pair, self.band.last - self.band.first
        return _values(pair.weight, self.own, num_rows), _values(pair.theirs, self.theirs, num_rows)


def bands_of(pair: Pair) -> Iterator[_Band]:
    """A small weight is one band, and so is one whose slices of rows have blocks of their own."""
    sides = (pair.weight, pair.theirs)
    num_rows, num_columns = pair.weight.shape
    if pair.weight.shape != pair.theirs.shape:
        num_rows = 0
    multiple = math.lcm(*_SHARED, *(side.block[0] for side in sides if side.block))
    step = max(1, _BAND // max(1, num_columns * multiple)) * multiple
    if any(side.form == "fp8_sliced" for side in sides):
        step = max(1, num_rows)
    for first in range(0, max(1, num_rows), step):
        yield _Band(pair, first, min(first + step, num_rows))


def _ahead(pool: Executor, read: Callable[[_Band], _Read], bands: Iterator[_Band], at_a_time: int) -> Iterator[_Read]:
    """What is read of the bands, in order; `at_a_time` of them are read before they are asked for."""
    waiting: deque[Future[_Read]] = deque()
    for band in bands:
        waiting.append(pool.submit(read, band))
        if len(waiting) > at_a_time:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()


def _compared(of_pair: Iterator[_Read], read: Callable[[_Band], _Read]) -> tuple[WeightError, Objection | None, Pair]:
    """The error of a weight by the sums of its bands; `read` gives bands again that are wanted once more."""
    first = next(of_pair)
    pair = first.band.pair
    bound = max(BOUND[pair.weight.form], BOUND[pair.theirs.form])
    if pair.weight.shape != pair.theirs.shape:
        return WeightError(pair.weight, pair.place, math.inf, bound), _of_another_shape(pair), pair
    same: list[_Band] = []
    others: list[tuple[float, float, _Band]] = []
    for each in itertools.chain((first,), of_pair):
        if each.is_same:
            same.append(each.band)
            continue
        ours, original = each.values
        others.append(((ours - original).norm().item() ** 2, original.norm().item() ** 2, each.band))
    if not others:
        return WeightError(pair.weight, pair.place, 0.0, bound), None, pair
    norms = sum(norm for _, norm, _ in others) + sum(read(band).values[1].norm().item() ** 2 for band in same)
    off = sum(off for off, _, _ in others)
    result = WeightError(pair.weight, pair.place, math.sqrt(off / norms) if norms else float(off > 0), bound)
    if result.error <= bound:
        return result, None, pair
    num_rows = pair.weight.shape[0]
    worst = max(others, key=lambda other: (math.isnan(other[0]), other[0]))[2]
    shown = _Band(pair, 0, num_rows) if math.prod(pair.weight.shape) <= _WHOLE else worst
    words = difference(*read(shown).values, bound)
    return result, _objection(result, words if shown.first == 0 else f"from row {shown.first} on {words}"), pair


def _of_another_shape(pair: Pair) -> Objection:
    """A vocabulary may be padded; another shape of a layer's weight is another model."""
    return objection(
        rule="release",
        severity="warning" if pair.place.role in ("embedding", "head") else "error",
        where=pair.weight.weight.name,
        says=f"is {list(pair.weight.shape)}, where the release has {list(pair.theirs.shape)}: it is another model's",
        cure="Name the release that it was made from",
        cause=f"{pair.place.part} {pair.place.row.path} shape",
        origin="values",
    )


def relative_error(ours: Tensor, original: Tensor) -> float:
    """The norm of the difference by the norm of the original; 0 for two matrices of zeros."""
    norm = original.norm().item()
    return (ours - original).norm().item() / norm if norm else float(ours.any())


def difference(ours: Tensor, original: Tensor, bound: float) -> str:
    """In words, how a matrix [N, K] differs from its original by more than rounding."""
    if not torch.isfinite(ours).all():
        return "it has values that are infinite or NaN"
    factor = _factor(ours, original)
    if relative_error(ours, original * factor) <= bound:
        return f"it is about {factor.item():.2g} times the release's"
    rows = _factors(ours, original)
    if relative_error(ours, original * rows) <= bound:
        return _words_of_rows(rows.flatten())
    columns = _factors(ours.T, original.T).T
    if relative_error(ours, original * columns) <= bound:
        return "each input channel has a factor of its own, as after AWQ or SmoothQuant"
    for words, other in _reordered(original):
        if relative_error(ours, other) <= bound:
            return words
    return (
        "it has nothing in common with the release's" if _cosine(ours, original) < _ALIKE else "it is another version"
    )


def _reordered(original: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The release's matrix as a faulty pack orders it, each with its words."""
    num_rows, num_columns = original.shape
    if num_columns % 2 == 0:
        yield "the two codes of each byte are swapped", original.unflatten(1, (-1, 2)).flip(-1).flatten(1)
    if num_rows == num_columns:
        yield "it is transposed", original.T
    if num_rows % 2 == 0:
        yield "its upper and lower halves are swapped", original.roll(num_rows // 2, 0)
    for dimension, what in ((1, "columns"), (0, "rows")):
        for by in (1, -1, 2, -2, 8, -8, 16, -16):
            yield f"its {what} are shifted by {by}", original.roll(by, dimension)


def _words_of_rows(factors: Tensor) -> str:
    """Which rows have a factor that is not 1, as words."""
    wrong = ((factors - 1).abs() > _FACTOR).nonzero().flatten()
    if not len(wrong):
        return f"its rows are about {factors.min().item():.2g} to {factors.max().item():.2g} times the release's"
    worst = factors[wrong][(factors[wrong] - 1).abs().argmax()].item()
    return f"its rows {int(wrong[0])} to {int(wrong[-1])} are up to about {worst:.2g} times the release's"


def _objection(result: WeightError, words: str) -> Objection:
    return objection(
        rule="release",
        severity="warning" if "AWQ" in words else "error",
        where=result.weight.weight.name,
        says=f"differs from the release by {result.error:.1%}, where {result.weight.form} rounds by less than "
        f"{result.bound:.0%}: {words}",
        cure="Quantize this module again from the release",
        cause=f"{result.place.part} {result.place.row.path} {words}",
        origin="values",
    )


def _factor(ours: Tensor, original: Tensor) -> Tensor:
    return (ours * original).sum() / (original * original).sum()


def _factors(ours: Tensor, original: Tensor) -> Tensor:
    """The best factor a row: [N, 1]."""
    return (ours * original).sum(1, keepdim=True) / (original * original).sum(1, keepdim=True).clamp_min(1e-30)


def _cosine(ours: Tensor, original: Tensor) -> float:
    norms = ours.norm() * original.norm()
    return ((ours * original).sum() / norms).item() if norms else 0.0


def _raw(part: Tensor) -> Tensor:
    return part.reshape(-1).view(torch.uint8)


def _parts(source: Source, weight: StoredWeight, band: _Band) -> Parts:
    return {leaf: _rows_of(source, entry, weight, band) for leaf, entry in weight.parts.items()}


def _rows_of(source: Source, entry: Entry, weight: StoredWeight, band: _Band) -> Tensor:
    """The rows of one of a weight's tensors that belong to a band; a tensor that is not cut by rows is read whole."""
    num_rows, block = weight.shape[0], weight.block or (1, 1)
    units = (unit for unit in (1, *_SHARED, block[0]) if entry.shape[:1] == (-(-num_rows // unit),))
    unit = 0 if band.last - band.first == num_rows else next(units, 0)
    if not unit:
        return read_tensor(source, entry)
    first, last = band.first // unit, -(-band.last // unit)
    line = entry.num_bytes // entry.shape[0]
    raw = read_bytes(source, entry, offset=first * line, length=(last - first) * line)
    return typed(raw, entry.dtype, (last - first, *entry.shape[1:]))


def _values(weight: StoredWeight, parts: Parts, num_rows: int) -> Tensor:
    shape = (num_rows, *weight.shape[1:])
    return dequantize(weight.form, parts, shape=shape, block=weight.block).float()


def _expert(module: HFName, place: Place) -> int | None:
    """The index of an expert, also of one in a stack."""
    if not place.row.stacked:
        return place.expert
    return int(module.rpartition(".")[0].rpartition(".")[2])


def _matrices(runtime: RuntimeView) -> Iterator[tuple[HFName, tuple[StoredWeight, Place]]]:
    """Every weight [N, K] of the language model, by the name that it has where experts are not stacked."""
    for module, weight in runtime.weights.items():
        place = runtime.placed.get(module)
        if place is None or place.role == "vision":
            continue
        if place.row.stacked and weight.form == "plain" and len(weight.shape) == 3:
            yield from _unstacked(weight.weight, place)
        elif len(weight.shape) == 2:
            yield module, (weight, place)
    for entry in runtime.others:
        place = runtime.placed.get(entry.name)
        if place is not None and place.row.stacked and len(entry.shape) == 3:
            yield from _unstacked(entry, place)


def _unstacked(entry: Entry, place: Place) -> Iterator[tuple[HFName, tuple[StoredWeight, Place]]]:
    """The experts and projections of a tensor [experts, projections x N, K], as weights of their own."""
    num_experts, num_rows, num_columns = entry.shape
    shape = (num_rows // len(place.row.stacked), num_columns)
    num_bytes = entry.num_bytes // max(1, num_experts * len(place.row.stacked))
    stem, start = place.module.removesuffix(place.row.path), entry.start
    if math.prod(shape) * num_experts * len(place.row.stacked) != math.prod(entry.shape):
        return
    for expert in range(num_experts):
        for path in place.row.unstacked:
            module = HFName(stem + path.replace("{e}", str(expert)))
            part = replace(entry, shape=shape, start=start, num_bytes=num_bytes)
            yield module, (StoredWeight(module=module, form="plain", parts={"weight": part}, shape=shape), place)
            start += num_bytes


def _some_of(count: int, number: int) -> frozenset[int]:
    """Some of `count` indices: the first, the last, and those evenly between."""
    steps = max(1, number - 1)
    return frozenset(round((count - 1) * step / steps) for step in range(number)) if count else frozenset()
