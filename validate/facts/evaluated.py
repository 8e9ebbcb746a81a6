"""What GSM8K gave: scores of source and checkpoint under one protocol, their difference, and the
draft counters.

In: lm-eval's scores (`lm_eval_task.py`), pairs of answers (`validate/facts/paired.py`) and vLLM's
counters.
Out: an `EvaluationFact`. eval.json and report.json hold it, field by field.

Easy to get wrong: a fact judges nothing. `reasons` does, by the recipe's limits.
"""

from collections.abc import Collection, Iterator, Sequence
from math import sqrt
from statistics import fmean, stdev
from typing import Annotated

from pydantic import Field, PositiveInt, model_validator

from ...checkpoints.fact import Count, Fact, Figure, Share
from ...recipes.errors import counted
from ...recipes.protocol import Evaluation, Gates
from ...recipes.tasks import TASKS
from .numbers import percent, points
from .paired import PairedFact, one_sided
from .rows import Row, detail
from .served import Drafted, Drafts, Judging, ServedModel, StationFact, those
from .settle import (
    BOUND,
    CHANCE,
    Estimate,
    ReasonFact,
    not_its_own,
    reason,
    settle,
    unmeasured,
    worst,
)

NOT_EMPTY = "not empty"
"""Reads an answer as right where there is any text in it."""


class ScoreFact(Fact):
    """Share of questions answered right, as one of lm-eval's filters or metrics reads the answers.

    Attributes:
        filter: strict-match wants "#### 12", flexible-extract takes the last number;
            recipes/tasks.py has the others.
        value: from 0 to 1.
        stderr: of the mean over questions.
    """

    filter: str
    value: Share
    stderr: Figure


def score_of(name: str, values: Sequence[float], num_questions: int | None = None) -> ScoreFact:
    """A score: the mean over all, and its standard error over questions, two or more, each with the
    mean of its runs.

    Args:
        name: of the filter.
        values: what each answer gets, from 0 to 1; run after run, each with all questions in one
            order.
        num_questions: of one run; None: each value is of a question of its own.
    """
    num = num_questions or len(values)
    # The runs of one question are no further questions, so each question is one draw.
    means = [fmean(values[number::num]) for number in range(num)]
    return ScoreFact(filter=name, value=fmean(means), stderr=stdev(means) / sqrt(num))


class EvaluatedFact(Drafts, ServedModel):
    """One checkpoint's answers, and vLLM's counters over the same questions.

    The counters lack the steps that were in flight when a sitting was cut off.

    Attributes:
        sha256: of the checkpoint's bytes, as `Identity.sha256`.
        num_questions: that were asked and answered.
        num_truncated: answers cut at max_tokens.
        num_empty: answers without any text.
        samples: file in the report's folder with a line for each question, and its SHA-256.
    """

    sha256: str
    scores: Annotated[tuple[ScoreFact, ...], Field(min_length=1)]
    num_questions: PositiveInt
    num_truncated: Count
    num_empty: Count
    samples: str
    samples_sha256: str

    def score(self, name: str) -> ScoreFact:
        """The score that one filter gives."""
        return next(score for score in self.scores if score.filter == name)

    @property
    def filters(self) -> list[str]:
        """The names of all scores."""
        return [score.filter for score in self.scores]


class SwitchFact(Fact):
    """Questions on which drafting and not drafting come to another result, as one reading of the
    answers sees them.

    Attributes:
        reads: one of lm-eval's filters, or `not empty`.
        only_plain, only_drafting: questions that are right with MTP off alone, and with it on.
        chance: how often two equal servers would split at least as unevenly (exact two-sided sign
            test: McNemar's).
    """

    reads: str
    only_plain: Count
    only_drafting: Count
    chance: Share


class DraftingFact(Fact):
    """What drafting changes: the checkpoint's greedy answers with MTP on against those with MTP
    off.

    Attributes:
        switches: a row for each filter, then `not empty`.
        num_changed: answers whose text is another.
    """

    switches: tuple[SwitchFact, ...]
    num_changed: Count


