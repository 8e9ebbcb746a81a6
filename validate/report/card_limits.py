"""The limitations in a model card: what a reader could think is proven, and is not.

In: a report, and the checkpoint's record. Out: sentences.

Easy to get wrong: people forget limitations. So each one follows from the report: a BF16 copy, a
CPU, kernels that were not judged, parts that are absent.
"""

from collections.abc import Iterator, Sequence

from ...checkpoints.record import Record
from ..facts.benched import Benched
from ..facts.evaluated import EvaluatedFact, EvaluationFact
from ..facts.schema import FullReport
from ..facts.served import Served
from .leaderboard import off_leaderboard
from .tables import endless

_MAX_NAMED = 5
FEW_DRAFTS = 200
"""Below so many drafted tokens, one more or less accepted moves acceptance by half a point."""


def limitations(report: FullReport, record: Record) -> Iterator[str]:
    """A sentence or two for each, the most important first."""
    for reason in report.judgement.reasons if report.judgement else ():
        if reason.verdict == "infeasible":
            yield (
                f"The gate of {reason.gate} neither passes nor fails ({reason.title}); it says "
                "above why."
            )
    yield from _served(report)
    if report.evaluation:
        yield from _evaluated(report.evaluation)
        yield from endless(report.evaluation)
    if report.dry:
        yield (
            "A dry load tells that every tensor finds its place, not that a kernel computes "
            "rightly."
        )
    yield from _calibrated(report)
    warned = [fact for fact in report.findings if fact.severity == "warning"]
    yield from (f"The check warns of {fact.where}: {fact.says}" for fact in warned[:_MAX_NAMED])
    if len(warned) > _MAX_NAMED:
        yield (
            f"The check has {len(warned) - _MAX_NAMED:,} further warnings; `report.json` lists "
            "them."
        )
    if record.source.revision == "local":
        yield (
            "The source was a local folder, identified by no more than its files' names and "
            "sizes in `keepmtp.json`."
        )
    if (other := record.mtp_source) is not None:
        where = "a local folder" if other.revision == "local" else f"revision `{other.revision}`"
        yield (
            f"The release has no MTP block. The one here was read from `{other.name}`, {where}, "
            "with a license of its own."
        )
    yield from (sentence for part, sentence in report.absent.items() if part != "calibration")
    yield f"Nothing here was tried with another vLLM than {report.vllm}."


def _served(report: FullReport) -> Iterator[str]:
    """Whose bytes were served, and where."""
    models: list[Served | EvaluatedFact | Benched] = list(
        report.serve.served if report.serve else ()
    )
    models += report.evaluation.evaluated if report.evaluation else ()
    models += report.bench.benched if report.bench else ()
    copies = [
        (one.role, one.as_served, one.reason.rstrip("."))
        for one in models
        if one.as_served != "native"
    ]
    for role, as_served, reason in dict.fromkeys(copies):
        why = f": {reason}" if reason else ""
        yield (
            f"Figures of the {role} are of a {as_served}{why}. What packed kernels and quantized "
            "activations change is not in these numbers."
        )
    parts = (report.serve, report.evaluation, report.bench)
    for device in dict.fromkeys(part.environment.get("device", "") for part in parts if part):
        if device.startswith("CPU"):
            yield f"No GPU was used ({device}), so nothing here says how fast it is."
    counts = (
        [run.draft_tokens for model in report.serve.served for run in model.drafting]
        if report.serve
        else []
    )
    counts += (
        [model.draft_tokens for model in report.evaluation.evaluated] if report.evaluation else []
    )
    few = min(filter(None, counts), default=FEW_DRAFTS)
    if few < FEW_DRAFTS:
        yield (
            f"An acceptance rate rests on no more than {few:,} drafted tokens: a few more or "
            "less would move it."
        )


def _evaluated(evaluation: EvaluationFact) -> Iterator[str]:
    if evaluation.source is None:
        yield "The source was not evaluated, so what quantization cost is not known."
    if evaluation.plain is None:
        yield (
            "The checkpoint was not asked with MTP off, so whether drafting changes its answers "
            "is not known."
        )
    for task in evaluation.by_task:
        where = f"{task.protocol.title}: " if evaluation.tasks else ""
        if why := off_leaderboard(task):
            yield f"{where}{why}"
        for model in task.arms:
            if model.num_truncated:
                yield (
                    f"{where}{model.num_truncated:,} of {model.num_questions:,} answers of the "
                    f"{model.title} were cut "
                    f"at {task.protocol.max_tokens:,} tokens; they count as they stand."
                )


def _calibrated(report: FullReport) -> Iterator[str]:
    if report.calibration is None:
        return
    coverage = report.calibration.coverage
    if never := coverage.never_routed:
        yield (
            f"The router sent no token of the calibration data to {len(never):,} expert modules "
            f"({_named(never)}), so data decided nothing there."
        )
    if report.calibration.unmeasured:
        yield f"Calibration could not measure acceptance: {report.calibration.unmeasured}"


def _named(modules: Sequence[str]) -> str:
    more = f" and {len(modules) - _MAX_NAMED:,} more" if len(modules) > _MAX_NAMED else ""
    return ", ".join(f"`{name}`" for name in modules[:_MAX_NAMED]) + more
