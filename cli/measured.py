"""What was measured, for people: by eval, bench and serve-check, and by a run that calibrates.

In: a fact. Out: tables and lines. It imports what help must not wait for, so verbs import it when
they run.
"""

from collections.abc import Iterator
from typing import Any

from rich.console import RenderableType

from ..quantize.calibrate.mtp.facts import CalibrationFact
from ..recipes.errors import counted
from ..validate.facts.benched import BenchFact
from ..validate.facts.evaluated import NO_CALL, EvaluationFact
from ..validate.facts.schema import JudgementFact
from ..validate.facts.served import ServeCheck, how_served
from ..validate.measure.bench import BenchPlan
from ..validate.report import tables
from ..validate.report.drafted import has_no_block
from ..validate.report.gates import verdict_on
from .exits import FINDINGS, OF_VERDICT
from .tables import drawn, in_words, reasons, verdict

OWN_GATES = ("findings", "loads", "acceptance", "probe")
"""Those that serve-check measures."""


def evaluated(fact: EvaluationFact, judged: JudgementFact) -> Iterator[RenderableType]:
    """For each task the scores, what they lost and the drafts; then all tasks, the gates, and
    notes.
    """
    path = fact.checkpoint.path
    for task in fact.by_task:
        yield drawn(f"eval {path}: {task.protocol.title}", tables.scores(task))
        if task.paired:
            yield drawn("checkpoint less source", tables.differences(task))
        yield drawn("drafts over the same questions", tables.drafts(task))
    together = tables.tasks(fact, judged.gates.filter)
    if together:
        yield drawn("recovery: of the source's score, and its interval", together)
    yield from verdict(path, judged)
    for task in fact.by_task:
        if task.num_calls == 0:
            yield NO_CALL
        for model in task.evaluated:
            if model.reason:
                yield how_served(model.title, model.as_served, model.reason)
            if not model.drafts and model is task.source:
                yield "The source has no MTP block: it was served with MTP off."
            elif not model.drafts:
                yield f"The drafts of the {model.title} were not counted: its server was killed."
            if model.sittings > 1:
                yield f"The {model.title} was asked in {model.sittings} sittings."
        said = in_words(task.protocol.model_dump(exclude_none=True))
        environment = task.environment
        harness = "" if task.protocol.calls_tools else f"lm-eval {environment['lm-eval']}, "
        yield (
            f"{task.protocol.title} on {task.protocol.dataset_name}: {said}; {harness}"
            f"vLLM {environment['vllm']} on {environment['device']}."
        )
        left_out = environment.get("left out")
        if left_out:
            yield f"Conversations left out: {left_out}."
    yield "±: standard error; accepted: of drafted tokens; length: tokens a step of the target."


def benched(found: BenchFact) -> Iterator[RenderableType]:
    """A table for each checkpoint; then the recommendations, and what a reader should know."""
    for benched in found.benched:
        yield drawn(f"bench {benched.path} ({benched.role})", tables.cells(benched))
        if benched.as_served != "native":
            served = f"served as a {benched.as_served}. {benched.reason}"
            yield f"NOT the checkpoint's speed: it was {served}."
        elif benched.reason:
            yield how_served(benched.role, benched.as_served, benched.reason)
    yield from tables.speed_notes(found)
    yield (
        "tok/s: generated tokens a second, ± half the distance from the slowest to the fastest "
        "repetition; best: the k that is recommended; first, each: milliseconds to the first token "
        "and to each further one, medians; by position: drafted tokens that were accepted; length: "
        "tokens a step of the target."
    )
    form = "as texts"
    if found.checkpoint.form == "chat":
        form = "as messages through the chat template"
    yield (
        f"{counted(found.num_prompts, 'prompt')} of {found.prompts}, {form}, greedily; answers end "
        f"by themselves or after {found.output_tokens:,} tokens."
    )
    yield "Each server was started once: what changed on the machine between them does not show."
    yield f"vLLM {found.environment['vllm']} on {found.environment['device']}."


def served(found: ServeCheck, judged: JudgementFact, places: str) -> Iterator[RenderableType]:
    """One row a server, then the gates, then what a reader should know."""
    path = found.checkpoint.path
    yield drawn(f"serve-check {path}", tables.servers(found))
    probed = tables.probed(found)
    if probed.rows:
        yield drawn("the probe, of 56 answers", probed)
    own = [one for one in judged.reasons if one.gate in OWN_GATES]
    yield reasons(f"gate {path}", own)
    for each in found.served:
        if each.reason:
            yield how_served(each.role, each.as_served, each.reason)
        for run in each.runs:
            if not run.is_repeatable:
                yield f"{each.role}, k={run.k}: the same prompt got other tokens the second time."
    yield (
        "start: seconds to a healthy server; accepted: of drafted tokens; length: tokens a step of "
        "the target; same: outputs equal to those of k=0."
    )
    environment = found.environment
    asked = f"{counted(len(found.prompts), 'prompt')}, {found.seconds:.0f} s in all"
    yield f"vLLM {environment['vllm']} on {environment['device']}; {asked}."
    yield places


def calibrated(fact: CalibrationFact) -> Iterator[RenderableType]:
    """What a run found: coverage, perplexity and acceptance, and the candidates of `mtp: auto`."""
    yield drawn("held-out text, without a server", tables.held_out(fact))
    search = fact.search
    if search:
        title = f"plans for {search.budget}, measured on held-out text before calibration"
        yield drawn(title, tables.plans(search))
        yield f"{search.units:,} units were searched."
        yield (
            "The recipe that was found is recipe.yaml in the output; it can be edited, and runs "
            "without a search."
        )
        yield (
            "bits: of weights and scales, for each weight; kept: part of the release's acceptance; "
            "lost: nats of it, where a loss against another plan is shown."
        )
        yield ""
    if fact.candidates:
        title = "candidates for the MTP block"
        if fact.min_acceptance is not None:
            title += f"; {fact.min_acceptance:.1%} must be kept"
        if fact.confidence is not None:
            title += f", at {fact.confidence:.0%} confidence"
        yield drawn(title, tables.candidates(fact))
    yield from tables.calibration_notes(fact)
    yield ""


def would_do(plan: BenchPlan, num_checkpoints: int) -> dict[str, Any]:
    """What a run would do."""
    servers = len(plan.ks) * num_checkpoints
    requests = sum(map(plan.num_requests, plan.concurrency)) * plan.repeat * servers
    return {
        "checkpoints": num_checkpoints,
        "servers": servers,
        "k": list(plan.ks),
        "concurrency": list(plan.concurrency),
        "repetitions": plan.repeat,
        "requests": requests,
        "output_tokens": plan.output_tokens,
        "prompts": f"{len(plan.prompts.items):,} of {plan.prompts.name}",
    }


def exit_status(judged: JudgementFact, found: ServeCheck) -> int:
    """1 for a regression in what this command measures; 3 if the prompts are too few to compare
    acceptance.
    """
    if verdict_on(judged, OWN_GATES) == "regression":
        return FINDINGS
    # Without a source nothing is compared, by choice; and one without an MTP block cannot be.
    if found.source is None or has_no_block(found, None):
        return 0
    return OF_VERDICT[verdict_on(judged, ("acceptance",))]
