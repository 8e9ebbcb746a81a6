"""The templates of the page and the card, with the filters that both have; and Markdown that shows
any string as it is.

In: a template's name, and how it escapes; strings of strangers' checkpoints, servers and recipes.
Out: the template, to be rendered, and `Md`: Markdown in which they are text or code, never markup:
no heading, link, image, HTML or table cell that the template does not have. Templates need the
`report` extra (jinja2).

Easy to get wrong: a template can forget to escape. So everything that it prints is escaped, unless
it is `Md` already. And a name that nobody passed is a mistake, and never an empty string.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...recipes.errors import size_in_words
from . import numbers

if TYPE_CHECKING:
    from jinja2 import Template
import re

from ...recipes.errors import printable

_FIGURES = (
    numbers.percent,
    numbers.signed,
    numbers.figure,
    numbers.count,
    numbers.limit,
    size_in_words,
)


def template(
    name: str,
    *,
    finalize: Callable[[Any], Any],
    filters: Mapping[str, Callable[..., Any]],
    is_html: bool = False,
    markup: Callable[[str], str] = str,
) -> "Template":
    """A template of this folder.

    Args:
        name: its file.
        finalize: what is printed for a value.
        filters: its own ones, besides those for figures.
        is_html: whether values are escaped for HTML.
        markup: makes a figure what `finalize` prints as it is.
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    def marked(figure: Callable[..., str]) -> Callable[..., str]:
        return lambda *values: markup(figure(*values))

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=is_html,  # noqa: S701 - the card's `finalize` escapes, for Markdown
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=not is_html,
        finalize=finalize,
    )
    for figure in _FIGURES:
        environment.filters[figure.__name__] = marked(figure)
    environment.filters |= filters
    return environment.get_template(name)


# An underscore between letters is one: `eh_proj`. An address in plain text would be a link.
_MARKUP = re.compile(r"([\\`*\[\]|~$]|:(?=//)|(?<=www)\.|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9]))")
# What makes a block where a line begins with it: list, heading, underline of a heading.
_BLOCK = re.compile(r"^(\d{1,9}(?=[.)](?:\s|$))|(?=[-+](?:\s|$)|#|[-=]{2}))(.)")
_ENTITIES = str.maketrans({"&": "&amp;", "<": "&lt;", ">": "&gt;"})


class Md(str):
    """Markdown, which a template prints as it is."""

    __slots__ = ()


def finalize(value: Any) -> Md:
    """What a template prints for a value."""
    if isinstance(value, Md):
        return value
    return escaped(str(value))


def escaped(text: str) -> Md:
    """Text on one line that reads as it is written, in a paragraph, a list or a table."""
    words = _MARKUP.sub(r"\\\1", _line(text).translate(_ENTITIES))
    return Md(_BLOCK.sub(lambda found: f"{found[1]}\\{found[2]}", words))


def code(text: str) -> Md:
    """Text on one line as code; a bar is escaped as tables want it."""
    line = _line(text).replace("|", "\\|")
    if not line:
        return Md("")
    fence = _fence(line, 1)
    if line.startswith("`") or line.endswith("`"):
        line = f" {line} "
    return Md(f"{fence}{line}{fence}")


def ticked(words: str) -> Md:
    """A sentence; the words between backticks are code."""
    parts = words.split("`")
    if len(parts) % 2 == 0:
        return escaped(words)
    spaced = []
    for spot, part in enumerate(parts):
        if spot % 2:
            spaced.append(code(part))
            continue
        before = part[:1].isspace()
        after = part[-1:].isspace() and not part.isspace()
        spaced.append(f"{' ' * before}{escaped(part)}{' ' * after}")
    return Md("".join(spaced))


def quoted(text: str) -> Md:
    """Text of a model or for one, as code with its line ends and quotes visible."""
    return code(numbers.quoted(text))


def fenced(text: str, language: str) -> Md:
    """A block of code as it is; characters that cannot be seen are shown as `\\x1b`."""
    shown = []
    for piece in re.split("([\n\t])", text):
        # Line ends and tabs are what a block of code is made of.
        shown.append(piece if piece in ("\n", "\t") else printable(piece))
    text = "".join(shown)
    fence = _fence(text, 3)
    return Md(f"{fence}{language}\n{text.rstrip()}\n{fence}")


def bare(text: str) -> Md:
    """Text on one line as it is, for the end of a line in a code block."""
    return Md(_line(text))


def _line(text: str) -> str:
    """One line, with control characters, marks of text direction and halves of surrogate pairs
    shown as `\\x1b`.
    """
    return printable(" ".join(text.split()))


def _fence(text: str, least: int) -> str:
    """More backticks than the text has in a row."""
    fence = "`" * least
    while fence in text:
        fence += "`"
    return fence