class TaskFact(StationFact):
    """One task through real servers with method=mtp.

    Attributes:
        protocol: the recipe's `evaluation` block, defaults filled in.
        dataset_sha256: of the questions and answers that were asked, in order.
        source: what the checkpoint was made from; None where it was not evaluated.
        paired: a row for each filter; empty without a source.
        plain: the checkpoint without method=mtp; None where it was not asked so.
        drafting: `checkpoint` against `plain`.
    """

    protocol: Evaluation
    dataset_sha256: str
    source: EvaluatedFact | None
    checkpoint: EvaluatedFact
    paired: tuple[PairedFact, ...]
    plain: EvaluatedFact | None = None
    drafting: DraftingFact | None = None

    def judged_filter(self, wanted: str) -> str:
        """The filter whose score counts: the recipe's for GSM8K, and for a task that has it; else
        the task's own.
        """
        if wanted in self.checkpoint.filters or self.protocol.task.startswith("gsm8k"):
            return wanted
        return TASKS[self.protocol.task].headline

    def pair(self, wanted: str) -> PairedFact | None:
        """The pairs of the filter that counts; None without a source."""
        name = self.judged_filter(wanted)
        for pair in self.paired:
            if pair.filter == name:
                return pair
        return None

    @property
    def arms(self) -> tuple[EvaluatedFact, ...]:
        """All that were asked: those that draft, then the checkpoint with MTP off."""
        return those(self.source, self.checkpoint, self.plain)

    def rows(self, wanted: str, *, is_first: bool = True) -> Iterator[Row]:
        """Scores by every filter, of which the one that is judged is no detail; answers that were
        cut or empty; and drafts.
        """
        judged = self.judged_filter(wanted)
        for arm in self.arms:
            asked = counted(arm.num_questions, "question")
            name = self.protocol.title
            for score in arm.scores:
                yield Row(
                    metric=f"{name}, {score.filter}",
                    case=asked,
                    of=arm.role,
                    value=score.value,
                    unit="%",
                    around=(score.value - score.stderr, score.value + score.stderr),
                    is_detail=score.filter != judged,
                )
            for what, num in (("cut", arm.num_truncated), ("empty", arm.num_empty)):
                share = num / arm.num_questions
                also = ("", f" ({num:,})")
                yield detail(f"{name}, {what}", asked, arm.role, share, "%", also=also)
            yield from arm.accepted(arm.role, self.protocol.k, name, is_detail=not is_first)

    def notes(self) -> Iterator[str]:
        """What a reader of these rows should know."""
        name = self.protocol.title
        if not self.source:
            yield f"{name}: the source was not evaluated, so there is no difference to show."
        if self.plain is None:
            yield (
                f"{name}: the checkpoint was not asked with MTP off, so whether drafting changes "
                "its answers is not known."
            )
        if self.protocol.dataset or self.protocol.limit:
            yield (
                f"{name}: only some of the benchmark's questions, or questions of a file, were "
                "asked. The score compares with the source's beside it and with no other."
            )
        if not self.checkpoint.drafts:
            yield "The drafts of the checkpoint were not counted: its server was killed."
        fields = self.protocol.model_dump(exclude_none=True)
        said = ", ".join([f"{name} {value}" for name, value in fields.items()])
        harness = f"lm-eval {self.environment.get('lm-eval')}"
        where = f"vLLM {self.environment['vllm']} on {self.environment['device']}"
        yield f"{name} on {self.protocol.dataset_name}: {said}; {harness}, {where}."

    @model_validator(mode="after")
    def _has_the_same_filters(self) -> "TaskFact":
        names = self.checkpoint.filters
        switches = ()
        compared = []
        drafting = []
        if self.drafting:
            switches = self.drafting.switches
        if self.source:
            compared = names
        if self.plain:
            drafting = [*names, NOT_EMPTY]
        rows = [
            *[arm.filters for arm in self.arms],
            [pair.filter for pair in self.paired],
            [switch.reads for switch in switches],
        ]
        wanted = [*[names for _ in self.arms], compared, drafting]
        if rows != wanted or len(set(names)) != len(names):
            raise ValueError("scores, pairs and switches must be of the same, different filters")
        return self


