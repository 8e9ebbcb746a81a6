"""Every position of the text compared, a line a window: written as it comes, read back to go on,
proof of the figures.

In and out: `closeness.jsonl` in the evidence folder. JSON lines, three kinds:

    {"compared": 1, asked, checkpoint_sha256, windows_sha256, num_windows, num_texts}
    {"window": 0, nats: [...], flips: [...], outside: [...], source_nll, checkpoint_nll, worst:
    {...}} {"sitting": 1, as_served, reason, seconds, repeated}

`nats` has a value for each position, `flips` the positions where the first choice is another. A
server is a sitting; its last line counts.

Easy to get wrong: positions of one window are not independent, so every error is taken over
windows.
"""

import hashlib
import json
import math
from bisect import bisect_right
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from ...checkpoints.fact import Count, Fact, Figure
from ..facts.closeness import HISTOGRAM_EDGES, NUM_WORST, Asked, WorstFact
from .line_file import KeptHeader, LineFile, SittingLine, read_lines

FILE = "closeness.jsonl"


class ComparedWindow(Fact):
    """One window: `nats` and `outside` by position, `flips` the positions themselves, `worst` the
    one farthest off.
    """

    window: Count
    nats: Annotated[tuple[Figure, ...], Field(min_length=1)]
    flips: tuple[Count, ...]
    outside: tuple[Figure, ...]
    source_nll: Figure
    checkpoint_nll: Figure
    worst: WorstFact

    @property
    def place(self) -> int:
        """Among the windows."""
        return self.window


class ComparedSitting(SittingLine):
    """One server of the checkpoint; `repeated` as in `SourceSitting`."""

    repeated: Figure | None = None


class ComparedHeader(KeptHeader):
    """What was compared; equal headers may share a file.

    Attributes:
        windows_sha256: of all token ids.
    """

    line = ComparedWindow
    sitting = ComparedSitting

    compared: Annotated[int, Field(ge=1, le=1)] = 1
    asked: Asked
    checkpoint_sha256: str
    windows_sha256: str
    num_windows: Annotated[int, Field(gt=0)]
    num_texts: Count

    @property
    def num(self) -> int:
        """Of windows."""
        return self.num_windows


ComparedFile = LineFile[ComparedHeader, ComparedWindow, ComparedSitting]


def read_compared(path: Path) -> ComparedFile:
    """See `line_file.read_lines`."""
    return read_lines(path, ComparedHeader)


def figures(found: ComparedFile) -> dict[str, Any]:
    """Everything that follows from the lines alone: fields of a `ClosenessFact`.

    All windows must be there.
    """
    lines = [found.lines[number] for number in range(found.header.num_windows)]
    sizes = [len(line.nats) for line in lines]
    flips = [len(line.flips) for line in lines]
    ordered = sorted(value for line in lines for value in line.nats)
    num, histogram = len(ordered), [0] * (len(HISTOGRAM_EDGES) + 1)
    for value in ordered:
        histogram[bisect_right(HISTOGRAM_EDGES, value)] += 1
    worst = sorted((line.worst for line in lines), key=lambda each: (-each.nats, each.window))
    outside = math.fsum(value for line in lines for value in line.outside)
    return {
        "texts": found.header.num_texts,
        "windows": len(lines),
        "tokens": num,
        "outside": min(1.0, outside / num),
        "divergence": math.fsum(ordered) / num,
        "stderr": _stderr([math.fsum(line.nats) for line in lines], sizes),
        "median": ordered[math.ceil(0.5 * num) - 1],
        "percentile_99": ordered[math.ceil(0.99 * num) - 1],
        "flips": sum(flips),
        "effective_tokens": _effective(flips, sizes),
        "histogram": tuple(histogram),
        "worst": tuple(worst[:NUM_WORST]),
    }


def perplexities(found: ComparedFile) -> tuple[float, float]:
    """Of the source and of the checkpoint, per token of the text."""
    lines = found.lines.values()
    num = sum(len(line.nats) for line in lines)
    sums = (
        math.fsum(line.source_nll for line in lines),
        math.fsum(line.checkpoint_nll for line in lines),
    )
    return math.exp(sums[0] / num), math.exp(sums[1] / num)


def sum_of(windows: Sequence[Sequence[int]]) -> str:
    """SHA-256 of all token ids."""
    return hashlib.sha256(json.dumps([list(each) for each in windows]).encode()).hexdigest()


def _stderr(sums: Sequence[float], sizes: Sequence[int]) -> float | None:
    """Standard error of a mean over positions, from the sum and the number of positions of each
    window.

    The windows are the independent draws: the ratio estimator's error with clusters of unequal size
    (W. G. Cochran, Sampling Techniques, 1977, 2.11).
    """
    num, size = len(sizes), sum(sizes)
    if num < 2:
        return None
    mean = math.fsum(sums) / size
    squares = math.fsum((one - mean * of) ** 2 for one, of in zip(sums, sizes, strict=True))
    return math.sqrt(num / (num - 1) * squares) / size


def _effective(counts: Sequence[int], sizes: Sequence[int]) -> float:
    """Independent positions with the same error of a share, at most as many as there are.

    E. L. Korn, B. I. Graubard, "Confidence intervals for proportions with small expected number of
    positive counts estimated from survey data", Survey Methodology 24 (1998), 193-201.
    """
    num = sum(sizes)
    share, stderr = sum(counts) / num, _stderr(counts, sizes)
    if not stderr or share in (0.0, 1.0):
        return float(num)
    return min(float(num), max(1.0, share * (1 - share) / stderr**2))
