"""report.html: one self-contained page from the content of report.json, and from nothing else.

In: a `FullReport`. Out: HTML with its style and pictures in it, no script and no request; light,
dark, on paper and on a phone. Needs the `report` extra (jinja2, matplotlib).

Easy to get wrong: names in a report come from strangers' checkpoints. Everything is escaped.
"""

from base64 import b64encode
from pathlib import Path
from typing import Any

from ...checkpoints.files import write_whole
from ...recipes import extras
from ...recipes.errors import printable
from ..facts.schema import FullReport
from .template import template

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
    # What needs the extra is imported once it is known to be there.
    from .charts import charts
    from .report_page import sections, ticked

    kind = "bad"
    if report.verdict.ok:
        kind = "good"
    drawn = {}
    for what, chart in charts(report).items():
        drawn[what] = (chart.title, chart.alt, b64encode(chart.png).decode())
    return template(
        "report.html.j2",
        finalize=_shown,
        filters={},
        is_html=True,
    ).render(
        report=report,
        name=Path(report.path).name or report.path,
        kind=kind,
        says=ticked(report.verdict.says),
        sections=sections(report, drawn),
        charts=drawn,
    )


def _shown(value: Any) -> Any:
    """A stranger's control characters and marks of direction become `\\x1b`."""
    if type(value) is str:  # what is markup has been made of such words
        return printable(value)
    return value
