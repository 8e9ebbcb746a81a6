"""The one sentence on top of a report.

In: what the stations found, and the judgement of it. Out: a `VerdictFact`: the worst that is known, or else how far the
checkpoint was tried.

Easy to get wrong: a part that did not run did not pass. The sentence names what was not tried, and it says where a gate
has too few samples. Servers and scores are good or bad only by the judgement: this module compares no figure.
"""

from collections.abc import Iterator, Sequence

from ..facts.benched import Benched, BenchFact, words_of
from ..facts.dry_load import DryLoad, places
from ..facts.evaluated import EvaluationFact
from ..facts.findings import Finding
from ..facts.results import CheckData
from ..facts.schema import JudgementFact, ReasonFact, VerdictFact
from ..facts.served import ServeCheck
from .numbers import percent
from .sampled_gates import Drafting, drafting_of

ENOUGH_PROMPTS = 30
"""With fewer prompts a speed-up is in the tables alone: one prompt more or less would move it."""


def verdict_of(
    check: CheckData,
    *,
    vllm: str,
    serve: ServeCheck | None = None,
    evaluation: EvaluationFact | None = None,
    bench: BenchFact | None = None,
    judgement: JudgementFact | None = None,
) -> VerdictFact:
    """The sentence, from the stations that ran; `vllm` is the version that judged."""
    if fault := _fault(check, judgement, vllm):
        return VerdictFact(ok=False, label="Not ready", says=fault if fault.endswith(".") else f"{fault}.")
    warnings = sum(fact.severity == "warning" for fact in check.findings)
    tried = (
        f"vLLM {vllm}'s own classes load this checkpoint and its MTP draft on {places(check.dry, is_named=True)}"
        if check.dry
        else f"Nothing in config.json and the headers is in vLLM {vllm}'s way"
    )
    also = f", with {warnings} warning{'s' * (warnings != 1)}" if warnings else ""
    measured = []
    drafted = next((each for each in drafting_of(serve, evaluation) if each.checkpoint.draft_tokens), None)
    if drafted:
        measured.append(_accepted(drafted))
    elif serve:
        measured.append("a server ran, but not with method=mtp")
    if serve and counts_speed(serve):
        measured += _decodes(serve)
    if evaluation:
        measured.append(_answers(evaluation, judgement))
    if faster := _speed(bench):
        measured.append(faster)
    elif bench and not measured and any(cell.repetitions for cell in bench.checkpoint.cells):
        measured.append(f"{_as_served(bench.checkpoint)}, it answered while its speed was measured")
    unmeasured = "no server was run" if check.dry else "it was neither dry-loaded nor served"
    says = f"{tried}{also}; {'; '.join(measured) or unmeasured}."
    if any(reason.gate == "acceptance" and reason.verdict == "pass" for reason in _reasons(judgement)):
        return VerdictFact(ok=True, label="Loads and drafts", says=says)
    if measured:
        return VerdictFact(ok=True, label="Served", says=says)
    return VerdictFact(ok=True, label="Loads" if check.dry else "No fault found", says=says)


def _fault(check: CheckData, judgement: JudgementFact | None, vllm: str) -> str:
    """The worst that is known; "" if nothing is wrong."""
    errors = [fact for fact in check.findings if fact.severity == "error"]
    failed = [load for load in check.dry if load.failure]
    if failed:
        return _refused(failed, errors, vllm)
    if errors:
        more = f" ({len(errors) - 1} more error{'s' * (len(errors) > 2)} below)" if errors[1:] else ""
        says = f"{errors[0].where}: {errors[0].says}{more}"
        return f"vLLM {vllm} would not run this checkpoint as it was meant: {says}"
    lost = next((reason for reason in _reasons(judgement) if reason.verdict == "regression"), None)
    return f"It fails its recipe's gate for {lost.gate}: {lost.says}" if lost else ""


def _refused(failed: Sequence[DryLoad], errors: Sequence[Finding], vllm: str) -> str:
    """vLLM's own words on the first of these dry loads, and where all of them failed."""
    exception = failed[0].failure.type if failed[0].failure else ""
    explained = [fact.says for fact in errors if fact.origin == "dry" and exception in fact.says]
    says = explained[0].partition(": ")[2] if explained else f"vLLM {vllm} raises {exception}"
    return f"On {places(failed, is_named=True)} {says}"


def _accepted(drafted: Drafting) -> str:
    source = f" (source: {percent(drafted.source.acceptance)})" if drafted.source else ""
    counted = f"{percent(drafted.checkpoint.acceptance)} of {drafted.checkpoint.draft_tokens:,} drafted tokens"
    return f"{_as_served(drafted)} with k={drafted.k}, it accepts {counted}{source}"


def _decodes(serve: ServeCheck) -> Iterator[str]:
    """The fastest k of serve-check."""
    timed = [(run.speed_up, run.k) for run in serve.checkpoint.drafting if run.speed_up]
    if timed:
        speed_up, k = max(timed)
        yield f"with k={k} it decodes {speed_up:.2f} times as fast as without MTP"


def _speed(bench: BenchFact | None) -> str:
    """What bench recommends for the smallest load, where its speed is the checkpoint's; "" where it cannot tell."""
    if bench is None or not counts_bench(bench):
        return ""
    row = min(bench.checkpoint.recommended, key=lambda each: (each.concurrency, each.context))
    load = (row.concurrency, row.context)
    asked = "one request at a time" if load == (1, 0) else words_of(load)
    if row.k is None or row.speed_up is None:
        return ""
    if not row.k:
        return f"asked {asked}, drafting makes it no faster"
    return f"asked {asked}, it writes {row.speed_up:.2f} times as many tokens a second with k={row.k} as without MTP"


def counts_speed(serve: ServeCheck) -> bool:
    """Whether a speed-up says what a reader of one sentence takes it for: on a GPU, over enough prompts."""
    device = serve.environment.get("device", "")
    return bool(device) and not device.startswith("CPU") and len(serve.prompts) >= ENOUGH_PROMPTS


def counts_bench(bench: BenchFact, *, device: str = "") -> bool:
    """Whether a speed matrix is about the checkpoint: its own bytes were served, on a GPU or on `device` itself."""
    served_on = bench.environment.get("device", "")
    is_gpu = bool(served_on) and not served_on.startswith("CPU")
    return bench.checkpoint.as_served == "native" and (is_gpu or (bool(device) and served_on == device))


def _as_served(model: Drafting | Benched) -> str:
    """How a model was served, as words that start a clause."""
    return "served natively" if model.as_served == "native" else "served as a BF16 copy of the same weights"


def _answers(evaluation: EvaluationFact, judgement: JudgementFact | None) -> str:
    """The score that the recipe judges, or the first, and whether it can be judged."""
    mine = evaluation.checkpoint
    name = evaluation.judged_filter(judgement.gates.filter if judgement else mine.scores[0].filter)
    source = f" (source: {percent(evaluation.source.score(name).value)})" if evaluation.source else ""
    reason = next((reason for reason in _reasons(judgement) if reason.gate == evaluation.protocol.task), None)
    words = {"pass": ", within its recipe's gate", "infeasible": ", which its recipe's gate cannot judge yet"}
    judged = words.get(reason.verdict, "") if reason else ""
    asked = f"{mine.num_questions} questions of {evaluation.protocol.title}"
    return f"it answers {percent(mine.score(name).value)} of {asked} right{source} by {name}{judged}"


def _reasons(judgement: JudgementFact | None) -> tuple[ReasonFact, ...]:
    return judgement.reasons if judgement else ()
