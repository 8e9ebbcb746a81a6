"""Every position of the text compared, a line a window: written as it comes, read back to go on, proof of the figures.

In and out: `closeness.jsonl` in the evidence folder. JSON lines, three kinds:

    {"compared": 1, asked, checkpoint_sha256, windows_sha256, num_windows, num_texts}
    {"window": 0, nats: [...], flips: [...], outside: [...], source_nll, checkpoint_nll, worst: {...}}
    {as_served, reason, seconds, repeated, "sitting": 1}

`nats` has a value for each position, `flips` the positions where the first choice is another. A server is a sitting;
its last line counts.

Easy to get wrong: a line is whole or cut off. What a crash leaves of the last one is removed, and its window asked
again.
"""

import hashlib
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import Field

from ...checkpoints.fact import Count, Fact, Figure
from ...checkpoints.kept_lines import KeptHeader, append_lines, open_kept, parse_line, read_kept
from ...recipes.errors import CheckpointError
from ..facts.closeness import HISTOGRAM_EDGES, NUM_WORST, Asked, SourceSitting, WorstFact

FILE = "closeness.jsonl"
_CURE = "Move the file away, and the checkpoint is asked again"


class ComparedHeader(KeptHeader):
    """What was compared; equal headers may share a file.

    Attributes:
        windows_sha256: of all token ids.
    """

    compared: Annotated[int, Field(ge=1, le=1)] = 1
    asked: Asked
    checkpoint_sha256: str
    windows_sha256: str
    num_windows: Annotated[int, Field(gt=0)]
    num_texts: Count


class ComparedWindow(Fact):
    """One window: `nats` and `outside` by position, `flips` the positions themselves, `worst` the one farthest off."""

    window: Count
    nats: Annotated[tuple[Figure, ...], Field(min_length=1)]
    flips: tuple[Count, ...]
    outside: tuple[Figure, ...]
    source_nll: Figure
    checkpoint_nll: Figure
    worst: WorstFact


class ComparedSitting(SourceSitting):
    """One server of the checkpoint."""

    sitting: Annotated[int, Field(gt=0)]


_Line = TypeVar("_Line", ComparedHeader, ComparedWindow, ComparedSitting)


class ComparedFile:
    """One file and what it holds.

    Attributes:
        windows, sittings: by number.
    """

    def __init__(self, path: Path, header: ComparedHeader) -> None:
        self.path = path
        self.header = header
        self.windows: dict[int, ComparedWindow] = {}
        self.sittings: dict[int, ComparedSitting] = {}

    @property
    def missing(self) -> tuple[int, ...]:
        """Windows that were not compared yet, ascending."""
        return tuple(number for number in range(self.header.num_windows) if number not in self.windows)

    def add(self, line: ComparedWindow | ComparedSitting) -> None:
        """Append one line; it is on the disk when this returns.

        Raises:
            CheckpointError: the disk does not take it. What it took before stays.
        """
        cure = "Make room: the same command goes on with what is not compared"
        append_lines(self.path, self.header.model_dump_json() + "\n", line.model_dump_json() + "\n", cure=cure)
        self.take(line)

    def take(self, line: ComparedWindow | ComparedSitting) -> None:
        """Hold a line that is in the file."""
        if isinstance(line, ComparedSitting):
            self.sittings[line.sitting] = line
        else:
            self.windows[line.window] = line

    def figures(self) -> dict[str, Any]:
        """Everything that follows from the lines alone: fields of a `ClosenessFact`. All windows must be there."""
        lines = [self.windows[number] for number in range(self.header.num_windows)]
        nats = [value for line in lines for value in line.nats]
        num, ordered = len(nats), sorted(nats)
        mean = math.fsum(nats) / num
        by_nats = sorted((line.worst for line in lines), key=lambda worst: (-worst.nats, worst.window))
        flips = sum(len(line.flips) for line in lines)
        return {
            "texts": self.header.num_texts,
            "windows": len(lines),
            "tokens": num,
            "outside": min(1.0, math.fsum(value for line in lines for value in line.outside) / num),
            "divergence": mean,
            "stderr": _stderr([(math.fsum(line.nats), len(line.nats)) for line in lines]),
            "median": _quantile(ordered, 0.5),
            "percentile_99": _quantile(ordered, 0.99),
            "flips": flips,
            "effective_tokens": _effective([(len(line.flips), len(line.nats)) for line in lines]),
            "histogram": _histogram(ordered),
            "worst": tuple(by_nats[:NUM_WORST]),
        }

    def perplexities(self) -> tuple[float, float]:
        """Of the source and of the checkpoint, per token of the text."""
        lines = self.windows.values()
        num = sum(len(line.nats) for line in lines)
        sums = math.fsum(line.source_nll for line in lines), math.fsum(line.checkpoint_nll for line in lines)
        return math.exp(sums[0] / num), math.exp(sums[1] / num)


