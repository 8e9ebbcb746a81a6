"""The one sentence on top of a report.

In: what the stations found, and the judgement of it. Out: a `VerdictFact`: the worst that is known,
or else how far the checkpoint was tried.

Easy to get wrong: a part that did not run did not pass. The sentence names what was not tried, and
it says where a gate has too few samples. Servers and scores are good or bad only by the judgement:
this module compares no figure.
"""

from collections.abc import Iterator

from ..facts.benched import BenchFact, words_of
from ..facts.dry_load import DryLoad, places
from ..facts.evaluated import EvaluationFact
from ..facts.results import CheckData
from ..facts.schema import JudgementFact, VerdictFact
from ..facts.served import ServeCheck
from .drafted import drafted
from .numbers import more, percent


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
        return VerdictFact(ok=False, label="Not ready", says=f"{fault.rstrip('.')}.")
    warnings = sum(fact.severity == "warning" for fact in check.findings)
    tried = f"Nothing in config.json and the headers is in vLLM {vllm}'s way"
    if check.dry:
        where = places(check.dry, is_named=True)
        tried = f"vLLM {vllm}'s own classes load this checkpoint and its MTP draft on {where}"
    also = f", with {warnings} warning{'s' * (warnings != 1)}" if warnings else ""
    measured = [*_served(serve, evaluation), *_answers(evaluation, judgement)]
    measured += _speed(bench, is_first=not measured)
    unmeasured = "no server was run" if check.dry else "it was neither dry-loaded nor served"
    says = f"{tried}{also}; {'; '.join(measured) or unmeasured}."
    if judgement and any(
        reason.gate == "acceptance" and reason.verdict == "pass" for reason in judgement.reasons
    ):
        return VerdictFact(ok=True, label="Loads and drafts", says=says)
    if measured:
        return VerdictFact(ok=True, label="Served", says=says)
    return VerdictFact(ok=True, label="Loads" if check.dry else "No fault found", says=says)


def counts_bench(bench: BenchFact, *, device: str = "") -> bool:
    """Whether a speed matrix is about the checkpoint: its own bytes were served, on a GPU or on
    `device` itself.
    """
    served_on = bench.environment.get("device", "")
    is_there = bool(served_on) and (served_on == device or not served_on.startswith("CPU"))
    return bench.checkpoint.as_served == "native" and is_there


def _fault(check: CheckData, judgement: JudgementFact | None, vllm: str) -> str:
    """The worst that is known; "" if nothing is wrong."""
    errors = [fact for fact in check.findings if fact.severity == "error"]
    failed: list[DryLoad] = [load for load in check.dry if load.failure]
    if failed:
        exception = failed[0].failure.type if failed[0].failure else ""
        explained = [
            fact.says for fact in errors if fact.origin == "dry" and exception in fact.says
        ]
        says = explained[0].partition(": ")[2] if explained else f"vLLM {vllm} raises {exception}"
        return f"On {places(failed, is_named=True)} {says}"
    if errors:
        says = f"{errors[0].where}: {errors[0].says.rstrip('.')}{more(len(errors), 'error')}"
        return f"vLLM {vllm} would not run this checkpoint as it was meant: {says}"
    for reason in judgement.reasons if judgement else ():
        if reason.verdict == "regression":
            return f"It fails its recipe's gate for {reason.gate}: {reason.says}"
    return ""


def _served(serve: ServeCheck | None, evaluation: EvaluationFact | None) -> Iterator[str]:
    """The acceptance that is judged."""
    found = next(
        (each for each in drafted(serve, evaluation) if each.checkpoint.draft_tokens), None
    )
    if found:
        source = f" (source: {percent(found.source.acceptance)})" if found.source else ""
        counted = (
            f"{percent(found.checkpoint.acceptance)} of {found.checkpoint.draft_tokens:,} "
            "drafted tokens"
        )
        yield f"{_as_served(found.as_served)} with k={found.k}, it accepts {counted}{source}"
    elif serve:
        yield "a server ran, but not with method=mtp"


def _speed(bench: BenchFact | None, *, is_first: bool) -> Iterator[str]:
    """What bench recommends for the smallest load, where its speed is the checkpoint's; else that
    it answered.
    """
    if bench is None:
        return
    own = bench.checkpoint
    row = min(own.recommended, key=lambda each: (each.concurrency, each.context))
    if counts_bench(bench) and row.k is not None and row.speed_up is not None:
        load = (row.concurrency, row.context)
        asked = "one request at a time" if load == (1, 0) else words_of(load)
        gain = "drafting makes it no faster"
        if row.k:
            gain = (
                f"it writes {row.speed_up:.2f} times as many tokens a second with k={row.k} as "
                "without MTP"
            )
        yield f"asked {asked}, {gain}"
    elif is_first and any(cell.repetitions for cell in own.cells):
        yield f"{_as_served(own.as_served)}, it answered while its speed was measured"


def _as_served(as_served: str) -> str:
    """How a model was served, as words that start a clause."""
    return (
        "served natively" if as_served == "native" else "served as a BF16 copy of the same weights"
    )


def _answers(evaluation: EvaluationFact | None, judgement: JudgementFact | None) -> Iterator[str]:
    """The score that the recipe judges, or the first, and whether it can be judged."""
    if evaluation is None:
        return
    mine = evaluation.checkpoint
    name = evaluation.judged_filter(judgement.gates.filter if judgement else mine.scores[0].filter)
    source = (
        f" (source: {percent(evaluation.source.score(name).value)})" if evaluation.source else ""
    )
    verdicts = {reason.gate: reason.verdict for reason in judgement.reasons} if judgement else {}
    words = {
        "pass": ", within its recipe's gate",
        "infeasible": ", which its recipe's gate cannot judge yet",
    }
    judged = words.get(verdicts.get(evaluation.protocol.task, ""), "")
    asked = f"{mine.num_questions} questions of {evaluation.protocol.title}"
    yield f"it answers {percent(mine.score(name).value)} of {asked} right{source} by {name}{judged}"
