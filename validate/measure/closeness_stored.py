"""What the source predicts for each window of the text, on disk: asked once for all checkpoints
made from it.

In and out: the folder `closeness.source.` and the number of what is asked, in the evidence folder:

    windows.json            the `Asked` that it answers, the token ids of every window, and the
    servers that were asked
    00000.safetensors       what the source predicts in window 0: ids, logprobs, following; of each
    window its own file

Easy to get wrong: a file is whole or not there, so a killed run goes on with the windows that have
none. Predictions for other text, of other bytes or from another vLLM never meet in one folder: each
`Asked` has a folder of its own.
"""

import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from pydantic import ValidationError
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from ...checkpoints.fact import Count, Fact
from ...checkpoints.files import complete, partial_path, unwritable, write_whole
from ...checkpoints.json_file import read_bytes_of
from ...recipes.errors import CheckpointError, first_fault
from ..facts.closeness import Asked, SourceSitting
from .divergence import Predicted

_WINDOWS = "windows.json"


class _Windows(Fact):
    """The windows of a text, as token ids, and the servers that were asked, in order."""

    asked: Asked
    windows: tuple[tuple[Count, ...], ...] = ()
    sittings: tuple[SourceSitting, ...] = ()


class SourceStore:
    """The folder of one source's predictions.

    Attributes:
        windows: token ids of each window; none until the source's tokenizer has made them.
        sittings: of servers, in order.
    """

    def __init__(self, folder: Path, asked: Asked) -> None:
        """Open what is there.

        Raises:
            CheckpointError: a folder that cannot be read.
        """
        self.folder, self.asked = folder, asked
        path, found = folder / _WINDOWS, _Windows(asked=asked)
        if path.is_file():
            cure = "Move the folder away, and the source is served"
            try:
                found = _Windows.model_validate_json(read_bytes_of(path, path, cure=cure))
            except ValidationError as error:
                rule, got = "must be as keepmtp wrote it", first_fault(error)
                raise CheckpointError(path, rule, got=got, cure=cure) from error
        self.windows, self.sittings = found.windows, found.sittings

    @property
    def missing(self) -> tuple[int, ...]:
        """Windows without predictions, ascending; once the windows are known."""
        numbers = range(len(self.windows))
        return tuple(number for number in numbers if not self._path(number).is_file())

    @property
    def is_finished(self) -> bool:
        """Whether no server is needed any more."""
        return bool(self.windows) and not self.missing

    def write(
        self, windows: Sequence[tuple[int, ...]], sittings: Sequence[SourceSitting] = ()
    ) -> None:
        """Keep what the tokenizer made of the texts, and how far the servers are."""
        self.windows, self.sittings = tuple(windows), tuple(sittings)
        kept = _Windows(asked=self.asked, windows=self.windows, sittings=self.sittings)
        write_whole(self.folder / _WINDOWS, kept.model_dump_json())

    def add(self, number: int, predicted: Predicted) -> None:
        """Write one window's predictions; they are on the disk when this returns.

        Raises:
            CheckpointError: the disk does not take them. What it took before stays.
        """
        path = self._path(number)
        tensors = {name: getattr(predicted, name) for name in ("ids", "logprobs", "following")}
        try:
            save_file(tensors, partial_path(path))
            complete(path)
        except (OSError, SafetensorError) as error:
            raise unwritable(path, error) from error

    def read(self, number: int) -> Predicted:
        """One window's predictions.

        Raises:
            CheckpointError: the file is damaged.
        """
        path, num = self._path(number), len(self.windows[number]) - 1
        try:
            is_whole = self.asked.top >= self.asked.vocabulary
            predicted = Predicted(**load_file(path), is_whole=is_whole)
            if len(predicted.ids) != num:
                raise ValueError(f"{len(predicted.ids)} positions")
        except (OSError, SafetensorError, TypeError, ValueError) as error:
            rule = f"must be what the source predicts at {num} positions"
            cure = "Remove the file, and it is asked again"
            raise CheckpointError(path, rule, got=repr(error), cure=cure) from error
        return predicted

    def _path(self, number: int) -> Path:
        return self.folder / f"{number:05}.safetensors"


def open_store(evidence: Path, asked: Asked, say: Callable[[str], None]) -> SourceStore:
    """The folder to go on with, or a copy of a finished one in another checkpoint's evidence
    folder.

    One release is quantized in several ways, and its predictions are the same for all of them.

    Args:
        say: called with a sentence on what was taken.

    Raises:
        CheckpointError: a folder that cannot be read.
    """
    folder = evidence / f"closeness.source.{asked.number}"
    if not (folder / _WINDOWS).is_file() and evidence.suffix == ".report":
        for other in sorted(evidence.parent.glob(f"*.report/{folder.name}")):
            with suppress(CheckpointError):  # another run may be writing it
                if SourceStore(other, asked).is_finished:
                    partial = partial_path(folder)
                    shutil.rmtree(partial, ignore_errors=True)
                    shutil.copytree(other, partial, symlinks=True)
                    shutil.rmtree(folder, ignore_errors=True)
                    complete(folder)
                    say(f"The source was asked the same before: taken from {other.parent.name}.")
                    break
    folder.mkdir(parents=True, exist_ok=True)
    return SourceStore(folder, asked)
