"""The two gates on samples, acceptance and gsm8k: an estimate, a limit, and whether the samples are enough.

In: draft counters and paired answers, of servers or of GSM8K, and the recipe's limits. Out: a `ReasonFact` each.

Easy to get wrong: an estimate on the right side of a limit is no pass, and one on the wrong side is no regression. A
gate judges a bound of the estimate, at the recipe's confidence, one-sided. Where the samples do not settle it, the
reason says how many would.
"""

import itertools
import math
from dataclasses import dataclass
from statistics import NormalDist

from ...recipes.protocol import Gates
from ..evaluation.evaluated import EvaluatedFact, EvaluationFact, PairedFact
from ..serving.served import Drafts, ServeCheck
from .numbers import limit, percent, points
from .paired import one_sided
from .schema import JudgementWord, ReasonFact

_ON_THE_LIMIT = 1e-9
"""An estimate nearer to its limit than this is equal to it: no number of samples tells."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Measurement:
    """Draft counters of source and checkpoint over the same questions or prompts.

    Attributes:
        what: was asked, in words.
        unit: of what was asked, "questions" or "prompts".
        k: draft tokens a step.
        num_asked: questions or prompts.
        is_native: the checkpoint's own bytes were served.
    """

    what: str
    unit: str
    k: int
    num_asked: int
    is_native: bool
    source: Drafts
    checkpoint: Drafts


def acceptance(gates: Gates, serve: ServeCheck | None, evaluation: EvaluationFact | None) -> ReasonFact:
    """The share of the source's acceptance, on GSM8K or else on serve-check's prompts."""
    measured = [each for each in (_of_evaluation(evaluation), _of_servers(serve)) if each]
    if not measured:
        return ReasonFact(gate="acceptance", verdict="infeasible", says=_why_no_drafts(serve, evaluation))
    first, *others = [_share_of_the_source(gates, each) for each in measured]
    says = first.says
    for other in others:
        if {first.verdict, other.verdict} == {"pass", "regression"}:
            says += f" The other measurement says {other.verdict}: {other.says}"
    return first.model_copy(update={"says": says + _not_its_own(is_native=measured[0].is_native)})


def _of_evaluation(evaluation: EvaluationFact | None) -> _Measurement | None:
    if evaluation is None or evaluation.source is None or not evaluation.source.draft_tokens:
        return None
    num = evaluation.checkpoint.num_questions
    return _Measurement(
        what=f"{num:,} questions of {evaluation.protocol.title}",
        unit="questions",
        k=evaluation.protocol.k,
        num_asked=num,
        is_native=evaluation.checkpoint.as_served == "native",
        source=evaluation.source,
        checkpoint=evaluation.checkpoint,
    )


def _of_servers(serve: ServeCheck | None) -> _Measurement | None:
    """Of the largest k that both drafted with."""
    if serve is None or serve.source is None:
        return None
    num = len(serve.prompts)
    for run in sorted(serve.checkpoint.drafting, key=lambda run: run.k, reverse=True):
        original = serve.source.run(run.k)
        if original is None or not original.draft_tokens:
            continue
        return _Measurement(
            what=f"serve-check's {num:,} prompts",
            unit="prompts",
            k=run.k,
            num_asked=num,
            is_native=serve.checkpoint.as_served == "native",
            source=original,
            checkpoint=run,
        )
    return None


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


def _share_of_the_source(gates: Gates, measured: _Measurement) -> ReasonFact:
    """Acceptance as a share of the source's; its error by the delta method."""
    mine, theirs = measured.checkpoint, measured.source
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
    (mean, error), (source_mean, source_error) = _per_draft(mine), _per_draft(theirs)
    middle = mean / source_mean
    reach = _deviations(gates) * middle * math.hypot(error / mean, source_error / source_mean)
    num = min(mine.draft_tokens, theirs.draft_tokens)
    verdict, needed = _settle(middle - gates.min_acceptance, reach, num)
    share, source_share = mine.accepted_tokens / mine.draft_tokens, theirs.accepted_tokens / theirs.draft_tokens
    bound = f"at most {percent(middle + reach)}" if verdict == "regression" else f"at least {percent(middle - reach)}"
    says = (
        f"{where}: {percent(share)} of {mine.draft_tokens:,} drafted tokens accepted, {percent(source_share)} of the "
        f"source's {theirs.draft_tokens:,}. That is {percent(share / source_share)} of it, {bound} at "
        f"{limit(gates.confidence)} confidence; at least {limit(gates.min_acceptance)} must be kept."
    )
    if verdict == "infeasible":
        asked = f", about {math.ceil(needed / num * measured.num_asked):,} {measured.unit}" if needed else ""
        says += _too_few("drafted tokens", needed, also=asked, is_good=middle > gates.min_acceptance)
    return ReasonFact(gate="acceptance", verdict=verdict, says=says, needed=needed)


