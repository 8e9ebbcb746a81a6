"""The judge: what was measured of a checkpoint, whether that is good enough, and why.

In: the check's findings and dry loads, what real servers did, the scores of tasks, speed,
closeness, and the recipe's limits. Out: a `JudgementFact` with a reason for each gate: findings,
loads, acceptance and the first task; drafting where the checkpoint was also asked with MTP off; and
one for each limit that only some recipes have (mean recovery, worst task, speed, closeness). Its
verdict is the worst of theirs: pass, regression, or infeasible where a measurement is missing or
too small.

Easy to get wrong: nothing else judges. `serve-check`, `eval`, the headline and the card take their
verdict from here. Most checkpoints have some answers that drafting changes, because near-ties flip,
as many for the better as for the worse: that gate asks whether the split is one that chance hardly
gives, in both directions. And the estimate of a ratio of speeds is no proof: a k passes only if its
slowest repetition reaches the limit against the fastest one without drafting; all of them fail only
if no pair of repetitions reaches it.
"""

from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from ...checkpoints.record import read_record
from ...recipes.errors import CheckpointError, first_fault
from ...recipes.protocol import Evaluation, Evaluations, Gates, listed
from ..facts.benched import BenchCell, BenchFact
from ..facts.closeness import ClosenessFact
from ..facts.dry_load import DryLoad, places
from ..facts.evaluated import NOT_EMPTY, EvaluationFact
from ..facts.findings import Finding
from ..facts.results import CheckData
from ..facts.schema import JudgementFact, JudgementWord, ReasonFact
from ..facts.served import GAP_TOLERANCE, ServeCheck
from . import sampled_gates as sampled
from .headline import counts_bench
from .numbers import more
from .settle import Estimate, at_least, unmeasured, worst

CHANCE = 0.001
"""A split is no chance if two equal servers come to it less often than this: one good checkpoint in
a thousand fails.

Both reports from the field are far beyond it: of 39 questions, 21 that only one server gets right
are 1 in a million.
"""
_MEASURE = "`keepmtp bench CHECKPOINT` measures it"


def judge(
    *,
    gates: Gates = Gates(),  # noqa: B008 - it is frozen
    check: CheckData | None = None,
    serve: ServeCheck | None = None,
    evaluation: EvaluationFact | None = None,
    bench: BenchFact | None = None,
    closeness: ClosenessFact | None = None,
    listed_tasks: Collection[str] = (),
) -> JudgementFact:
    """Judge a checkpoint by what was measured; None is what was not.

    Args:
        gates: the recipe's limits.
        check: of these bytes, with the dry loads that were made.
        serve: what `keepmtp serve-check` measured.
        evaluation: what `keepmtp eval` measured.
        bench: what `keepmtp bench` measured; without a limit on speed in `gates` there is no reason
            for it.
        closeness: what `keepmtp closeness` measured; likewise.
        listed_tasks: of the recipe.
    """
    reasons = (
        _findings(check, serve),
        _loads(check, serve, evaluation, bench),
        sampled.acceptance(gates, serve, evaluation),
        sampled.score(gates, evaluation),
        *sampled.tasks_together(gates, evaluation, listed_tasks),
        *_drafting(evaluation),
        *_speed(gates, bench),
        *sampled.closeness(gates, closeness),
    )
    return JudgementFact(
        verdict=worst(reason.verdict for reason in reasons), gates=gates, reasons=reasons
    )


def verdict_on(judgement: JudgementFact, gates: Iterable[str]) -> JudgementWord:
    """The worst verdict of these gates alone: the part of a judgement that one command measures."""
    wanted = set(gates)
    return worst(reason.verdict for reason in judgement.reasons if reason.gate in wanted)


def decided_in(
    record: Path | None, *, cure: str, where: object = None
) -> tuple[Gates, tuple[Evaluation, ...]]:
    """The limits and the protocols, a task each, in a checkpoint's keepmtp.json; the defaults where
    it has none.

    Args:
        record: the file; None where there is none.
        cure: what to do where it cannot be read.
        where: its name in messages; default `record`.

    Raises:
        CheckpointError: keepmtp did not write it, or a limit or a protocol in it is none.
    """
    recipe = read_record(record, where=where, cure=cure).recipe.whole if record else {}
    read = {}
    for key, form in {"gates": Gates, "evaluation": Evaluations}.items():
        try:
            read[key] = TypeAdapter(form).validate_python(recipe.get(key) or {})
        except ValidationError as error:
            rule = f"recipe.{key} must be as a recipe has it"
            raise CheckpointError(
                where or record, rule, got=first_fault(error), cure=cure
            ) from error
    return read["gates"], listed(read["evaluation"])


# --- findings and loads ---------------------------------------------------------------------------


