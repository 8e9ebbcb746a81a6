"""`keepmtp gate`: the recipe's gates on what was measured of a checkpoint, as an exit status and a
table of reasons.

In: a checkpoint with its evidence folder NAME.report. Out: pass, regression, or what was not
measured.

Easy to get wrong: there is no verdict on numbers that were edited, or on bytes that have changed
since. Both are refused, with exit status 2, before anything is judged.
"""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from ..recipes.errors import CheckpointError
from .options import JsonOption
from .progress import bytes_bar
from .tables import answer, verdict

if TYPE_CHECKING:
    from ..validate.facts.schema import JudgementWord

TOO_LITTLE = 3
EXITS: "dict[JudgementWord, int]" = {"pass": 0, "regression": 1, "infeasible": TOO_LITTLE}


def gate(
    path: Annotated[Path, typer.Argument(help="Folder of the checkpoint, or its NAME.report.")],
    as_json: JsonOption = False,
) -> None:
    """Judge a checkpoint by its recipe's gates, from what was measured.

    The limits are those of the `gates` block in the recipe that the checkpoint was made by. A gate
    passes if its limit holds at the confidence named there; an estimate on the right side of the
    limit is not enough. Where something was not measured, or in too few samples, the table says
    which, and how many samples would do (`infeasible` in JSON).

    Exit status 0: pass. 1: regression. 3: too little was measured. 2: no result to judge, an
    altered one, or one of other bytes.

    Example: `keepmtp gate out/tiny-glm4-moe.w4a16-fp8`
    """
    from ..checkpoints.identity import identify, refuse_other_bytes
    from ..validate.facts.results import checkpoint_folder, report_folder
    from ..validate.report.report import JSON_FILE, verify

    folder = path
    if path.suffix != ".report":
        if not (path / "config.json").is_file():
            rule = "gates judge a checkpoint's folder"
            raise CheckpointError(path, rule, got="no config.json", cure="Name that folder")
        folder = report_folder(path)
    if not (folder / JSON_FILE).is_file():
        named = shlex.quote(str(folder.with_suffix("")))
        cure = f"Run `keepmtp check {named} --record` and `keepmtp eval {named}`"
        raise CheckpointError(
            folder, "gates judge what was measured", got=f"no {JSON_FILE}", cure=cure
        )
    full = verify(folder)
    assert full.judgement is not None and full.identity is not None, "verify() has made both"
    checkpoint, bar = checkpoint_folder(folder), bytes_bar(Console(stderr=True), "reading")
    refuse_other_bytes(checkpoint, full.identity, identify(checkpoint, cache=folder, watch=bar))
    told = {
        "path": full.path,
        "sha256": full.identity.sha256,
        **full.judgement.model_dump(mode="json"),
    }
    status = EXITS[full.judgement.verdict]
    answer(told, verdict(full.path, full.judgement), as_json=as_json, status=status)
