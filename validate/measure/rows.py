"""How far the weights of a checkpoint are from its release's, group by group, by a sample of rows.

In: the `RuntimeView`s of both, and how many rows of each group are read. Out: a `SampledError` a
group. Rows are read in stretches of eight, with their own scales alone, from a folder or by range
requests; stretches that are near each other in a file are one request.

Easy to get wrong: the scales of a block are those of 128 rows, and zero points of integers are
packed along the rows, up to eight in a word. A stretch begins at a multiple of eight, so that it
has whole words and is in one block.

Source of the interval: the variance of a ratio (W. G. Cochran, Sampling Techniques, 3rd edition,
1977, section 6.4). One stretch is drawn in each of many equal parts of the group, which makes the
interval rather too wide.
"""

import math
import os
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import accumulate
from operator import attrgetter
from typing import NamedTuple

import torch
from torch import Tensor

from ...checkpoints.dequantize import dequantize
from ...checkpoints.dialects.runtime_view import RuntimeView
from ...checkpoints.hub import AT_A_TIME
from ...checkpoints.safetensors_file import Entry, total_bytes
from ...checkpoints.source import Source
from ...checkpoints.stored import StoredWeight
from ...checkpoints.values import read_bytes, typed
from ...recipes.forms import TRANSPOSED
from ...recipes.frozen import Say, silent
from ..check.against import Pair, matrices, pairs
from ..check.reading import Stretch, is_remote, joined
from ..facts.comparison import SampledError, group_of

_ROWS = 8
_NOT_IN_ROWS = {"fp8_sliced", *TRANSPOSED}
_NORMAL = 1.96  # 95 %, to both sides


class NotFiniteError(ValueError):
    """ReadRows have infinity or NaN; it says which."""


