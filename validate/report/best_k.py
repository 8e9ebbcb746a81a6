"""How many tokens to draft in a step: what was measured says it, else the recipe, else the number of MTP layers.

In: a report, or a checkpoint. Out: a `BestK`, with the reason, and with the acceptance to expect.

Easy to get wrong: a k that was measured on other bytes says nothing. So a report counts only if the hashes that its
folder keeps are of files with today's sizes and times. No byte is read for that: 700 GB would take an hour.
"""

from dataclasses import dataclass, replace

from ...checkpoints.identity import remembered
from ...checkpoints.record import RECORD, read_record
from ...checkpoints.source import Source, small_file
from ...recipes.errors import CheckpointError
from ..serving.served import Drafts
from .headline import counts_speed
from .report import JSON_FILE, read_json
from .results import report_folder
from .schema import FullReport


@dataclass(frozen=True, slots=True, kw_only=True)
class BestK:
    """A number of tokens to draft in a step.

    Attributes:
        k: 0 serves without drafting.
        why: where it is from, as a clause.
        measured: draft counters of the checkpoint, where some were measured; else None.
        measured_by: the command that measured them; "" where none did.
    """

    k: int
    why: str
    measured: Drafts | None = None
    measured_by: str = ""


def best_k_of_report(report: FullReport) -> BestK:
    """As evaluated, else the fastest that serve-check timed on a GPU, else one for each MTP layer."""
    serve, evaluation = report.serve, report.evaluation
    if evaluation:
        why = f"with which {evaluation.protocol.title} was measured"
        return BestK(k=evaluation.protocol.k, why=why, measured=evaluation.checkpoint, measured_by="keepmtp eval")
    runs = [run for run in (serve.checkpoint.drafting if serve else ()) if run.draft_tokens]
    if serve and runs and counts_speed(serve):
        fastest = max(runs, key=lambda run: run.speed_up or 0.0)
        why = "the fastest that serve-check timed"
        return BestK(k=fastest.k, why=why, measured=fastest, measured_by="keepmtp serve-check")
    found = BestK(k=max(1, report.facts.num_mtp_layers), why="one for each MTP layer")
    return replace(found, measured=runs[0], measured_by="keepmtp serve-check") if runs else found


def best_k(opened: Source, num_mtp_layers: int) -> BestK:
    """Of a checkpoint: by its NAME.report of these bytes, or the report in its repository; else by recipe or layers.

    Args:
        opened: a folder or a repository.
        num_mtp_layers: as the check counts them.

    Raises:
        CheckpointError: keepmtp.json is there, and is not keepmtp's.
    """
    if not num_mtp_layers:
        return BestK(k=0, why="the checkpoint has no MTP block")
    report, doubt = _report_of(opened)
    if report is not None:
        return best_k_of_report(report)
    k = _of_recipe(opened)
    if k and (k <= num_mtp_layers or k % num_mtp_layers == 0):
        return BestK(k=k, why=f"as its recipe evaluates it{doubt}")
    return BestK(k=max(1, num_mtp_layers), why=f"one for each MTP layer{doubt}")


def _report_of(opened: Source) -> tuple[FullReport | None, str]:
    """The report of these bytes, or why the one that is there does not count, as a clause."""
    folder = report_folder(opened.folder) if opened.folder else None
    path = folder / JSON_FILE if folder else small_file(opened, JSON_FILE)
    if path is None or not path.is_file():
        return None, ""
    try:
        report = read_json(path)
    except CheckpointError:
        return None, f"; {JSON_FILE} cannot be read by this keepmtp"
    if opened.folder and folder:
        found = remembered(opened.folder, cache=folder)
        if found is None or report.identity is None or found.sha256 != report.identity.sha256:
            return None, f"; {folder.name} is not known to be of these bytes"
    return report, ""


def _of_recipe(opened: Source) -> int:
    """The `evaluation.k` of the recipe that made the checkpoint; 0 where no recipe names one."""
    path = small_file(opened, RECORD)
    if path is None:
        return 0
    evaluation = read_record(path).recipe.whole.get("evaluation")
    first = evaluation[0] if isinstance(evaluation, list) and evaluation else evaluation
    k = first.get("k") if isinstance(first, dict) else None
    return k if isinstance(k, int) else 0
