"""The two gates on samples, acceptance and the first task's score: an estimate, a limit, and enough samples or not.

In: draft counters and paired answers, of servers or of GSM8K, and the recipe's limits. Out: a `ReasonFact` each.

Easy to get wrong: an estimate on the right side of a limit is no pass, and one on the wrong side is no regression. A
gate judges a bound of the estimate, at the recipe's confidence, one-sided, from exact limits (binomial.py). Where the
samples do not settle it, the reason says how many would.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from ...recipes.protocol import Gates
from ..facts.binomial import ratio_limits
from ..facts.evaluated import EvaluatedFact, EvaluationFact, PairedFact
from ..facts.paired import one_sided
from ..facts.schema import JudgementWord, ReasonFact
from ..facts.served import Drafts, ServeCheck
from .numbers import down, limit, percent, points, up

_ON_THE_LIMIT = 1e-9
"""An estimate nearer to its limit than this is equal to it: no number of samples tells."""
_MOST_TIMES = 1_000_000
"""So many times as many samples nobody takes: where they would not settle it either, no number is named."""
BOUND = "one-sided, Clopper-Pearson"

Bounds = Callable[[float], tuple[float, float]]
"""How far an estimate is above its limit, at least and at most, with so many times as many samples."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafting:
    """Draft counters of a served checkpoint, and of its source over the same questions or prompts.

    Attributes:
        what: was asked, in words.
        unit: of what was asked, "questions" or "prompts".
        k: draft tokens a step.
        num_asked: questions or prompts.
        as_served: how the checkpoint was served, "native" for its own bytes.
        source: None where it was not asked, or drafted nothing.
    """

    what: str
    unit: str
    k: int
    num_asked: int
    as_served: str
    checkpoint: Drafts
    source: Drafts | None


def drafting_of(serve: ServeCheck | None, evaluation: EvaluationFact | None) -> list[Drafting]:
    """What was measured of drafting, at most one of each station; the first is judged, and on top of the page.

    That is the evaluation, unless only serve-check asked the source. Of serve-check it is the largest k that both
    drafted with.
    """
    found = []
    if evaluation:
        theirs = evaluation.source
        found.append(
            Drafting(
                what=f"{evaluation.checkpoint.num_questions:,} questions of {evaluation.protocol.title}",
                unit="questions",
                k=evaluation.protocol.k,
                num_asked=evaluation.checkpoint.num_questions,
                as_served=evaluation.checkpoint.as_served,
                checkpoint=evaluation.checkpoint,
                source=theirs if theirs and theirs.draft_tokens else None,
            )
        )
    if serve and serve.checkpoint.drafting:
        sources = {run.k: run for run in serve.source.drafting if run.draft_tokens} if serve.source else {}
        run = max(serve.checkpoint.drafting, key=lambda run: (run.k in sources, run.k))
        found.append(
            Drafting(
                what=f"serve-check's {len(serve.prompts):,} prompts",
                unit="prompts",
                k=run.k,
                num_asked=len(serve.prompts),
                as_served=serve.checkpoint.as_served,
                checkpoint=run,
                source=sources.get(run.k),
            )
        )
    return sorted(found, key=lambda each: each.source is None)


def acceptance(gates: Gates, serve: ServeCheck | None, evaluation: EvaluationFact | None) -> ReasonFact:
    """The share of the source's acceptance, on GSM8K or else on serve-check's prompts."""
    measured = drafting_of(serve, evaluation)
    reasons = [_share_of_the_source(gates, each, each.source) for each in measured if each.source]
    if not reasons:
        return ReasonFact(gate="acceptance", verdict="infeasible", says=_why_no_drafts(serve, evaluation))
    first, *others = reasons
    says = first.says
    for other in others:
        if {first.verdict, other.verdict} == {"pass", "regression"}:
            says += f" The other measurement says {other.verdict}: {other.says}"
    return first.model_copy(update={"says": says + not_its_own(is_native=measured[0].as_served == "native")})


