"""The gates on counted samples: acceptance, the tasks' scores, their mean recovery, and what
drafting changes.

In: draft counters and paired answers, of servers or of tasks, and the recipe's limits. Out: a
`ReasonFact` each.

Easy to get wrong: a mean over the tasks that were asked is no mean over those that the recipe
lists, so one that is missing leaves the mean unjudged. Most checkpoints have some answers that
drafting changes, because near-ties flip, as many for the better as for the worse: that gate asks
whether the split is one that chance hardly gives, in both directions.
"""

import math
from collections.abc import Collection, Iterator

from ...recipes.protocol import Gates
from ..facts.binomial import ratio_limits
from ..facts.evaluated import NOT_EMPTY, DraftingFact, EvaluationFact, SwitchFact, TaskFact
from ..facts.paired import one_sided
from ..facts.schema import ReasonFact
from ..facts.served import Drafts, ServeCheck
from .drafted import Drafted, drafted
from .numbers import limit, percent, points
from .recovery import mean_recovery, recovery
from .settle import WORST_FIRST, Estimate, Settled, at_least, unmeasured

CHANCE = 0.001
"""A split is no chance if two equal servers come to it less often than this: one good checkpoint in
a thousand fails.

Both reports from the field are far beyond it: of 39 questions, 21 that only one server gets right
are 1 in a million.
"""
BOUND = "one-sided, Clopper-Pearson"


# --- acceptance -----------------------------------------------------------------------------------


def acceptance(
    gates: Gates, serve: ServeCheck | None, evaluation: EvaluationFact | None
) -> ReasonFact:
    """The share of the source's acceptance, on the first task's questions or else on serve-check's
    prompts.
    """
    measured = drafted(serve, evaluation)
    reasons = [_kept(gates, each, each.source) for each in measured if each.source]
    if not reasons:
        return unmeasured("acceptance", _why_no_drafts(serve, evaluation))
    first, *others = reasons
    says = first.says
    for other in others:
        if {first.verdict, other.verdict} == {"pass", "regression"}:
            says += f" The other measurement says {other.verdict}: {other.says}"
    return first.model_copy(update={"says": says + not_its_own(measured[0].as_served)})


def _why_no_drafts(serve: ServeCheck | None, evaluation: EvaluationFact | None) -> str:
    """Why no measurement has counters of both."""
    if serve is None and evaluation is None:
        return "Not measured: `keepmtp eval CHECKPOINT` measures acceptance beside the score."
    if all(each is None or each.source is None for each in (serve, evaluation)):
        return (
            "The source was not measured, and acceptance alone does not tell a damaged draft "
            "from a hard text."
        )
    served = serve.served if serve else ()
    dead = [
        f"{one.role}, k={run.k}: {run.error}" for one in served for run in one.runs if run.error
    ]
    why = f" A server did not come up: {dead[0].rstrip('.')}." if dead else ""
    return (
        f"No k drafted tokens of both source and checkpoint, so there is nothing to compare.{why}"
    )


def _kept(gates: Gates, measured: Drafted, theirs: Drafts) -> ReasonFact:
    """Acceptance as a share of the source's."""
    mine = measured.checkpoint
    where = f"On {measured.what} with k={measured.k}"
    if not mine.draft_tokens:
        says = (
            f"{where}, the checkpoint drafted nothing; the source drafted "
            f"{theirs.draft_tokens:,} tokens."
        )
        return ReasonFact(gate="acceptance", verdict="regression", says=says)
    share, source_share = (
        mine.accepted_tokens / mine.draft_tokens,
        theirs.accepted_tokens / theirs.draft_tokens,
    )
    if not source_share:
        says = (
            f"{where}, none of the source's own {theirs.draft_tokens:,} drafted tokens was "
            "accepted: "
        )
        return unmeasured("acceptance", f"{says}there is nothing to keep a share of.")

    def bounds(times: float) -> tuple[float, float]:
        ours, others = (
            times * _num_drafts(mine, measured.k),
            times * _num_drafts(theirs, measured.k),
        )
        return ratio_limits(share * ours, ours, source_share * others, others, gates.confidence)

    num, kept = min(mine.draft_tokens, theirs.draft_tokens), share / source_share
    estimate = Estimate(value=kept, bounds=bounds, samples=num, unit="drafted tokens")
    found = at_least(estimate, gates.min_acceptance)
    asked = math.ceil((found.needed or 0) / num * measured.num_asked)
    says = (
        f"{where}: {percent(share)} of {mine.draft_tokens:,} drafted tokens accepted, "
        f"{percent(source_share)} of the source's {theirs.draft_tokens:,}. That is "
        f"{percent(kept)} of it, {found.side} {percent(found.rounded)} at "
        f"{limit(gates.confidence)} confidence ({BOUND}, a draft as one trial); at least "
        f"{limit(gates.min_acceptance)} must be "
        f"kept.{found.open_end(f', about {asked:,} {measured.unit}')}"
    )
    return ReasonFact(gate="acceptance", verdict=found.verdict, says=says, needed=found.needed)


