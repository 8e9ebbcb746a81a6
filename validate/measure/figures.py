"""What follows from the windows of a text that were compared.

In: a file of them, and the source's own. Out: fields of a `ClosenessFact`.

Easy to get wrong: positions of one window of text are not independent, so every error is taken over
windows.
"""

import math
from collections.abc import Sequence
from itertools import chain
from typing import Any

from ...recipes.frozen import Json
from ..facts.served import Role
from .store import ComparedFile, LineFile


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
        "texts": file.header.num_texts,
        "windows": len(lines),
        "tokens": num,
        "outside": min(1.0, math.fsum(outside) / num),
        "divergence": math.fsum(chain.from_iterable(line.nats for line in lines)) / num,
        "stderr": _stderr(sums, sizes),
        "flips": sum(flips),
        "effective_tokens": _effective(flips, sizes),
    }


def predicted(file: ComparedFile, source: LineFile[Any, Any]) -> tuple[Json, Json]:
    """Fields of the source's `PredictedFact` and of the checkpoint's; `source` is its own file."""
    lines = file.in_order()
    num = sum([len(line.nats) for line in lines])
    before = math.fsum([line.source_nll for line in lines])
    after = math.fsum([line.checkpoint_nll for line in lines])
    header = file.header
    return (
        _predicted(source, "source", header.source_sha256, before / num),
        _predicted(file, "checkpoint", header.checkpoint_sha256, after / num),
    )


def _predicted(file: LineFile[Any, Any], role: Role, sha256: str, nll: float) -> Json:
    sittings = file.sittings.values()
    repeated = [sitting.repeated for sitting in sittings if sitting.repeated is not None]
    return {
        "role": role,
        "sha256": sha256,
        "perplexity": math.exp(nll),
        "sittings": len(sittings),
        "seconds": file.seconds,
        "repeated": max(repeated, default=None),
        **file.served,
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
