"""The measured repetitions of one checkpoint, a line each: written as they come, read back to go on.

In and out: `bench.source.jsonl` and `bench.checkpoint.jsonl` in the evidence folder. The first line is a
`BenchHeader`, each other one a `Measured`.

Easy to get wrong: repetitions of other bytes, other prompts, another vLLM, device or server settings never meet in one
file. An older file is set aside under the number of its first line, and taken back when the same is asked again. The
list of k and the list of loads are not in that line: a matrix that grows by a k measures that k alone.
"""

import json
from pathlib import Path
from typing import Literal

from ...checkpoints.fact import Count, Fact, NumDrafts
from ...checkpoints.kept_lines import KeptHeader, append_lines, open_kept, parse_line, read_kept
from ...recipes.errors import CheckpointError
from ..facts.benched import Repetition, RequestForm
from ..facts.served import AsServed, Role

_CURE = "Move the file away, and its repetitions are measured again"

MatrixPlace = tuple[int, int, int, int]
"""k, concurrency, context, number of the repetition."""


class BenchHeader(KeptHeader):
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
    return open_kept(path, header, read=read_lines, make=lambda: Lines(path, header))


def read_lines(path: Path) -> Lines:
    """Every line of a file.

    Raises:
        CheckpointError: no such file, a line of another kind, or a repetition that is there twice.
    """
    first, *others = read_kept(path, cure=_CURE)
    found = Lines(path, parse_line(BenchHeader, first, f"{path}:1", rule="must be a header of repetitions", cure=_CURE))
    for number, line in enumerate(others, 2):
        measured = parse_line(Measured, line, f"{path}:{number}", rule="must be a repetition", cure=_CURE)
        if measured.place in found.measured:
            got = "k={}, {} at once, context {}, repetition {} again".format(*measured.place)
            raise CheckpointError(f"{path}:{number}", "must measure each repetition once", got=got, cure=_CURE)
        found.measured[measured.place] = measured
    return found


def _text(line: Fact) -> str:
    return json.dumps(line.model_dump(mode="json")) + "\n"
