"""All tasks of an evaluation below each other: what the page and the card show of them.

In: a report. Out: a `TaskLine` for each task, and one for their mean.

Easy to get wrong: a checkpoint that no longer ends its answers reaches the limit of tokens more often than its source,
and its score may hide that where the answer comes early. So each line has both shares of answers that were cut.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from ...recipes.protocol import Evaluation
from ..facts.evaluated import EvaluatedFact, TaskFact
from ..facts.schema import FullReport
from .numbers import percent
from .recovery import Recovery, mean_recovery, recovery

MORE_CUT = 0.01
"""A checkpoint whose answers are cut more often than the source's by this share of all is said to end fewer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskLine:
    """One task, or the mean of all: shares, and None for what was not measured.

    Attributes:
        title, asked: the task, and its protocol in short.
        filter: whose score counts.
        source, checkpoint, plain: scores; `plain` is the checkpoint's with MTP off. `stderr` is of `checkpoint`.
        recovery: with its interval.
        cut, source_cut: answers that reached the limit of tokens.
    """

    title: str
    asked: str = ""
    filter: str = ""
    source: float | None = None
    checkpoint: float | None = None
    stderr: float | None = None
    plain: float | None = None
    recovery: Recovery | None = None
    cut: float | None = None
    source_cut: float | None = None


def task_lines(report: FullReport) -> list[TaskLine]:
    """A line for each task and one for the mean; none where one task or less was asked."""
    evaluation = report.evaluation
    if evaluation is None or not evaluation.tasks:
        return []
    wanted = report.judgement.gates.filter if report.judgement else evaluation.checkpoint.scores[0].filter
    lines = [_line(task, wanted) for task in evaluation.by_task]
    return [*lines, TaskLine(title="mean", recovery=mean_recovery(evaluation.by_task, wanted))]


def endless(report: FullReport) -> Iterator[str]:
    """A sentence for each task whose answers the checkpoint ends less often than the source."""
    for task in report.evaluation.by_task if report.evaluation else ():
        if task.source is None:
            continue
        mine, theirs = _cut(task.checkpoint), _cut(task.source)
        if mine - theirs > MORE_CUT:
            yield (
                f"{task.protocol.title}: {percent(mine)} of the checkpoint's answers reach the limit of "
                f"{task.protocol.max_tokens:,} tokens, of the source's {percent(theirs)}: it ends fewer of them."
            )


def in_short(protocol: Evaluation) -> str:
    """`5-shot chat, first 200, 2,048 tokens`."""
    first = f"first {protocol.limit:,}, " if protocol.limit else ""
    return f"{protocol.shots}-shot {protocol.api}, {first}{protocol.max_tokens:,} tokens"


def _line(task: TaskFact, wanted: str) -> TaskLine:
    name = task.judged_filter(wanted)
    mine = task.checkpoint.score(name)
    return TaskLine(
        title=task.protocol.title,
        asked=in_short(task.protocol),
        filter=name,
        source=task.source.score(name).value if task.source else None,
        checkpoint=mine.value,
        stderr=mine.stderr,
        plain=task.plain.score(name).value if task.plain else None,
        recovery=recovery(task, wanted),
        cut=_cut(task.checkpoint),
        source_cut=_cut(task.source) if task.source else None,
    )


def _cut(one: EvaluatedFact) -> float:
    return one.num_truncated / one.num_questions
