"""The tables and sentences that the page and the card have in common, each figure rounded once.

In: a report. Out: a `Table` of words, and sentences. Templates put them into HTML or Markdown and
compute nothing.

Easy to get wrong: a matrix is matched only if every cell of a row had the same requests. A k that
one model was not asked with, or whose server failed, has no figure there and says so. And a
checkpoint that no longer ends its answers reaches the limit of tokens more often than its source,
and its score may hide that where the answer comes early: so each task has both shares of answers
that were cut.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from ...recipes.protocol import Evaluation
from ..facts.benched import Benched, BenchFact, RecommendedK, words_of
from ..facts.dry_load import DryLoad, KernelUse, places
from ..facts.evaluated import EvaluatedFact, TaskFact
from ..facts.schema import FullReport
from ..facts.served import Drafts, Served
from .numbers import figure, percent
from .recovery import Recovery, mean_recovery, recovery

MORE_CUT = 0.01
"""A checkpoint whose answers are cut more often than the source's by this share of all is said to
end fewer.
"""
ROLES = {"source": "source", "checkpoint": "this checkpoint", "plain": "this checkpoint, MTP off"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Words in rows, as many in each as there are columns."""

    columns: tuple[str, ...]
    rows: list[tuple[str, ...]]


# --- tasks ----------------------------------------------------------------------------------------


def tasks(report: FullReport) -> Table | None:
    """A row for each task and one for their mean; None where one task or less was asked."""
    evaluation = report.evaluation
    if evaluation is None or not evaluation.tasks:
        return None
    wanted = (
        report.judgement.gates.filter
        if report.judgement
        else evaluation.checkpoint.scores[0].filter
    )
    rows = [_task(task, wanted) for task in evaluation.by_task]
    mean = mean_recovery(evaluation.by_task, wanted)
    columns = "task", "asked", "source", "this checkpoint", "MTP off"
    return Table(
        columns=(*columns, "recovery", "interval", "cut: source", "cut: this"),
        rows=[*rows, ("mean", "-", "-", "-", "-", *_recovery(mean), "-", "-")],
    )


def _task(task: TaskFact, wanted: str) -> tuple[str, ...]:
    name = task.judged_filter(wanted)
    scores = {arm.role: arm.score(name) for arm in task.arms}
    theirs = task.source
    return (
        f"{task.protocol.title}, {name}",
        in_short(task.protocol),
        percent(scores["source"].value if theirs else None),
        f"{percent(scores['checkpoint'].value)} ± {percent(scores['checkpoint'].stderr)}",
        percent(scores["plain"].value if task.plain else None),
        *_recovery(recovery(task, wanted)),
        percent(_cut(theirs) if theirs else None),
        percent(_cut(task.checkpoint)),
    )


def _recovery(found: Recovery | None) -> tuple[str, str]:
    if found is None:
        return "-", "-"
    return percent(found.value), f"{percent(found.low)} to {percent(found.high)}"


def _cut(one: EvaluatedFact) -> float:
    return one.num_truncated / one.num_questions


def in_short(protocol: Evaluation) -> str:
    """`5-shot chat, first 200, 2,048 tokens`."""
    first = f"first {protocol.limit:,}, " if protocol.limit else ""
    return f"{protocol.shots}-shot {protocol.api}, {first}{protocol.max_tokens:,} tokens"


def endless(report: FullReport) -> Iterator[str]:
    """A sentence for each task whose answers the checkpoint ends less often than the source."""
    for task in report.evaluation.by_task if report.evaluation else ():
        if task.source and _cut(task.checkpoint) - _cut(task.source) > MORE_CUT:
            yield (
                f"{task.protocol.title}: {percent(_cut(task.checkpoint))} of the checkpoint's "
                f"answers reach the limit of {task.protocol.max_tokens:,} tokens, of the source's "
                f"{percent(_cut(task.source))}: it ends fewer of them."
            )


# --- speed ----------------------------------------------------------------------------------------


def speed(bench: BenchFact) -> Table:
    """k across and loads down: the source's rows first, loads in the order in which they were
    measured.
    """
    ks = ks_of(bench)
    rows = []
    for model in bench.benched:
        best = {(row.concurrency, row.context): row.k for row in model.recommended}
        for load in model.loads:
            cells = [_rate(model, k, load) + ", best k" * (k == best[load]) for k in ks]
            rows.append((ROLES[model.role], served_as(model), words_of(load), *cells))
    return Table(columns=("model", "served", "load", *(f"k={k}" for k in ks)), rows=rows)


def ks_of(bench: BenchFact) -> tuple[int, ...]:
    """Every k of the matrix, ascending."""
    return tuple(sorted({cell.k for model in bench.benched for cell in model.cells}))