class EvaluationFact(TaskFact):
    """What `keepmtp eval` measured: the recipe's first task, and the others that it lists.

    Attributes:
        tasks: the others, each with a protocol of its own.
    """

    station = "eval"
    part = "evaluation"
    command = "eval {}"
    form = 5

    tasks: tuple[TaskFact, ...] = ()

    @property
    def by_task(self) -> tuple[TaskFact, ...]:
        """All tasks, the recipe's first one first."""
        return (self, *self.tasks)

    @property
    def evidence(self) -> tuple[EvaluatedFact, ...]:
        """Whose answers are in files of their own."""
        return tuple([arm for task in self.by_task for arm in task.arms])

    def rows(self, wanted: str, *, is_first: bool = True) -> Iterator[Row]:
        """Of all tasks."""
        for task in self.by_task:
            yield from TaskFact.rows(task, wanted, is_first=task is self)

    def notes(self) -> Iterator[str]:
        """Of all tasks."""
        for task in self.by_task:
            yield from TaskFact.notes(task)

    @model_validator(mode="after")
    def _names_each_task_once(self) -> "EvaluationFact":
        names = [one.protocol.task for one in self.by_task]
        if len(set(names)) != len(names):
            raise ValueError("tasks must be different tasks")
        return self

    @property
    def asked(self) -> tuple[str, ...]:
        """Without a source nothing is compared, by choice."""
        if self.source is None:
            return ()
        return self.protocol.task, "worst task", "acceptance"

    @property
    def has_no_block(self) -> bool:
        """Its source was served with MTP off alone."""
        return bool(self.source) and not self.source.drafts

    def drafted(self) -> Drafted | None:
        """Of the first task."""
        theirs = self.source
        if theirs and not theirs.draft_tokens:
            theirs = None
        num = self.checkpoint.num_questions
        return Drafted(
            what=f"{counted(num, 'question')} of {self.protocol.title}",
            unit="questions",
            k=self.protocol.k,
            num_asked=num,
            as_served=self.checkpoint.as_served,
            checkpoint=self.checkpoint,
            source=theirs,
        )

    @classmethod
    def reasons(cls, fact: "EvaluationFact | None", judging: Judging) -> Iterator[ReasonFact]:
        """The first task's drop; that of the worst task, where the recipe limits it; and what
        drafting changes.
        """
        tasks = ()
        if fact:
            tasks = fact.by_task
        yield _first_task(judging.gates, fact)
        yield from _worst_task(judging.gates, tasks, judging.listed)
        yield from _drafting(tasks, is_compared=judging.is_compared)


def _first_task(gates: Gates, evaluation: EvaluationFact | None) -> ReasonFact:
    """The drop of the first task's score, paired by question; the gate has the task's name."""
    if evaluation is None:
        return unmeasured("gsm8k", "Not measured: `keepmtp eval CHECKPOINT` does.")
    gate = evaluation.protocol.task
    source = evaluation.source
    if source is None:
        says = "The source was not evaluated: `keepmtp eval CHECKPOINT --source SOURCE` does both."
        return unmeasured(gate, says)
    name = evaluation.judged_filter(gates.filter)
    before = source.score(name).value
    if before <= gates.max_drop:
        says = f"the source itself gets {percent(before)}, so a drop of "
        says += f"{points(gates.max_drop)} could not be seen."
        return unmeasured(gate, f"{name}: {says}")
    return _dropped(gate, gates, evaluation, gates.max_drop)


