"""The answers to an evaluation, a line each: written as they come, read back to go on, proof of the
score at the end.

In and out: `gsm8k.source.jsonl`, `gsm8k.checkpoint.jsonl` and `gsm8k.plain.jsonl` in the evidence
folder. JSON lines, three kinds:

    {"samples": 1, role, protocol, dataset_sha256, prompts_sha256, num_questions, vllm, ...}
    {"question": 0, prompt_sha256, text, finish_reason, num_tokens, correct}  a question
    {"sitting": 1, as_served, reason, seconds, drafts, draft_tokens, accepted_tokens, ...}

A server is a sitting; its last line counts. `correct`, by filter, is there once all are answered;
the file is then in order and changes no more.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from ...checkpoints.fact import Count, Fact, Share
from ...recipes.protocol import Evaluation
from ..facts.evaluated import Arm
from ..facts.served import Drafts, total
from .line_file import KeptHeader, LineFile, SittingLine, read_lines


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
    return tuple(
        samples.lines[number].correct[name] for number in range(samples.header.num_questions)
    )


def finish(samples: Samples, right: Mapping[str, Sequence[float]]) -> None:
    """Put the lines in order, with what each filter says of every answer."""
    for number, answer in samples.lines.items():
        by_filter = {name: values[number] for name, values in right.items()}
        samples.lines[number] = answer.model_copy(update={"correct": by_filter})
    samples.put_in_order()


def read_samples(path: Path) -> Samples:
    """See `line_file.read_lines`."""
    return read_lines(path, Header)
