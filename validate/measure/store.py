"""The files of what servers answered, a line each: written as it comes, read back to go on, proof
of the figures.

In: a header, which is the first line: all that the answers below depend on. Out: a `LineFile` in
the evidence folder, such as gsm8k.source.1a2b3c4d.jsonl. Further lines are answers, or say how a
server was doing:

    {"role": "source", "checkpoint_sha256": ..., "vllm": ..., "protocol": ...}
    {"question": 0, prompt_sha256, text, finish_reason, num_tokens, correct}         from 0
    {"drafts": 9, draft_tokens, ..., "sitting": 1, as_served, reason, has_all}

A server is a sitting; its last line counts. `correct`, by filter, is there once all questions are
answered; the file is then in order and changes no more.

Easy to get wrong: lines under another header say nothing under this one.
"""

import hashlib
import os
from collections.abc import Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any, ClassVar, Generic, Literal, TypeVar

from pydantic import ConfigDict, Field, ValidationError

from ...checkpoints import json_file
from ...checkpoints.fact import Count, Fact, Figure
from ...checkpoints.files import refuse_strange, unwritable, write_whole
from ...recipes.errors import CheckpointError, first_fault
from ...recipes.frozen import Json
from ..facts.benched import Repetition
from ..facts.rows import Arm
from ..facts.served import AsServed, Drafts, Output, counters, total

_CURE = "Move the file away, and what it held is measured again"


class Sitting(Drafts):
    """One server, with vLLM's counters over its answers, as far as they were read.

    Attributes:
        sitting: from 1.
        has_all: nothing was left to ask.
    """

    dropped = frozenset({"repeated", "seconds", "seconds_to_health"})

    sitting: int = Field(gt=0)
    as_served: AsServed
    reason: str
    has_all: bool = False


class Line(Fact):
    """What a server was asked once; `key` is the field that says in which place."""

    key: ClassVar[str]

    @property
    def place(self) -> Any:
        """Among what was asked."""
        return getattr(self, self.key)


class Answer(Line):
    """What a server wrote; `num_tokens` of it, and whether it ended by itself (stop) or was cut
    (length).

    Attributes:
        question: number of the request; further runs of a sampled task go on counting.
        correct: by filter.
    """

    key = "question"

    question: Count
    prompt_sha256: str
    text: str
    finish_reason: Literal["stop", "length"]
    num_tokens: Count
    correct: Mapping[str, bool] = Field(default_factory=dict)


class Continuation(Output, Line):
    """What a server wrote after one prompt, greedily."""

    key = "prompt"
    dropped = frozenset({"seconds"})

    prompt: Count

    @property
    def num_tokens(self) -> int:
        """That were generated."""
        return len(self.token_ids)


class PredictedWindow(Line):
    """A window of text whose predictions by the source are in a file of their own."""

    key = "window"

    window: Count
    ids: tuple[Count, ...]

    @property
    def num_tokens(self) -> int:
        """That were read."""
        return len(self.ids)


class ComparedWindow(Line):
    """One window: `nats` and `outside` by position, `flips` the positions themselves."""

    key = "window"

    window: Count
    nats: Annotated[tuple[Figure, ...], Field(min_length=1)]
    flips: tuple[Count, ...]
    outside: tuple[Figure, ...]
    source_nll: Figure
    checkpoint_nll: Figure

    @property
    def num_tokens(self) -> int:
        """That were read."""
        return len(self.nats) + 1


class Measured(Line):
    """One repetition, with how many requests in flight."""

    num_tokens: ClassVar[int] = 0  # a load's rate says nothing about another's

    concurrency: Count
    repetition: Repetition

    @property
    def place(self) -> tuple[int, int]:
        """Where it belongs in the matrix."""
        return self.concurrency, self.repetition.number


class Header(Fact):
    """What was asked of what, by which vLLM and where, and all else that answers depend on; equal
    headers may share a file.

    Attributes:
        checkpoint_sha256: of what was served, as `Identity.sha256`.
        words: further words for `vllm serve`.
        num: how many places there are, from 0; 0 where that is not known before.
    """

    model_config = ConfigDict(extra="allow")

    role: Arm
    checkpoint_sha256: str
    vllm: str
    device: str
    words: tuple[str, ...] = ()
    num: Count = 0


OneLine = TypeVar("OneLine", bound=Line)
KindOfLine = TypeVar("KindOfLine", bound=Fact)


