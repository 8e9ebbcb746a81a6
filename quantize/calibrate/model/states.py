"""The hidden states between two decoder layers: kept in memory where they fit, and always on disk as well.

In: what a layer returned for some rows of a stream; a row is one sequence. Out: any rows of that stream, as inputs of
the next layer.

    states = States(folder / "states", ranks)
    with states.writing(index + 1) as outputs:  # every rank calls it; layer index + 1 has its states at the end
        outputs.put("calibration", 8, state)    # rows from 8 on; a thread writes them while the caller goes on
    states.read(index + 1, "calibration", 10, 15, device)

Rows are addressed by their number in the data. Which batch size wrote them, and which process, does not matter: a
resumed run may read them in other batches and in other shares. A file holds the rows of one `put`, and its name says
which.

Easy to get wrong: states in memory alone would be gone after a kill, and with them every layer. So each is on disk too
before the layer counts as done; memory only saves reading. And what is read from memory is a copy: a model's own code
may compute in place.
"""

import re
import shutil
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from ....checkpoints.files import complete, partial_path, sync, unwritable, write_at
from ....checkpoints.safetensors_file import fill, lay_out, read_header
from ....checkpoints.values import TORCH_DTYPES, typed
from ....recipes.errors import CheckpointError
from ....recipes.family import HFName
from ...needs.free_memory import free_host_bytes
from ...run.ranks import Ranks

Stream = Literal["calibration", "source", "served", "mtp"]
"""The calibration text as llm-compressor hands it on, held-out text of the release and as a server computes it, and the
calibration text as a server computes it, for the MTP block.
"""
LayerState = tuple[Tensor | None, ...]
"""What a decoder layer returns: hidden states [B, S, H] (or streams [B, S, C, H]), maybe with more for the next one.

Rows are the first dimension of every value.
"""

SHARE_IN_MEMORY = 0.5
"""States take at most this part of the memory that is free on a machine; its processes divide it."""
_MAX_WAITING = 8  # puts that are not on disk yet
_FILE = re.compile(r"(?P<stream>[a-z]+)-(?P<first>\d{6,})-(?P<last>\d{6,})\.safetensors")
_DTYPE_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rows:
    """Rows `first` to `last` (exclusive) of a stream: the file that holds them, and the values if they are kept."""

    first: int
    last: int
    path: Path
    kept: LayerState | None = None

    def part(self, first: int, last: int) -> LayerState:
        """Those of its rows that are in this range, on the CPU."""
        own = slice(max(first, self.first) - self.first, min(last, self.last) - self.first)
        if self.kept is None:
            return _read(self.path, own)
        return tuple(None if value is None else value[own] for value in self.kept)


