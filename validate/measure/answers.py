"""The answers to an evaluation, a line each: written as they come, read back to go on, proof of the score at the end.

In and out: `gsm8k.source.jsonl`, `gsm8k.checkpoint.jsonl` and `gsm8k.plain.jsonl` in the evidence folder. JSON lines,
three kinds:

    {"samples": 1, role, protocol, dataset_sha256, prompts_sha256, num_questions, checkpoint_sha256, vllm, ...}
    {"question": 0, prompt_sha256, text, finish_reason, num_tokens, correct}        a question, numbered from 0
    {"sitting": 1, as_served, reason, seconds, drafts, draft_tokens, accepted_tokens, accepted_per_position}

A server is a sitting; its last line counts. `correct`, by filter, is there once all are answered; the file is then in
order and changes no more.

Easy to get wrong: answers of another protocol, of other bytes or from another vLLM never meet in one file. An older
file is set aside under the number of its first line, and taken back when the same is asked again.
"""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Literal, TypeVar

from pydantic import Field

from ...checkpoints.fact import Count, Fact, Share
from ...checkpoints.files import write_whole
from ...checkpoints.kept_lines import KeptHeader, append_lines, open_kept, parse_line, read_kept
from ...recipes.errors import CheckpointError
from ...recipes.protocol import Evaluation
from ..facts.evaluated import Arm
from ..facts.served import AsServed, Drafts, total

FinishReason = Literal["stop", "length"]

_CURE = "Move the file away, and its questions are asked again"


class Header(KeptHeader):
    """What was asked of what, and by which vLLM; equal headers may share a file.

    Attributes:
        dataset_sha256: of questions and reference answers.
        prompts_sha256: of all that is sent.
        checkpoint_sha256: as `Identity.sha256`.
        words: further words for `vllm serve`.
    """

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


class Answer(Fact):
    """What a server wrote; `num_tokens` of it, and whether it ended by itself (stop) or was cut (length).

    Attributes:
        question: number of the request; further runs of a sampled task go on counting.
        correct: by filter; a share from 0 to 1 where an answer can be partly right.
    """

    question: Count
    prompt_sha256: str
    text: str
    finish_reason: FinishReason
    num_tokens: Count
    correct: Mapping[str, bool | Share] = Field(default_factory=dict)


class Sitting(Drafts):
    """One server: how it was served, seconds of asking, and vLLM's counters over them, as far as they were read."""

    sitting: Annotated[int, Field(gt=0)]
    as_served: AsServed
    reason: str
    seconds: Annotated[float, Field(ge=0)]


_Kind = TypeVar("_Kind", Header, Answer, Sitting)


class Samples:
    """One file and what it holds.

    Attributes:
        answers: by question.
        sittings: by number, the last line of each.
    """

    def __init__(self, path: Path, header: Header) -> None:
        self.path = path
        self.header = header
        self._first = _text(header)
        self.answers: dict[int, Answer] = {}
        self.sittings: dict[int, Sitting] = {}

    @property
    def missing(self) -> tuple[int, ...]:
        """Questions without an answer, ascending."""
        return tuple(number for number in range(self.header.num_questions) if number not in self.answers)

    @property
    def drafts(self) -> Drafts:
        """vLLM's counters over all sittings."""
        return total(list(self.sittings.values()))

    def correct(self, name: str) -> tuple[float, ...]:
        """Right or not by one filter, or a share, in the order of the numbers, once the file is finished."""
        return tuple(self.answers[number].correct[name] for number in range(self.header.num_questions))

    def add(self, line: Answer | Sitting) -> None:
        """Append one line; it is on the disk when this returns.

        Raises:
            CheckpointError: the disk does not take it. What it took before stays.
        """
        cure = "Make room: the same command goes on with what has no answer yet"
        append_lines(self.path, self._first, _text(line), cure=cure)
        self._take(line)

    def finish(self, correct: Mapping[str, Sequence[float]]) -> None:
        """Put the lines in order, with what each filter says of every answer."""
        for number, answer in sorted(self.answers.items()):
            by_filter = {name: right[number] for name, right in correct.items()}
            self.answers[number] = answer.model_copy(update={"correct": by_filter})
        lines: list[Fact] = [self.header]
        lines += [self.answers[number] for number in sorted(self.answers)]
        lines += [self.sittings[number] for number in sorted(self.sittings)]
        text = "".join(map(_text, lines))
        if self.path.read_text(encoding="utf-8") != text:
            write_whole(self.path, text)

    def _take(self, line: Answer | Sitting) -> None:
        if isinstance(line, Sitting):
            self.sittings[line.sitting] = line
        else:
            self.answers[line.question] = line


def open_samples(path: Path, header: Header) -> tuple[Samples, Path | None]:
    """The file to go on with, and where one with another header has been set aside to.

    A line that a crash has left without its end, the last, is cut off.

    Raises:
        CheckpointError: a file that cannot be read as samples.
    """
    return open_kept(path, header, read=read_samples, make=lambda: Samples(path, header))


def take_from_sibling(path: Path, header: Header) -> Path | None:
    """Copy a finished file of the same header from another checkpoint's evidence folder, where there is none here.

    One release is quantized in several ways, and its answers are the same for all of them.

    Returns: the folder it came from, or None.
    """
    if path.exists() or path.parent.suffix != ".report":
        return None
    for other in sorted(path.parent.parent.glob(f"*.report/{path.name}")):
        with suppress(CheckpointError):  # another run may be writing it
            found = read_samples(other)
            if found.header == header and not found.missing:
                write_whole(path, other.read_text(encoding="utf-8"))
                return other.parent
    return None


def read_samples(path: Path) -> Samples:
    """Every line of a file.

    Raises:
        CheckpointError: no such file, a line that is none of the three kinds, or a question answered twice.
    """
    first, *others = read_kept(path, cure=_CURE)
    found = Samples(path, _read(Header, first, f"{path}:1"))
    for number, line in enumerate(others, 2):
        where = f"{path}:{number}"
        if line.startswith('{"sitting"'):
            found._take(_read(Sitting, line, where))
            continue
        answer = _read(Answer, line, where)
        if answer.question in found.answers or answer.question >= found.header.num_questions:
            rule = f"must answer one of {found.header.num_questions} questions, each once"
            raise CheckpointError(where, rule, got=f"question {answer.question}", cure=_CURE)
        found._take(answer)
    return found


def _read(kind: type[_Kind], line: str, where: str) -> _Kind:
    return parse_line(kind, line, where, rule=f"must be a line of answers ({kind.__name__.lower()})", cure=_CURE)


def _text(line: Fact) -> str:
    """One line of JSON: the fields of its kind first, then the counters; no computed figure."""
    kind = type(line)
    values = line.model_dump(mode="json", exclude=set(kind.model_computed_fields))
    own = [name for name in kind.__annotations__ if name in values]
    return json.dumps({name: values[name] for name in dict.fromkeys((*own, *values))}) + "\n"