def _dropped(gate: str, gates: Gates, task: TaskFact, most: float) -> ReasonFact:
    """One task's score against its source's, which was asked."""
    name = task.judged_filter(gates.filter)
    pair = task.pair(gates.filter)
    assert task.source is not None and pair is not None, "the callers ask for a source"
    num = task.checkpoint.num_questions // task.protocol.repeats
    asked = counted(num, "question")
    alone = f"source alone {pair.only_source:,}, in the checkpoint alone {pair.only_checkpoint:,}"

    def bounds(times: float) -> tuple[float, float]:
        low, high = one_sided(pair, gates.confidence, times=times)
        return -high, -low  # of a loss

    estimate = Estimate(
        value=-pair.difference,
        bounds=bounds,
        samples=num,
        unit="questions",
        says=f"{task.protocol.title}, {name}: {percent(task.checkpoint.score(name).value)} of "
        f"{asked}, the source {percent(task.source.score(name).value)} (right in the "
        f"{alone}): a drop of {points(-pair.difference)}",
        how=f"{BOUND}, paired",
        shown=points,
        also=not_its_own(task.checkpoint.as_served),
    )
    return settle(gate, estimate, most, gates, is_floor=False)


def _worst_task(
    gates: Gates, tasks: Sequence[TaskFact], wanted: Collection[str]
) -> Iterator[ReasonFact]:
    """The task that lost most, where the recipe has a limit for it."""
    most = gates.max_worst_drop
    if most is None:
        return
    names = [task.protocol.task for task in tasks]
    # What the recipe lists and nobody asked may be the worst.
    lacking = [name for name in wanted if name not in names]
    for task in tasks:
        score = task.source and task.source.score(task.judged_filter(gates.filter)).value
        if not score:
            lacking.append(task.protocol.task)
    if lacking or not tasks:
        cure = "`keepmtp eval CHECKPOINT --source SOURCE` asks both all that the recipe lists."
        if lacking:
            cure = f"{', '.join(lacking)}: not asked, or the source gets nothing right. {cure}"
        yield unmeasured("worst task", cure)
        return
    drops = [_dropped("worst task", gates, task, most) for task in tasks]
    for drop in drops:
        if drop.verdict == worst(drops):
            yield drop
            return


def _drafting(tasks: Sequence[TaskFact], *, is_compared: bool) -> Iterator[ReasonFact]:
    """The checkpoint's answers with MTP on against those with MTP off: one reason, where it was
    asked both ways.

    Every task, every filter and empty answers are asked, by the exact sign test.
    """
    # Most checkpoints have some answers that drafting changes, because near-ties flip, as many for
    # the better as for the worse. What is asked is whether the split is one that chance hardly
    # gives, in both directions.
    rarest: SwitchFact | None = None
    asked: TaskFact | None = None
    for task in tasks:
        if task.drafting is None:
            continue
        for switch in task.drafting.switches:
            if rarest is None or switch.chance < rarest.chance:
                rarest = switch
                asked = task
    if rarest is None or asked is None or asked.drafting is None:
        return
    what = f"right by {rarest.reads}"
    if rarest.reads == NOT_EMPTY:
        what = "with text"
    says = (
        f"{asked.protocol.title}: {asked.drafting.num_changed:,} of "
        f"{asked.checkpoint.num_questions:,} greedy answers are another text with MTP on than off. "
        f"Only without drafting "
        f"{rarest.only_plain:,} are {what}, only with it {rarest.only_drafting:,} (exact sign "
        f"test: {rarest.chance:.2g}), "
    )
    if rarest.chance < CHANCE:
        yield reason("drafting", "regression", f"{says}beyond chance.")
    elif 2 * asked.drafting.num_changed > asked.checkpoint.num_questions and not is_compared:
        # Right and wrong say little where most texts are other ones.
        says += (
            "no more than chance gives. Most texts differ, and were not compared with a control: "
        )
        says += "`keepmtp eval CHECKPOINT --only acceptance` shows whether near-ties explain it."
        yield unmeasured("drafting", says)
    else:
        says += "no more than chance gives where near-ties flip."
        yield reason("drafting", "pass", says)