class States:
    """The states of one pass.

    State: which rows this process knows of, by the layer that reads them and by stream, and the values it keeps.

    Args:
        folder: a folder for each layer whose inputs are whole, called by its number.
        ranks: who shares the folder.
    """

    def __init__(self, folder: Path, ranks: Ranks):
        self._folder, self._ranks = folder, ranks
        self._rows: dict[tuple[int, str], list[_Rows]] = {}

    def num_done(self) -> int:
        """How many layers have left their states."""
        return max((int(path.name) for path in self._folder.glob("[0-9]" * 5)), default=0)

    def tidy(self) -> None:
        """Remove what a killed run was writing, or removing."""
        done = self.num_done()
        self._ranks.wait()
        if self._ranks.is_first:
            for path in self._folder.iterdir():
                if path.name != f"{done:05d}":
                    shutil.rmtree(path)
        self._ranks.wait()

    @contextmanager
    def writing(self, index: int) -> Iterator["NextStates"]:
        """What the layer before `index` returns; whole at the end, when the states that it read are removed.

        Every rank enters it, and leaves it when all have. After an error inside, nothing is renamed or removed.

        Raises:
            CheckpointError: a file cannot be written, such as on a full disk.
        """
        whole = self._folder / f"{index:05d}"
        if self._ranks.is_first:
            partial_path(whole).mkdir()
        self._ranks.wait()
        with ThreadPoolExecutor(1, "states") as pool:
            outputs = NextStates(whole, pool, room=self._room())
            try:
                yield outputs
                outputs.flush()
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
        self._ranks.wait()
        if self._ranks.is_first:
            complete(whole)
            if index > 1:
                shutil.rmtree(self._folder / f"{index - 1:05d}")
        self._rows = {(index, stream): rows for stream, rows in outputs.rows.items()}
        self._ranks.wait()

    def read(self, index: int, stream: Stream, first: int, last: int, device: torch.device) -> LayerState:
        """Rows `first` to `last` (exclusive) of the states that layer `index` reads, as a copy on `device`.

        Raises:
            CheckpointError: a file is missing or damaged.
        """
        parts = [rows.part(first, last) for rows in self._covering(index, stream, first, last)]
        return tuple(_joined(values, device) for values in zip(*parts, strict=True))

    def _covering(self, index: int, stream: Stream, first: int, last: int) -> list[_Rows]:
        """What holds these rows, in their order: rows that this process wrote, and files of others."""
        known = self._rows.setdefault((index, stream), [])
        if not _is_covered(known, first, last):  # another process, or an earlier run, has written them
            folder = self._folder / f"{index:05d}"
            known += [rows for rows in _on_disk(folder, stream) if rows.path not in {own.path for own in known}]
            known.sort(key=lambda rows: rows.first)
        if not _is_covered(known, first, last):
            where = self._folder / f"{index:05d}"
            cure = f"Remove {self._folder.parent}, and run the same command again: calibration starts anew"
            rule = f"rows {first} to {last - 1} of {stream} must be there"
            raise CheckpointError(where, rule, got="not all of them", cure=cure)
        return [rows for rows in known if rows.first < last and rows.last > first]

    def _room(self) -> int:
        """Bytes that the next layer's states may take in this process's memory."""
        kept = [rows.kept for all_rows in self._rows.values() for rows in all_rows if rows.kept is not None]
        own = sum(map(_num_bytes, kept))
        # Free without any states; the other processes of the machine keep as much as this one.
        free = free_host_bytes() // self._ranks.local_size + own
        return max(0, int(free * SHARE_IN_MEMORY) - own)


class NextStates:
    """States that are being written. State: the rows so far, and the files that a thread has yet to write."""

    def __init__(self, whole: Path, pool: ThreadPoolExecutor, *, room: int):
        self.rows: dict[Stream, list[_Rows]] = {}
        self._whole, self._pool, self._room = whole, pool, room
        self._waiting: deque[Future[None]] = deque()

    def put(self, stream: Stream, first: int, state: Sequence[Tensor | None]) -> None:
        """Rows of one stream, from `first` on; none is put twice.

        The caller may go on computing at once, but not change the values.

        Raises:
            CheckpointError: an earlier file could not be written.
        """
        own, copied = _on_host(state)
        last = first + next(len(value) for value in own if value is not None)
        name = f"{stream}-{first:06d}-{last:06d}.safetensors"
        rows = _Rows(first=first, last=last, path=self._whole / name)
        self._waiting.append(self._pool.submit(_write, partial_path(self._whole) / name, own, copied))
        if (size := _num_bytes(own)) <= self._room:
            self._room -= size
            rows = replace(rows, kept=own)
        self.rows.setdefault(stream, []).append(rows)
        self.flush(_MAX_WAITING)

    def flush(self, leave: int = 0) -> None:
        """Wait until at most `leave` files are not on disk yet; raises what the thread raised."""
        while self._waiting and (len(self._waiting) > leave or self._waiting[0].done()):
            self._waiting.popleft().result()


# --- tensors --------------------------------------------------------------------------------------------------------


