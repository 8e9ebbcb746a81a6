"""The hidden states between two decoder layers: files that the system keeps in memory while they
fit, and that are on the disk every few minutes.

In: what a layer returned for some rows of a stream; a row is one sequence. Out: any rows of that
stream, as inputs of the next layer.

    states = States(folder / "states", ranks)
    with states.writing(index + 1) as outputs:  # every rank calls it; layer index + 1 has its
    states at the end
        outputs.put("calibration", 8, state)  # rows from 8 on; a thread writes them
    states.read(index + 1, "calibration", 10, 15)

Rows are addressed by their number in the data. A file holds the rows of one `put`, and its name
says which.

Easy to get wrong: a kill leaves what was written, on the disk or not, and a machine that stops
leaves only what is on the disk. To wait for the disk at every layer may take longer than the layer:
4 GB each. So states for which nobody has waited are marked with the boot they were written in, and
after another boot the last ones without a mark count.
"""

import os
import shutil
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ....checkpoints.files import complete, partial_path, sync, unwritable
from ....recipes.errors import CheckpointError
from ...run.ranks import Ranks
from ...run.statistics import save

# The calibration text as llm-compressor hands it on, held-out text of the release and as a server
# computes it, and the calibration text as a server computes it, for the MTP block.
Stream = Literal["calibration", "source", "served", "mtp"]
# What a decoder layer returns: hidden states [B, S, H] (or streams [B, S, C, H]), maybe with more
# for the next one. Rows are the first dimension of every value.
LayerState = tuple[Tensor | None, ...]


_MAX_WAITING = 8  # puts that are not written yet
# What a power cut may cost of a calibration.
_LASTING_SECONDS = 300
_MARK = "only-since-boot"
_BOOT = Path("/proc/sys/kernel/random/boot_id")


def as_state(output: Any) -> LayerState:
    """The same of what a layer returns that may return one tensor alone."""
    if isinstance(output, tuple):
        return output
    return (output,)


class States:
    """The states of one pass.

    Args:
        folder: a folder for each layer whose inputs are whole, called by its number.
        ranks: who shares the folder.
    """

    def __init__(self, folder: Path, ranks: Ranks):
        self._folder = folder
        self._ranks = ranks
        self._lasted = time.monotonic()

    def num_done(self) -> int:
        """How many layers have left their states; all ranks call it."""
        return self._ranks.of_first(lambda: max(self._left(), default=0))

    def tidy(self) -> None:
        """Remove what a killed run was writing, or removing."""
        if self._ranks.is_first:
            self._folder.mkdir(parents=True, exist_ok=True)
            needed = {f"{index:05d}" for index in self._needed(self._left())}
            for path in self._folder.iterdir():
                if path.name not in needed:
                    _remove(path)
        self._ranks.wait()

    def _left(self) -> dict[int, bool]:
        """Layer -> whether its states are on the disk, of those that are whole."""
        left = {}
        for path in self._folder.glob("[0-9]" * 5):
            mark = path / _MARK
            if not mark.exists():
                left[int(path.name)] = True
            elif mark.read_text() == _boot():
                left[int(path.name)] = False
        return left

    @staticmethod
    def _needed(left: Mapping[int, bool]) -> set[int]:
        """The last layer, and the last on the disk."""
        lasting = [index for index, is_lasting in left.items() if is_lasting]
        return {max(left, default=0), max(lasting, default=0)}

    def _is_due(self) -> bool:
        """Whether the next states are to be on the disk: those of several nodes always are."""
        is_late = time.monotonic() - self._lasted >= _LASTING_SECONDS
        return is_late or not _boot() or self._ranks.local_size < self._ranks.size

    @contextmanager
    def writing(
        self, index: int, *, keeps: bool = False, is_last: bool = False
    ) -> Iterator["NextStates"]:
        """What the layer before `index` returns; whole at the end, when the states that it read are
        removed.

        Every rank enters it, and leaves it when all have. After an error inside, nothing is renamed
        or removed.

        Args:
            index: of the layer that reads them.
            keeps: whether those of other layers stay; all are on the disk then.
            is_last: they come after the last layer, and another run may read them; so are they.

        Raises:
            CheckpointError: a file cannot be written, such as on a full disk.
        """
        whole = self._folder / f"{index:05d}"
        if self._ranks.is_first:
            shutil.rmtree(partial_path(whole), ignore_errors=True)
            partial_path(whole).mkdir(parents=True)
        self._ranks.wait()
        is_lasting = keeps or is_last or self._ranks.of_first(self._is_due)
        with ThreadPoolExecutor(1, "states") as pool:
            outputs = NextStates(partial_path(whole), pool, is_lasting=is_lasting)
            try:
                yield outputs
                outputs.flush()
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
        self._ranks.wait()
        if is_lasting:
            self._lasted = time.monotonic()
        if self._ranks.is_first:
            if whole.exists():  # made before a kill, and made again
                _remove(whole)
            if not is_lasting:
                (partial_path(whole) / _MARK).write_text(_boot())
            complete(whole)
            if not keeps:
                left = self._left()
                for other in left.keys() - self._needed(left):
                    _remove(self._folder / f"{other:05d}")
        self._ranks.wait()

    def read(self, index: int, stream: Stream, first: int, last: int) -> LayerState:
        """Rows `first` to `last` (exclusive) of the states that layer `index` reads, in memory of
        their own.

        Raises:
            CheckpointError: a file is missing or damaged.
        """
        folder = self._folder / f"{index:05d}"
        parts = []
        got = f"no row {first}"
        place = first
        for path in sorted(folder.glob(f"{stream}-*.safetensors")):
            # Another batch size may have written them, or another process: a resumed run may read
            # them in other batches and other shares.
            start, end = map(int, path.stem.split("-")[1:])
            if not start <= place < min(end, last):
                continue
            end = min(end, last)
            try:
                with safe_open(path, "pt") as file:
                    values: list[Tensor | None] = [None] * int(file.metadata()["length"])
                    for name in file.keys():  # noqa: SIM118 (it is no dict)
                        values[int(name)] = file.get_slice(name)[place - start : end - start]
                parts.append(values)
            except (SafetensorError, OSError) as error:
                got = f"{path.name}: {error}"
                break
            place = end
            got = f"no row {end}"
        if place < last:
            cure = f"Remove {self._folder.parent}, and run the same command again"
            raise CheckpointError(
                folder,
                f"rows {first} to {last - 1} of {stream} must be there",
                got=got,
                cure=f"{cure}: calibration starts anew",
            )
        whole = []
        for of_files in zip(*parts, strict=True):
            if of_files[0] is None:
                whole.append(None)
            else:
                whole.append(torch.cat(of_files))
        return tuple(whole)


