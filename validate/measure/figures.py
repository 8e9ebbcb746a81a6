"""What follows from the files of answers alone, as fields of a result.

In: files whose answers are all there. Out: fields of an `EvaluatedFact` or a `ClosenessFact`.

Easy to get wrong: positions of one window of text are not independent, so every error is taken over
windows.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import chain
from operator import attrgetter
from typing import Any

from ...recipes.frozen import Json
from ..facts.served import Role, counters, total
from .store import ComparedFile, LineFile, Samples

# --- tasks ----------------------------------------------------------------------------------------


def finish(samples: Samples, right: Mapping[str, Sequence[bool]]) -> None:
    """Put the lines in order, with what each filter says of every answer."""
    for number, answer in samples.lines.items():
        by_filter = {name: values[number] for name, values in right.items()}
        samples.lines[number] = answer.model_copy(update={"correct": by_filter})
    samples.put_in_order()


def correct(samples: Samples, name: str) -> tuple[bool, ...]:
    """Right or not by one filter, in the order of the numbers, once the file is finished."""
    return tuple([answer.correct[name] for answer in samples.in_order()])


def counted(samples: Samples) -> Json:
    """Fields of an `EvaluatedFact`."""
    answers = samples.lines.values()
    sittings = list(samples.sittings.values())
    return {
        "role": samples.header.role,
        "sha256": samples.header.checkpoint_sha256,
        "num_questions": len(answers),
        "num_truncated": sum([answer.finish_reason == "length" for answer in answers]),
        "num_empty": sum([not answer.text.strip() for answer in answers]),
        "num_tokens": sum([answer.num_tokens for answer in answers]),
        "seconds": sum([sitting.seconds for sitting in sittings]),
        "sittings": len(sittings),
        **counters(total(sittings)),
        **served(samples),
    }


def served(file: LineFile[Any, Any]) -> Json:
    """How the servers were served, as fields of a fact."""
    # One that drafts may have applied more cures than the others, and its reason names them.
    sittings = sorted(file.sittings.values(), key=attrgetter("sitting"), reverse=True)
    if not sittings:
        return {}
    fullest = max(sittings, key=lambda sitting: len(sitting.reason))
    return {"as_served": fullest.as_served, "reason": fullest.reason}


# --- closeness ------------------------------------------------------------------------------------


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
        "seconds": sum([sitting.seconds for sitting in sittings]),
        "repeated": max(repeated, default=None),
        **served(file),
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