def _on_host(state: Sequence[Tensor | None]) -> tuple[LayerState, Any]:
    """Values of its own in main memory, and the event after which they are there; None where they are already.

    From a GPU they go to pinned memory, so that the copy runs while the GPU computes on.
    """
    event = None
    values: list[Tensor | None] = []
    for value in state:
        if value is None or value.device.type == "cpu":
            values.append(None if value is None else _alone(value))
            continue
        host = torch.empty(value.shape, dtype=value.dtype, pin_memory=True)
        values.append(host.copy_(value.detach(), non_blocking=True))
        event = torch.cuda.Event()
        event.record()
    return tuple(values), event


def _alone(value: Tensor) -> Tensor:
    """On the CPU, contiguous, in a storage that holds nothing else, and no tensor of inference mode."""
    own = value.detach().cpu().contiguous()
    if own.untyped_storage().nbytes() > own.nbytes or own.is_inference():
        with torch.inference_mode(False):
            own = own.clone()
    return own


def _joined(values: Sequence[Tensor | None], device: torch.device) -> Tensor | None:
    """Parts one after the other, on a device, in memory of their own."""
    present = [value for value in values if value is not None]
    if not present:
        return None
    moved = [value.to(device, non_blocking=True) for value in present]
    return torch.cat(moved) if len(moved) > 1 or moved[0] is present[0] else moved[0]


def _num_bytes(state: Iterable[Tensor | None]) -> int:
    """In memory: PyTorch makes a pinned buffer as long as the next power of two."""
    values = [value for value in state if value is not None]
    return sum(1 << (value.nbytes - 1).bit_length() if value.is_pinned() else value.nbytes for value in values)


# --- files ----------------------------------------------------------------------------------------------------------


def _is_covered(known: Iterable[_Rows], first: int, last: int) -> bool:
    """Whether rows in order of their first one cover a range without a gap."""
    for rows in known:
        if rows.first <= first:
            first = max(first, rows.last)
    return first >= last


def _on_disk(folder: Path, stream: Stream) -> list[_Rows]:
    found = [(path, match) for path in folder.glob(f"{stream}-*") if (match := _FILE.fullmatch(path.name))]
    return [_Rows(first=int(match["first"]), last=int(match["last"]), path=path) for path, match in found]


def _write(path: Path, state: LayerState, copied: Any) -> None:
    """One file of states; on disk when this returns."""
    if copied is not None:
        copied.synchronize()
    values = {HFName(str(turn)): value for turn, value in enumerate(state) if value is not None}
    entries = [(name, _DTYPE_NAMES[value.dtype], tuple(value.shape)) for name, value in values.items()]
    layout = lay_out(entries, metadata={"length": str(len(state))})
    try:
        with open(path, "wb", buffering=0) as file:
            write_at(file.fileno(), memoryview(layout.header), 0)
            for name, value in values.items():
                write_at(file.fileno(), value.reshape(-1).view(torch.uint8).numpy().data, layout.starts[name])
        sync(path)
    except OSError as error:
        raise unwritable(path, error) from error


def _read(path: Path, rows: slice) -> LayerState:
    """Some rows of one file."""
    cure = f"Remove {path.parents[2]}, and run the same command again: calibration starts anew"
    try:
        header = read_header(path, str(path))
    except CheckpointError as error:
        raise error.with_cure(cure) from error
    values: list[Tensor | None] = [None] * int(header.metadata["length"])
    with open(path, "rb", buffering=0) as file:
        for name, entry in header.entries.items():
            a_row = entry.num_bytes // entry.shape[0]
            raw = torch.empty((rows.stop - rows.start) * a_row, dtype=torch.uint8)
            fill(raw.numpy().data, file, entry, where=path, offset=rows.start * a_row, cure=cure)
            values[int(name)] = typed(raw, entry.dtype, (rows.stop - rows.start, *entry.shape[1:]))
    return tuple(values)
