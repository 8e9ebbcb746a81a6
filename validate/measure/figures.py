"""What follows from the files of answers alone, as fields of a result.

In: files whose answers are all there. Out: fields of an `EvaluatedFact`, a `DraftingFact` or a
`ClosenessFact`.

Easy to get wrong: greedy decoding promises the same text with and without drafting, but only up to
rounding: a step of one token and a step of several are computed by other kernels, and where two
tokens are nearly as likely, the last digit decides. So another text is counted and shown, and is no
fault by itself. A fault is one way of serving that is right more often than chance gives (vLLM
issue 43559: 20 % fewer right answers with prefix caching; issue 43650: 18 of 39 against 39 of 39,
many answers empty). And positions of one window of text are not independent, so every error is
taken over windows.
"""

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

from ...recipes.frozen import Json
from ..facts.binomial import sign_test
from ..facts.closeness import HISTOGRAM_EDGES, NUM_WORST, SourceSitting
from ..facts.evaluated import NOT_EMPTY, ChangedAnswer, DraftingFact, SwitchFact
from ..facts.paired import outcomes
from ..facts.served import counters, total
from .store import ComparedFile, LineFile, Samples

MOST_SHOWN = 5
"""So many changed answers have their texts in the result."""
MOST_NAMED = 20
"""So many questions are named for each reading."""
_BEFORE, _AFTER = 60, 140


# --- tasks ----------------------------------------------------------------------------------------


def finish(samples: Samples, right: Mapping[str, Sequence[bool]]) -> None:
    """Put the lines in order, with what each filter says of every answer."""
    for number, answer in samples.lines.items():
        by_filter = {name: values[number] for name, values in right.items()}
        samples.lines[number] = answer.model_copy(update={"correct": by_filter})
    samples.put_in_order()


def correct(samples: Samples, name: str) -> tuple[bool, ...]:
    """Right or not by one filter, in the order of the numbers, once the file is finished."""
    return tuple(answer.correct[name] for answer in samples.in_order())


def counted(samples: Samples) -> Json:
    """Fields of an `EvaluatedFact`."""
    answers = samples.lines.values()
    sittings = [*samples.sittings.values()]
    found = {
        "role": samples.header.role,
        "sha256": samples.header.checkpoint_sha256,
        "num_questions": len(answers),
        "num_truncated": sum(answer.finish_reason == "length" for answer in answers),
        "num_empty": sum(not answer.text.strip() for answer in answers),
        "num_tokens": sum(answer.num_tokens for answer in answers),
        "seconds": sum(sitting.seconds for sitting in sittings),
        "sittings": len(sittings),
        **counters(total(sittings)),
    }
    return found | served(samples)


def served(file: LineFile[Any, Any]) -> Json:
    """How the servers were served, as fields of a fact: one that drafts may have applied more cures
    than the last.
    """
    if not file.sittings:
        return {}
    told = max(file.sittings.values(), key=lambda each: (len(each.reason), each.sitting))
    return told.model_dump(include={"as_served", "reason"})


def drafting(plain: Samples, drafted: Samples, filters: Sequence[str]) -> DraftingFact:
    """What drafting changed.

    Args:
        plain: finished answers with MTP off.
        drafted: finished answers with MTP on, to the same questions.
        filters: lm-eval's, of the task.
    """
    numbers = range(plain.header.num)
    readings = {}
    for name in filters:
        readings[name] = correct(plain, name), correct(drafted, name)
    texts = [(plain.lines[number].text, drafted.lines[number].text) for number in numbers]
    has_text = [[bool(text.strip()) for text in side] for side in zip(*texts, strict=True)]
    readings[NOT_EMPTY] = has_text[0], has_text[1]
    switches = []
    for name, (off, on) in readings.items():
        both, only_plain, only_drafting, neither = outcomes(off, on)
        parted = [number for number in numbers if off[number] != on[number]]
        switches.append(
            SwitchFact(
                reads=name,
                both=both,
                only_plain=only_plain,
                only_drafting=only_drafting,
                neither=neither,
                chance=sign_test(only_plain, only_drafting),
                questions=tuple(parted[:MOST_NAMED]),
            )
        )
    changed = [number for number in numbers if texts[number][0] != texts[number][1]]
    shown = []
    for number in changed[:MOST_SHOWN]:
        # Both texts from a little before they part to a little after.
        pairs = enumerate(zip_longest(*texts[number]))
        at = next(at for at, (one, other) in pairs if one != other)
        start = max(0, at - _BEFORE)
        end = at + _AFTER
        cut = []
        for text in texts[number]:
            cut.append("..." * (start > 0) + text[start:end] + "..." * (len(text) > end))
        shown.append(ChangedAnswer(question=number, plain=cut[0], drafting=cut[1]))
    return DraftingFact(switches=tuple(switches), num_changed=len(changed), changed=tuple(shown))


# --- closeness ------------------------------------------------------------------------------------


def closeness(file: ComparedFile) -> Json:
    """Fields of a `ClosenessFact`."""
    lines = file.in_order()
    sizes = [len(line.nats) for line in lines]
    flips = [len(line.flips) for line in lines]
    ordered = sorted(value for line in lines for value in line.nats)
    num = len(ordered)
    histogram = [0] * (len(HISTOGRAM_EDGES) + 1)
    for value in ordered:
        histogram[bisect_right(HISTOGRAM_EDGES, value)] += 1
    worst = sorted((line.worst for line in lines), key=lambda each: (-each.nats, each.window))
    outside = math.fsum(value for line in lines for value in line.outside)
    asked = file.header.model_dump(include={"text_sha256", "window", "top", "vocabulary"})
    return asked | {
        "texts": file.header.num_texts,
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


def predicted(file: ComparedFile) -> tuple[Json, Json]:
    """What the lines give of the source's `PredictedFact` and of the checkpoint's: bytes, and
    perplexity per token of the text.
    """
    lines = file.lines.values()
    header = file.header
    num = sum(len(line.nats) for line in lines)
    before = math.exp(math.fsum(line.source_nll for line in lines) / num)
    after = math.exp(math.fsum(line.checkpoint_nll for line in lines) / num)
    return (
        {"sha256": header.source_sha256, "perplexity": before},
        {"sha256": header.checkpoint_sha256, "perplexity": after, "servers": servers(file)},
    )


def servers(file: LineFile[Any, Any]) -> tuple[SourceSitting, ...]:
    """Each server that was asked."""
    fields = set(SourceSitting.model_fields)
    return tuple(
        SourceSitting(**each.model_dump(include=fields)) for each in file.sittings.values()
    )


def _stderr(sums: Sequence[float], sizes: Sequence[int]) -> float | None:
    """Standard error of a mean over positions, from the sum and the number of positions of each
    window.

    The windows are the independent draws: the ratio estimator's error with clusters of unequal size
    (W. G. Cochran, Sampling Techniques, 1977, 2.11).
    """
    num = len(sizes)
    size = sum(sizes)
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
    share = sum(counts) / num
    stderr = _stderr(counts, sizes)
    if not stderr or share in (0.0, 1.0):
        return float(num)
    return min(float(num), max(1.0, share * (1 - share) / stderr**2))
