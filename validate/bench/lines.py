"""The measured repetitions of one checkpoint, a line each: written as they come, read back to go on.

In and out: `bench.source.jsonl` and `bench.checkpoint.jsonl` in the evidence folder. The first line is a
`BenchHeader`, each other one a `Measured`.

Easy to get wrong: repetitions of other bytes, other prompts, another vLLM, device or server settings never meet in one
file. An older file is set aside under the number of its first line, and taken back when the same is asked again. The
list of k and the list of loads are not in that line: a matrix that grows by a k measures that k alone.
"""

import hashlib
import json
import os
from pathlib import Path
from typing import Literal, TypeVar

from pydantic import ValidationError

from ...checkpoints.fact import Count, Fact, NumDrafts
from ...checkpoints.json_file import read_bytes_of
from ...checkpoints.kept_lines import append_lines, has_whole_lines
from ...recipes.errors import CheckpointError, first_fault
from ..serving.served import AsServed, Role
from .benched import Repetition, RequestForm

_CURE = "Move the file away, and its repetitions are measured again"

MatrixPlace = tuple[int, int, int, int]
"""k, concurrency, context, number of the repetition."""


class BenchHeader(Fact):
    """What was asked of what, how, by which vLLM and where; equal headers may share a file.

    Attributes:
        checkpoint_sha256: as `Identity.sha256`.
        words: further words for `vllm serve`.
        prompts_sha256: of all prompts.
        requests: for each load, as the user named it; 0 where it follows from the load.
    """

    bench: Literal[1] = 1
    role: Role
    checkpoint_sha256: str
    vllm: str
    device: str
    words: tuple[str, ...]
    form: RequestForm
    prompts_sha256: str
    requests: Count
    output_tokens: Count
    seed: Count
    max_num_seqs: Count
    max_model_len: Count

    @property
    def digits(self) -> str:
        """Eight hexadecimal digits that tell headers apart."""
        return hashlib.sha256(self.model_dump_json().encode()).hexdigest()[:8]


class Measured(Fact):
    """One repetition, under which load and k, and whether the checkpoint's own bytes were served."""

    k: NumDrafts
    concurrency: Count
    context: Count
    as_served: AsServed
    reason: str
    repetition: Repetition

    @property
    def place(self) -> MatrixPlace:
        """Where it belongs in the matrix."""
        return self.k, self.concurrency, self.context, self.repetition.number


_Line = TypeVar("_Line", BenchHeader, Measured)


class Lines:
    """One file and what it holds; `measured` by place."""

    def __init__(self, path: Path, header: BenchHeader) -> None:
        self.path = path
        self.header = header
        self.measured: dict[MatrixPlace, Measured] = {}

    def add(self, line: Measured) -> None:
        """Append one line; it is on the disk when this returns.

        Raises:
            CheckpointError: the disk does not take it. What it took before stays.
        """
        cure = "Make room: the same command measures what is missing"
        append_lines(self.path, _text(self.header), _text(line), cure=cure)
        self.measured[line.place] = line


def open_lines(path: Path, header: BenchHeader) -> tuple[Lines, Path | None]:
    """The file to go on with, and where one with another header has been set aside to.

    The part of a line that a kill has left at the end is cut off.

    Raises:
        CheckpointError: a file that cannot be read.
    """
    aside = None
    if has_whole_lines(path):
        found = read_lines(path)
        if found.header == header:
            return found, None
        aside = _aside(path, found.header)
        os.replace(path, aside)
    kept = _aside(path, header)
    if kept.is_file():
        os.replace(kept, path)
        return read_lines(path), aside
    path.parent.mkdir(parents=True, exist_ok=True)
    return Lines(path, header), aside


def read_lines(path: Path) -> Lines:
    """Every line of a file.

    Raises:
        CheckpointError: no such file, a line of another kind, or a repetition that is there twice.
    """
    lines = read_bytes_of(path, path, cure=_CURE).decode(errors="replace").split("\n")
    if lines.pop():
        raise CheckpointError(path, "must end with a line's end", got="a part of a line", cure=_CURE)
    found = Lines(path, _read(BenchHeader, lines[0] if lines else "", f"{path}:1"))
    for number, line in enumerate(lines[1:], 2):
        measured = _read(Measured, line, f"{path}:{number}")
        if measured.place in found.measured:
            got = "k={}, {} at once, context {}, repetition {} again".format(*measured.place)
            raise CheckpointError(f"{path}:{number}", "must measure each repetition once", got=got, cure=_CURE)
        found.measured[measured.place] = measured
    return found


def _read(kind: type[_Line], line: str, where: str) -> _Line:
    try:
        return kind.model_validate_json(line)
    except ValidationError as error:
        raise CheckpointError(
            where, f"must be a line of {kind.__name__}", got=first_fault(error), cure=_CURE
        ) from error


def _text(line: Fact) -> str:
    return json.dumps(line.model_dump(mode="json")) + "\n"


def _aside(path: Path, header: BenchHeader) -> Path:
    return path.with_name(f"{path.stem}.{header.digits}{path.suffix}")
