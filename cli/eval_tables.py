"""What `keepmtp eval` found, for people: scores, what they lost, drafts, and what the recipe's
gates say of it.

In: an `EvaluationFact` and a `JudgementFact`. Out: what rich prints.

Easy to get wrong: a score without its protocol, its number of questions and its standard error is
no score.
"""

from collections.abc import Iterator, Mapping

from rich.console import RenderableType
from rich.table import Table

from ..recipes.protocol import Gates
from ..validate.facts.evaluated import Arm, EvaluatedFact, EvaluationFact, TaskFact
from ..validate.facts.schema import JudgementFact
from ..validate.report.recovery import Recovery, mean_recovery, recovery
from .tables import figure, table, verdict

_ROWS: Mapping[Arm, str] = {"source": "source", "checkpoint": "checkpoint", "plain": "MTP off"}

_MOST_WORD = 8


def shown(fact: EvaluationFact, judged: JudgementFact) -> Iterator[RenderableType]:
    """For each task a row a checkpoint and the differences; then all tasks, the gates, and
    notes.
    """
    path = fact.checkpoint.path
    for task in fact.by_task:
        filters = [
            f">{score.filter.partition('-')[0][:_MOST_WORD]}" for score in task.checkpoint.scores
        ]
        columns = ("", *filters, ">n", ">kept", ">by position", ">len", ">tok/s")
        yield table(
            f"eval {path}: {task.protocol.title}", columns, (_cells(one) for one in task.arms)
        )
        for pair in task.paired:
            low, high = 100 * pair.low, 100 * pair.high
            yield (
                f"{pair.filter}: {100 * pair.difference:+.2f} points, {100 * pair.confidence:g} % "
                f"interval {low:+.2f} to {high:+.2f}; {pair.only_source} right by the source "
                f"alone, {pair.only_checkpoint} by the checkpoint alone."
            )
    if fact.tasks and fact.source is not None:
        yield _recoveries(fact, judged.gates)
    yield from verdict(path, judged)
    for task in fact.by_task:
        yield from _notes(task)
    yield (
        "Scores in %, ±: standard error; kept: drafted tokens that were accepted, in %, also by "
        "position; len: mean accepted length, tokens a step of the target."
    )


def _recoveries(fact: EvaluationFact, gates: Gates) -> Table:
    """The tasks below each other, and their mean."""
    rows = []
    for task in fact.by_task:
        name = task.judged_filter(gates.filter)
        scores = [f"{100 * one.score(name).value:.2f}" for one in task.evaluated]
        cut = " / ".join(str(one.num_truncated) for one in task.evaluated)
        rows.append((task.protocol.title, *scores, *_share(recovery(task, gates.filter)), cut))
    rows.append(("mean", "", "", *_share(mean_recovery(fact.by_task, gates.filter)), ""))
    columns = ("task", ">source", ">checkpoint", ">recovery", ">interval", ">cut")
    return table("Of the source's scores", columns, rows)


def _share(found: Recovery | None) -> tuple[str, str]:
    if found is None:
        return "-", "-"
    return f"{100 * found.value:.2f}", f"{100 * found.low:.2f} to {100 * found.high:.2f}"


def _cells(one: EvaluatedFact) -> tuple[str, ...]:
    return (
        _ROWS[one.role],
        *(f"{100 * score.value:.2f} ±{100 * score.stderr:.2f}" for score in one.scores),
        f"{one.num_questions}",
        figure("{:.1%}", one.acceptance).rstrip("%"),
        " ".join(f"{100 * share:.1f}" for share in one.acceptance_per_position) or "-",
        figure("{:.2f}", one.mean_accepted_length),
        f"{one.num_tokens / one.seconds:.0f}" if one.seconds else "-",
    )


def _notes(fact: TaskFact) -> Iterator[str]:
    for one in fact.evaluated:
        if one.as_served != "native":
            yield f"The {one.title} was served as a {one.as_served}: {one.reason}."
        if one.sittings > 1:
            yield f"The {one.title} was asked in {one.sittings} sittings."
    protocol, environment = fact.protocol, fact.environment
    yield (
        f"Protocol: {protocol.title} by lm-eval {environment['lm-eval']} on "
        f"{protocol.dataset_name}, {protocol.shots} shots, {protocol.api}, at most "
        f"{protocol.max_tokens} tokens, greedy, method=mtp with k={protocol.k}, prefix caching "
        f"{'on' if protocol.prefix_caching else 'off'}, {protocol.concurrency} requests in "
        f"flight, seed {protocol.seed}."
    )
    cut = ", ".join(f"{_ROWS[one.role]} {one.num_truncated}" for one in fact.arms)
    empty = ", ".join(f"{_ROWS[one.role]} {one.num_empty}" for one in fact.arms)
    yield f"Answers cut at the limit of tokens: {cut}. Empty answers: {empty}."
    yield f"vLLM {environment['vllm']} on {environment['device']}."
