"""Which tensors the value check reads, and their summaries, from a folder or from the Hub, in the order of the files.

In: a `RuntimeView` and a level. Out: a `Summary` a tensor. Neighbours are read together, and a large tensor in pieces,
so that disk or line give what they have and memory stays small.

Easy to get wrong: a file that ends early is found by its header; a disk that gives other bytes each time is not.
"""

import os
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Literal, NamedTuple

import torch

from ...checkpoints.hub import AT_A_TIME, GAP_BYTES
from ...checkpoints.safetensors_file import Entry
from ...checkpoints.source import Source, read
from ...checkpoints.stored import FLOATS, KV_SCALE_LEAVES, SCALE_LEAVES, WEIGHT_LEAVES
from ...recipes.family import HFName
from ...recipes.family_view import Place
from .runtime_view import RuntimeView
from .values_summary import Summary, Summing, bits_of, summary

Level = Literal["scalars", "scales", "unpacked", "all"]
"""What is read: scales of one value; every scale, every norm and the small tensors of the MTP block; every byte but
those of the backbone's packed weights; every byte."""

BytesRead = Callable[[int], None]

_NOT_SCALES = ("weight_shape", "weight_zero_point", "weight_g_idx")
# What GPTQ, AWQ and AutoRound call theirs.
SCALES = (*(leaf for leaf in SCALE_LEAVES if leaf not in _NOT_SCALES), *KV_SCALE_LEAVES, "scales")
_PIECE_BYTES = 32 * 2**20
_GAP_OF_A_DISK = 256 * 2**10


class Stretch(NamedTuple):
    """Bytes of one file that are read at once, with the tensors in them; or one tensor that is read in pieces."""

    file: str
    start: int
    num_bytes: int
    entries: tuple[Entry, ...]


def chosen(runtime: RuntimeView, level: Level) -> list[Entry]:
    """The tensors that a level reads, in the order of the files."""
    entries = [entry for entry in runtime.source.entries.values() if entry.num_bytes and _wants(runtime, entry, level)]
    return sorted(entries, key=lambda entry: (entry.file, entry.start))


def summaries(
    runtime: RuntimeView, entries: Iterable[Entry], progress: BytesRead = lambda _bytes: None
) -> dict[HFName, Summary]:
    """Read tensors of a checkpoint: of a folder with all cores, of a repository by 16 range requests at a time.

    Args:
        runtime: the checkpoint.
        entries: from `chosen`.
        progress: called with the number of bytes, whenever that many more are read.

    Raises:
        CheckpointError: a file ends early, or the Hub does not send it.
    """
    source = runtime.source
    found: dict[HFName, Summary] = {}
    stop = threading.Event()
    with ThreadPoolExecutor(max_workers=AT_A_TIME if is_remote(source) else os.cpu_count()) as pool:
        runs = list(joined(entries, gap=gap_of(source)))
        try:
            for run, read_here in zip(runs, pool.map(lambda run: _read(source, run, stop), runs), strict=True):
                found |= read_here
                progress(run.num_bytes)
        finally:  # an error or Ctrl-C does not wait for the rest of a large tensor
            stop.set()
    return found


def is_remote(source: Source) -> bool:
    """Whether it is a repository, read by ranges."""
    return source.folder is None


def gap_of(source: Source) -> int:
    """Bytes between two tensors that are read for nothing: a request costs what a disk's seek costs many times."""
    return GAP_BYTES if is_remote(source) else _GAP_OF_A_DISK


def num_requests(runs: Iterable[Stretch]) -> int:
    """The range requests that read them."""
    return sum(-(-run.num_bytes // _PIECE_BYTES) for run in runs)


def joined(entries: Iterable[Entry], *, gap: int = _GAP_OF_A_DISK) -> Iterator[Stretch]:
    """Neighbours in one read: those not more than `gap` bytes apart, up to 32 MiB."""
    group: list[Entry] = []
    for entry in entries:
        if group and not _belongs(entry, group, gap):
            yield _run(group)
            group = []
        group.append(entry)
    if group:
        yield _run(group)


def _belongs(entry: Entry, group: list[Entry], gap: int) -> bool:
    first, last = group[0], group[-1]
    end = last.start + last.num_bytes
    is_near = entry.file == first.file and entry.start - end <= gap
    return is_near and entry.start + entry.num_bytes - first.start <= _PIECE_BYTES


def _run(group: list[Entry]) -> Stretch:
    first, last = group[0], group[-1]
    return Stretch(first.file, first.start, last.start + last.num_bytes - first.start, tuple(group))


def _read(source: Source, run: Stretch, stop: threading.Event) -> dict[HFName, Summary]:
    if len(run.entries) == 1:
        (entry,) = run.entries
        summing = Summing(bits_of(entry.dtype, is_scale=is_scale(entry.name)))
        for offset in range(0, entry.num_bytes, _PIECE_BYTES):
            if stop.is_set():
                return {}
            raw = torch.empty(min(_PIECE_BYTES, entry.num_bytes - offset), dtype=torch.uint8)
            read(source, entry, raw.numpy().data, offset=offset)
            summing.add(raw)
        return {entry.name: summing.done()}
    raw = torch.empty(run.num_bytes, dtype=torch.uint8)
    read(source, run.entries[0], raw.numpy().data)
    return {entry.name: _summary_in(raw, entry, run) for entry in run.entries}


def _summary_in(raw: torch.Tensor, entry: Entry, run: Stretch) -> Summary:
    first = entry.start - run.start
    own = raw[first : first + entry.num_bytes]
    if first % 8:
        own = own.clone()  # a view of wider elements starts at a multiple of their width
    return summary(own, entry.dtype, is_scale=is_scale(entry.name))


def is_scale(name: str) -> bool:
    """Whether a tensor is a scale, by its name."""
    return name.rpartition(".")[2] in SCALES


def _wants(runtime: RuntimeView, entry: Entry, level: Level) -> bool:
    if level == "all":
        return True
    if is_scale(entry.name):
        return level != "scalars" or not entry.shape or entry.shape in ((1,), (1, 1))
    if level == "unpacked":
        return entry.dtype in FLOATS or _is_of_the_mtp_block(runtime, entry)
    return level == "scales" and _is_small(runtime, entry)


def _is_of_the_mtp_block(runtime: RuntimeView, entry: Entry) -> bool:
    place = _place(runtime, entry)
    return place is not None and place.part == "mtp"


def _is_small(runtime: RuntimeView, entry: Entry) -> bool:
    """A vector, or a matrix of the MTP block that is not packed and no expert's."""
    if len(entry.shape) <= 1:
        return True
    place = _place(runtime, entry)
    return place is not None and place.part == "mtp" and place.role not in ("experts", "embedding", "head")


def _place(runtime: RuntimeView, entry: Entry) -> Place | None:
    module, _, leaf = entry.name.rpartition(".")
    return runtime.placed.get(HFName(module if leaf in WEIGHT_LEAVES else entry.name))
