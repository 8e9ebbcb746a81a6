"""What `keepmtp eval` found, for people: scores, what they lost, drafts, and what the recipe's gates say of it.

In: an `EvaluationFact` and a `JudgementFact`. Out: what rich prints.

Easy to get wrong: a score without its protocol, its number of questions and its standard error is no score.
"""

from collections.abc import Iterator, Mapping

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ..recipes.protocol import Gates
from ..validate.facts.evaluated import Arm, EvaluatedFact, EvaluationFact, PairedFact, TaskFact
from ..validate.facts.schema import JudgementFact
from ..validate.report.recovery import Recovery, mean_recovery, recovery
from .tables import VERDICT_COLOURS, escape

_ROWS: Mapping[Arm, str] = {"source": "source", "checkpoint": "checkpoint", "plain": "MTP off"}

_MOST_WORD = 8
_LEGEND = (
    "Scores in %, ±: standard error; kept: drafted tokens that were accepted, in %, also by position; len: mean "
    "accepted length, tokens a step of the target."
)


def table(fact: EvaluationFact, judged: JudgementFact) -> RenderableType:
    """For each task a row a checkpoint and the differences; then all tasks, the gates, and notes."""
    path, parts = escape(fact.checkpoint.path), list[RenderableType]()
    for task in fact.by_task:
        parts.append(_scores(task, f"eval {path}" + (f": {task.protocol.title}" if fact.tasks else "")))
        parts += [Text(_difference(pair)) for pair in task.paired]
    if fact.tasks and fact.source is not None:
        parts += ["", _recoveries(fact, judged.gates)]
    lines = []
    for reason in judged.reasons:
        colour = VERDICT_COLOURS[reason.verdict]
        lines.append(f"[{colour}]{reason.gate}: {reason.verdict}[/]  {escape(reason.says)}")
    lines.append(f"[{VERDICT_COLOURS[judged.verdict]}]Judgement: {judged.verdict}[/]")
    lines += [escape(note) for task in fact.by_task for note in _notes(task)]
    return Group(*parts, Text.from_markup("\n".join([*lines, escape(_LEGEND)])))


def _scores(task: TaskFact, title: str) -> Table:
    rows = _table(title)
    filters = [score.filter.partition("-")[0][:_MOST_WORD] for score in task.checkpoint.scores]
    for name in ("", *filters, "n", "kept", "by position", "len", "tok/s"):
        rows.add_column(name, justify="right" if name else "left", no_wrap=True)
    for one in task.arms:
        rows.add_row(_ROWS[one.role], *_cells(one))
    return rows


def _recoveries(fact: EvaluationFact, gates: Gates) -> Table:
    """The tasks below each other, and their mean."""
    rows = _table("Of the source's scores")
    for name in ("task", "source", "checkpoint", "recovery", "interval", "cut"):
        rows.add_column(name, justify="left" if name == "task" else "right", no_wrap=True)
    for task in fact.by_task:
        name = task.judged_filter(gates.filter)
        scores = [f"{100 * one.score(name).value:.2f}" for one in task.evaluated]
        cut = " / ".join(str(one.num_truncated) for one in task.evaluated)
        rows.add_row(escape(task.protocol.title), *scores, *_share(recovery(task, gates.filter)), cut)
    rows.add_row("mean", "", "", *_share(mean_recovery(fact.by_task, gates.filter)), "")
    return rows


def _share(found: Recovery | None) -> tuple[str, str]:
    if found is None:
        return "-", "-"
    return f"{100 * found.value:.2f}", f"{100 * found.low:.2f} to {100 * found.high:.2f}"


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))


def _cells(one: EvaluatedFact) -> tuple[str, ...]:
    length = one.mean_accepted_length
    return (
        *(f"{100 * score.value:.2f} ±{100 * score.stderr:.2f}" for score in one.scores),
        f"{one.num_questions}",
        "-" if one.acceptance is None else f"{100 * one.acceptance:.1f}",
        " ".join(f"{100 * share:.1f}" for share in one.acceptance_per_position) or "-",
        f"{length:.2f}" if length else "-",
        f"{one.num_tokens / one.seconds:.0f}" if one.seconds else "-",
    )


def _difference(pair: PairedFact) -> str:
    low, high = 100 * pair.low, 100 * pair.high
    return (
        f"{pair.filter}: {100 * pair.difference:+.2f} points, {100 * pair.confidence:g} % interval {low:+.2f} to "
        f"{high:+.2f}; {pair.only_source} right by the source alone, {pair.only_checkpoint} by the checkpoint alone."
    )


def _notes(fact: TaskFact) -> Iterator[str]:
    for one in fact.evaluated:
        if one.as_served != "native":
            yield f"The {one.title} was served as a {one.as_served}: {one.reason}."
        if one.sittings > 1:
            yield f"The {one.title} was asked in {one.sittings} sittings."
    protocol, environment = fact.protocol, fact.environment
    yield (
        f"Protocol: {protocol.title} by lm-eval {environment['lm-eval']} on {protocol.dataset_name}, "
        f"{protocol.shots} shots, {protocol.api}, at most {protocol.max_tokens} tokens, greedy, method=mtp with "
        f"k={protocol.k}, prefix caching {'on' if protocol.prefix_caching else 'off'}, {protocol.concurrency} requests "
        f"in flight, seed {protocol.seed}."
    )
    cut = ", ".join(f"{_ROWS[one.role]} {one.num_truncated}" for one in fact.arms)
    empty = ", ".join(f"{_ROWS[one.role]} {one.num_empty}" for one in fact.arms)
    yield f"Answers cut at the limit of tokens: {cut}. Empty answers: {empty}."
    yield f"vLLM {environment['vllm']} on {environment['device']}."
