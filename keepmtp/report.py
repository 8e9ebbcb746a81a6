"""`keepmtp report`: report.json and the page made from it, for `check --html`, `serve-check` and on its own.

In: what the stations found, or an old report.json. Out: report.json and report.html in one folder.

Easy to get wrong: the page needs the `report` extra. Who is going to write one calls `require_extra` before the work,
not after ten minutes of it.
"""

import sys
from pathlib import Path
from typing import Annotated

import typer

from .quantize.source import Source
from .recipes.errors import RecipeError
from .validate.acceptance import ServeReport
from .validate.evidence import Evidence
from .validate.findings import Report
from .validate.report import assemble, calibration_of, read_json, sizes_by_group, write_json
from .validate.report_html import write_html


def page(
    path: Annotated[Path, typer.Argument(help="A report.json.")],
    folder: Annotated[Path | None, typer.Option("--out", help="Where report.html goes; default beside it.")] = None,
) -> None:
    """Make the HTML page of a report.json again: one file without scripts or requests, to send or to print.

    The page holds what report.json holds and nothing else; nothing is checked again.

    Example: `keepmtp report out/report.json --out pages`
    """
    sys.stdout.write(f"{write_html(folder or path.parent, read_json(path))}\n")


def save(
    folder: Path, found: Report, *, vllm: str, evidence: Evidence | None = None, opened: Source | None = None,
    source: Source | None = None, serve: ServeReport | None = None,
) -> Path:  # fmt: skip
    """Write report.json and report.html of one checkpoint; returns the page's path.

    Args:
        folder: made if need be; an older report in it is replaced.
        found: the check's report, dry loads included.
        vllm: the version that judged, or that the rules describe.
        evidence, opened: the checkpoint's, from `validate.static.examine`; None where it could not be read.
        source: what it was made from, for sizes before and after.
        serve: a real server's report.

    Raises:
        RecipeError: the `report` extra is missing.
    """
    sizes, calibration, absent = (), None, {}
    try:
        if opened is None:
            absent["sizes"] = "No sizes: the checkpoint's headers could not be read."
            absent["calibration"] = "Not known: the checkpoint could not be read."
        else:
            calibration, absent["calibration"] = calibration_of(opened)
            sizes = sizes_by_group(opened, source)
    except RecipeError as unknown:
        absent["sizes"] = f"No sizes: {unknown}"
    full = assemble(found, vllm=vllm, evidence=evidence, sizes=sizes, calibration=calibration, serve=serve,
                    absent=absent)  # fmt: skip
    write_json(folder, full)
    return write_html(folder, full)
