"""`keepmtp card`: the model card in NAME.card, of the measurements in NAME.report.

In: a checkpoint NAME with its results. Out: a folder with the card, its page and its plot.
"""

from pathlib import Path
from typing import Annotated

import typer

from .options import JsonOption
from .progress import bytes_bar
from .tables import answer, in_words


def card(
    path: Annotated[Path, typer.Argument(help="The checkpoint's folder NAME.")],
    base_model: Annotated[
        str | None, typer.Option(help="ORG/NAME that it was made from, or `none`.")
    ] = None,
    license_id: Annotated[
        str | None, typer.Option("--license", help="As the Hub names it, like apache-2.0.")
    ] = None,
    source: Annotated[
        Path | None, typer.Option(help="Its release, for license, language and task.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="The card's folder, not NAME.card.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Write a checkpoint's model card: README.md, the same as an HTML page, a plot and the whole
    report, ready for `keepmtp publish`.

    Every number comes from the result files in NAME.report. No card is made from a report that
    differs from them. The card says what was not measured, and what the gates say. It is made
    whether they pass or not; exit status 0.

    A base model is named only if it was read from the Hub. Otherwise the card says that
    --base-model is the author's word. Without --license, the license is that of the source's own
    card. Without --source, the source is the folder that keepmtp.json names.

    \b
    Example: `keepmtp card /data/GLM-4.7-NVFP4A16 --base-model zai-org/GLM-4.7 --license mit`
    """
    from .. import api

    made, report = api.card(
        path,
        source=source,
        base_model=base_model,
        license_id=license_id,
        out=out,
        progress=bytes_bar("reading"),
    )
    files = sorted(file.relative_to(made).as_posix() for file in made.rglob("*") if file.is_file())
    # A checkpoint that failed its gates gets a card too, which says so first; `keepmtp publish`
    # refuses it.
    judged = report.judgement
    found = {"card": str(made), "files": files, "verdict": judged.verdict, "says": judged.says}
    answer(found, [in_words(found)], as_json=as_json)
