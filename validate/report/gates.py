"""The judge: what was measured of a checkpoint, whether that is good enough, and why.

In: the check's findings and dry loads, what real servers did, the scores of tasks, speed,
closeness, and the recipe's limits. Out: a `JudgementFact` with a reason for each gate: findings,
loads, acceptance and the first task; drafting where the checkpoint was also asked with MTP off; and
one for each limit that only some recipes have (mean recovery, worst task, speed, closeness). Its
verdict is the worst of theirs: pass, regression, or infeasible where a measurement is missing or
too small.

Easy to get wrong: nothing else judges. `serve-check`, `eval`, the headline and the card take their
verdict from here.
"""

from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from ...checkpoints.record import read_record
from ...recipes.errors import CheckpointError, first_fault
from ...recipes.protocol import Evaluation, Evaluations, Gates, listed
from ..facts.benched import BenchFact
from ..facts.closeness import ClosenessFact
from ..facts.dry_load import DryLoad, places
from ..facts.evaluated import EvaluationFact
from ..facts.findings import Finding
from ..facts.results import CheckData
from ..facts.schema import JudgementFact, JudgementWord, ReasonFact
from ..facts.served import GAP_TOLERANCE, ServeCheck
from .closeness_gate import closeness_reasons
from .numbers import more
from .sampled_gates import acceptance, drafting, score, tasks_together
from .settle import unmeasured, worst
from .speed_gate import speed


def judge(
    *,
    gates: Gates,
    check: CheckData | None,
    serve: ServeCheck | None,
    evaluation: EvaluationFact | None,
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
        acceptance(gates, serve, evaluation),
        score(gates, evaluation),
        *tasks_together(gates, evaluation, listed_tasks),
        *drafting(evaluation),
        *speed(gates, bench),
        *closeness_reasons(gates, closeness),
    )
    return JudgementFact(
        verdict=worst(reason.verdict for reason in reasons), gates=gates, reasons=reasons
    )


def verdict_on(judgement: JudgementFact, gates: Iterable[str]) -> JudgementWord:
    """The worst verdict of these gates alone: the part of a judgement that one command measures."""
    wanted = set(gates)
    return worst(reason.verdict for reason in judgement.reasons if reason.gate in wanted)


def limits_in(record: Path | None, *, cure: str, where: object = None) -> Gates:
    """The limits in a checkpoint's keepmtp.json; the defaults where there is no record, or none in
    it.

    Args:
        record: the file.
        cure: what to do where it cannot be read.
        where: its name in messages; default `record`.

    Raises:
        CheckpointError: keepmtp did not write it, or a limit in it is none.
    """
    return _of_recipe(record, "gates", Gates, cure, where)


def protocols_in(record: Path | None, *, cure: str, where: object = None) -> tuple[Evaluation, ...]:
    """The protocols in a checkpoint's keepmtp.json, a task each; the default one where there is
    none.

    Args:
        record: the file.
        cure: what to do where it cannot be read.
        where: its name in messages; default `record`.

    Raises:
        CheckpointError: keepmtp did not write it, or a protocol in it is none.
    """
    return listed(_of_recipe(record, "evaluation", Evaluations, cure, where))


def _of_recipe(record: Path | None, key: str, form: Any, cure: str, where: object) -> Any:
    """A block of the recorded recipe, read as its form; without a record, or a block, the form's
    defaults.
    """
    block = read_record(record, where=where, cure=cure).recipe.whole.get(key) if record else None
    try:
        return TypeAdapter(form).validate_python(block or {})
    except ValidationError as error:
        rule = f"recipe.{key} must be as a recipe has it"
        raise CheckpointError(where or record, rule, got=first_fault(error), cure=cure) from error


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