def open_compared(path: Path, header: ComparedHeader) -> tuple[ComparedFile, Path | None]:
    """The file to go on with, and where one with another header has been set aside to.

    Raises:
        CheckpointError: a file that cannot be read.
    """
    return open_kept(path, header, read=read_compared, make=lambda: ComparedFile(path, header))


def read_compared(path: Path) -> ComparedFile:
    """Every line of a file.

    Raises:
        CheckpointError: no such file, a line that is none of the three kinds, or a window compared twice.
    """
    first, *others = read_kept(path, cure=_CURE)
    found = ComparedFile(path, _read(ComparedHeader, first, f"{path}:1"))
    for number, line in enumerate(others, 2):
        where = f"{path}:{number}"
        if line.startswith('{"window"'):
            window = _read(ComparedWindow, line, where)
            if window.window in found.windows or window.window >= found.header.num_windows:
                rule = f"must be one of {found.header.num_windows} windows, each once"
                raise CheckpointError(where, rule, got=f"window {window.window}", cure=_CURE)
            found.take(window)
        else:
            found.take(_read(ComparedSitting, line, where))
    return found


def sum_of(windows: Sequence[Sequence[int]]) -> str:
    """SHA-256 of all token ids."""
    return hashlib.sha256(json.dumps([list(each) for each in windows]).encode()).hexdigest()


# --- figures ----------------------------------------------------------------------------------------------------------


def _stderr(windows: Sequence[tuple[float, int]]) -> float | None:
    """Standard error of a mean over positions, from the sum and the number of positions of each window.

    The windows are the independent draws: the ratio estimator's error with clusters of unequal size (W. G. Cochran,
    Sampling Techniques, 1977, 2.11).
    """
    num = sum(size for _, size in windows)
    if len(windows) < 2:
        return None
    mean = math.fsum(total for total, _ in windows) / num
    squares = math.fsum((total - mean * size) ** 2 for total, size in windows)
    return math.sqrt(len(windows) / (len(windows) - 1) * squares) / num


def _effective(windows: Sequence[tuple[int, int]]) -> float:
    """Independent positions with the same error of a share, at most as many as there are.

    E. L. Korn, B. I. Graubard, "Confidence intervals for proportions with small expected number of positive counts
    estimated from survey data", Survey Methodology 24 (1998), 193-201.
    """
    num = sum(size for _, size in windows)
    share = sum(count for count, _ in windows) / num
    stderr = _stderr([(float(count), size) for count, size in windows])
    if not stderr or share in (0.0, 1.0):
        return float(num)
    return min(float(num), max(1.0, share * (1 - share) / stderr**2))


def _quantile(ordered: Sequence[float], share: float) -> float:
    """The least value that so large a share of the values does not exceed."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def _histogram(ordered: Sequence[float]) -> tuple[int, ...]:
    counts = [0] * (len(HISTOGRAM_EDGES) + 1)
    for value in ordered:
        counts[sum(value >= edge for edge in HISTOGRAM_EDGES)] += 1
    return tuple(counts)


# --- lines ------------------------------------------------------------------------------------------------------------


def _read(kind: type[_Line], line: str, where: str) -> _Line:
    return parse_line(kind, line, where, rule=f"must be a line of {FILE} ({kind.__name__})", cure=_CURE)
