"""`keepmtp report`: report.json and the page made from it, for `check --html` and on its own.

In: what was measured, a checkpoint with an evidence folder, or an old report.json. Out: report.json
and report.html in one folder.

Easy to get wrong: the page needs the `report` extra. A command that will write one calls
`require_extra` before its work, not after ten minutes of it.
"""

import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..recipes.errors import printable

if TYPE_CHECKING:
    from ..checkpoints.source import Source
    from ..validate.facts.results import CheckData


def page(
    path: Annotated[
        Path,
        typer.Argument(
            help="A checkpoint's folder NAME, its results NAME.report, or a report.json."
        ),
    ],
    folder: Annotated[
        Path | None, typer.Option("--out", help="Where report.html goes; default beside it.")
    ] = None,
) -> None:
    """Make the HTML page of a report.json again: one file without scripts or requests, to send or
    to print.

    The page holds what report.json holds and nothing else. Of a checkpoint NAME or its NAME.report,
    report.json is made anew first, from the results that the stations left there.

    Example: `keepmtp report out/report.json --out pages`

    Example: `keepmtp report out/tiny-glm4-moe.w4a16-fp8`
    """
    from .. import api
    from ..validate.facts.results import results_of
    from ..validate.report.html import require_extra

    require_extra()
    page = api.report_page(api.report(path), folder or results_of(path) or path.parent)
    sys.stdout.write(f"{printable(str(page))}\n")


def save(
    folder: Path,
    found: "CheckData",
    *,
    vllm: str,
    opened: "Source | None" = None,
    source: "Source | None" = None,
    **measured: Any,
) -> Path:
    """Write report.json of one checkpoint, and report.html where it can be made; returns the one to
    look at.

    Args:
        folder: made if need be; an older report in it is replaced.
        found: the check, dry loads included.
        vllm: the version that judged, or that the rules describe.
        opened: the checkpoint; None where it could not be read.
        source: what it was made from, for sizes before and after.
        measured: more facts, as `assemble` names them.
    """
    from ..validate.facts.results import TIME
    from ..validate.report.check_data import check_data
    from ..validate.report.report import assemble, write

    data = check_data(found, opened=opened, source=source)
    return write(
        folder, assemble(data, vllm=vllm, made_at=datetime.now(UTC).strftime(TIME), **measured)
    )
