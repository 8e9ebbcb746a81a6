"""The templates of the page and the card, with the filters that both have.

In: a template's name, and how it escapes. Out: the template, to be rendered. Needs the `report`
extra (jinja2).

Easy to get wrong: a name that nobody passed is a mistake, and never an empty string.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...recipes.errors import size_in_words
from . import numbers

if TYPE_CHECKING:
    from jinja2 import Template

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
    environment.filters |= {figure.__name__: marked(figure) for figure in _FIGURES} | dict(filters)
    return environment.get_template(name)
