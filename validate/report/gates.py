"""The recipe's gates: what was measured of a checkpoint, and whether that is good enough, with a reason each.

In: the check's findings and dry loads, real servers, GSM8K. Out: a `JudgementFact`, the worst of its reasons: pass,
regression, or infeasible where the measurement is missing or too small to tell.

Easy to get wrong: an estimate on the right side of a limit is no pass, and one on the wrong side no regression. A gate
judges its bound at the recipe's confidence, one-sided, and says how many samples would settle what these do not.
"""

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import NormalDist

from ...recipes.protocol import Gates
from ..check.findings import Finding, Origin
from ..dryload.facts import DryLoad
from .headline import places
from .paired import one_sided
from .results import CheckData
from .schema import (
    EvaluatedFact,
    EvaluationFact,
    JudgementFact,
    JudgementWord,
    PairedFact,
    ReasonFact,
    RunFact,
    Serve,
)

_WORST_FIRST: tuple[JudgementWord, ...] = ("regression", "infeasible", "pass")
_ON_THE_LIMIT = 1e-9
"""An estimate that lies nearer to its limit than this lies on it: no number of samples tells."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Drafted:
    """Draft counters of source and checkpoint in one measurement, `what`, of `num_asked` questions or prompts."""

    what: str
    unit: str
    k: int
    num_asked: int
    is_native: bool
    source: EvaluatedFact | RunFact
    checkpoint: EvaluatedFact | RunFact


def judge(
    *, gates: Gates, check: CheckData | None, serve: Serve | None, evaluation: EvaluationFact | None
) -> JudgementFact:
    """Judge a checkpoint by what was measured; None is what was not.

    Args:
        gates: the recipe's limits.
        check: of these bytes, with the dry loads that were made.
        serve: `keepmtp serve-check`'s.
        evaluation: `keepmtp eval`'s.
    """
    reasons = (
        _findings(check, serve),
        _loads(check, serve, evaluation),
        _acceptance(gates, serve, evaluation),
        _gsm8k(gates, evaluation),
    )
    return JudgementFact(verdict=worst(reason.verdict for reason in reasons), gates=gates, reasons=reasons)


def worst(verdicts: Iterable[JudgementWord]) -> JudgementWord:
    """Regression before infeasible before pass."""
    return min(verdicts, key=_WORST_FIRST.index)


def _findings(check: CheckData | None, serve: Serve | None) -> ReasonFact:
    """No error in config.json and headers, and no output that drafting changes."""
    if errors := _errors(check, "static"):
        says = f"{errors[0].where}: {errors[0].says.rstrip('.')}{_more(len(errors), 'error')}."
        return _reason("findings", "regression", says)
    changed = next((gate for gate in serve.gates if gate.name == "equality"), None) if serve else None
    if changed and changed.verdict == "failed":
        return _reason("findings", "regression", f"Drafting changes what is written: {changed.says}")
    if check is None:
        return _reason("findings", "infeasible", "Not checked: `keepmtp check CHECKPOINT --record` does.")
    warnings = sum(found.severity == "warning" for found in check.findings)
    also = f"; {warnings} warning{'s' * (warnings != 1)}" if warnings else ""
    return _reason("findings", "pass", f"No error in config.json and the headers{also}.")


def _loads(check: CheckData | None, serve: Serve | None, evaluation: EvaluationFact | None) -> ReasonFact:
    """vLLM takes every tensor, on pretended GPUs or in a server of the checkpoint's own bytes."""
    loads = check.dry if check else ()
    if failed := [load for load in loads if not load.ok]:
        says = f"A dry load fails on {places(failed[:1])}: {_why(failed[0], check).rstrip('.')}"
        return _reason("loads", "regression", f"{says}{_more(len(failed), 'dry load')}.")
    runs = serve.checkpoint.runs if serve else ()
    dead = [f"The server with k={run.k} did not come up: {run.error}" for run in runs if not run.loaded]
    dead += [f"The server with k={run.k} ran with {run.unwritten[0]} unwritten" for run in runs if run.unwritten]
    if dead:
        return _reason("loads", "regression", f"{dead[0].rstrip('.')}{_more(len(dead), 'server')}.")
    models = [each.checkpoint for each in (serve, evaluation) if each]
    native = any(model.as_served == "native" for model in models)
    copy = next((model for model in models if model.as_served != "native"), None)
    if not loads and not native:
        got = f"only a {copy.as_served} was served" if copy else "nothing has loaded it"
        return _reason(
            "loads",
            "infeasible",
            f"Not tried: {got}. `keepmtp check CHECKPOINT --gpu sm100 --record` lets vLLM load it without a GPU.",
        )
    ways = [f"vLLM's own classes take every tensor on {places(loads)}."] if loads else []
    ways += ["Its own bytes were served."] if native else [f"Served was only a {copy.as_served}."] if copy else []
    return _reason("loads", "pass", " ".join(ways))


