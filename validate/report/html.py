"""report.html: one self-contained page from the content of report.json, and from nothing else.

In: a `FullReport`. Out: HTML with inline CSS and SVG, no script and no request; light, dark, on
paper and on a phone. Needs the `report` extra (jinja2, matplotlib); planning and checking do not.

Easy to get wrong: names in a report come from strangers' checkpoints. Everything is escaped; only
our own charts, whose labels matplotlib has escaped, go in as they are.
"""

import json
import re
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING

from ...checkpoints.files import write_whole
from ...recipes import extras
from ...recipes.errors import printable
from ..facts.benched import words_of
from ..facts.dry_load import DryLoad, gpu_title, places
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
    from markupsafe import Markup

    from .charts import charts, svg

    filters = {
        "quoted": _quoted,
        "broken": _broken,
        "ticked": _ticked,
        "gpu_title": gpu_title,
        "words_of": words_of,
    }
    runs = (
        [(model.role, run) for model in report.serve.served for run in model.runs]
        if report.serve
        else []
    )
    shared: dict[str, list[DryLoad]] = defaultdict(list)
    for load in report.dry:
        for name in load.draft.shared:
            shared[name].append(load)
    return template("report.html.j2", finalize=_shown, filters=filters, is_html=True).render(
        report=report,
        name=Path(report.path).name or report.path,
        charts={
            what: (chart.title, chart.alt, Markup(svg(chart)))  # noqa: S704 - our own chart, its labels escaped
            for what, chart in charts(report).items()
        },
        tables=tables,
        wanted=tables.wanted_filter(report),
        runs=runs,
        shared=[(name, places(where)) for name, where in sorted(shared.items())],
        partings=[(role, run.k, one) for role, run in runs for one in run.partings or ()],
        num_compared=sum(len(run.outputs) for _, run in runs if run.partings is not None),
    )


def _shown(value: object) -> object:
    """What the page prints for a value: a stranger's control characters and marks of direction as
    `\\x1b`.
    """
    return printable(value) if type(value) is str else value


def _broken(name: str) -> "Markup":
    """A name with break opportunities after its dots, underscores and humps, escaped."""
    from markupsafe import Markup, escape

    parts = re.split(r"(?<=[._/,])(?=[^._/,\s\d])|(?<=[a-z0-9])(?=[A-Z])", printable(name))
    return Markup("<wbr>").join(map(escape, parts))


def _ticked(words: str) -> "Markup":
    """A sentence, escaped, with the words between backticks as code."""
    from markupsafe import Markup, escape

    words = printable(words)
    parts = words.split("`")
    if len(parts) % 2 == 0:
        return escape(words)
    code = Markup("<code>{}</code>").format
    return Markup("").join(
        code(part) if spot % 2 else escape(part) for spot, part in enumerate(parts)
    )


def _quoted(text: str) -> str:
    """Text of a model on one line, with its line ends and quotes visible."""
    return printable(json.dumps(text, ensure_ascii=False))
