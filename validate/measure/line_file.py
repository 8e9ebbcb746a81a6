"""A file of what servers answered, a line each: written as it comes, read back to go on, proof of
the figures.

In: a header, which is the first line and says what kind the others are. Out: a `LineFile`.

Easy to get wrong: lines under another header say nothing under this one. Such a file is set aside
under the number of its header, and taken back when the same is asked again. And a killed process
may leave a part of a line at the end: it is cut off before anything is appended, or two lines would
become one that nobody can read.
"""

import hashlib
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

from pydantic import Field, ValidationError

from ...checkpoints.fact import Fact, Figure
from ...checkpoints.files import unwritable, write_whole
from ...checkpoints.json_file import read_bytes_of
from ...recipes.errors import CheckpointError, first_fault
from ..facts.served import AsServed

_CURE = "Move the file away, and what it held is measured again"


class KeptHeader(Fact):
    """The first line: all that the lines below depend on.

    Attributes:
        line: what the other lines are; each has a `place`.
        sitting: what a line about a server is; None where each line names its own.
    """

    line: ClassVar[type[Fact]]
    sitting: ClassVar[type[Fact] | None] = None

    @property
    def num(self) -> int:
        """How many places there are, from 0; 0 where the header does not say it."""
        return 0

    @property
    def digits(self) -> str:
        """Eight hexadecimal digits that tell headers apart."""
        return hashlib.sha256(self.model_dump_json().encode()).hexdigest()[:8]


class SittingLine(Fact):
    """One server, from 1: how it was served, and seconds of asking so far. Its last line counts."""

    sitting: int = Field(gt=0)
    as_served: AsServed
    reason: str
    seconds: Figure


Head = TypeVar("Head", bound=KeptHeader)
Line = TypeVar("Line", bound=Fact)
Sat = TypeVar("Sat", bound=Fact)


class LineFile(Generic[Head, Line, Sat]):
    """One file and what it holds.

    Attributes:
        lines: by place.
        sittings: servers by number, the last line of each.
    """

    def __init__(self, path: Path, header: Head) -> None:
        self.path, self.header = path, header
        self.lines: dict[Any, Line] = {}
        self.sittings: dict[int, Sat] = {}

    @property
    def missing(self) -> tuple[int, ...]:
        """Places without a line, ascending, where the header says how many there are."""
        return tuple(place for place in range(self.header.num) if place not in self.lines)

    def add(self, line: Line | Sat) -> None:
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
        if "sitting" in type(line).model_fields:
            self.sittings[line.sitting] = line
        else:
            self.lines[line.place] = line

    def put_in_order(self) -> None:
        """Write the file anew: lines by place, then the servers."""
        text = _text(self.header)
        for held in (self.lines, self.sittings):
            text += "".join(_text(held[place]) for place in sorted(held))
        if self.path.read_text(encoding="utf-8") != text:
            write_whole(self.path, text)


def open_lines(
    path: Path, header: Head, say: Callable[[str], None] = lambda _: None
) -> LineFile[Head, Any, Any]:
    """The file to go on with; one of another header that is in its place is set aside.

    Without a file of its own, a run takes the finished one of another checkpoint's evidence folder
    that has the same
    header: one release is quantized in several ways, and its answers are the same for all of them.

    Args:
        say: called with a sentence on what was set aside, or taken.

    Raises:
        CheckpointError: a file that cannot be read.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_file():
        whole = path.read_bytes()
        end = whole.rfind(b"\n") + 1
        if end != len(whole):
            os.truncate(path, end)
        if end:
            found = read_lines(path, type(header))
            if found.header == header:
                return found
            aside = _aside(path, found.header)
            os.replace(path, aside)
            say(f"What was asked otherwise, or of other bytes, is kept in {aside.name}.")
    if (kept := _aside(path, header)).is_file():
        os.replace(kept, path)
        return read_lines(path, type(header))
    others = path.parent.parent.glob(f"*.report/{path.name}")
    for other in sorted(others if path.parent.suffix == ".report" else ()):
        with suppress(CheckpointError):  # another run may be writing it
            found = read_lines(other, type(header))
            if found.header == header and header.num and not found.missing:
                write_whole(path, other.read_text(encoding="utf-8"))
                came = other.parent.name
                say(f"The same was asked before: {path.name} is taken from {came}.")
                return read_lines(path, type(header))
    return LineFile(path, header)


def read_lines(path: Path, kind: type[Head]) -> LineFile[Head, Any, Any]:
    """Every line of a file.

    Raises:
        CheckpointError: no such file, a line of another form, or a place that is there twice.
    """
    try:
        # Not splitlines, which knows other ends.
        lines = read_bytes_of(path, path, cure=_CURE).decode().split("\n")
    except UnicodeDecodeError as error:
        rule = "must be a file of lines of text"
        raise CheckpointError(path, rule, got=str(error), cure=_CURE) from error
    if lines.pop():
        got = "a part of a line"
        raise CheckpointError(path, "must end with a line's end", got=got, cure=_CURE)
    first, *others = lines or [""]
    found = LineFile(path, _parsed(kind, first, f"{path}:1"))
    for number, text in enumerate(others, 2):
        where = f"{path}:{number}"
        # A quotation mark within a text is written with a backslash: no text looks like this key.
        if kind.sitting and '"sitting":' in text:
            found.take(_parsed(kind.sitting, text, where))
            continue
        line: Any = _parsed(kind.line, text, where)
        num = found.header.num
        if line.place in found.lines or (num and line.place >= num):
            rule = "must be of a place that was asked for, and is there once"
            raise CheckpointError(where, rule, got=line.place, cure=_CURE)
        found.take(line)
    return found


def _text(line: Fact) -> str:
    return line.model_dump_json(exclude=set(type(line).model_computed_fields)) + "\n"


def _parsed(kind: type[Line], text: str, where: str) -> Line:
    try:
        return kind.model_validate_json(text)
    except ValidationError as error:
        rule = f"must be a line that keepmtp wrote ({kind.__name__})"
        raise CheckpointError(where, rule, got=first_fault(error), cure=_CURE) from error


def _aside(path: Path, header: KeptHeader) -> Path:
    return path.with_name(f"{path.stem}.{header.digits}{path.suffix}")