def _acceptance(gates: Gates, serve: Serve | None, evaluation: EvaluationFact | None) -> ReasonFact:
    """The share of the source's acceptance, on GSM8K or else on serve-check's prompts."""
    measured = [each for each in (_drafted_in_evaluation(evaluation), _drafted_in_serve(serve)) if each]
    if not measured:
        return _reason("acceptance", "infeasible", _why_no_drafts(serve, evaluation))
    first, *others = [_ratio(gates, each) for each in measured]
    says = first.says
    for other in others:
        if {first.verdict, other.verdict} == {"pass", "regression"}:
            says += f" The other measurement says {other.verdict}: {other.says}"
    return first.model_copy(update={"says": says + _not_its_own(is_native=measured[0].is_native)})


def _drafted_in_evaluation(evaluation: EvaluationFact | None) -> _Drafted | None:
    if evaluation is None or evaluation.source is None or not evaluation.source.draft_tokens:
        return None
    num, k = evaluation.checkpoint.num_questions, evaluation.protocol.k
    return _Drafted(
        what=f"{num:,} questions of {evaluation.protocol.title}",
        unit="questions",
        k=k,
        num_asked=num,
        is_native=evaluation.checkpoint.as_served == "native",
        source=evaluation.source,
        checkpoint=evaluation.checkpoint,
    )


def _drafted_in_serve(serve: Serve | None) -> _Drafted | None:
    if serve is None or serve.source is None:
        return None
    pairs = [
        (original, run)
        for run in serve.checkpoint.drafting
        if (original := serve.source.run(run.k)) and original.draft_tokens
    ]
    if not pairs:
        return None
    original, run = max(pairs, key=lambda pair: pair[1].k)
    num = len(serve.prompts)
    return _Drafted(
        what=f"serve-check's {num:,} prompts",
        unit="prompts",
        k=run.k,
        num_asked=num,
        is_native=serve.checkpoint.as_served == "native",
        source=original,
        checkpoint=run,
    )


def _why_no_drafts(serve: Serve | None, evaluation: EvaluationFact | None) -> str:
    """Why no measurement has counters of both."""
    if serve is None and evaluation is None:
        return "Not measured: `keepmtp eval CHECKPOINT` measures acceptance beside the score."
    if all(each is None or each.source is None for each in (serve, evaluation)):
        return "The source was not measured, and acceptance alone does not tell a damaged draft from a hard text."
    return "The source drafted nothing, so there is nothing to compare with. Serve both with at least one draft token."


def _ratio(gates: Gates, drafted: _Drafted) -> ReasonFact:
    """Acceptance as a share of the source's, by the delta method."""
    mine, theirs = drafted.checkpoint, drafted.source
    where = f"On {drafted.what} with k={drafted.k}"
    if not mine.draft_tokens:
        return _reason(
            "acceptance",
            "regression",
            f"{where}, the checkpoint drafted nothing; the source drafted {theirs.draft_tokens:,} tokens.",
        )
    if not theirs.accepted_tokens:
        return _reason(
            "acceptance",
            "infeasible",
            f"{where}, none of the source's own {theirs.draft_tokens:,} drafted "
            "tokens was accepted: there is nothing to keep a share of.",
        )
    (mean, error), (source_mean, source_error) = _per_draft(mine), _per_draft(theirs)
    middle = mean / source_mean
    reach = _z(gates) * middle * math.hypot(error / mean, source_error / source_mean)
    num = min(mine.draft_tokens, theirs.draft_tokens)
    verdict, needed = _told(middle - gates.min_acceptance, reach, num)
    share, source_share = mine.accepted_tokens / mine.draft_tokens, theirs.accepted_tokens / theirs.draft_tokens
    bound = f"at most {_percent(middle + reach)}" if verdict == "regression" else f"at least {_percent(middle - reach)}"
    says = (
        f"{where}: {_percent(share)} of {mine.draft_tokens:,} drafted tokens accepted, {_percent(source_share)} of the "
        f"source's {theirs.draft_tokens:,}. That is {_percent(share / source_share)} of it, {bound} at "
        f"{100 * gates.confidence:g} % confidence; at least {100 * gates.min_acceptance:g} % must be kept."
    )
    if verdict == "infeasible":
        asked = f", about {math.ceil(needed / num * drafted.num_asked):,} {drafted.unit}" if needed else ""
        says += _too_few("drafted tokens", needed, also=asked, good=middle > gates.min_acceptance)
    return _reason("acceptance", verdict, says, needed=needed)


def _per_draft(counted: EvaluatedFact | RunFact) -> tuple[float, float]:
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


