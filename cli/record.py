"""`keepmtp check --record`: keeps what a check found, together with the hashes of the files that it
checked.

In: one local checkpoint, and what was found in it. Out: check.json in NAME.report, and report.json
and report.html of all results there.

Easy to get wrong: the files are hashed before the check, so that a file that changes meanwhile does
not count as checked. Results of other bytes are refused before that, not after a dry load.
"""

from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from ..checkpoints.identity import identify
from ..checkpoints.source import open_source
from ..checkpoints.source_of import folder_it_was_made_from
from ..recipes.errors import RecipeError
from ..validate.check.check import Checked
from ..validate.facts.results import report_folder, write_result
from ..validate.facts.vllm_env import TESTED
from ..validate.report import report as reports
from ..validate.report.check_data import check_data
from .progress import bytes_bar


def recorder(paths: list[str], err: Console) -> Callable[[Checked], Path]:
    """Hash the one checkpoint that is going to be checked.

    Returns: called with what was found, it writes that and the report of all results, and returns
    its path.

    Raises:
        RecipeError: several checkpoints, or a Hub id.
        CheckpointError: the folder of results holds results of other bytes.
    """
    if len(paths) != 1 or not Path(paths[0]).is_dir():
        rule, cure = (
            "keeps the check of one folder",
            "Run it for each, on a checkpoint that lies here",
        )
        raise RecipeError("--record", rule, got=" ".join(paths), cure=cure)
    checkpoint = Path(paths[0])
    folder = report_folder(checkpoint)
    identity = identify(checkpoint, cache=folder, watch=bytes_bar(err, "reading"))
    reports.refuse_stale(folder, identity, but=("check",))

    def keep(checked: Checked) -> Path:
        made_from = folder_it_was_made_from(checkpoint)
        source = None if made_from is None else open_source(str(made_from))
        data = check_data(checked.data, opened=checked.source, source=source)
        write_result(folder, "check", data, checkpoint=identity, vllm=TESTED[0])
        reports.refresh(folder, measured="check")
        return folder / reports.JSON_FILE

    return keep
