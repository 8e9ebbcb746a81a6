"""How an answer looks: lines, tables, and JSON on standard output.

In: values, in words. Out: what rich prints. Nothing is decided here.

Easy to get wrong: a name may be a stranger's. What is printed is text, never rich's markup, and
moves no cursor.
"""

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import typer
from rich import box
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from ..recipes.errors import printable

if TYPE_CHECKING:
    from ..validate.facts.schema import JudgementFact
    from ..validate.facts.settle import JudgementWord, ReasonFact
    from ..validate.report.tables import Table as Rows

VERDICT_COLOURS: "Mapping[JudgementWord, str]" = {
    "pass": "green",
    "regression": "red",
    "infeasible": "yellow",
}


# Where everything goes that is not the answer.
ERR = Console(stderr=True)


def is_live() -> bool:
    """Whether a line of standard error may be written over: FORCE_COLOR makes no terminal."""
    return ERR.file.isatty() or ERR.is_jupyter


def write_over(line: str, *, stays: bool = False) -> None:
    """A line on standard error, in the place of the last one that does not stay."""
    width = ERR.width - 1
    ERR.file.write(f"\r{printable(line)[:width]:<{width}}")
    if stays:
        ERR.file.write("\n")
    ERR.file.flush()


def clear() -> None:
    """Remove the line that does not stay. A notebook prints elsewhere."""
    if ERR.file.isatty():
        ERR.file.write("\r\x1b[2K")


def tell(line: str | Text, style: str = "") -> None:
    """One line on standard error."""
    say(ERR, line, style)


def say(console: Console, line: str | Text, style: str = "") -> None:
    """One line as it is, fit for a terminal, which may wrap it."""
    clear()
    if isinstance(line, str):
        line = Text(printable(line), style)
    console.print(line, highlight=False, soft_wrap=True)


def answer(
    value: object, parts: Iterable[RenderableType], *, as_json: bool, status: int = 0
) -> None:
    """Print the answer of a verb, and end with its status.

    Args:
        value: for machines: one JSON value on a line, which may hold facts.
        parts: for people; a string is a line. Made only if it is printed.
        as_json: which of them is printed.
        status: of the process, if it is not 0.
    """
    clear()
    if as_json:
        sys.stdout.write(json.dumps(value, default=_plain) + "\n")
    else:
        show(parts)
    if status:
        raise typer.Exit(status)


def show(parts: Iterable[RenderableType], console: Console | None = None) -> None:
    """Print an answer for people, on standard output; a string is a line."""
    out = console or Console()
    for part in parts:
        if isinstance(part, str | Text):
            say(out, part)
        else:
            out.print(part)


def _plain(value: object) -> object:
    from pydantic_core import to_jsonable_python

    return to_jsonable_python(value)


def in_words(value: object) -> str:
    """A JSON value for people, on one line; what is null or empty is left out."""
    if isinstance(value, Mapping):
        said = [
            f"{name} {in_words(part)}" for name, part in value.items() if part not in (None, "")
        ]
        return ", ".join(said)
    if isinstance(value, list | tuple):
        return "; ".join(map(in_words, value)) or "none"
    if isinstance(value, bool):
        return ("no", "yes")[value]
    return str(value)


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str | Text] | None]) -> Table:
    """The one look of keepmtp's tables.

    Args:
        title: above it.
        columns: heads; one that begins with `>` is of numbers: to the right and never broken, its
            last word on a line of its own.
        rows: a cell a column; None draws a line.
    """
    made = Table(
        title=Text(printable(title)),
        title_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
        show_header=any(columns),
    )
    for column in columns:
        if column.startswith(">"):
            head = "\n".join(column[1:].rsplit(" ", 1))
            made.add_column(head, justify="right", no_wrap=True)
        else:
            made.add_column(column, overflow="fold")
    for row in rows:
        if row is None:
            made.add_section()
            continue
        cells = []
        for cell in row:
            if isinstance(cell, str):
                cell = Text(printable(cell))
            cells.append(cell)
        made.add_row(*cells)
    return made


def drawn(title: str, rows: "Rows") -> Table:
    """The rows that terminal, page and card have in common."""
    return table(title, rows.columns, rows.rows)


def verdict(path: str, judged: "JudgementFact") -> list[RenderableType]:
    """A row for each gate of a checkpoint, then the verdict."""
    rows = [(reason.gate, _verdict(reason), reason.says) for reason in judged.reasons]
    return [table(f"gate {path}", ("gate", "verdict", "reason"), rows), _verdict(judged)]


def _verdict(judged: "JudgementFact | ReasonFact") -> Text:
    return Text(judged.title, VERDICT_COLOURS[judged.verdict])


def by_reason(pairs: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Each reason once, with the names of what has it."""
    names_of: dict[str, dict[str, None]] = {}
    for reason, name in pairs:
        names_of.setdefault(reason, {})[name] = None
    return {reason: ", ".join(names) for reason, names in names_of.items()}