def _findings(check: CheckData | None, serve: ServeCheck | None) -> ReasonFact:
    """No error in config.json, headers and values, and no output that drafting changes."""
    errors = [each for each in _errors(check) if each.origin != "dry"]
    if errors:
        says = f"{errors[0].where}: {errors[0].says.rstrip('.')}{more(len(errors), 'error')}."
        return ReasonFact(gate="findings", verdict="regression", says=says)
    if serve and (changes := _changed_outputs(serve)):
        says = f"Drafting changes what is written: {changes}"
        return ReasonFact(gate="findings", verdict="regression", says=says)
    if check is None:
        return unmeasured("findings", "Not checked: `keepmtp check CHECKPOINT --record` does.")
    warnings = sum(found.severity == "warning" for found in check.findings)
    also = f"; {warnings} warning{'s' * (warnings != 1)}" if warnings else ""
    return ReasonFact(
        gate="findings", verdict="pass", says=f"No error in config.json and the headers{also}."
    )


def _changed_outputs(serve: ServeCheck) -> str:
    """The first output that drafting changes without a near-tie, and how many there are; "" if none
    is changed.
    """
    runs = [(served.role, run) for served in serve.served for run in served.runs]
    far = [
        (role, run.k, one)
        for role, run in runs
        for one in run.partings or ()
        if not one.is_near_tie
    ]
    if not far:
        return ""
    role, k, parting = far[0]
    gap = "unknown" if parting.gap is None else f"{parting.gap:.3f}"
    return (
        f"{role} with k={k} leaves the output without it in prompt {parting.prompt} at token "
        f"{parting.at}: {parting.token} instead of {parting.plain_token}, log-probability gap "
        f"{gap}, more than a near-tie's {GAP_TOLERANCE:g}{more(len(far), 'output')}."
    )


def _errors(check: CheckData | None) -> list[Finding]:
    return [each for each in check.findings if each.severity == "error"] if check else []


def _loads(
    check: CheckData | None,
    serve: ServeCheck | None,
    evaluation: EvaluationFact | None,
    bench: BenchFact | None,
) -> ReasonFact:
    """vLLM takes every tensor, on pretended GPUs or in a server of the checkpoint's own bytes."""
    loads = check.dry if check else ()
    if failed := [load for load in loads if not load.ok]:
        why = _why_it_fails(failed[0], check).rstrip(".")
        says = (
            f"A dry load fails on {places(failed[:1], is_named=True)}: "
            f"{why}{more(len(failed), 'dry load')}."
        )
        return ReasonFact(gate="loads", verdict="regression", says=says)
    runs = (
        serve.checkpoint.runs if serve else ()
    )  # a source's server may fail without any fault here
    dead = [
        f"The server with k={run.k} did not come up: {run.error}" for run in runs if not run.loaded
    ]
    dead += [
        f"The server with k={run.k} ran with {run.unwritten[0]} unwritten"
        for run in runs
        if run.unwritten
    ]
    if dead:
        says = f"{dead[0].rstrip('.')}{more(len(dead), 'server')}."
        return ReasonFact(gate="loads", verdict="regression", says=says)
    served = [each.checkpoint.as_served for each in (serve, evaluation) if each]
    if bench and any(cell.repetitions for cell in bench.checkpoint.cells):
        served.append(bench.checkpoint.as_served)
    ways = (
        [f"vLLM's own classes take every tensor on {places(loads, is_named=True)}."]
        if loads
        else []
    )
    if "native" in served:
        ways.append("Its own bytes were served.")
    elif not loads:
        got = f"only a {served[0]} was served" if served else "nothing has loaded it"
        cure = "`keepmtp check CHECKPOINT --gpu sm100 --record` lets vLLM load it without a GPU."
        return unmeasured("loads", f"Not tried: {got}. {cure}")
    elif served:
        ways.append(f"Served was only a {served[0]}.")
    return ReasonFact(gate="loads", verdict="pass", says=" ".join(ways))


def _why_it_fails(load: DryLoad, check: CheckData | None) -> str:
    """vLLM's words where it raised, else the first error of keepmtp's own account."""
    if load.failure:
        return (
            f"{load.failure.type}: {load.failure.words}"
            if load.failure.type
            else load.failure.words
        )
    for error in _errors(check):
        if error.origin == "dry":
            return f"{error.where}: {error.says}"
    return f"{load.num_errors} errors in keepmtp's own account of it"


# --- drafting -------------------------------------------------------------------------------------


