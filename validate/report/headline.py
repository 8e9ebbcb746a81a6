"""The one sentence on top of a report.

In: what the stations found, and the judgement of it. Out: a `VerdictFact`: the first gate that
fails, or else how far the checkpoint was tried.

Easy to get wrong: a part that did not run did not pass. The sentence names what was not tried.
Nothing is judged here: this module compares no figure.
"""

from ..facts.benched import BenchFact
from ..facts.dry_load import newest, places
from ..facts.evaluated import EvaluationFact
from ..facts.results import CheckData
from ..facts.schema import JudgementFact, VerdictFact
from ..facts.served import ServeCheck
from .drafted import drafted
from .gates import judge
from .numbers import percent


def verdict_of(
    check: CheckData,
    *,
    vllm: str,
    judgement: JudgementFact | None = None,
    serve: ServeCheck | None = None,
    evaluation: EvaluationFact | None = None,
    bench: BenchFact | None = None,
    **_: object,
) -> VerdictFact:
    """The sentence, from the stations that ran; `vllm` is the version that judged."""
    reasons = (judgement or judge(check=check)).reasons
    for reason in reasons:
        if reason.verdict == "regression":
            says = f"It fails its gate for {reason.gate}: {reason.says}"
            return VerdictFact(ok=False, label="Not ready", says=says)
    says = f"Nothing in config.json and the headers is in vLLM {vllm}'s way"
    label = "No fault found"
    tried = "it was neither dry-loaded nor served"
    if check.dry:
        where = places(newest(check.dry), is_named=True)
        label = "Loads"
        says = f"vLLM {vllm}'s own classes load this checkpoint and its MTP draft on {where}"
        tried = "no server was run"
    warnings = sum(fact.severity == "warning" for fact in check.findings)
    if warnings:
        says += f", with {warnings} warning{'s' * (warnings != 1)}"
    found = next(
        (each for each in drafted(serve, evaluation) if each.checkpoint.draft_tokens), None
    )
    if found:
        label = "Served"
        how = "natively" if found.as_served == "native" else f"as a {found.as_served}"
        tried = (
            f"served {how} with k={found.k}, it accepts {percent(found.checkpoint.acceptance)} of "
            f"{found.checkpoint.draft_tokens:,} drafted tokens"
        )
        if found.source:
            tried += f" (source: {percent(found.source.acceptance)})"
        if any(each.gate == "acceptance" and each.verdict == "pass" for each in reasons):
            label = "Loads and drafts"
    elif serve or evaluation or bench:
        label = "Served"
        tried = "a server ran"
    return VerdictFact(ok=True, label=label, says=f"{says}; {tried}.")
