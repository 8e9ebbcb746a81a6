"""report.html: one self-contained page from the content of report.json, and from nothing else.

In: a `FullReport`. Out: HTML with its style and pictures in it, no script and no request; light,
dark, on paper and on a phone. Needs the `report` extra (jinja2, matplotlib).

Easy to get wrong: names in a report come from strangers' checkpoints. Everything is escaped.
"""

import json
import re
from base64 import b64encode
from pathlib import Path
from typing import TYPE_CHECKING

from ...checkpoints.files import write_whole
from ...recipes import extras
from ...recipes.errors import printable
from ..facts.benched import words_of
from ..facts.dry_load import cured_in, gpu_title, versions_in_short
from ..facts.schema import FullReport
from . import tables
from .template import template

if TYPE_CHECKING:
    from markupsafe import Markup

HTML_FILE = "report.html"


def require_extra() -> None:
    """Refuse where the page cannot be made; called before the work whose result it would show.

    Raises:
        RecipeError: a package of the `report` extra is missing.
    """
    extras.require_extra("report.html", "report")


def write_html(folder: Path, report: FullReport) -> Path:
    """Write report.html into `folder`, replacing an older one at once; returns its path.

    Raises:
        RecipeError: the `report` extra is missing.
    """
    return write_whole(folder / HTML_FILE, render(report))


def render(report: FullReport) -> str:
    """The page. Equal reports give equal bytes.

    Raises:
        RecipeError: the `report` extra is missing.
    """
    require_extra()
    from .charts import charts

    filters = {
        "quoted": lambda text: printable(json.dumps(text, ensure_ascii=False)),
        "ticked": _ticked,
        "gpu_title": gpu_title,
        "words_of": words_of,
    }
    runs = []
    for model in report.serve.served if report.serve else ():
        runs += [(model.role, run) for run in model.runs]
    return template(
        "report.html.j2",
        # A stranger's control characters and marks of direction become `\x1b`.
        finalize=lambda value: printable(value) if type(value) is str else value,
        filters=filters,
        is_html=True,
    ).render(
        report=report,
        name=Path(report.path).name or report.path,
        charts={
            what: (chart.title, chart.alt, b64encode(chart.png).decode())
            for what, chart in charts(report).items()
        },
        tables=tables,
        cured_in=cured_in,
        versions=versions_in_short(report.dry),
        wanted=tables.wanted_filter(report),
        runs=runs,
    )


def _ticked(words: str) -> "Markup":
    """A sentence, escaped, with the words between backticks as code."""
    from markupsafe import Markup, escape

    words = str(escape(printable(words)))  # of a Markup, `re` would escape what it puts in
    return Markup(re.sub("`([^`]*)`", r"<code>\1</code>", words))  # noqa: S704 - escaped above