def _num_drafts(counted: Drafts, k: int) -> float:
    """How many trials the counters are.

    A later token is accepted only if all before it are, so the draft is the trial, not the token:
    its accepted share is a value from 0 to 1. Drafts are taken as independent: within an answer
    that makes the bounds too near, between two models' answers to one question too far.
    """
    return counted.drafts or counted.draft_tokens / k


def not_its_own(as_served: str) -> str:
    """A warning where other bytes than the checkpoint's were served."""
    if as_served == "native":
        return ""
    return (
        " Served was a BF16 copy of the same weights: packed kernels and quantized activations "
        "were not tried."
    )


# --- scores ---------------------------------------------------------------------------------------


def score(gates: Gates, evaluation: EvaluationFact | None) -> ReasonFact:
    """The drop of the first task's score, paired by question; the gate has the task's name."""
    if evaluation is None:
        return unmeasured("gsm8k", "Not measured: `keepmtp eval CHECKPOINT` does.")
    gate, source, checkpoint = evaluation.protocol.task, evaluation.source, evaluation.checkpoint
    if source is None:
        says = "The source was not evaluated, so a drop cannot be told. "
        return unmeasured(gate, f"{says}`keepmtp eval CHECKPOINT --source SOURCE` evaluates both.")
    name = evaluation.judged_filter(gates.filter)
    before = source.score(name).value
    if before <= gates.max_drop:
        right = f"{percent(before)} of {_num_pairs(evaluation):,} questions"
        says = (
            f"{name}: the source itself gets {right}, so a drop of {points(gates.max_drop)} "
            "could not be seen."
        )
        return unmeasured(gate, says)
    found, says = _lost(gates, evaluation, gates.max_drop)
    says += not_its_own(checkpoint.as_served)
    return ReasonFact(gate=gate, verdict=found.verdict, says=says, needed=found.needed)


def _lost(gates: Gates, task: TaskFact, most: float) -> tuple[Settled, str]:
    """One task's score against its source's, which was asked: what it comes to, and the figures in
    words.
    """
    name, pair = task.judged_filter(gates.filter), task.pair(gates.filter)
    assert task.source is not None and pair is not None, "the callers ask for a source"
    num = _num_pairs(task)
    estimate = Estimate(
        value=pair.difference,
        bounds=lambda times: one_sided(pair, gates.confidence, times=times),
        samples=num,
        unit="questions",
    )
    found = at_least(estimate, -most)
    change = "as many"
    if pair.difference:
        change = f"{points(abs(pair.difference))} {'more' if pair.difference > 0 else 'fewer'}"
    bound = f"a drop of {'at most' if found.is_lower else 'at least'} {points(abs(found.rounded))}"
    if found.bound >= 0:
        bound = f"a gain of at least {points(found.rounded)}"
    says = (
        f"{name}: {percent(task.checkpoint.score(name).value)} of {num:,} questions, the source "
        f"{percent(task.source.score(name).value)}: {change} (only the source gets "
        f"{pair.only_source:,} right, only the checkpoint {pair.only_checkpoint:,}), {bound} at "
        f"{limit(gates.confidence)} confidence ({BOUND}, paired); at most {points(most)} may be "
        "lost."
    )
    return found, says + found.open_end(
        "" if task.protocol.limit else ", more than this dataset has"
    )


def _num_pairs(task: TaskFact) -> int:
    return task.checkpoint.num_questions // task.protocol.repeats


def tasks_together(
    gates: Gates, evaluation: EvaluationFact | None, listed: Collection[str]
) -> Iterator[ReasonFact]:
    """Mean recovery and the worst task, each where the recipe has a limit for it.

    Args:
        gates: the recipe's.
        evaluation: what `keepmtp eval` measured.
        listed: the recipe's tasks.
    """
    lack = _lack(evaluation, listed, gates.filter)
    for gate, value in (
        ("mean recovery", gates.min_mean_recovery),
        ("worst task", gates.max_worst_drop),
    ):
        if value is None:
            continue
        if evaluation is None or lack:
            yield unmeasured(gate, lack)
        elif gate == "mean recovery":
            yield _mean(gates, evaluation, value)
        else:
            yield _worst(gates, evaluation, value)


