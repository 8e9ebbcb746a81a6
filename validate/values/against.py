"""Dequantized values compared with the release's, module by module: is each weight the one it was made from?

In: a checkpoint and its release, and the pairs of weights to compare. Out: the error of each weight, and objections.

Easy to get wrong: a rounding error is expected, and each scheme has its own size of it. A transform that moves scale
between neighbours (AWQ, SmoothQuant) changes columns on purpose; a weight is compared after the best factor a column
then, and only what is left counts.
"""

import math
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch
from torch import Tensor

from ...checkpoints.dequantize import dequantize
from ...checkpoints.hub_ranges import AT_A_TIME
from ...checkpoints.source import Source
from ...checkpoints.stored import Form, StoredWeight
from ...checkpoints.values import read_tensor
from ...recipes.family_view import Place
from ..check.findings import Objection, objection
from ..check.runtime_view import RuntimeView
from .pairing import Pair
from .reading import BytesRead, is_remote

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

    def parts(pair: Pair) -> tuple[Parts, Parts]:
        return _parts(runtime.source, pair.weight), _parts(release.source, pair.theirs)

    with ThreadPoolExecutor(at_a_time) as pool:
        for first in range(0, len(found), at_a_time):
            some = found[first : first + at_a_time]
            for pair, (own, original) in zip(some, pool.map(parts, some), strict=True):
                yield _compared(pair, own, original)
                progress(sum(entry.num_bytes for side in pair.entries for entry in side))


def _compared(pair: Pair, own: Parts, theirs: Parts) -> tuple[WeightError, Objection | None]:
    bound = max(BOUND[pair.weight.form], BOUND[pair.theirs.form])
    if pair.weight.shape != pair.theirs.shape:
        result = WeightError(pair.weight, pair.place, math.inf, bound)
        return result, _of_another_shape(pair)
    ours, original = _values(pair.weight, own), _values(pair.theirs, theirs)
    result = WeightError(pair.weight, pair.place, relative_error(ours, original), bound)
    return result, None if result.error <= bound else _objection(result, ours, original)


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


def _objection(result: WeightError, ours: Tensor, original: Tensor) -> Objection:
    words = difference(ours, original, result.bound)
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


def _parts(source: Source, weight: StoredWeight) -> Parts:
    return {leaf: read_tensor(source, entry) for leaf, entry in weight.parts.items()}


def _values(weight: StoredWeight, parts: Parts) -> Tensor:
    return dequantize(weight.form, parts, shape=weight.shape, block=weight.block).float()
