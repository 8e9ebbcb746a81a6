"""How many tokens to draft in a step: what was measured says it, else the recipe, else the number
of MTP layers.

In: a report, or a checkpoint. Out: a `BestK`, with the reason, and with the acceptance to expect.

Easy to get wrong: a k that was measured on other bytes says nothing. So a report counts only if the
hashes that its folder keeps are of files with today's sizes and times. No byte is read for that:
700 GB would take an hour.
"""

from dataclasses import dataclass

from ...checkpoints.identity import remembered
from ...checkpoints.record import RECORD, read_record
from ...checkpoints.source import Source, small_file
from ...recipes.errors import CheckpointError
from ..facts.benched import BenchFact, words_of
from ..facts.results import report_folder
from ..facts.schema import FullReport
from ..facts.served import Drafts
from .drafted import counts_bench
from .report import JSON_FILE, read_json


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


def best_k_of_report(report: FullReport, *, device: str = "") -> BestK:
    """As bench recommends, else as evaluated, else one for each MTP layer.

    `device` is the one that will serve: a speed that was measured on a CPU counts for that CPU
    alone.
    """
    evaluation = report.evaluation
    if (
        report.bench
        and counts_bench(report.bench, device=device)
        and (found := _of_bench(report.bench))
    ):
        return found
    if evaluation:
        why = f"with which {evaluation.protocol.title} was measured"
        return BestK(
            k=evaluation.protocol.k,
            why=why,
            measured=evaluation.checkpoint,
            measured_by="keepmtp eval",
        )
    runs = report.serve.checkpoint.drafting if report.serve else ()
    measured = next((run for run in runs if run.draft_tokens), None)
    by = "keepmtp serve-check" if measured else ""
    layers = max(1, report.facts.num_mtp_layers)
    return BestK(k=layers, why="one for each MTP layer", measured=measured, measured_by=by)


def _of_bench(bench: BenchFact) -> BestK | None:
    """What bench recommends for the smallest load, with what it says of the others; None where it
    cannot tell.
    """
    first, *others = sorted(
        bench.checkpoint.recommended, key=lambda each: (each.concurrency, each.context)
    )
    if first.k is None:
        return None
    load = first.concurrency, first.context
    also = [
        f"k={each.k} for {words_of((each.concurrency, each.context))}"
        for each in others
        if each.k is not None
    ]
    why = (
        f"as bench recommends for {words_of(load)} on "
        f"{bench.environment.get('device') or 'an unnamed device'}"
    )
    cell = bench.checkpoint.cell(first.k, load)
    measured = cell.drafts if cell and first.k else None
    return BestK(
        k=first.k, why="; ".join([why, *also]), measured=measured, measured_by="keepmtp bench"
    )


def best_k(opened: Source, num_mtp_layers: int, *, device: str = "") -> BestK:
    """Of a checkpoint: by its NAME.report of these bytes, or the report in its repository; else by
    recipe or layers.

    Args:
        opened: a folder or a repository.
        num_mtp_layers: as the check counts them.
        device: that will serve, in vLLM's words; "" where it is not known.

    Raises:
        CheckpointError: keepmtp.json is there, and is not keepmtp's.
    """
    if not num_mtp_layers:
        return BestK(k=0, why="the checkpoint has no MTP block")
    report, doubt = _report_of(opened)
    if report is not None:
        return best_k_of_report(report, device=device)
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
    k = first.get("k") if isinstance(first, dict) else 0
    return k if isinstance(k, int) else 0