def _why_no_drafts(serve: ServeCheck | None, evaluation: EvaluationFact | None) -> str:
    """Why no measurement has counters of both."""
    if serve is None and evaluation is None:
        return "Not measured: `keepmtp eval CHECKPOINT` measures acceptance beside the score."
    if all(each is None or each.source is None for each in (serve, evaluation)):
        return "The source was not measured, and acceptance alone does not tell a damaged draft from a hard text."
    for served in serve.served if serve else ():
        for run in served.runs:
            if not run.loaded:
                return (
                    f"The {served.role}'s server with k={run.k} did not come up, so there is nothing to compare: "
                    f"{run.error.rstrip('.')}."
                )
    return "The source drafted nothing, so there is nothing to compare with. Serve both with at least one draft token."


def _share_of_the_source(gates: Gates, measured: Drafting, theirs: Drafts) -> ReasonFact:
    """Acceptance as a share of the source's; its error by the delta method."""
    mine = measured.checkpoint
    where = f"On {measured.what} with k={measured.k}"
    if not mine.draft_tokens:
        says = f"{where}, the checkpoint drafted nothing; the source drafted {theirs.draft_tokens:,} tokens."
        return ReasonFact(gate="acceptance", verdict="regression", says=says)
    if not theirs.accepted_tokens:
        says = (
            f"{where}, none of the source's own {theirs.draft_tokens:,} drafted tokens was accepted: "
            "there is nothing to keep a share of."
        )
        return ReasonFact(gate="acceptance", verdict="infeasible", says=says)
    num = min(mine.draft_tokens, theirs.draft_tokens)
    share, source_share = mine.accepted_tokens / mine.draft_tokens, theirs.accepted_tokens / theirs.draft_tokens
    kept = share / source_share

    def bounds(times: float) -> tuple[float, float]:
        ours, others = times * _num_drafts(mine, measured.k), times * _num_drafts(theirs, measured.k)
        lower, upper = ratio_limits(share * ours, ours, source_share * others, others, gates.confidence)
        return lower - gates.min_acceptance, upper - gates.min_acceptance

    low, high = (gates.min_acceptance + each for each in bounds(1))
    verdict, needed = settle(kept - gates.min_acceptance, bounds, num)
    bound = f"at most {percent(up(high))}" if verdict == "regression" else f"at least {percent(down(low))}"
    says = (
        f"{where}: {percent(share)} of {mine.draft_tokens:,} drafted tokens accepted, {percent(source_share)} of the "
        f"source's {theirs.draft_tokens:,}. That is {percent(kept)} of it, {bound} at "
        f"{limit(gates.confidence)} confidence ({BOUND}, a draft as one trial); "
        f"at least {limit(gates.min_acceptance)} must be kept."
    )
    if verdict == "infeasible":
        asked = f", about {math.ceil(needed / num * measured.num_asked):,} {measured.unit}" if needed else ""
        says += too_few("drafted tokens", needed, also=asked, is_good=kept > gates.min_acceptance)
    return ReasonFact(gate="acceptance", verdict=verdict, says=says, needed=needed)


def _num_drafts(counted: Drafts, k: int) -> float:
    """How many trials the counters are.

    A later token is accepted only if all before it are, so the draft is the trial, not the token: its accepted share is
    a value from 0 to 1. Drafts are taken as independent: within an answer that makes the bounds too near, between two
    models' answers to one question too far.
    """
    return counted.drafts or counted.draft_tokens / k