def _per_draft(counted: Drafts) -> tuple[float, float]:
    """Mean number of accepted tokens a draft, and its standard error.

    A later token is accepted only if all before it are, so the draft is the unit, not the token; the counters by
    position tell how many drafts had exactly 0 to k tokens accepted. One draft in all is added, in equal parts to each,
    so that the error is not zero where every draft went one way. Drafts are taken as independent: within an answer that
    makes the error too small, between two models' answers to one question too large.
    """
    reached = (counted.drafts, *(counted.accepted_per_position or (counted.accepted_tokens,)), 0)
    kinds = len(reached) - 1
    weights = [max(0, here - there) + 1 / kinds for here, there in itertools.pairwise(reached)]
    total = sum(weights)
    mean = sum(number * weight for number, weight in enumerate(weights)) / total
    spread = sum(weight * (number - mean) ** 2 for number, weight in enumerate(weights)) / total
    return mean, math.sqrt(spread / total)


def gsm8k(gates: Gates, evaluation: EvaluationFact | None) -> ReasonFact:
    """The drop of the score, paired by question."""
    if evaluation is None:
        return ReasonFact(gate="gsm8k", verdict="infeasible", says="Not measured: `keepmtp eval CHECKPOINT` does.")
    source, checkpoint = evaluation.source, evaluation.checkpoint
    pair = next((pair for pair in evaluation.paired if pair.filter == gates.filter), None)
    if source is None or pair is None:
        says = (
            "The source was not evaluated, so a drop cannot be told. "
            "`keepmtp eval CHECKPOINT --source SOURCE` evaluates both."
        )
        return ReasonFact(gate="gsm8k", verdict="infeasible", says=says)
    before, after = source.score(gates.filter).value, checkpoint.score(gates.filter).value
    num = checkpoint.num_questions
    if before <= gates.max_drop:
        says = (
            f"{gates.filter}: the source itself gets {percent(before, 2)} of {num:,} questions, "
            f"so a drop of {points(gates.max_drop)} could not be seen."
        )
        return ReasonFact(gate="gsm8k", verdict="infeasible", says=says)
    low, high = one_sided(pair, gates.confidence)
    middle, reach = (low + high) / 2, (high - low) / 2
    verdict, needed = _settle(gates.max_drop + middle, reach, num)
    bound = f"a drop of at least {points(-high)}" if verdict == "regression" else _at_most(-low)
    says = (
        f"{gates.filter}: {percent(after, 2)} of {num:,} questions, the source {percent(before, 2)}: {_change(pair)} "
        f"(only the source gets {pair.only_source:,} right, only the checkpoint {pair.only_checkpoint:,}), {bound} at "
        f"{limit(gates.confidence)} confidence; at most {points(gates.max_drop)} may be lost."
    )
    if verdict == "infeasible":
        also = ", more than this dataset has" if needed and evaluation.protocol.limit is None else ""
        says += _too_few("questions", needed, also=also, is_good=middle > -gates.max_drop)
    says += _truncation(gates, source, checkpoint) + _not_its_own(is_native=checkpoint.as_served == "native")
    return ReasonFact(gate="gsm8k", verdict=verdict, says=says, needed=needed)


def _settle(margin: float, reach: float, num: int) -> tuple[JudgementWord, int | None]:
    """The verdict on one estimate.

    Args:
        margin: how much better than its limit the estimate is; negative where it is worse.
        reach: half the width of its interval.
        num: samples that it is from.
    Returns: the verdict, and with infeasible how many samples would settle it: `reach` falls with their square root
        until it is `margin`. None where no number would.
    """
    if margin >= reach:
        return "pass", None
    if margin < -reach:
        return "regression", None
    if abs(margin) < _ON_THE_LIMIT:
        return "infeasible", None
    return "infeasible", max(num + 1, math.ceil(num * (reach / margin) ** 2))


def _too_few(what: str, needed: int | None, *, also: str, is_good: bool) -> str:
    if needed is None:
        return " It lies on the limit itself: no number of samples tells."
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


def _not_its_own(*, is_native: bool) -> str:
    """A warning where other bytes than the checkpoint's were served."""
    if is_native:
        return ""
    return " Served was a BF16 copy of the same weights: packed kernels and quantized activations were not tried."


def _deviations(gates: Gates) -> float:
    """Standard deviations from an estimate to its one-sided bound."""
    return NormalDist().inv_cdf(gates.confidence)


def _change(pair: PairedFact) -> str:
    if pair.difference == 0:
        return "as many"
    return f"{points(abs(pair.difference))} {'more' if pair.difference > 0 else 'fewer'}"


def _at_most(drop: float) -> str:
    return f"a drop of at most {points(drop)}" if drop > 0 else f"a gain of at least {points(-drop)}"