def _lack(evaluation: EvaluationFact | None, listed: Collection[str], wanted: str) -> str:
    """What was not measured; "" where all was."""
    cure = "`keepmtp eval CHECKPOINT --source SOURCE` asks both all that the recipe lists"
    if evaluation is None:
        return f"Not measured: {cure}."
    asked = {task.protocol.task for task in evaluation.by_task}
    if missing := [name for name in listed if name not in asked]:
        return f"Of the recipe's tasks {', '.join(missing)} was not asked. {cure}."
    if unknown := [
        task.protocol.task for task in evaluation.by_task if recovery(task, wanted) is None
    ]:
        return f"{', '.join(unknown)}: the source was not asked, or gets nothing right. {cure}."
    return ""


def _mean(gates: Gates, evaluation: EvaluationFact, least: float) -> ReasonFact:
    mean = mean_recovery(evaluation.by_task, gates.filter)
    assert mean is not None, "_lack"
    estimate = Estimate(
        value=mean.value,
        bounds=lambda times: mean.one_sided(gates.confidence, times=times),
        samples=sum(task.checkpoint.num_questions for task in evaluation.by_task),
        unit="questions",
    )
    found = at_least(estimate, least)
    each = [(task.protocol.title, recovery(task, gates.filter)) for task in evaluation.by_task]
    says = (
        f"{', '.join(f'{title} {percent(kept and kept.value)}' for title, kept in each)}: "
        f"{percent(mean.value)} of the source's scores on average, {found.side} "
        f"{percent(found.rounded)} at {limit(gates.confidence)} confidence (one-sided, paired by "
        f"question, tasks independent); at least {limit(least)} must be "
        f"kept.{found.open_end(' over all tasks')}"
    )
    return ReasonFact(gate="mean recovery", verdict=found.verdict, says=says, needed=found.needed)


def _worst(gates: Gates, evaluation: EvaluationFact, most: float) -> ReasonFact:
    """The task with the worst verdict, and among equals the one whose bound is the worst."""
    judged = [(task, *_lost(gates, task, most)) for task in evaluation.by_task]
    task, found, says = min(
        judged, key=lambda one: (WORST_FIRST.index(one[1].verdict), one[1].bound)
    )
    says = f"{task.protocol.title}, {says}"
    if found.verdict == "pass" and len(judged) > 1:
        says += " No other task has a worse bound."
    return ReasonFact(gate="worst task", verdict=found.verdict, says=says, needed=found.needed)


# --- drafting -------------------------------------------------------------------------------------


def drafting(evaluation: EvaluationFact | None) -> Iterator[ReasonFact]:
    """The checkpoint's answers with MTP on against those with MTP off: one reason, where it was
    asked both ways.

    Every task, every filter and empty answers are asked, by the exact sign test.
    """
    both = (
        [(task, task.drafting) for task in evaluation.by_task if task.drafting]
        if evaluation
        else []
    )
    if not both:
        return
    task, found = min(both, key=lambda one: _rarest(one[1]).chance)
    rarest, num = _rarest(found), task.checkpoint.num_questions
    where = f"{task.protocol.title}: " if len(both) > 1 else ""
    texts = (
        f"{where}{num - found.num_changed:,} of {num:,} greedy answers are the same text with MTP "
        f"on and off{'; near-ties may flip the others' if found.num_changed else ''}."
    )
    what = "with text" if rarest.reads == NOT_EMPTY else f"right by {rarest.reads}"
    parted = rarest.only_plain + rarest.only_drafting
    split = (
        f"Only without drafting {rarest.only_plain:,} are {what}, only with it "
        f"{rarest.only_drafting:,} (exact sign test: {rarest.chance:.2g})"
    )
    if rarest.chance < CHANCE:
        says = f"Drafting changes what is right beyond chance. {split}. {texts}"
        yield ReasonFact(gate="drafting", verdict="regression", says=says)
    elif parted:
        yield ReasonFact(
            gate="drafting", verdict="pass", says=f"{texts} {split}: no more than chance gives."
        )
    else:
        yield ReasonFact(
            gate="drafting",
            verdict="pass",
            says=f"{texts} Each is as right or wrong with it as without.",
        )


def _rarest(found: DraftingFact) -> SwitchFact:
    return min(found.switches, key=lambda switch: switch.chance)
