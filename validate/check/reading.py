"""Which tensors the value check reads, and what each holds, from a folder or from the Hub, in the
order of the files.

In: a `RuntimeView` and a level. Out: a `Summary` a tensor. Neighbours are read together, and a
large tensor in pieces, so that disk or line give what they have and memory stays small. A summary
is read from the bits: in each dtype the magnitudes of floats have the order of their bits without
the sign.

Easy to get wrong: FP4 codes are two a byte, and one byte has two signs. A byte of U8 is an E8M0
exponent where the tensor is a scale, and two codes where it is a weight.
"""

import math
import os
import threading
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from operator import attrgetter
from types import MappingProxyType
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ...checkpoints.dialects.runtime_view import RuntimeView
from ...checkpoints.hub import AT_A_TIME, GAP_BYTES
from ...checkpoints.safetensors_file import Entry
from ...checkpoints.source import Source, read
from ...checkpoints.stored import KV_SCALE_LEAVES, SCALE_LEAVES
from ...recipes.family import HFName
from ...recipes.forms import FLOATS
from ...recipes.frozen import Advance, frozen, nowhere

Level = Literal["norms", "scalars", "scales", "unpacked", "all"]
"""What is read: norms, biases and scales of one value of the MTP block; these, and every scale of
one value; every scale, every norm and the small tensors of the MTP block; every byte but those of
the backbone's packed weights; every byte."""


_NOT_SCALES = {"weight_shape", "weight_zero_point", "weight_g_idx"}
# The last is what GPTQ, AWQ and AutoRound call theirs.
_SCALES = ({*SCALE_LEAVES} - _NOT_SCALES) | {*KV_SCALE_LEAVES, "scales"}
PIECE_BYTES = 32 * 2**20
"""What is asked for at once, or read into memory."""
_GAP_OF_A_DISK = 256 * 2**10
# Bytes looked at at a time: what fits a core's cache.
_CHUNK_BYTES = 1024 * 1024


class Bits(NamedTuple):
    """How a dtype's bits are read.

    Attributes:
        holder: an integer dtype of the same width.
        magnitude: the bits that are not a sign.
        not_finite: the smallest magnitude that is infinite or NaN; 0 where every value is finite.
        values: the dtype that gives a magnitude's value; None where a magnitude is only zero or
            not.
        has_zero: a magnitude of 0 is the number zero.
    """

    holder: torch.dtype
    magnitude: int
    not_finite: int = 0
    values: torch.dtype | None = None
    has_zero: bool = True


_BITS: Mapping[str, Bits] = MappingProxyType(
    {
        "F32": Bits(torch.int32, 0x7FFFFFFF, 0x7F800000, torch.float32),
        "BF16": Bits(torch.int16, 0x7FFF, 0x7F80, torch.bfloat16),
        "F16": Bits(torch.int16, 0x7FFF, 0x7C00, torch.float16),
        "F8_E4M3": Bits(torch.int8, 0x7F, 0x7F, torch.float8_e4m3fn),
        "F8_E5M2": Bits(torch.int8, 0x7F, 0x7C, torch.float8_e5m2),
        "F8_E8M0": Bits(torch.uint8, 0xFF, 0xFF, torch.float8_e8m0fnu, has_zero=False),
        "U8": Bits(torch.uint8, 0x77),
    }
)
# Packed integers: of their bytes alone, whether they are all the same says something.
_BYTES = Bits(torch.uint8, 0xFF, values=torch.uint8, has_zero=False)
# Of a holder, in bytes.
_WIDEST = 4


@frozen
class Summary:
    """What a tensor holds.

    Attributes:
        largest: the largest magnitude among finite values, or the largest byte of packed integers;
            NaN where there is none, or where a dtype has no values.
        num_not_finite: elements that are infinite or NaN.
        first_not_finite: the position of the first of them, row by row; -1 if there is none.
        has_negative: an element below zero.
        is_zero: every element is zero.
        is_constant: every element, or every byte of a packed weight, is the same; False for a
            single one.
    """

    largest: float
    num_not_finite: int
    first_not_finite: int
    has_negative: bool
    is_zero: bool
    is_constant: bool


class Stretch(NamedTuple):
    """Neighbours in one file that are read at once; or one tensor that is read in pieces."""

    entries: list[Entry]

    @property
    def num_bytes(self) -> int:
        """With the gaps between them."""
        last = self.entries[-1]
        return last.start + last.num_bytes - self.entries[0].start


def chosen(runtime: RuntimeView, level: Level) -> list[Entry]:
    """The tensors that a level reads, in the order of the files."""
    entries = [entry for entry in runtime.source.entries.values() if entry.num_bytes]
    entries.sort(key=attrgetter("file", "start"))
    return [entry for entry in entries if _wants(runtime, entry, level)]


def summaries(
    runtime: RuntimeView, entries: Iterable[Entry], progress: Advance = nowhere
) -> dict[HFName, Summary]:
    """Read tensors of a checkpoint: of a folder with all cores, of a repository by 16 range
    requests at a time.

    Args:
        runtime: the checkpoint.
        entries: from `chosen`.
        progress: called with the number of bytes, whenever that many more are read.

    Raises:
        CheckpointError: a file ends early, or the Hub does not send it.
    """
    source = runtime.source
    summaries_of = dict[HFName, Summary]()
    stop = threading.Event()
    at_a_time = os.cpu_count()
    if is_remote(source):
        at_a_time = AT_A_TIME
    with ThreadPoolExecutor(max_workers=at_a_time) as pool:
        stretches = joined(source, entries)
        try:
            all_read = pool.map(partial(_read, source, stop, _Room()), stretches)
            for stretch, found in zip(stretches, all_read, strict=True):
                summaries_of |= found
                progress(stretch.num_bytes)
        finally:  # an error or Ctrl-C does not wait for the rest of a large tensor
            stop.set()
    return summaries_of