def _rate(model: Benched, k: int, load: tuple[int, int]) -> str:
    """Tokens a second, half the distance from the slowest to the fastest repetition, and times as
    fast as k=0.
    """
    cell = model.cell(k, load)
    if cell is None or cell.tokens_per_second is None:
        was_asked = any((each.k, each.load) == (k, load) for each in model.cells)
        return "failed" if was_asked else "-"
    spread = ((cell.fastest or 0.0) - (cell.slowest or 0.0)) / 2
    rate = f"{cell.tokens_per_second:,.1f} ± {spread:,.1f}"
    gain = model.speed_up(cell)
    return f"{rate}, {gain:.2f}x" if k and gain else rate


def speed_notes(bench: BenchFact) -> Iterator[str]:
    """What is recommended of the checkpoint, and what speaks against the figures."""
    yield from map(recommendation, bench.checkpoint.recommended)
    yield from bench.checkpoint.slower
    yield from failures(bench)


def failures(bench: BenchFact) -> Iterator[str]:
    """A sentence for each cell without a figure."""
    for model in bench.benched:
        for cell in model.cells:
            if cell.error:
                yield (
                    f"{model.role}, k={cell.k}, {words_of(cell.load)}: no figure. "
                    f"{cell.error.rstrip('.')}."
                )


def recommendation(row: RecommendedK) -> str:
    """`1 at once: k=3, 1.82 times as fast as k=0: its slowest repetition, ...`."""
    load = words_of((row.concurrency, row.context))
    if row.k is None:
        return f"{load}: no k is recommended: {row.says}."
    gain = f", {row.speed_up:.2f} times as fast as k=0" if row.k and row.speed_up else ""
    return f"{load}: k={row.k}{gain}: {row.says}."


# --- drafts and kernels ---------------------------------------------------------------------------


def accepted(report: FullReport) -> Table:
    """Draft counters: of the first task, of serve-check's prompts, and of bench with each k under
    the smallest load.

    Under other loads acceptance is nearly the same.
    """
    found: list[tuple[str, EvaluatedFact | Served | Benched, int, int, Drafts]] = []
    if evaluation := report.evaluation:
        protocol = evaluation.protocol
        for model in evaluation.evaluated:
            asked = f"{protocol.title}, {model.num_questions:,} questions"
            found.append((asked, model, protocol.k, protocol.concurrency, model))
    if serve := report.serve:
        asked = f"serve-check, {len(serve.prompts):,} prompts"
        found += [(asked, model, run.k, 1, run) for model in serve.served for run in model.drafting]
    if bench := report.bench:
        load = min(bench.checkpoint.loads)
        for model in bench.benched:
            for cell in filter(None, (model.cell(k, load) for k in ks_of(bench))):
                asked = f"bench, {cell.repetitions[0].requests:,} prompts of {bench.prompts}"
                found.append((asked, model, cell.k, cell.concurrency, cell.drafts))
    columns = (
        "asked",
        "model",
        "served",
        "k",
        "in flight",
        "accepted of drafted tokens",
        "share",
        "by position",
    )
    rows = [
        (
            asked,
            ROLES[model.role],
            served_as(model),
            f"{k}",
            f"{in_flight}",
            f"{counted.accepted_tokens:,} of {counted.draft_tokens:,}",
            percent(counted.acceptance),
            ", ".join(map(percent, counted.acceptance_per_position)),
            figure(counted.mean_accepted_length),
        )
        for asked, model, k, in_flight, counted in found
        if counted.draft_tokens
    ]
    return Table(columns=(*columns, "tokens a step"), rows=rows)


def served_as(model: EvaluatedFact | Served | Benched) -> str:
    """How a model was served, in a cell of a table."""
    return "as it is" if model.as_served == "native" else model.as_served


def kernels(loads: Iterable[DryLoad]) -> Table:
    """One row for each quant method and kernel, with the GPUs and TP sizes that agree on it;
    refusals first.
    """
    found: dict[tuple[str, ...], list[DryLoad]] = defaultdict(list)
    for load in loads:
        for role, model in (("target", load.target), ("draft", load.draft)):
            groups: dict[tuple[str, str, str], list[KernelUse]] = defaultdict(list)
            for use in model.kernels:
                groups[use.method, use.kernel, use.outcome].append(use)
            for (method, kernel, outcome), uses in groups.items():
                layers = ", ".join(dict.fromkeys(use.layer for use in uses))
                count = sum(use.count for use in uses)
                first = f" (first: {uses[0].where})" if outcome.startswith("refused") else ""
                found[role, layers, method, kernel or "-", f"{count:,}", outcome + first].append(
                    load
                )
    rows = [(*key[:5], places(where), key[5]) for key, where in found.items()]
    rows.sort(key=lambda row: (not row[-1].startswith("refused"), row[0] != "target"))
    return Table(
        columns=("model", "layers", "quant method", "kernel", "count", "GPU", "outcome"), rows=rows
    )
