"""The measured repetitions of one checkpoint, a line each: written as they come, read back to go
on.

In and out: `bench.source.jsonl` and `bench.checkpoint.jsonl` in the evidence folder. The first line
is a `BenchHeader`, each other one a `Measured`.

Easy to get wrong: repetitions of other bytes, other prompts, another vLLM, device or server
settings never meet in one file. The list of k and the list of loads are not in that line: a matrix
that grows by a k measures that k alone.
"""

from pathlib import Path
from typing import Any, Literal, NamedTuple

from ...checkpoints.fact import Count, Fact, NumDrafts
from ..facts.benched import Repetition, RequestForm
from ..facts.served import AsServed, Role
from . import line_file
from .line_file import KeptHeader


class MatrixPlace(NamedTuple):
    """One repetition of the matrix; `load` is requests in flight, and context."""

    k: int
    concurrency: int
    context: int
    number: int

    @property
    def load(self) -> tuple[int, int]:
        """Requests in flight, and context."""
        return self.concurrency, self.context


class Measured(Fact):
    """One repetition, under which load and k, and whether the checkpoint's own bytes were
    served.
    """

    k: NumDrafts
    concurrency: Count
    context: Count
    as_served: AsServed
    reason: str
    repetition: Repetition

    @property
    def place(self) -> MatrixPlace:
        """Where it belongs in the matrix."""
        return MatrixPlace(self.k, self.concurrency, self.context, self.repetition.number)


class BenchHeader(KeptHeader):
    """What was asked of what, how, by which vLLM and where; equal headers may share a file.

    Attributes:
        checkpoint_sha256: as `Identity.sha256`.
        words: further words for `vllm serve`.
        prompts_sha256: of all prompts.
        requests: for each load, as the user named it; 0 where it follows from the load.
    """

    line = Measured

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


Lines = line_file.LineFile[BenchHeader, Measured, Any]


def read_lines(path: Path) -> Lines:
    """See `line_file.read_lines`."""
    return line_file.read_lines(path, BenchHeader)
