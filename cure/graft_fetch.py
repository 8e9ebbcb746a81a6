"""The bytes of a release's MTP block, brought here from the Hub by range requests.

In: tensors of a repository. Out: files of holes with the repository's names and offsets, in which
only these tensors have bytes; and a `Source` over them.

Easy to get wrong: what a killed run has left. A range counts as here once its line is in the list
of ranges, and the line is written after its bytes.
"""

import json
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Lock
from typing import NamedTuple

from ..checkpoints.files import within, write_at
from ..checkpoints.hub import AT_A_TIME, GAP_BYTES, read_range
from ..checkpoints.safetensors_file import Entry
from ..checkpoints.source import Source
from ..checkpoints.unchanged import states_of

_MOST_BYTES = 64 << 20
_DONE = "ranges.jsonl"


class Range(NamedTuple):
    """Neighbouring bytes of one file."""

    file: str
    start: int
    num_bytes: int


def ranges_of(entries: Iterable[Entry]) -> list[Range]:
    """What is asked for: neighbours less than 1 MiB apart together, in pieces of at most 64 MiB."""
    joined: list[Range] = []
    for entry in sorted(entries, key=lambda entry: (entry.file, entry.start)):
        last = joined[-1] if joined else Range("", 0, 0)
        end = entry.start + entry.num_bytes
        if last.file == entry.file and entry.start - (last.start + last.num_bytes) <= GAP_BYTES:
            joined[-1] = last._replace(num_bytes=max(last.num_bytes, end - last.start))
        else:
            joined.append(Range(entry.file, entry.start, entry.num_bytes))
    return [
        Range(whole.file, whole.start + offset, min(_MOST_BYTES, whole.num_bytes - offset))
        for whole in joined
        for offset in range(0, whole.num_bytes, _MOST_BYTES)
    ]


def fetch(
    source: Source, entries: Iterable[Entry], folder: Path, progress: Callable[[int], None]
) -> Source:
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
    wanted, lines, lock = ranges_of(entries), folder / _DONE, Lock()
    # A line that a kill cut in two is none.
    *whole, rest = lines.read_text(encoding="utf-8").split("\n") if lines.is_file() else [""]
    if rest:
        lines.write_text("".join(f"{line}\n" for line in whole), encoding="utf-8")
    done = {Range(*json.loads(line)) for line in whole}
    progress(sum(piece.num_bytes for piece in wanted if piece in done))

    def bring(piece: Range) -> None:
        # One piece in memory for each connection, at most 1 GiB in all.
        buffer = bytearray(piece.num_bytes)
        into = memoryview(buffer)
        read_range(
            source.where,
            piece.file,
            commit=source.revision,
            start=piece.start,
            into=into,
            arrived=progress,
        )
        descriptor = os.open(within(folder, piece.file), os.O_WRONLY | os.O_CREAT, 0o644)
        try:
            write_at(descriptor, buffer, piece.start)
        finally:
            os.close(descriptor)
        with lock, open(lines, "a", encoding="utf-8") as file:
            file.write(json.dumps(piece) + "\n")

    with ThreadPoolExecutor(AT_A_TIME) as pool:
        jobs = [pool.submit(bring, piece) for piece in wanted if piece not in done]
        try:
            for job in jobs:
                job.result()
        finally:
            pool.shutdown(cancel_futures=True)
    return replace(
        source, folder=folder, states=states_of(folder, sorted({piece.file for piece in wanted}))
    )
