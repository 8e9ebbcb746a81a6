"""A document in blocks, and the Markdown that shows any string of it as it is.

In: blocks, made of words of keepmtp and of strangers' checkpoints, servers and recipes. Out:
Markdown in which every word is text or code, never markup: no heading, link, image, HTML or table
cell that no block asked for. The card is this text, and the page is what a browser makes of it.

Easy to get wrong: the words between backticks are code, whoever wrote them. Whatever else a string
holds is escaped, unless it is `Md`.
"""

import re
from collections.abc import Iterable, Sequence

from ...recipes.errors import printable
from ...recipes.frozen import frozen


@frozen
class Table:
    """Words in rows, as many in each as there are columns; a head that begins with `>` is of
    numbers.
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


@frozen
class Code:
    """Lines that are shown as they are."""

    text: str
    language: str = ""


class Md(str):
    """Markdown, which is shown as it is."""

    __slots__ = ()


Block = str | list[str] | Table | Code
"""A paragraph, a list, a table, lines of code."""

# An underscore between letters is one: `eh_proj`. An address in plain text would be a link.
_MARKUP = re.compile(r"([\\`*\[\]~$]|:(?=//)|(?<=www)\.|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9]))")
# What makes a block where a line begins with it: list, heading, underline of a heading.
_BLOCK = re.compile(r"^(\d{1,9}(?=[.)](?:\s|$))|(?=[-+](?:\s|$)|#|[-=]{2}))(.)")
_ENTITIES = str.maketrans({"&": "&amp;", "<": "&lt;", ">": "&gt;"})


def markdown(blocks: Iterable[Block]) -> str:
    """The text of a document. Equal blocks give equal bytes."""
    return "\n\n".join([_text_of(block) for block in blocks]) + "\n"


def title(words: str, level: int = 2) -> Md:
    """A heading."""
    return Md(f"{'#' * level} {inline(words)}")


def picture(alt: str, address: str) -> Md:
    """An image at an address of keepmtp's own."""
    return Md(f"![{inline(alt)}]({address})")


def code(text: object) -> str:
    """A word that `inline` shows as code; "" for none."""
    word = " ".join(str(text).replace("`", "'").split())
    if not word:
        return ""
    return f"`{word}`"


def codes(words: Iterable[str]) -> str:
    """Names, each as code."""
    return ", ".join([code(word) for word in words])


def inline(words: str) -> str:
    """Text on one line that reads as it is written, with the words between backticks as code.

    Control characters, marks of text direction and halves of surrogate pairs show as `\\x1b`.
    """
    if isinstance(words, Md):
        return words
    line = printable(" ".join(words.split()))
    parts = line.split("`")
    if len(parts) % 2 == 0:  # one has no partner
        parts = [line]
    shown = ""
    for spot, part in enumerate(parts):
        if spot % 2:
            shown += f"`{part}`"
        else:
            shown += _MARKUP.sub(r"\\\1", part.translate(_ENTITIES))
    return _BLOCK.sub(r"\1\\\2", shown)


def _text_of(block: Block) -> str:
    if isinstance(block, str):
        return inline(block)
    if isinstance(block, list):
        return "\n".join([f"- {inline(words)}" for words in block])
    if isinstance(block, Table):
        return "\n".join(_lines_of(block))
    # Line ends and tabs are what a block of code is made of.
    text = re.sub(r"[^\n\t]+", lambda piece: printable(piece[0]), block.text.rstrip())
    fence = "```"
    while fence in text:
        fence += "`"
    return f"{fence}{block.language}\n{text}\n{fence}"


def _lines_of(table: Table) -> Iterable[str]:
    yield _row([column.lstrip(">") for column in table.columns])
    yield "".join(["|---:" if column.startswith(">") else "|---" for column in table.columns]) + "|"
    for row in table.rows:
        yield _row(row)


def _row(cells: Iterable[str]) -> str:
    shown = [inline(cell).replace("|", "\\|") for cell in cells]
    return f"| {' | '.join(shown)} |"