class LineFile(Generic[OneLine]):
    """One file and what it holds.

    Attributes:
        lines: answers by place.
        sittings: servers by number, the last line of each.
        wanted: all places, in the order in which they are asked.
    """

    def __init__(self, path: Path, header: Header) -> None:
        self.path = path
        self.header = header
        self.lines = dict[Any, OneLine]()
        self.sittings = dict[int, Sitting]()
        self.wanted: Sequence[Any] = range(header.num)

    def in_order(self) -> list[OneLine]:
        """The lines of a finished file."""
        return [self.lines[place] for place in self.wanted]

    @property
    def missing(self) -> list[Any]:
        """Places without a line."""
        return [place for place in self.wanted if place not in self.lines]

    @property
    def counts(self) -> Json:
        """The draft counters of all servers, as fields of a fact."""
        return counters(total([*self.sittings.values()]))

    @property
    def served(self) -> Json:
        """How the last server was served, as fields of a fact."""
        newest = max(self.sittings.values(), key=attrgetter("sitting"))
        return {"as_served": newest.as_served, "reason": newest.reason}

    def add(self, line: Any) -> None:
        """Append one line; it is on the disk when this returns.

        Raises:
            CheckpointError: the disk does not take it. What it took before stays.
        """
        try:
            with open(self.path, "a", encoding="utf-8") as file:
                if not file.tell():
                    file.write(_text(self.header))
                file.write(_text(line))
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise unwritable(self.path, error) from error
        self.take(line)

    def take(self, line: Any) -> None:
        """Hold a line that is in the file."""
        if isinstance(line, Sitting):
            self.sittings[line.sitting] = line
        else:
            self.lines[line.place] = line


Samples = LineFile[Answer]
PredictedFile = LineFile[PredictedWindow]
ComparedFile = LineFile[ComparedWindow]


def finish(samples: Samples, right: Mapping[str, Sequence[bool]]) -> None:
    """Write a file of answers anew: in order, with what each filter says of every answer; then the
    servers.
    """
    text = _text(samples.header)
    for number in sorted(samples.lines):
        by_filter = {name: values[number] for name, values in right.items()}
        answer = samples.lines[number].model_copy(update={"correct": by_filter})
        samples.lines[number] = answer
        text += _text(answer)
    for number in sorted(samples.sittings):
        text += _text(samples.sittings[number])
    if samples.path.read_text(encoding="utf-8") != text:
        write_whole(samples.path, text)


def open_lines(folder: Path, name: str, kind: type[OneLine], header: Header) -> LineFile[OneLine]:
    """The file of such lines to go on with, whether it is there or not.

    Raises:
        CheckpointError: a file that cannot be read.
    """
    folder.mkdir(parents=True, exist_ok=True)
    # The name has the number of its header: what is asked otherwise, or of other bytes, has a file
    # of its own.
    number = sum_of(header.model_dump_json())[:8]
    path = folder / f"{name}.{number}.jsonl"
    refuse_strange(path, is_alone=True)
    if path.is_file():
        whole = path.read_bytes()
        # A killed process may leave a part of a line at the end. It is cut off before anything is
        # appended, or two lines would become one that nobody can read.
        end = whole.rfind(b"\n") + 1
        if end != len(whole):
            os.truncate(path, end)
        if end:
            return read_lines(path, kind)
    return LineFile(path, header)


def read_lines(path: Path, kind: type[OneLine]) -> LineFile[OneLine]:
    """Every line of a file.

    Raises:
        CheckpointError: no such file, or a line of another form.
    """
    rows = json_file.read_lines(path, cure=_CURE)
    where, first = next(rows, (path, None))
    found = LineFile[OneLine](path, _checked(Header, first, where))
    for where, row in rows:
        if isinstance(row, dict) and "sitting" in row:
            found.take(_checked(Sitting, row, where))
        else:
            found.take(_checked(kind, row, where))
    return found


def sum_of(text: str) -> str:
    """SHA-256 of a text."""
    return hashlib.sha256(text.encode()).hexdigest()


def _text(line: Fact) -> str:
    return line.model_dump_json(exclude=set(type(line).model_computed_fields)) + "\n"


def _checked(kind: type[KindOfLine], row: Any, where: object) -> KindOfLine:
    try:
        return kind.model_validate(row)
    except ValidationError as error:
        rule = f"must be a line that keepmtp wrote ({kind.__name__})"
        raise CheckpointError(where, rule, got=first_fault(error), cure=_CURE) from error
