"""How many tokens to draft in a step: what was measured says it, else the number of MTP layers.

In: a report, or a checkpoint. Out: a `BestK`, with the reason.

Easy to get wrong: a k that was measured on other bytes says nothing.
"""

from dataclasses import replace

from ...checkpoints.identity import remembered
from ...checkpoints.source import Source, small_file, view_of
from ...recipes.errors import CheckpointError
from ...recipes.frozen import frozen
from ..facts.benched import BenchFact, words_of
from ..facts.dry_load import versions_in_short
from ..facts.evaluated import EvaluationFact
from ..facts.results import report_folder
from ..facts.schema import FullReport
from .report import JSON_FILE, read_json


@frozen
class BestK:
    """A number of tokens to draft in a step.

    Attributes:
        k: 0 serves without drafting.
        why: where it is from, as a clause.
        versions: the oldest vLLM that serves it, as a clause; "" where one alone was tried.
    """

    k: int
    why: str
    versions: str = ""


def best_k_of_report(report: FullReport, *, device: str = "") -> BestK:
    """As bench recommends, else as evaluated, else one for each MTP layer; `device` will serve."""
    bench = report.of(BenchFact)
    evaluation = report.of(EvaluationFact)
    # A speed that was measured on a CPU counts for that CPU alone.
    if bench and bench.counts(device=device):
        fewest = min(bench.checkpoint.recommended, key=lambda row: row.concurrency)
        if fewest.k is not None:
            where = bench.environment["device"]
            why = f"as bench recommends for {words_of(fewest.concurrency)} on {where}"
            return BestK(k=fewest.k, why=why)
    if evaluation:
        why = f"with which {evaluation.protocol.title} was measured"
        return BestK(k=evaluation.protocol.k, why=why)
    return BestK(k=max(1, report.facts.num_mtp_layers), why="one for each MTP layer")


def best_k(opened: Source, num_mtp_layers: int, *, device: str = "") -> BestK:
    """Of a checkpoint: by its NAME.report of these bytes, or the report in its repository; else one
    for each MTP layer.

    Args:
        opened: a folder or a repository.
        num_mtp_layers: as the check counts them.
        device: that will serve, in vLLM's words; "" where it is not known.
    """
    if not num_mtp_layers:
        return BestK(k=0, why="the checkpoint has no MTP block")
    report, doubt = report_of(opened)
    if report is not None:
        found = best_k_of_report(report, device=device)
        return replace(found, versions=versions_in_short(report.dry))
    why = "one for each MTP layer"
    view = view_of(opened)
    if view.family.method == "dspark":
        why = "as many as dspark_block_size says"
    return BestK(k=max(1, view.usual_k), why=f"{why}{doubt}")


def report_of(opened: Source) -> tuple[FullReport | None, str]:
    """The report of these bytes, or why the one that is there does not count, as a clause."""
    folder = None
    path = small_file(opened, JSON_FILE)
    if opened.folder:
        folder = report_folder(opened.folder)
        path = folder / JSON_FILE
    if path is None or not path.is_file():
        return None, ""
    try:
        report = read_json(path)
    except CheckpointError:
        return None, f"; {JSON_FILE} cannot be read by this keepmtp"
    # A report counts only if the hashes that its folder keeps are of files with today's sizes and
    # times. No byte is read for that: 700 GB would take an hour.
    if opened.folder and folder:
        found = remembered(opened.folder, cache=folder)
        if found is None or report.identity is None or found.sha256 != report.identity.sha256:
            return None, f"; {folder.name} is not known to be of these bytes"
    return report, ""
