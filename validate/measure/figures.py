"""What follows from the windows of a text that were compared.

In: a file of them. Out: fields of a `ClosenessFact`.

Easy to get wrong: positions of one window of text are not independent, so every error is taken over
windows.
"""

import math
from collections.abc import Sequence
from itertools import chain

from ...recipes.frozen import Json
from .store import ComparedFile


def closeness(file: ComparedFile) -> Json:
    """Fields of a `ClosenessFact`."""
    lines = file.in_order()
    sizes = [len(line.nats) for line in lines]
    flips = [len(line.flips) for line in lines]
    sums = [math.fsum(line.nats) for line in lines]
    outside = chain.from_iterable(line.outside for line in lines)
    num = sum(sizes)
    asked = file.header.model_dump(include={"text_sha256", "window", "top", "vocabulary"})
    return asked | {
        "windows": len(lines),
        "tokens": num,
        "outside": min(1.0, math.fsum(outside) / num),
        "divergence": math.fsum(chain.from_iterable(line.nats for line in lines)) / num,
        "stderr": _stderr(sums, sizes),
        "flips": sum(flips),
        "effective_tokens": _effective(flips, sizes),
    }


def _stderr(sums: Sequence[float], sizes: Sequence[int]) -> float | None:
    """Standard error of a mean over positions, from the sum and the number of positions of each
    window.

    The windows are the independent draws: the ratio estimator's error with clusters of unequal size
    (W. G. Cochran, Sampling Techniques, 1977, 2.11).
    """
    num = len(sizes)
    if num < 2:
        return None
    size = sum(sizes)
    mean = math.fsum(sums) / size
    squares = [(one - mean * of) ** 2 for one, of in zip(sums, sizes, strict=True)]
    return math.sqrt(num / (num - 1) * math.fsum(squares)) / size


def _effective(counts: Sequence[int], sizes: Sequence[int]) -> float:
    """Independent positions with the same error of a share, at most as many as there are.

    E. L. Korn, B. I. Graubard, "Confidence intervals for proportions with small expected number of
    positive counts estimated from survey data", Survey Methodology 24 (1998), 193-201.
    """
    num = sum(sizes)
    share = sum(counts) / num
    stderr = _stderr(counts, sizes)
    if not stderr or share in (0.0, 1.0):
        return float(num)
    return min(float(num), max(1.0, share * (1 - share) / stderr**2))
