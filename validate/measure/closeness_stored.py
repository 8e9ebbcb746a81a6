"""What the source predicts for each window of the text, on disk: asked once for all checkpoints made from it.

In and out: the folder `closeness.source` in the evidence folder:

    windows.json            the `Asked` that it answers, and the token ids of every window
    00000.safetensors       what the source predicts in window 0: ids, logprobs, following; of each window its own file
    sittings.json           the servers that were asked: as_served, reason, seconds, repeated

Easy to get wrong: a file is whole or not there, so a killed run goes on with the windows that have none. Predictions
for other text, of other bytes or from another vLLM never meet in one folder: an older one is set aside under its
number, and taken back when the same is asked again.
"""

import os
import shutil
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from ...checkpoints.files import complete, partial_path, unwritable, write_whole
from ...checkpoints.json_file import read_bytes_of
from ...recipes.errors import CheckpointError, first_fault
from ..facts.closeness import Asked, SourceSitting, SourceSittings, Windows
from .divergence import Predicted

FOLDER = "closeness.source"
_CURE = "Move the folder away, and the source is served again"
_Part = TypeVar("_Part", Windows, SourceSittings)


class SourceStore:
    """The folder of one source's predictions.

    Attributes:
        windows: token ids of each window; None until the source's tokenizer has made them.
        sittings: of servers, in order.
    """

    def __init__(self, folder: Path, asked: Asked) -> None:
        self.folder = folder
        self.asked = asked
        self.windows: tuple[tuple[int, ...], ...] | None = None
        self.sittings: tuple[SourceSitting, ...] = ()

    @property
    def missing(self) -> tuple[int, ...]:
        """Windows without predictions, ascending; once the windows are known."""
        return tuple(number for number in range(len(self.windows or ())) if not self._path(number).is_file())

    @property
    def is_finished(self) -> bool:
        """Whether no server is needed any more."""
        return self.windows is not None and not self.missing

    def cut(self, windows: Sequence[tuple[int, ...]]) -> None:
        """Keep what the tokenizer made of the texts."""
        write_whole(self.folder / "windows.json", Windows(asked=self.asked, windows=tuple(windows)).model_dump_json())
        self.windows = tuple(windows)

    def sit(self, number: int, sitting: SourceSitting) -> None:
        """Write down how far the sitting with a number, from 0, is."""
        self.sittings = (*self.sittings[:number], sitting)
        write_whole(self.folder / "sittings.json", SourceSittings(sittings=self.sittings).model_dump_json())

    def add(self, number: int, predicted: Predicted) -> None:
        """Write one window's predictions; they are on the disk when this returns.

        Raises:
            CheckpointError: the disk does not take them. What it took before stays.
        """
        path = self._path(number)
        tensors = {"ids": predicted.ids, "logprobs": predicted.logprobs, "following": predicted.following}
        try:
            save_file(tensors, partial_path(path), metadata={"is_whole": str(predicted.is_whole)})
            complete(path)
        except (OSError, SafetensorError) as error:
            raise unwritable(path, error) from error

    def read(self, number: int) -> Predicted:
        """One window's predictions.

        Raises:
            CheckpointError: the file is damaged.
        """
        path = self._path(number)
        try:
            found = load_file(path)
            is_whole = self.asked.top >= self.asked.vocabulary
            predicted = Predicted(
                ids=found["ids"], logprobs=found["logprobs"], following=found["following"], is_whole=is_whole
            )
        except (OSError, SafetensorError, KeyError) as error:
            rule = "must be what the source predicts"
            raise CheckpointError(path, rule, got=repr(error), cure="Remove the file, and it is asked again") from error
        assert self.windows is not None
        if len(predicted.ids) != len(self.windows[number]) - 1:
            got, cure = f"{len(predicted.ids)} positions", "Remove the file, and it is asked again"
            raise CheckpointError(path, f"must have {len(self.windows[number]) - 1} positions", got=got, cure=cure)
        return predicted

    def _path(self, number: int) -> Path:
        return self.folder / f"{number:05}.safetensors"


def open_store(evidence: Path, asked: Asked) -> tuple[SourceStore, Path | None]:
    """The folder to go on with, and where one for another question has been set aside to.

    Raises:
        CheckpointError: a folder that cannot be read.
    """
    folder, aside = evidence / FOLDER, None
    if (folder / "windows.json").is_file():
        found = read_store(folder)
        if found.asked == asked:
            return found, None
        aside = _aside(folder, found.asked)
        if aside.exists():
            shutil.rmtree(aside)
        os.replace(folder, aside)
    kept = _aside(folder, asked)
    if (kept / "windows.json").is_file() and not folder.exists():
        os.replace(kept, folder)
        return read_store(folder), aside
    folder.mkdir(parents=True, exist_ok=True)
    return SourceStore(folder, asked), aside


def take_store_from_sibling(evidence: Path, asked: Asked) -> Path | None:
    """Copy a finished folder for the same question from another checkpoint's evidence, where there is none here.

    One release is quantized in several ways, and its predictions are the same for all of them.

    Returns: the evidence folder that it came from, or None.
    """
    if (evidence / FOLDER / "windows.json").is_file() or evidence.suffix != ".report":
        return None
    for other in sorted(evidence.parent.glob(f"*.report/{FOLDER}*")):
        with suppress(CheckpointError):  # another run may be writing it
            found = read_store(other)
            if found.asked == asked and found.is_finished:
                partial = partial_path(evidence / FOLDER)
                shutil.rmtree(partial, ignore_errors=True)
                shutil.copytree(other, partial, symlinks=True)
                shutil.rmtree(evidence / FOLDER, ignore_errors=True)
                complete(evidence / FOLDER)
                return other.parent
    return None


def read_store(folder: Path) -> SourceStore:
    """A folder as a run has left it.

    Raises:
        CheckpointError: no such folder, or files that keepmtp did not write.
    """
    found = _read(Windows, folder / "windows.json")
    store = SourceStore(folder, found.asked)
    store.windows = found.windows
    if (folder / "sittings.json").is_file():
        store.sittings = _read(SourceSittings, folder / "sittings.json").sittings
    return store


def _read(kind: type[_Part], path: Path) -> _Part:
    try:
        return kind.model_validate_json(read_bytes_of(path, path, cure=_CURE))
    except ValidationError as error:
        raise CheckpointError(path, "must be as keepmtp wrote it", got=first_fault(error), cure=_CURE) from error


def _aside(folder: Path, asked: Asked) -> Path:
    return folder.with_name(f"{FOLDER}.{asked.number}")
