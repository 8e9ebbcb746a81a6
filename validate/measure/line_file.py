"""A file of what servers answered, a line each: written as it comes, read back to go on, proof of the figures.

In: a header, which is the first line, and a `LineForm`, which says what the others are. Out: a `LineFile`.

Easy to get wrong: lines under another header say nothing under this one. Such a file is set aside under the number of
its header, and taken back when the same is asked again. And a line that a crash has left without its end is cut off.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from ...checkpoints.fact import Fact
from ...checkpoints.kept_lines import KeptHeader, append_lines, open_kept, parse_line, read_kept
from ...recipes.errors import CheckpointError

Head = TypeVar("Head", bound=KeptHeader)
Line = TypeVar("Line", bound=Fact)
Sat = TypeVar("Sat", bound=Fact)


@dataclass(frozen=True, slots=True, kw_only=True)
class LineForm(Generic[Head, Line, Sat]):
    """What the lines of one kind of file are, and what is said of those that cannot be read.

    Attributes:
        header, line: their types.
        sitting: of a line about a server; None where each line names its own.
        begins: how a line that is no sitting begins.
        place: of a line among those that are asked.
        num: how many are asked, where the header says it.
        rule: of a line of some type.
        once: rule for a place that is there twice, or that nobody asked; `{}` is the number of places.
        named: a place in words.
        again: what happens once the file is moved away.
        left: what the same command does once there is room on the disk.
        text: a line as JSON.
    """

    header: type[Head]
    line: type[Line]
    sitting: type[Sat] | None = None
    begins: str = ""
    place: Callable[[Line], Any]
    num: Callable[[Head], int | None]
    rule: Callable[[type[Fact]], str]
    once: str
    named: str
    again: str
    left: str
    text: Callable[[Fact], str] = Fact.model_dump_json


class LineFile(Generic[Head, Line, Sat]):
    """One file and what it holds.

    Attributes:
        lines: by place.
        sittings: servers by number, the last line of each.
    """

    def __init__(self, path: Path, header: Head, form: LineForm[Head, Line, Sat]) -> None:
        self.path, self.header, self.form = path, header, form
        self.lines: dict[Any, Line] = {}
        self.sittings: dict[int, Sat] = {}

    @property
    def missing(self) -> tuple[int, ...]:
        """Places without a line, ascending, where the header says how many there are."""
        return tuple(place for place in range(self.form.num(self.header) or 0) if place not in self.lines)

    def add(self, line: Line | Sat) -> None:
        """Append one line; it is on the disk when this returns.

        Raises:
            CheckpointError: the disk does not take it. What it took before stays.
        """
        first, text = (self.form.text(each) + "\n" for each in (self.header, line))
        append_lines(self.path, first, text, cure=f"Make room: the same command {self.form.left}")
        self.take(line)

    def take(self, line: Any) -> None:
        """Hold a line that is in the file."""
        if isinstance(line, self.form.line):
            self.lines[self.form.place(line)] = line
        else:
            self.sittings[line.sitting] = line


def open_lines(
    path: Path, header: Head, form: LineForm[Head, Line, Sat]
) -> tuple[LineFile[Head, Line, Sat], Path | None]:
    """The file to go on with, and where one with another header has been set aside to.

    Raises:
        CheckpointError: a file that cannot be read.
    """
    return open_kept(
        path, header, read=lambda found: read_lines(found, form), make=lambda: LineFile(path, header, form)
    )


def read_lines(path: Path, form: LineForm[Head, Line, Sat]) -> LineFile[Head, Line, Sat]:
    """Every line of a file.

    Raises:
        CheckpointError: no such file, a line of another form, or a place that is there twice.
    """
    cure = f"Move the file away, and {form.again}"
    first, *others = read_kept(path, cure=cure)
    header = parse_line(form.header, first, f"{path}:1", rule=form.rule(form.header), cure=cure)
    found, num = LineFile(path, header, form), form.num(header)
    for number, text in enumerate(others, 2):
        where = f"{path}:{number}"
        if form.sitting and not text.startswith(form.begins):
            found.take(parse_line(form.sitting, text, where, rule=form.rule(form.sitting), cure=cure))
            continue
        line = parse_line(form.line, text, where, rule=form.rule(form.line), cure=cure)
        place = form.place(line)
        if place in found.lines or (num is not None and place >= num):
            raise CheckpointError(where, form.once.format(num), got=form.named.format(place), cure=cure)
        found.take(line)
    return found
