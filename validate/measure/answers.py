"""The answers to an evaluation, a line each: written as they come, read back to go on, proof of the
score at the end; and what drafting changes of them.

In and out: `gsm8k.source.jsonl`, `gsm8k.checkpoint.jsonl` and `gsm8k.plain.jsonl` in the evidence
folder. JSON lines, three kinds:

    {"samples": 1, role, protocol, dataset_sha256, prompts_sha256, num_questions, vllm, ...}
    {"question": 0, prompt_sha256, text, finish_reason, num_tokens, correct}        from 0
    {"sitting": 1, as_served, reason, seconds, drafts, draft_tokens, accepted_tokens, ...}

A server is a sitting; its last line counts. `correct`, by filter, is there once all are answered;
the file is then in order and changes no more.

Easy to get wrong: greedy decoding promises the same text with and without drafting, but only up to
rounding: a step of one token and a step of several are computed by other kernels, and where two
tokens are nearly as likely, the last digit decides. So another text is counted and shown, and is no
fault by itself. A fault is one way of serving that is right more often than chance gives (vLLM
issue 43559: 20 % fewer right answers with prefix caching; issue 43650: 18 of 39 against 39 of 39,
many answers empty).
"""

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from ...checkpoints.fact import Count, Fact, Share
from ...recipes.protocol import Evaluation
from ..facts.binomial import sign_test
from ..facts.evaluated import NOT_EMPTY, Arm, ChangedAnswer, DraftingFact, SwitchFact
from ..facts.paired import outcomes
from ..facts.served import Drafts, counters, total
from .line_file import KeptHeader, LineFile, SittingLine, read_lines

MOST_SHOWN = 5
"""So many changed answers have their texts in the result."""
MOST_NAMED = 20
"""So many questions are named for each reading."""
_BEFORE, _AFTER = 60, 140


class Answer(Fact):
    """What a server wrote; `num_tokens` of it, and whether it ended by itself (stop) or was cut
    (length).

    Attributes:
        question: number of the request; further runs of a sampled task go on counting.
        correct: by filter; a share from 0 to 1 where an answer can be partly right.
    """

    question: Count
    prompt_sha256: str
    text: str
    finish_reason: Literal["stop", "length"]
    num_tokens: Count
    correct: Mapping[str, bool | Share] = Field(default_factory=dict)

    @property
    def place(self) -> int:
        """Among the questions."""
        return self.question


class Sitting(Drafts, SittingLine):
    """One server, with vLLM's counters over its answers, as far as they were read."""


class Header(KeptHeader):
    """What was asked of what, and by which vLLM; equal headers may share a file.

    Attributes:
        dataset_sha256: of questions and reference answers.
        prompts_sha256: of all that is sent.
        checkpoint_sha256: as `Identity.sha256`.
        words: further words for `vllm serve`.
    """

    line = Answer
    sitting = Sitting

    samples: Literal[1] = 1
    role: Arm
    protocol: Evaluation
    dataset_sha256: str
    prompts_sha256: str
    num_questions: Annotated[int, Field(gt=0)]
    checkpoint_sha256: str
    vllm: str
    device: str
    words: tuple[str, ...] = ()

    @property
    def num(self) -> int:
        """Of questions."""
        return self.num_questions


Samples = LineFile[Header, Answer, Sitting]


def drafts_of(samples: Samples) -> Drafts:
    """vLLM's counters over all sittings."""
    return total(list(samples.sittings.values()))


def correct(samples: Samples, name: str) -> tuple[float, ...]:
    """Right or not by one filter, or a share, in the order of the numbers, once the file is
    finished.
    """
    numbers = range(samples.header.num_questions)
    return tuple(samples.lines[number].correct[name] for number in numbers)


def counted(samples: Samples) -> dict[str, Any]:
    """What follows from the lines alone: fields of an `EvaluatedFact`."""
    answers, sittings = samples.lines.values(), samples.sittings
    found = {
        "role": samples.header.role,
        "sha256": samples.header.checkpoint_sha256,
        "num_questions": len(answers),
        "num_truncated": sum(answer.finish_reason == "length" for answer in answers),
        "num_empty": sum(not answer.text.strip() for answer in answers),
        "num_tokens": sum(answer.num_tokens for answer in answers),
        "seconds": sum(sitting.seconds for sitting in sittings.values()),
        "sittings": len(sittings),
        **counters(drafts_of(samples)),
    }
    if sittings:
        last = sittings[max(sittings)]
        found |= {"as_served": last.as_served, "reason": last.reason}
    return found


def finish(samples: Samples, right: Mapping[str, Sequence[float]]) -> None:
    """Put the lines in order, with what each filter says of every answer."""
    for number, answer in samples.lines.items():
        by_filter = {name: values[number] for name, values in right.items()}
        samples.lines[number] = answer.model_copy(update={"correct": by_filter})
    samples.put_in_order()


def read_samples(path: Path) -> Samples:
    """See `line_file.read_lines`."""
    return read_lines(path, Header)


def drafting(plain: Samples, drafted: Samples, filters: Sequence[str]) -> DraftingFact:
    """What drafting changed.

    Args:
        plain: finished answers with MTP off.
        drafted: finished answers with MTP on, to the same questions.
        filters: lm-eval's, of the task.
    """
    numbers = range(plain.header.num_questions)
    texts = [[file.lines[number].text for number in numbers] for file in (plain, drafted)]
    readings = [(name, correct(plain, name), correct(drafted, name)) for name in filters]
    off, on = (tuple(bool(each.strip()) for each in side) for side in texts)
    readings.append((NOT_EMPTY, off, on))
    switches = []
    for name, off, on in readings:
        both, only_plain, only_drafting, neither = outcomes(off, on)
        parted = [number for number in numbers if off[number] != on[number]]
        switch = SwitchFact(
            reads=name,
            both=both,
            only_plain=only_plain,
            only_drafting=only_drafting,
            neither=neither,
            chance=sign_test(only_plain, only_drafting),
            questions=tuple(parted[:MOST_NAMED]),
        )
        switches.append(switch)
    changed = [
        _shown(number, *pair)
        for number, pair in enumerate(zip(*texts, strict=True))
        if pair[0] != pair[1]
    ]
    shown = tuple(changed[:MOST_SHOWN])
    return DraftingFact(switches=tuple(switches), num_changed=len(changed), changed=shown)


def _shown(question: int, plain: str, drafted: str) -> ChangedAnswer:
    """Both texts from a little before they part to a little after."""
    pairs, cut = enumerate(zip_longest(plain, drafted)), []
    at = next(at for at, (one, other) in pairs if one != other)
    start, end = max(0, at - _BEFORE), at + _AFTER
    for text in (plain, drafted):
        cut.append("..." * (start > 0) + text[start:end] + "..." * (len(text) > end))
    return ChangedAnswer(question=question, plain=cut[0], drafting=cut[1])
