"""`keepmtp check --record`: keeps what a check found, together with the hashes of the files that it checked.

In: one local checkpoint, and what `validate.check.check` or `validate.dryload.check_on` found in it. Out: check.json in
NAME.report, and report.json and report.html of all results there.

Easy to get wrong: the files are hashed before the check, so that a file that changes meanwhile does not count as
checked. Results of other bytes are refused before that, not after a dry load.
"""

from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from ..checkpoints.identity import Identity, identify
from ..checkpoints.source import Source, open_source
from ..checkpoints.source_of import recorded_source
from ..recipes.errors import RecipeError
from ..validate.check.check import Checked
from ..validate.facts.results import report_folder, write_result
from ..validate.facts.vllm_env import TESTED
from ..validate.report import report as reports
from ..validate.report.check_data import check_data
from .progress import bytes_bar


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """A check that has begun: the folder of its results, and the identity of the files."""

    folder: Path
    identity: Identity

    def keep(self, checked: Checked) -> Path:
        """Write check.json and the report of all results; return the path of report.json."""
        source = None if checked.source is None else _source_of(checked.source)
        data = check_data(checked.data, opened=checked.source, source=source)
        write_result(self.folder, "check", data, checkpoint=self.identity, vllm=TESTED[0])
        reports.refresh(self.folder, measured="check")
        return self.folder / reports.JSON_FILE


def begin(paths: list[str]) -> Record:
    """Hash the one checkpoint that is going to be checked.

    Raises:
        RecipeError: several checkpoints, or a Hub id.
        CheckpointError: the folder of results holds results of other bytes.
    """
    if len(paths) != 1 or not Path(paths[0]).is_dir():
        raise RecipeError(
            "--record",
            "keeps the check of one folder",
            got=" ".join(paths),
            cure="Run it for each, on a checkpoint that lies here",
        )
    checkpoint = Path(paths[0])
    folder = report_folder(checkpoint)
    identity = identify(checkpoint, cache=folder, watch=bytes_bar(Console(stderr=True), "reading"))
    reports.refuse_stale(folder, identity, but=("check",))
    return Record(folder=folder, identity=identity)


def _source_of(checkpoint: Source) -> Source | None:
    """The source of the checkpoint, for sizes before and after; None unless its record names a folder here."""
    try:
        return open_source(recorded_source(checkpoint, cure=""))
    except RecipeError:
        return None  # not known, or not on this machine: the report then has no sizes before
