"""`keepmtp gate`: the recipe's gates, from the measurements in NAME.report.

In: a checkpoint NAME with its results. Out: an exit status and a table of reasons.
"""

from pathlib import Path
from typing import Annotated

import typer

from .exits import OF_VERDICT
from .options import JsonOption
from .progress import bytes_bar
from .tables import answer, verdict


def gate(
    path: Annotated[Path, typer.Argument(help="Folder of the checkpoint, or its NAME.report.")],
    as_json: JsonOption = False,
) -> None:
    """Judge a checkpoint by its recipe's gates, from what was measured.

    The limits are those of the `gates` block in the recipe that the checkpoint was made by. A gate
    passes if its limit holds at the confidence named there; an estimate on the right side of the
    limit is not enough. Where something was not measured, or in too few samples, the table says
    `not measured`, and how many samples would do (`infeasible` in JSON).

    Exit status 0: pass. 1: regression. 3: too little was measured. 2: no result to judge, an
    altered one, or one of other bytes.

    \b
    Example: `keepmtp gate out/tiny-glm4-moe.w4a16-fp8`
    """
    from ..checkpoints.identity import identify, refuse_other_bytes
    from ..validate.facts.results import checkpoint_folder, report_folder
    from ..validate.report.report import of_checkpoint

    checkpoint = path
    if path.suffix == ".report":
        checkpoint = checkpoint_folder(path)
    # There is no verdict on numbers that were edited, which the seals of the results show...
    full = of_checkpoint(checkpoint)
    assert full.judgement is not None and full.identity is not None, "verify() has made both"
    folder = report_folder(checkpoint)
    # ... or on bytes that have changed since.
    now = identify(checkpoint, cache=folder, watch=bytes_bar("reading"))
    refuse_other_bytes(checkpoint, full.identity, now)
    judged = full.judgement
    found = {"path": full.path, "sha256": full.identity.sha256, **judged.model_dump(mode="json")}
    status = OF_VERDICT[judged.verdict]
    answer(found, verdict(full.path, judged), as_json=as_json, status=status)
