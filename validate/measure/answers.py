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
from typing import Annotated, Literal

from pydantic import Field

from ...checkpoints.fact import Count, Fact, Share
from ...checkpoints.files import write_whole
from ...checkpoints.kept_lines import KeptHeader
from ...recipes.errors import CheckpointError
from ...recipes.protocol import Evaluation
from ..facts.evaluated import Arm
from ..facts.served import AsServed, Drafts, total
from .line_file import LineFile, LineForm, open_lines, read_lines


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
    finish_reason: Literal["stop", "length"]
    num_tokens: Count
    correct: Mapping[str, bool | Share] = Field(default_factory=dict)


class Sitting(Drafts):
    """One server: how it was served, seconds of asking, and vLLM's counters over them, as far as they were read."""

    sitting: Annotated[int, Field(gt=0)]
    as_served: AsServed
    reason: str
    seconds: Annotated[float, Field(ge=0)]


def _text(line: Fact) -> str:
    """JSON: the fields of its kind first, then the counters; no computed figure."""
    kind = type(line)
    values = line.model_dump(mode="json", exclude=set(kind.model_computed_fields))
    own = [name for name in kind.__annotations__ if name in values]
    return json.dumps({name: values[name] for name in dict.fromkeys((*own, *values))})


Samples = LineFile[Header, Answer, Sitting]
FORM = LineForm(
    header=Header,
    line=Answer,
    sitting=Sitting,
    begins='{"question"',
    place=lambda answer: answer.question,
    num=lambda header: header.num_questions,
    rule=lambda kind: f"must be a line of answers ({kind.__name__.lower()})",
    once="must answer one of {} questions, each once",
    named="question {}",
    again="its questions are asked again",
    left="goes on with what has no answer yet",
    text=_text,
)


def drafts_of(samples: Samples) -> Drafts:
    """vLLM's counters over all sittings."""
    return total(list(samples.sittings.values()))


def correct(samples: Samples, name: str) -> tuple[float, ...]:
    """Right or not by one filter, or a share, in the order of the numbers, once the file is finished."""
    return tuple(samples.lines[number].correct[name] for number in range(samples.header.num_questions))


def finish(samples: Samples, right: Mapping[str, Sequence[float]]) -> None:
    """Put the lines in order, with what each filter says of every answer."""
    for number, answer in sorted(samples.lines.items()):
        by_filter = {name: values[number] for name, values in right.items()}
        samples.lines[number] = answer.model_copy(update={"correct": by_filter})
    lines: list[Fact] = [samples.header]
    lines += [samples.lines[number] for number in sorted(samples.lines)]
    lines += [samples.sittings[number] for number in sorted(samples.sittings)]
    text = "".join(f"{_text(line)}\n" for line in lines)
    if samples.path.read_text(encoding="utf-8") != text:
        write_whole(samples.path, text)


def open_samples(path: Path, header: Header) -> tuple[Samples, Path | None]:
    """See `line_file.open_lines`."""
    return open_lines(path, header, FORM)


def read_samples(path: Path) -> Samples:
    """See `line_file.read_lines`."""
    return read_lines(path, FORM)


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