def _gsm8k(gates: Gates, evaluation: EvaluationFact | None) -> ReasonFact:
    """The drop of the score, paired by question."""
    if evaluation is None:
        return _reason("gsm8k", "infeasible", "Not measured: `keepmtp eval CHECKPOINT` does.")
    pair = next((pair for pair in evaluation.paired if pair.filter == gates.filter), None)
    if evaluation.source is None or pair is None:
        return _reason(
            "gsm8k",
            "infeasible",
            "The source was not evaluated, so a drop cannot be told. `keepmtp eval "
            "CHECKPOINT --source SOURCE` evaluates both.",
        )
    before, after = evaluation.source.score(gates.filter).value, evaluation.checkpoint.score(gates.filter).value
    num = evaluation.checkpoint.num_questions
    if before <= gates.max_drop:
        return _reason(
            "gsm8k",
            "infeasible",
            f"{gates.filter}: the source itself gets {_score(before)} of {num:,} "
            f"questions, so a drop of {_points(gates.max_drop)} could not be seen.",
        )
    low, high = one_sided(pair, gates.confidence)
    middle, reach = (low + high) / 2, (high - low) / 2
    verdict, needed = _told(gates.max_drop + middle, reach, num)
    bound = f"a drop of at least {_points(-high)}" if verdict == "regression" else _at_most(-low)
    says = (
        f"{gates.filter}: {_score(after)} of {num:,} questions, the source {_score(before)}: {_change(pair)} (only "
        f"the source gets {pair.only_source:,} right, only the checkpoint {pair.only_checkpoint:,}), {bound} at "
        f"{100 * gates.confidence:g} % confidence; at most {_points(gates.max_drop)} may be lost."
    )
    if verdict == "infeasible":
        also = ", more than this dataset has" if needed and evaluation.protocol.limit is None else ""
        says += _too_few("questions", needed, also=also, good=middle > -gates.max_drop)
    says += _truncation(gates, evaluation.source, evaluation.checkpoint) + _not_its_own(
        is_native=evaluation.checkpoint.as_served == "native"
    )
    return _reason("gsm8k", verdict, says, needed=needed)


def _told(margin: float, reach: float, num: int) -> tuple[JudgementWord, int | None]:
    """The verdict on an estimate that is better than its limit by `margin`, known to within `reach` from `num` samples.

    Returns: with infeasible also the samples at which `reach`, which falls with their square root, would be `margin`;
    None if there is no such number.
    """
    if margin >= reach:
        return "pass", None
    if margin < -reach:
        return "regression", None
    if abs(margin) < _ON_THE_LIMIT:
        return "infeasible", None
    return "infeasible", max(num + 1, math.ceil(num * (reach / margin) ** 2))


def _too_few(what: str, needed: int | None, *, also: str, good: bool) -> str:
    if needed is None:
        return " It lies on the limit itself: no number of samples tells."
    verdict = "pass" if good else "fail"
    return f" Too few to tell: at these figures it would {verdict} with about {needed:,} {what}{also}."


def _truncation(gates: Gates, source: EvaluatedFact, checkpoint: EvaluatedFact) -> str:
    """Said where answers cut at max_tokens could by themselves account for more than the limit."""
    before, after = (model.num_truncated / model.num_questions for model in (source, checkpoint))
    if abs(after - before) <= gates.max_drop:
        return ""
    return (
        f" Of its answers {_percent(after)} were cut at max_tokens, of the source's {_percent(before)}: the scores "
        "differ by that too."
    )


def _not_its_own(*, is_native: bool) -> str:
    """Said where other bytes than the checkpoint's were served."""
    told = " Served was a BF16 copy of the same weights: packed kernels and quantized activations were not tried."
    return "" if is_native else told


def _why(load: DryLoad, check: CheckData | None) -> str:
    """What a failed dry load stumbled over."""
    if load.failure:
        return f"{load.failure.type}: {load.failure.words}" if load.failure.type else load.failure.words
    told = _errors(check, "dry")
    return f"{told[0].where}: {told[0].says}" if told else f"{load.num_errors} errors in keepmtp's own account of it"


def _errors(check: CheckData | None, origin: Origin) -> list[Finding]:
    found = check.findings if check else ()
    return [each for each in found if each.severity == "error" and each.origin == origin]


def _reason(gate: str, verdict: JudgementWord, says: str, *, needed: int | None = None) -> ReasonFact:
    return ReasonFact(gate=gate, verdict=verdict, says=says, needed=needed)


def _z(gates: Gates) -> float:
    return NormalDist().inv_cdf(gates.confidence)


def _change(pair: PairedFact) -> str:
    if pair.difference == 0:
        return "as many"
    return f"{_points(abs(pair.difference))} {'more' if pair.difference > 0 else 'fewer'}"


def _at_most(drop: float) -> str:
    return f"a drop of at most {_points(drop)}" if drop > 0 else f"a gain of at least {_points(-drop)}"


def _points(share: float) -> str:
    return f"{100 * share:.2f}".rstrip("0").rstrip(".") + " points"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _score(share: float) -> str:
    return f"{100 * share:.2f} %"


def _more(count: int, what: str) -> str:
    return f", and {count - 1} more {what}{'s' * (count > 2)}" if count > 1 else ""
