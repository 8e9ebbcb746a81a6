"""The bytes of a release's MTP block, brought here from the Hub by range requests.

In: tensors of a repository. Out: files of holes with the repository's names and offsets, in which only these tensors
have bytes; and a `Source` over them.

Easy to get wrong: what a killed run has left. A range counts as here once its line is in the list of ranges, and the
line is written after its bytes.
"""

import json
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Lock

from ..checkpoints.files import within, write_at
from ..checkpoints.hub import AT_A_TIME, GAP_BYTES, read_range
from ..checkpoints.safetensors_file import Entry
from ..checkpoints.source import Source
from ..checkpoints.unchanged import states_of

_MOST_BYTES = 64 << 20
_DONE = "ranges.jsonl"


@dataclass(frozen=True, slots=True)
class Range:
    """Neighbouring bytes of one file."""

    file: str
    start: int
    num_bytes: int


def ranges_of(entries: Iterable[Entry]) -> list[Range]:
    """What is asked for: neighbours less than 1 MiB apart together, in pieces of at most 64 MiB."""
    joined: list[Range] = []
    for entry in sorted(entries, key=lambda entry: (entry.file, entry.start)):
        last = joined[-1] if joined else None
        end = entry.start + entry.num_bytes
        if last and last.file == entry.file and entry.start - (last.start + last.num_bytes) <= GAP_BYTES:
            joined[-1] = replace(last, num_bytes=max(last.num_bytes, end - last.start))
        else:
            joined.append(Range(entry.file, entry.start, entry.num_bytes))
    return [piece for each in joined for piece in _pieces(each)]


def fetch(source: Source, entries: Iterable[Entry], folder: Path, progress: Callable[[int], None]) -> Source:
    """Bring these tensors here; what an earlier run brought into `folder` is not asked for again.

    Args:
        source: a repository.
        entries: its tensors.
        folder: for the files; it is this function's alone.
        progress: called with numbers of bytes, from several threads.

    Raises:
        NoCheckpointError: see `read_range`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    wanted, done, lock = ranges_of(entries), _done(folder), Lock()
    for piece in wanted:
        if piece in done:
            progress(piece.num_bytes)

    def bring(piece: Range) -> None:
        # One piece in memory for each connection, at most 1 GiB in all.
        buffer = bytearray(piece.num_bytes)
        read_range(
            source.where,
            piece.file,
            commit=source.revision,
            start=piece.start,
            into=memoryview(buffer),
            arrived=progress,
        )
        descriptor = os.open(within(folder, piece.file), os.O_WRONLY | os.O_CREAT, 0o644)
        try:
            write_at(descriptor, buffer, piece.start)
        finally:
            os.close(descriptor)
        with lock, open(folder / _DONE, "a", encoding="utf-8") as lines:
            lines.write(json.dumps([piece.file, piece.start, piece.num_bytes]) + "\n")

    with ThreadPoolExecutor(AT_A_TIME) as pool:
        jobs = [pool.submit(bring, piece) for piece in wanted if piece not in done]
        try:
            for job in jobs:
                job.result()
        finally:
            pool.shutdown(cancel_futures=True)
    files = sorted({piece.file for piece in wanted})
    return replace(source, folder=folder, states=states_of(folder, files))


def _pieces(whole: Range) -> Iterator[Range]:
    for offset in range(0, whole.num_bytes, _MOST_BYTES):
        yield Range(whole.file, whole.start + offset, min(_MOST_BYTES, whole.num_bytes - offset))


def _done(folder: Path) -> set[Range]:
    """The ranges that are here; a line that a kill cut in two is none."""
    path = folder / _DONE
    if not path.is_file():
        return set()
    text = path.read_text(encoding="utf-8")
    whole, _, rest = text.rpartition("\n")
    if rest:
        path.write_text(f"{whole}\n" if whole else "", encoding="utf-8")
    return {Range(*json.loads(line)) for line in whole.splitlines()}
