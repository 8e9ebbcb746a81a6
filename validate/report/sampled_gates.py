"""The gates on samples: acceptance, the tasks' scores, their mean recovery, and closeness to the
source.

In: draft counters, paired answers and divergences, of servers, and the recipe's limits. Out: a
`ReasonFact` each.

Easy to get wrong: a mean over the tasks that were asked is no mean over those that the recipe
lists, so one that is missing leaves the mean unjudged. Tokens of one window are not independent:
the bound of a mean is Student's over windows, and that of a share is Clopper and Pearson's over as
many independent positions as would tell as much (Korn and Graubard). A divergence from a part of
the vocabulary is a lower bound: a limit that it fails is failed, and where it passes the reason
says how much probability was not compared token by token.
"""

import math
from collections.abc import Collection, Iterator

from ...recipes.protocol import Gates
from ..facts.binomial import limits, ratio_limits, student
from ..facts.closeness import ClosenessFact
from ..facts.evaluated import EvaluationFact, TaskFact
from ..facts.paired import one_sided
from ..facts.schema import ReasonFact
from ..facts.served import Drafts, ServeCheck
from .drafted import Drafted, drafted
from .numbers import limit, percent, points
from .recovery import mean_recovery, recovery
from .settle import WORST_FIRST, Estimate, Settled, at_least, at_most, unmeasured, worst

BOUND = "one-sided, Clopper-Pearson"


# --- acceptance -----------------------------------------------------------------------------------


def acceptance(
    gates: Gates, serve: ServeCheck | None, evaluation: EvaluationFact | None
) -> ReasonFact:
    """The share of the source's acceptance, on the first task's questions or else on serve-check's
    prompts.
    """
    measured = drafted(serve, evaluation)
    first, *others = [_kept(gates, each, each.source) for each in measured if each.source] or [None]
    if first is not None:
        says = first.says
        for other in others:
            if other and {first.verdict, other.verdict} == {"pass", "regression"}:
                says += f" The other measurement says {other.verdict}: {other.says}"
        says += not_its_own(measured[0].as_served)
        return first.model_copy(update={"says": says})
    served = serve.served if serve else ()
    dead = [
        f"{one.role}, k={run.k}: {run.error}" for one in served for run in one.runs if run.error
    ]
    why = f" A server did not come up: {dead[0].rstrip('.')}." if dead else ""
    says = "Not measured of both source and checkpoint: `keepmtp eval CHECKPOINT` does."
    return unmeasured("acceptance", f"{says}{why}")


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
        f"{percent(source_share)} of the "
        f"source's {theirs.draft_tokens:,}. That is {percent(kept)} of it, {found.side} "
        f"{percent(found.rounded)} at "
        f"{limit(gates.confidence)} confidence ({BOUND}, a draft as one trial); at least "
        f"{limit(gates.min_acceptance)} must be kept."
    )
    return found.reason("acceptance", says, f", about {asked:,} {measured.unit}")


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
    gate, source = evaluation.protocol.task, evaluation.source
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
    says += not_its_own(evaluation.checkpoint.as_served)
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
    if found.bound >= 0:
        bound = f"a gain of at least {points(found.rounded)}"
    else:
        bound = (
            f"a drop of {'at most' if found.side == 'at least' else 'at least'} "
            f"{points(abs(found.rounded))}"
        )
    says = (
        f"{name}: {percent(task.checkpoint.score(name).value)} of {num:,} questions, the source "
        f"{percent(task.source.score(name).value)}: {change} (only the source gets "
        f"{pair.only_source:,} right, only "
        f"the checkpoint {pair.only_checkpoint:,}), {bound} at {limit(gates.confidence)} "
        f"confidence ({BOUND}, paired); "
        f"at most {points(most)} may be lost."
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
    for gate, value in (
        ("mean recovery", gates.min_mean_recovery),
        ("worst task", gates.max_worst_drop),
    ):
        if value is None:
            continue
        lack = _lack(evaluation, listed, gates.filter)
        if evaluation is None or lack:
            cure = "`keepmtp eval CHECKPOINT --source SOURCE` asks both all that the recipe lists"
            yield unmeasured(gate, f"{lack} {cure}.")
        elif gate == "mean recovery":
            yield _mean(gates, evaluation, value)
        else:
            yield _worst(gates, evaluation, value)


def _lack(evaluation: EvaluationFact | None, listed: Collection[str], wanted: str) -> str:
    """What was not measured; "" where all was."""
    asked = {task.protocol.task: task for task in evaluation.by_task} if evaluation else {}
    if missing := [name for name in listed if name not in asked]:
        return f"Of the recipe's tasks {', '.join(missing)} was not asked."
    if unknown := [name for name, task in asked.items() if recovery(task, wanted) is None]:
        return f"{', '.join(unknown)}: the source was not asked, or gets nothing right."
    return "" if asked else "Not measured."


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
        f"{percent(mean.value)} of the "
        f"source's scores on average, {found.side} {percent(found.rounded)} at "
        f"{limit(gates.confidence)} confidence "
        f"(one-sided, paired by question, tasks independent); at least {limit(least)} must be kept."
    )
    return found.reason("mean recovery", says, " over all tasks")


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