def is_remote(source: Source) -> bool:
    """Whether it is a repository, read by ranges."""
    return source.folder is None


def joined(source: Source, entries: Iterable[Entry]) -> list[Stretch]:
    """Neighbours in one read, up to 32 MiB; a request costs what a disk's seek costs many times."""
    gap = _GAP_OF_A_DISK
    if is_remote(source):
        gap = GAP_BYTES
    stretches = list[Stretch]()
    end = 0
    for entry in entries:
        first = entry
        if stretches:
            first = stretches[-1].entries[0]
        is_far = entry.file != first.file or entry.start - end > gap
        end = entry.start + entry.num_bytes
        if is_far or not stretches or end - first.start > PIECE_BYTES:
            stretches.append(Stretch([]))
        stretches[-1].entries.append(entry)
    return stretches


class _Room(threading.local):
    """Where a thread reads to, again and again: memory that is taken from the system for each read
    costs four times the read.
    """

    def __init__(self) -> None:
        self.raw = torch.empty(PIECE_BYTES, dtype=torch.uint8)

    def filled(self, source: Source, first: Entry, offset: int, length: int) -> Tensor:
        """Bytes from a tensor's `offset` on, until the next call."""
        raw = self.raw[:length]
        read(source, first, raw.numpy().data, offset=offset)
        return raw


def _read(
    source: Source, stop: threading.Event, room: _Room, stretch: Stretch
) -> dict[HFName, Summary]:
    first, *others = stretch.entries
    size = stretch.num_bytes
    if not others:
        pieces = (
            room.filled(source, first, offset, min(PIECE_BYTES, size - offset))
            for offset in range(0, size, PIECE_BYTES)
            if not stop.is_set()
        )
        return {first.name: summary(pieces, first.dtype, is_scale=is_scale(first.name))}
    raw = room.filled(source, first, 0, size)
    summaries_of = dict[HFName, Summary]()
    for entry in stretch.entries:
        offset = entry.start - first.start
        own = raw.narrow(0, offset, entry.num_bytes)
        if offset % _WIDEST:  # a view of wider elements starts at a multiple of their width
            own = own.clone()
        summaries_of[entry.name] = summary([own], entry.dtype, is_scale=is_scale(entry.name))
    return summaries_of


def summary(pieces: Iterable[Tensor], dtype: str, *, is_scale: bool) -> Summary:
    """What a tensor holds.

    Args:
        pieces: its bytes in order, U8, each a whole number of elements.
        dtype: as safetensors names it.
        is_scale: a byte of U8 is an exponent.
    """
    bits = _BITS.get(dtype, _BYTES)
    if dtype == "U8" and is_scale:
        bits = _BITS["F8_E8M0"]
    lowest = math.inf
    highest = -math.inf
    largest = -1
    count = 0
    num_bad = 0
    first_bad = -1
    for piece in pieces:
        elements = piece.view(bits.holder)
        for chunk in elements.split(_CHUNK_BYTES // elements.element_size()):
            # Of codes no more is asked than whether all are zero, or the same.
            if bits.values is None and largest > 0 and lowest < highest:
                count += chunk.numel()
                continue
            if not lowest < 0 <= highest:  # both signs say all that is asked of the two
                low, high = torch.aminmax(chunk)
                lowest = min(lowest, int(low))
                highest = max(highest, int(high))
            magnitude = chunk & bits.magnitude
            top = int(magnitude.max())
            if bits.not_finite and top >= bits.not_finite:
                bad = magnitude >= bits.not_finite
                if first_bad < 0:
                    first_bad = count + int(bad.nonzero()[0])
                num_bad += int(bad.sum())
                # Below every magnitude, so that the largest of the others is left.
                top = int(magnitude.masked_fill(bad, -magnitude.dtype.is_signed).max())
            largest = max(largest, top)
            count += chunk.numel()
    value = math.nan
    if bits.values is not None and num_bad < count:
        value = torch.tensor([largest], dtype=bits.holder).view(bits.values).float().item()
    return Summary(
        largest=value,
        num_not_finite=num_bad,
        first_not_finite=first_bad,
        has_negative=bits.values is not None and lowest < 0,
        is_zero=bits.has_zero and largest == 0 and not num_bad,
        is_constant=count > 1 and lowest == highest,
    )


def is_scale(name: str) -> bool:
    """Whether a tensor is a scale, by its name."""
    return name.rpartition(".")[2] in _SCALES


def _wants(runtime: RuntimeView, entry: Entry, level: Level) -> bool:
    if level == "all":
        return True
    is_mtp = runtime.view.is_mtp(entry.name)
    if level in ("norms", "scalars"):
        is_scalar = is_scale(entry.name) and math.prod(entry.shape) == 1
        if is_mtp:
            return is_scalar or len(entry.shape) <= 1
        return is_scalar and level == "scalars"
    if is_scale(entry.name) or entry.name.endswith(".qzeros"):
        return True
    if level == "unpacked":
        return is_mtp or entry.dtype in FLOATS
    if len(entry.shape) <= 1:
        return True
    place = runtime.view.place(entry.name)
    is_large = place is not None and place.role in ("experts", "embedding", "head", "table")
    return is_mtp and not is_large