class NextStates:
    """States that are being written. State: the files that a thread has yet to write."""

    def __init__(self, folder: Path, pool: ThreadPoolExecutor, *, is_lasting: bool):
        self._folder = folder
        self._pool = pool
        self._is_lasting = is_lasting
        self._waiting: deque[Future[None]] = deque()

    def put(self, stream: Stream, first: int, state: Sequence[Tensor | None]) -> None:
        """Rows of one stream, from `first` on; none is put twice.

        The caller may go on computing at once, and change the values.

        Raises:
            CheckpointError: an earlier file could not be written.
        """
        own = {}
        num_rows = 0
        for turn, value in enumerate(state):
            if value is not None:
                own[str(turn)] = value.detach().to("cpu", copy=True).contiguous()
                num_rows = len(value)
        path = self._folder / f"{stream}-{first:06d}-{first + num_rows:06d}.safetensors"
        writing = self._pool.submit(_write, path, own, len(state), is_lasting=self._is_lasting)
        self._waiting.append(writing)
        self.flush(_MAX_WAITING)

    def flush(self, leave: int = 0) -> None:
        """Wait until at most `leave` files are not written yet; raises what the thread raised."""
        while self._waiting and (len(self._waiting) > leave or self._waiting[0].done()):
            self._waiting.popleft().result()


def _write(path: Path, values: dict[str, Tensor], length: int, *, is_lasting: bool) -> None:
    """One file of states; on the disk when this returns, if it `is_lasting`."""
    save(values, path, {"length": str(length)})
    if not is_lasting:
        return
    try:
        sync(path)
    except OSError as error:
        raise unwritable(path, error) from error


def _remove(folder: Path) -> None:
    """By another name, since a kill may leave a part of it, without its mark."""
    gone = partial_path(folder.with_name("gone"))
    if gone.exists():
        shutil.rmtree(gone)
    if folder != gone:
        os.replace(folder, gone)
        shutil.rmtree(gone)


@cache
def _boot() -> str:
    """What only this run of the system is called; "" where it has no name."""
    try:
        return _BOOT.read_text().strip()
    except OSError:
        return ""
