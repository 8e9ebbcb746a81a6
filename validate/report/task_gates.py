"""The gates on all tasks together: the mean recovery, and the task that lost most.

In: an evaluation, the recipe's limits, and the tasks that the recipe lists. Out: a `ReasonFact` for each limit that the
recipe has.

Easy to get wrong: a mean over the tasks that were asked is no mean over those that the recipe lists, so one that is
missing leaves the mean unjudged. And the worst of many tasks looks bad by chance: it is judged by its bound, as the
score of one task is, and the reason names it.
"""

from collections.abc import Collection, Iterator

from ...recipes.protocol import Gates
from ..facts.evaluated import EvaluationFact, TaskFact
from ..facts.paired import one_sided
from ..facts.schema import JudgementWord, ReasonFact
from .numbers import down, limit, percent, points, up
from .recovery import mean_recovery, recovery
from .sampled_gates import settle, too_few

MEAN, WORST = "mean recovery", "worst task"
_ORDER: tuple[JudgementWord, ...] = ("regression", "infeasible", "pass")


def tasks_together(gates: Gates, evaluation: EvaluationFact | None, listed: Collection[str]) -> Iterator[ReasonFact]:
    """A reason for each of both limits that the recipe has.

    Args:
        gates: the recipe's.
        evaluation: what `keepmtp eval` measured.
        listed: the recipe's tasks.
    """
    wanted = [(MEAN, gates.min_mean_recovery), (WORST, gates.max_worst_drop)]
    lack = _lack(evaluation, listed, gates.filter)
    for gate, least in wanted:
        if least is None:
            continue
        if evaluation is None or lack:
            yield ReasonFact(gate=gate, verdict="infeasible", says=lack)
        elif gate == MEAN:
            yield _mean(gates, evaluation, least)
        else:
            yield _worst(gates, evaluation, least)


def _lack(evaluation: EvaluationFact | None, listed: Collection[str], wanted: str) -> str:
    """What was not measured; "" where all was."""
    cure = "`keepmtp eval CHECKPOINT --source SOURCE` asks both all that the recipe lists"
    if evaluation is None:
        return f"Not measured: {cure}."
    asked = {task.protocol.task for task in evaluation.by_task}
    if missing := [name for name in listed if name not in asked]:
        return f"Of the recipe's tasks {', '.join(missing)} was not asked. {cure}."
    if unknown := [task.protocol.task for task in evaluation.by_task if recovery(task, wanted) is None]:
        return f"{', '.join(unknown)}: the source was not asked, or gets nothing right. {cure}."
    return ""


def _mean(gates: Gates, evaluation: EvaluationFact, least: float) -> ReasonFact:
    mean = mean_recovery(evaluation.by_task, gates.filter)
    assert mean is not None, "_lack"
    num = sum(task.checkpoint.num_questions for task in evaluation.by_task)

    def bounds(times: float) -> tuple[float, float]:
        low, high = mean.one_sided(gates.confidence, times=times)
        return low - least, high - least

    low, high = (each + least for each in bounds(1))
    verdict, needed = settle(mean.value - least, bounds, num)
    each = ", ".join(f"{task.protocol.title} {_percent_of(task, gates)}" for task in evaluation.by_task)
    bound = f"at most {percent(up(high))}" if verdict == "regression" else f"at least {percent(down(low))}"
    says = (
        f"{each}: {percent(mean.value)} of the source's scores on average, {bound} at {limit(gates.confidence)} "
        f"confidence (one-sided, paired by question, tasks independent); at least {limit(least)} must be kept."
    )
    if verdict == "infeasible":
        says += too_few("questions", needed, also=" over all tasks", is_good=mean.value > least)
    return ReasonFact(gate=MEAN, verdict=verdict, says=says, needed=needed)


def _worst(gates: Gates, evaluation: EvaluationFact, most: float) -> ReasonFact:
    """The task with the worst verdict, and among equals the one whose bound is the worst."""
    judged = [_of_task(gates, task, most) for task in evaluation.by_task]
    reason, _ = min(judged, key=lambda one: (_ORDER.index(one[0].verdict), one[1]))
    others = len(judged) - 1
    if reason.verdict == "pass" and others:
        return reason.model_copy(update={"says": f"{reason.says} No other task has a worse bound."})
    return reason


def _of_task(gates: Gates, task: TaskFact, most: float) -> tuple[ReasonFact, float]:
    """One task's reason, and the lower bound of its difference."""
    name, pair = task.judged_filter(gates.filter), task.pair(gates.filter)
    assert task.source is not None and pair is not None, "_lack"

    def bounds(times: float) -> tuple[float, float]:
        lower, upper = one_sided(pair, gates.confidence, times=times)
        return most + lower, most + upper

    low, high = (each - most for each in bounds(1))
    num = task.checkpoint.num_questions // task.protocol.repeats  # the pairs
    verdict, needed = settle(most + pair.difference, bounds, num)
    before, after = task.source.score(name).value, task.checkpoint.score(name).value
    bound = (
        f"a drop of at least {points(down(-high))}"
        if verdict == "regression"
        else f"a drop of at most {points(up(max(0.0, -low)))}"
    )
    says = (
        f"{task.protocol.title}, {name}: {percent(after)} of {num:,} questions, the source {percent(before)}, {bound} "
        f"at {limit(gates.confidence)} confidence (one-sided, paired); no task may lose more than {points(most)}."
    )
    if verdict == "infeasible":
        says += too_few("questions", needed, also="", is_good=pair.difference > -most)
    return ReasonFact(gate=WORST, verdict=verdict, says=says, needed=needed), low


def _percent_of(task: TaskFact, gates: Gates) -> str:
    found = recovery(task, gates.filter)
    return "unknown" if found is None else percent(found.value)