# --- closeness ------------------------------------------------------------------------------------


def closeness(gates: Gates, fact: ClosenessFact | None) -> Iterator[ReasonFact]:
    """The worse of both limits, and what was found for each; none where the recipe has no limit."""
    if gates.max_divergence is None and gates.max_flips is None:
        return
    if fact is None:
        yield unmeasured(
            "closeness", "Not measured: `keepmtp closeness CHECKPOINT --source SOURCE` does."
        )
        return
    found, says = [], f"On {fact.tokens:,} tokens of held-out text in {fact.windows:,} windows:"
    for most, judged in ((gates.max_divergence, _divergence), (gates.max_flips, _flips)):
        if most is not None:
            settled, words = judged(most, gates.confidence, fact)
            found.append(settled)
            says += words + settled.open_end()
    says += not_its_own(fact.checkpoint.as_served)
    still_open = [each.needed for each in found if each.verdict == "infeasible"]
    needed = None
    if still_open and None not in still_open:
        needed = max(number for number in still_open if number)
    yield ReasonFact(
        gate="closeness", verdict=worst(each.verdict for each in found), says=says, needed=needed
    )


def _divergence(most: float, confidence: float, fact: ClosenessFact) -> tuple[Settled, str]:
    stderr, figure = fact.stderr, f" {_nats(fact.divergence)} a token from the source,"
    if stderr is None:
        one = Settled(verdict="infeasible", bound=0.0, side="at most")
        return (
            one,
            f"{figure} in one window, which has no standard error. Use text for more windows.",
        )
    reach = student(confidence, fact.windows - 1)

    def bounds(times: float) -> tuple[float, float]:
        wide = reach * stderr / times**0.5
        return fact.divergence - wide, fact.divergence + wide

    found = at_most(
        Estimate(value=fact.divergence, bounds=bounds, samples=fact.tokens, unit="tokens"), most
    )
    says = (
        f"{figure} {found.side} {_nats(found.bound)} at {limit(confidence)} confidence "
        "(one-sided, over windows); at "
        f"most {most:g} nats may be lost."
    )
    if not fact.is_exact and found.verdict == "pass":
        outside = (
            f"{percent(fact.outside)} of the source's probability lies on tokens that were "
            "compared as one"
        )
        says += f" It is a lower bound: {outside}."
    return found, says


def _flips(most: float, confidence: float, fact: ClosenessFact) -> tuple[Settled, str]:
    def bounds(times: float) -> tuple[float, float]:
        trials = times * fact.effective_tokens
        return limits(fact.flip_rate * trials, trials, confidence)

    found = at_most(
        Estimate(value=fact.flip_rate, bounds=bounds, samples=fact.tokens, unit="tokens"), most
    )
    says = (
        f" The first choice is another at {percent(fact.flip_rate)} of the tokens, {found.side} "
        f"{percent(found.rounded)} at {limit(confidence)} confidence ({BOUND}, as "
        f"{fact.effective_tokens:,.0f} "
        f"independent tokens); at most {limit(most)} may be."
    )
    return found, says


def _nats(value: float) -> str:
    return f"{value:.3g} nats"