def score(gates: Gates, evaluation: EvaluationFact | None) -> ReasonFact:
    """The drop of the first task's score, paired by question; the gate has the task's name."""
    if evaluation is None:
        return ReasonFact(gate="gsm8k", verdict="infeasible", says="Not measured: `keepmtp eval CHECKPOINT` does.")
    gate, source, checkpoint = evaluation.protocol.task, evaluation.source, evaluation.checkpoint
    name, pair = evaluation.judged_filter(gates.filter), evaluation.pair(gates.filter)
    if source is None or pair is None:
        says = (
            "The source was not evaluated, so a drop cannot be told. "
            "`keepmtp eval CHECKPOINT --source SOURCE` evaluates both."
        )
        return ReasonFact(gate=gate, verdict="infeasible", says=says)
    before, after = source.score(name).value, checkpoint.score(name).value
    num = checkpoint.num_questions // evaluation.protocol.repeats  # the pairs
    if before <= gates.max_drop:
        says = (
            f"{name}: the source itself gets {percent(before)} of {num:,} questions, "
            f"so a drop of {points(gates.max_drop)} could not be seen."
        )
        return ReasonFact(gate=gate, verdict="infeasible", says=says)

    def bounds(times: float) -> tuple[float, float]:
        lower, upper = one_sided(pair, gates.confidence, times=times)
        return gates.max_drop + lower, gates.max_drop + upper

    low, high = (each - gates.max_drop for each in bounds(1))
    verdict, needed = settle(gates.max_drop + pair.difference, bounds, num)
    bound = f"a drop of at least {points(down(-high))}" if verdict == "regression" else _at_most(-low)
    says = (
        f"{name}: {percent(after)} of {num:,} questions, the source {percent(before)}: {_change(pair)} "
        f"(only the source gets {pair.only_source:,} right, only the checkpoint {pair.only_checkpoint:,}), {bound} at "
        f"{limit(gates.confidence)} confidence ({BOUND}, paired); at most {points(gates.max_drop)} may be lost."
    )
    if verdict == "infeasible":
        also = ", more than this dataset has" if needed and evaluation.protocol.limit is None else ""
        says += too_few("questions", needed, also=also, is_good=pair.difference > -gates.max_drop)
    says += _truncation(gates, source, checkpoint) + not_its_own(is_native=checkpoint.as_served == "native")
    return ReasonFact(gate=gate, verdict=verdict, says=says, needed=needed)


def settle(margin: float, bounds: Bounds, num: int) -> tuple[JudgementWord, int | None]:
    """The verdict on one estimate.

    Args:
        margin: how much better than its limit the estimate is; negative where it is worse.
        bounds: of the margin.
        num: samples that it is from.
    Returns: the verdict, and with infeasible how many samples of the same shares would settle it. None where no number
        would.
    """
    low, high = bounds(1)
    if low >= 0:
        return "pass", None
    if high < 0:
        return "regression", None
    if abs(margin) < _ON_THE_LIMIT:
        return "infeasible", None
    times = _times_to_settle(lambda times: bounds(times)[0] >= 0 if margin > 0 else bounds(times)[1] < 0)
    return "infeasible", max(num + 1, math.ceil(num * times)) if times else None


def _times_to_settle(settles: Callable[[float], bool]) -> float | None:
    """The least number of times as many samples that settle it, to a thousandth; None where it is out of reach."""
    high = 2.0
    while not settles(high):
        high *= 2
        if high > _MOST_TIMES:
            return None
    low = high / 2
    while high / low > 1.0005:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if settles(middle) else (middle, high)
    return high


def too_few(what: str, needed: int | None, *, also: str, is_good: bool) -> str:
    """What a gate says that its samples do not settle: how many would."""
    if needed is None:
        return " It lies on the limit itself, or so near that no number of samples tells."
    verdict = "pass" if is_good else "fail"
    return f" Too few to tell: at these figures it would {verdict} with about {needed:,} {what}{also}."


def _truncation(gates: Gates, source: EvaluatedFact, checkpoint: EvaluatedFact) -> str:
    """A warning where answers cut at max_tokens could by themselves make more difference than the limit."""
    before, after = (model.num_truncated / model.num_questions for model in (source, checkpoint))
    if abs(after - before) <= gates.max_drop:
        return ""
    return (
        f" Of its answers {percent(after)} were cut at max_tokens, of the source's {percent(before)}: the scores "
        "differ by that too."
    )


def not_its_own(*, is_native: bool) -> str:
    """A warning where other bytes than the checkpoint's were served."""
    if is_native:
        return ""
    return " Served was a BF16 copy of the same weights: packed kernels and quantized activations were not tried."


def _change(pair: PairedFact) -> str:
    if pair.difference == 0:
        return "as many"
    return f"{points(abs(pair.difference))} {'more' if pair.difference > 0 else 'fewer'}"


def _at_most(drop: float) -> str:
    return f"a drop of at most {points(up(drop))}" if drop > 0 else f"a gain of at least {points(down(-drop))}"
