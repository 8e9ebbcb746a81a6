"""`keepmtp card`: the model card of a checkpoint, from its measurements.

In: a checkpoint folder NAME with NAME.report. Out: NAME.card with README.md, plots, report.json,
report.html, and the score in the form of the Hub's leaderboards.

Easy to get wrong: a card does not mean that a checkpoint is good. One that failed its gates gets a
card too, which says so first; `keepmtp publish` refuses it.
"""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from ..recipes.errors import printable
from .options import JsonOption
from .progress import bytes_bar
from .tables import VERDICT_COLOURS, answer


def card(
    path: Annotated[
        Path,
        typer.Argument(help="The checkpoint's folder NAME; its measurements are in NAME.report."),
    ],
    base_model: Annotated[
        str | None,
        typer.Option(
            "--base-model",
            help="ORG/NAME on the Hub that it was made from, or `none`; default: what was read "
            "from the Hub.",
        ),
    ] = None,
    license_id: Annotated[
        str | None,
        typer.Option(
            "--license",
            help="As the Hub names it, like apache-2.0; default: what the source's own card says.",
        ),
    ] = None,
    source: Annotated[
        Path | None,
        typer.Option(
            help="Folder of what it was made from, for its license, language and "
            "task; default: what keepmtp.json names, if that is here."
        ),
    ] = None,
    folder: Annotated[
        Path | None, typer.Option("--out", help="Where the card goes; default NAME.card.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Write a checkpoint's model card: README.md, plots, the whole report, ready for `keepmtp
    publish`.

    Every number comes from the result files in NAME.report. A report that differs from them makes
    no card. The card says what was not measured, and what the gates say. It is made whether they
    pass or not; exit status 0.

    A base model is named only if it was read from the Hub. Otherwise the card says that
    --base-model is the author's word.

    Example: `keepmtp card /data/GLM-4.7-NVFP4A16 --base-model zai-org/GLM-4.7 --license mit`
    """
    from .. import api

    made, report = api.card(
        path,
        source=source,
        base_model=base_model,
        license_id=license_id,
        out=folder,
        progress=bytes_bar(Console(stderr=True), "reading"),
    )
    files = sorted(file.relative_to(made).as_posix() for file in made.rglob("*") if file.is_file())
    verdict, title = "not judged", Text("not judged", "yellow")
    if report.judgement:
        verdict = report.judgement.verdict
        title = Text(report.judgement.title, VERDICT_COLOURS[verdict])
    told = {"card": str(made), "files": files, "verdict": verdict, "says": report.verdict.says}
    says = Text.assemble("It says: ", title, f". {printable(report.verdict.says)}")
    answer(told, [f"{made}: {', '.join(files)}", says], as_json=as_json)