def sampled_errors(
    runtime: RuntimeView, release: RuntimeView, rows: int, progress: Say = silent
) -> tuple[dict[str, SampledError], dict[str, str]]:
    """Compare so many rows of each group, or all where it has fewer; the seed is fixed.

    Returns: the errors, and of groups that have none for it, which rows have infinity or NaN.

    Raises:
        CheckpointError: a file ends early, the Hub does not send it.
    """
    of_group = Counter(group_of(place) for place, _ in matrices(runtime).values())
    groups: dict[str, list[Pair]] = defaultdict(list)
    for pair in pairs(runtime, release, whole=True).found:
        are_rows = _NOT_IN_ROWS.isdisjoint((pair.weight.form, pair.theirs.form))
        if pair.weight.shape == pair.theirs.shape and are_rows:
            groups[group_of(pair.place)].append(pair)
    errors = {}
    not_finite = {}
    for group, found in groups.items():
        progress(f"{runtime.source.where}: comparing {group}")
        # The order of the files is another in each checkpoint, and the sample is to be the same.
        found.sort(key=lambda pair: pair.weight.module)
        try:
            sampled = _sampled((runtime.source, release.source), found, rows // _ROWS)
        except NotFiniteError as rows_of:
            not_finite[group] = str(rows_of)
            continue
        errors[group] = sampled.model_copy(update={"of_matrices": of_group[group]})
    return errors, not_finite


def _sampled(sources: tuple[Source, Source], found: Sequence[Pair], stretches: int) -> SampledError:
    counts = [-(-pair.weight.shape[0] // _ROWS) for pair in found]
    ends = [*accumulate(counts)]
    total = ends[-1]
    count = min(stretches, total)
    chance = torch.rand(count, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    drawn = list[tuple[Pair, int]]()
    for at in ((torch.arange(count) + chance) * (total / count)).long().tolist():
        number = bisect_right(ends, at)
        drawn.append((found[number], (at - ends[number] + counts[number]) * _ROWS))
    ours, theirs = sources
    own = [_stretch(ours, pair.weight, first) for pair, first in drawn]
    released = [_stretch(theirs, pair.theirs, first) for pair, first in drawn]
    own_bytes = _read(own)
    released_bytes = _read(released)
    squares = list[tuple[float, float, int]]()
    for stretch, other in zip(own, released, strict=True):
        squares.append(_squares(stretch.rows(own_bytes), other.rows(released_bytes)))
    read = torch.tensor(squares, dtype=torch.float64)
    off, norm, num_read = read.sum(0)
    ratio = _ratio(off, norm)
    spread = (read[:, 0] - ratio * read[:, 1]).square().sum() * count / max(1, count - 1)
    wide = _NORMAL * _ratio(((1 - count / total) * spread).sqrt(), norm)
    ratios = _ratio(read[:, 0], read[:, 1])
    worst = int(ratios.argmax())
    limits = torch.stack((ratio - wide, ratio, ratio + wide, ratios[worst]))
    low, value, high, worst_value = limits.clamp_min(0).sqrt().tolist()
    return SampledError(
        value=value,
        low=low,
        high=high,
        stretches=count,
        of_stretches=total,
        matrices=len(found),
        of_matrices=len(found),
        worst=drawn[worst][0].weight.module,
        worst_value=worst_value,
        num_read=int(num_read),
    )


def _ratio(off: Tensor, norm: Tensor) -> Tensor:
    """As `against.relative_error`: zeros that stay zeros are right, others wholly off."""
    return (off / torch.where(norm > 0, norm, off)).nan_to_num()


# Bytes by where they are.
_Read = dict[Entry, Tensor]


class ReadRows(NamedTuple):
    """A stretch as it was read: [8, K] in F32, or as many rows as are left."""

    values: Tensor
    stretch: "_Stretch"
    num_bytes: int


class _Stretch(NamedTuple):
    """ReadRows of a stored weight [N, K] from `first` to `last`, and where their bytes are."""

    source: Source
    weight: StoredWeight
    first: int
    last: int
    parts: dict[str, Entry]

    def rows(self, read: _Read) -> ReadRows:
        weight = self.weight
        parts = {}
        for leaf, entry in self.parts.items():
            parts[leaf] = typed(read[entry], entry.dtype, entry.shape)
        where = f"{self.source.where}: {weight.module}"
        shape = (self.last - self.first, weight.shape[1])
        values = dequantize(weight.form, parts, shape=shape, block=weight.block, where=where)
        return ReadRows(values.float(), self, total_bytes(self.parts.values()))


def _squares(ours: ReadRows, theirs: ReadRows) -> tuple[float, float, int]:
    """The squared norms of the difference and of the release's rows, and the bytes that were
    read.
    """
    for rows, whose in ((theirs, " of the release"), (ours, "")):
        if not rows.values.isfinite().all():
            _, weight, first, last, _ = rows.stretch
            raise NotFiniteError(
                f"infinity or NaN in {weight.module}{whose}, rows {first} to {last - 1}"
            )
    off = (ours.values - theirs.values).square().sum().item()
    return off, theirs.values.square().sum().item(), ours.num_bytes + theirs.num_bytes


def read_rows(source: Source, weight: StoredWeight, first: int) -> ReadRows:
    """A stretch of a stored weight.

    Args:
        source: the checkpoint.
        weight: of a form that has rows in their order.
        first: a multiple of eight.
    """
    stretch = _stretch(source, weight, first)
    return stretch.rows(_read([stretch]))


def _stretch(source: Source, weight: StoredWeight, first: int) -> _Stretch:
    num_rows, num_columns = weight.shape
    last = min(first + _ROWS, num_rows)
    # What has fewer rows has one for each block, or for each word of zero points.
    height, _ = weight.block or (num_columns // weight.weight.shape[1], 1)
    parts = dict(weight.parts)
    parts.pop("weight_shape", None)  # of the whole
    for leaf, entry in [*parts.items()]:
        rows, *others = entry.shape or (1,)
        start, end = first, last
        if rows != num_rows:
            start, end = first // height, -(-last // height)
        if leaf != "weight_g_idx" and math.prod(entry.shape) > 1:
            stride = entry.num_bytes // rows
            parts[leaf] = replace(
                entry,
                shape=(end - start, *others),
                start=entry.start + start * stride,
                num_bytes=(end - start) * stride,
            )
    return _Stretch(source, weight, first, last, parts)


def _read(stretches: Sequence[_Stretch]) -> _Read:
    """The bytes of stretches of one checkpoint. What is near each other in a file is one read, and
    a scale that many stretches have is read once.
    """
    source = stretches[0].source
    wanted = set[Entry]()
    for stretch in stretches:
        wanted.update(stretch.parts.values())
    runs = joined(source, sorted(wanted, key=attrgetter("file", "start")))
    read: _Read = {}
    at_a_time = os.cpu_count()  # a run has up to 32 MiB
    if is_remote(source):
        at_a_time = AT_A_TIME
    with ThreadPoolExecutor(at_a_time) as pool:
        for found in pool.map(partial(_read_run, source), runs):
            read |= found
    return read


def _read_run(source: Source, run: Stretch) -> _Read:
    first = run.entries[0]
    raw = read_bytes(source, first, length=run.num_bytes)
    found: _Read = {}
    for entry in run.entries:
        own = raw.narrow(0, entry.start - first.start, entry.num_bytes)
        found[entry] = own.clone()
    return found
