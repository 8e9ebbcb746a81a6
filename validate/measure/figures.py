"""What follows from the files of answers alone, as fields of a result.

In: files whose answers are all there. Out: fields of an `EvaluatedFact`, a `DraftingFact` or a
`ClosenessFact`.

Easy to get wrong: another text with drafting is no fault by itself. And positions of one window of
text are not independent, so every error is taken over windows.
"""

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from operator import attrgetter
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
# Characters of a changed answer around the place where it parts.
_BEFORE = 60
_AFTER = 140


# --- tasks ----------------------------------------------------------------------------------------


def finish(samples: Samples, right: Mapping[str, Sequence[bool]]) -> None:
    """Put the lines in order, with what each filter says of every answer."""
    for number, answer in samples.lines.items():
        by_filter = {}
        for name, values in right.items():
            by_filter[name] = values[number]
        samples.lines[number] = answer.model_copy(update={"correct": by_filter})
    samples.put_in_order()


def correct(samples: Samples, name: str) -> tuple[bool, ...]:
    """Right or not by one filter, in the order of the numbers, once the file is finished."""
    return tuple([answer.correct[name] for answer in samples.in_order()])


def counted(samples: Samples) -> Json:
    """Fields of an `EvaluatedFact`."""
    num_truncated = 0
    num_empty = 0
    num_tokens = 0
    for answer in samples.lines.values():
        num_tokens += answer.num_tokens
        if answer.finish_reason == "length":
            num_truncated += 1
        if not answer.text.strip():
            num_empty += 1
    sittings = list(samples.sittings.values())
    return {
        "role": samples.header.role,
        "sha256": samples.header.checkpoint_sha256,
        "num_questions": len(samples.lines),
        "num_truncated": num_truncated,
        "num_empty": num_empty,
        "num_tokens": num_tokens,
        "seconds": sum([sitting.seconds for sitting in sittings]),
        "sittings": len(sittings),
        **counters(total(sittings)),
        **served(samples),
    }


def served(file: LineFile[Any, Any]) -> Json:
    """How the servers were served, as fields of a fact."""
    fullest = None
    for number in sorted(file.sittings):
        sitting = file.sittings[number]
        # One that drafts may have applied more cures than the last, and its reason names them.
        if fullest is None or len(sitting.reason) >= len(fullest.reason):
            fullest = sitting
    if fullest is None:
        return {}
    return {"as_served": fullest.as_served, "reason": fullest.reason}


def drafting(plain: Samples, drafted: Samples, filters: Sequence[str]) -> DraftingFact:
    """What drafting changed.

    Args:
        plain: finished answers with MTP off.
        drafted: finished answers with MTP on, to the same questions.
        filters: lm-eval's, of the task.
    """
    # A fault is one way of serving that is right more often than chance gives. vLLM issue 43559:
    # 20 % fewer right answers with prefix caching; issue 43650: 18 of 39 against 39 of 39, many
    # answers empty.
    switches = []
    for name in filters:
        switches.append(_switch(name, correct(plain, name), correct(drafted, name)))
    switches.append(_switch(NOT_EMPTY, _has_text(plain), _has_text(drafted)))
    # Greedy decoding promises the same text, but only up to rounding: a step of one token and a
    # step of several are computed by other kernels, and where two tokens are nearly as likely, the
    # last digit decides. So another text is counted and shown, and is no fault by itself.
    num_changed = 0
    shown = []
    for before, after in zip(plain.in_order(), drafted.in_order(), strict=True):
        if before.text == after.text:
            continue
        num_changed += 1
        if len(shown) < MOST_SHOWN:
            at = 0
            while before.text[at : at + 1] == after.text[at : at + 1]:
                at += 1
            changed = ChangedAnswer(
                question=before.question,
                plain=_around(before.text, at),
                drafting=_around(after.text, at),
            )
            shown.append(changed)
    return DraftingFact(switches=tuple(switches), num_changed=num_changed, changed=tuple(shown))


def _has_text(samples: Samples) -> list[bool]:
    """Of each answer, in the order of the questions."""
    return [answer.text.strip() != "" for answer in samples.in_order()]


def _switch(name: str, plain: Sequence[bool], drafted: Sequence[bool]) -> SwitchFact:
    """One reading of the answers with MTP off and on."""
    both, only_plain, only_drafting, neither = outcomes(plain, drafted)
    parted = []
    for number, (off, on) in enumerate(zip(plain, drafted, strict=True)):
        if off != on:
            parted.append(number)
    return SwitchFact(
        reads=name,
        both=both,
        only_plain=only_plain,
        only_drafting=only_drafting,
        neither=neither,
        chance=sign_test(only_plain, only_drafting),
        questions=tuple(parted[:MOST_NAMED]),
    )


def _around(text: str, at: int) -> str:
    """A text from a little before a place to a little after it."""
    start = max(0, at - _BEFORE)
    end = at + _AFTER
    part = text[start:end]
    if start:
        part = f"...{part}"
    if len(text) > end:
        part = f"{part}..."
    return part


# --- closeness ------------------------------------------------------------------------------------


def closeness(file: ComparedFile) -> Json:
    """Fields of a `ClosenessFact`."""
    sizes = []
    flips = []
    sums = []
    ordered = list[float]()
    outside = list[float]()
    worst = []
    for line in file.in_order():
        sizes.append(len(line.nats))
        flips.append(len(line.flips))
        sums.append(math.fsum(line.nats))
        ordered += line.nats
        outside += line.outside
        worst.append(line.worst)
    ordered.sort()
    worst.sort(key=attrgetter("nats"), reverse=True)  # of equal ones the first window stays first
    num = len(ordered)
    histogram = [0] * (len(HISTOGRAM_EDGES) + 1)
    for value in ordered:
        histogram[bisect_right(HISTOGRAM_EDGES, value)] += 1
    asked = file.header.model_dump(include={"text_sha256", "window", "top", "vocabulary"})
    return asked | {
        "texts": file.header.num_texts,
        "windows": len(sizes),
        "tokens": num,
        "outside": min(1.0, math.fsum(outside) / num),
        "divergence": math.fsum(ordered) / num,
        "stderr": _stderr(sums, sizes),
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
    header = file.header
    num = 0
    of_source = []
    of_checkpoint = []
    for line in file.lines.values():
        num += len(line.nats)
        of_source.append(line.source_nll)
        of_checkpoint.append(line.checkpoint_nll)
    before = math.exp(math.fsum(of_source) / num)
    after = math.exp(math.fsum(of_checkpoint) / num)
    return (
        {"sha256": header.source_sha256, "perplexity": before},
        {"sha256": header.checkpoint_sha256, "perplexity": after, "servers": servers(file)},
    )


def servers(file: LineFile[Any, Any]) -> tuple[SourceSitting, ...]:
    """Each server that was asked."""
    fields = set(SourceSitting.model_fields)
    found = []
    for sitting in file.sittings.values():
        found.append(SourceSitting(**sitting.model_dump(include=fields)))
    return tuple(found)


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
    squares = []
    for one, of in zip(sums, sizes, strict=True):
        squares.append((one - mean * of) ** 2)
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