def _drafting(evaluation: EvaluationFact | None) -> Iterator[ReasonFact]:
    """The checkpoint's answers with MTP on against those with MTP off: one reason, where it was
    asked both ways.

    Every task, every filter and empty answers are asked, by the exact sign test.
    """
    tasks = evaluation.by_task if evaluation else ()
    both = [
        (task, found, each) for task in tasks if (found := task.drafting) for each in found.switches
    ]
    if not both:
        return
    task, found, rarest = min(both, key=lambda one: one[2].chance)
    num, where = task.checkpoint.num_questions, f"{task.protocol.title}: " if len(tasks) > 1 else ""
    texts = (
        f"{where}{num - found.num_changed:,} of {num:,} greedy answers are the "
        "same text with MTP on "
        f"and off{'; near-ties may flip the others' if found.num_changed else ''}."
    )
    what = "with text" if rarest.reads == NOT_EMPTY else f"right by {rarest.reads}"
    split = (
        f"Only without drafting {rarest.only_plain:,} are {what}, only with it "
        f"{rarest.only_drafting:,} "
        f"(exact sign test: {rarest.chance:.2g})"
    )
    if rarest.chance < CHANCE:
        says = f"Drafting changes what is right beyond chance. {split}. {texts}"
        yield ReasonFact(gate="drafting", verdict="regression", says=says)
        return
    more = "Each is as right or wrong with it as without."
    if rarest.only_plain + rarest.only_drafting:
        more = f"{split}: no more than chance gives."
    yield ReasonFact(gate="drafting", verdict="pass", says=f"{texts} {more}")


# --- speed ----------------------------------------------------------------------------------------


def _speed(gates: Gates, bench: BenchFact | None) -> Iterator[ReasonFact]:
    """Whether drafting makes one request at a time faster; none where the recipe has no limit."""
    least = gates.min_speedup
    if least is None:
        return
    if bench is None:
        yield unmeasured("speed", f"Not measured: {_MEASURE}.")
        return
    # One request at a time with the shortest context that was measured.
    alone = [cell for cell in bench.checkpoint.cells if cell.concurrency == 1 and cell.slowest]
    plain = min((cell for cell in alone if not cell.k), key=lambda cell: cell.context, default=None)
    drafting = [cell for cell in alone if cell.k and plain and cell.load == plain.load]
    device = bench.environment.get("device") or "an unnamed device"
    if not counts_bench(bench):
        own = bench.checkpoint.as_served
        served = "the checkpoint" if own == "native" else f"a {own}"
        says = (
            f"Measured was {served} on {device}: that promises no speed on a GPU. {_MEASURE} there."
        )
        yield unmeasured("speed", says)
        return
    if plain is None or not drafting:
        errors = [
            f" (k={cell.k}: {cell.error.rstrip('.')})"
            for cell in bench.checkpoint.cells
            if cell.error
        ]
        lack = "k=0 and a k with drafting must both answer one request at a time"
        says = (
            f"Nothing to compare: {lack}{''.join(errors[:1])}. {_MEASURE} with --k 0,1 "
            "--concurrency 1."
        )
        yield unmeasured("speed", says)
        return
    if any(len(cell.repetitions) < 2 for cell in (plain, *drafting)):
        yield unmeasured("speed", f"One repetition has no spread. {_MEASURE} with --repeat 3.")
        return
    found = [(cell.k, _times_as_fast(cell, plain)) for cell in drafting]
    verdicts = {at_least(estimate, least).verdict for _, estimate in found}
    k, best = max(found, key=lambda one: one[1].bounds(1)[0])
    low, high = best.bounds(1)
    says = (
        f"One request at a time on {device}: k={k} is {best.value:.2f} times as fast as k=0, by "
        "the repetitions "
        f"{low:.2f} to {high:.2f} times; at least {least:g} times is asked for."
    )
    if "pass" in verdicts:
        yield ReasonFact(gate="speed", verdict="pass", says=says)
    elif verdicts == {"regression"}:
        others = ", ".join(f"k={other}: {each.value:.2f}" for other, each in found if other != k)
        says += f" No other k is faster ({others})." if others else ""
        yield ReasonFact(gate="speed", verdict="regression", says=says)
    else:
        also = (
            "The repetitions are too far apart to tell: measure more of them, on a machine "
            "that does nothing else."
        )
        yield unmeasured("speed", f"{says} {also}")


def _times_as_fast(cell: BenchCell, plain: BenchCell) -> Estimate:
    """Slowest against fastest, median against median, fastest against slowest; more repetitions
    would not move it.
    """
    rates = [each.tokens_per_second for each in cell.repetitions]
    plain_rates = [each.tokens_per_second for each in plain.repetitions]
    ends = min(rates) / max(plain_rates), max(rates) / min(plain_rates)
    middle = (cell.tokens_per_second or 0.0) / (plain.tokens_per_second or 1.0)
    return Estimate(value=middle, bounds=lambda _: ends, samples=len(rates), unit="repetitions")
