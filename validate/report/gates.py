"""The judge: what was measured of a checkpoint, whether that is good enough, and why.

In: the check's findings and dry loads, what real servers did, the scores of tasks, speed, closeness, and the recipe's
limits. Out: a `JudgementFact` with a reason for each gate: findings, loads, acceptance and the first task; drafting
where the checkpoint was also asked with MTP off; and one for each limit that only some recipes have (mean recovery,
worst task, speed, closeness). Its verdict is the worst of theirs: pass, regression, or infeasible where a measurement
is missing or too small.

Easy to get wrong: nothing else judges. `serve-check`, `eval`, the headline and the card take their verdict from here.
"""

from collections.abc import Collection, Iterable
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from ...checkpoints.record import read_record
from ...recipes.errors import CheckpointError, first_fault
from ...recipes.protocol import Evaluation, Evaluations, Gates, listed
from ..facts.benched import BenchFact
from ..facts.closeness import ClosenessFact
from ..facts.dry_load import DryLoad
from ..facts.evaluated import EvaluationFact
from ..facts.findings import Finding, Origin
from ..facts.results import CheckData
from ..facts.schema import JudgementFact, JudgementWord, ReasonFact
from ..facts.served import GAP_TOLERANCE, Parting, Run, ServeCheck
from .closeness_gate import closeness_reasons
from .drafting_gate import drafting
from .headline import places
from .numbers import more
from .sampled_gates import acceptance, score
from .speed_gate import speed
from .task_gates import tasks_together

_WORST_FIRST: tuple[JudgementWord, ...] = ("regression", "infeasible", "pass")


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
        bench: what `keepmtp bench` measured; without a limit on speed in `gates` there is no reason for it.
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
    return JudgementFact(verdict=worst(reason.verdict for reason in reasons), gates=gates, reasons=reasons)


def worst(verdicts: Iterable[JudgementWord]) -> JudgementWord:
    """Regression before infeasible before pass."""
    return min(verdicts, key=_WORST_FIRST.index)


def verdict_on(judgement: JudgementFact, gates: Iterable[str]) -> JudgementWord:
    """The worst verdict of these gates alone: the part of a judgement that one command measures."""
    wanted = set(gates)
    return worst(reason.verdict for reason in judgement.reasons if reason.gate in wanted)


def limits_in(record: Path | None, *, cure: str, where: object = None) -> Gates:
    """The limits in a checkpoint's keepmtp.json; the defaults where there is no record, or none in it.

    Args:
        record: the file.
        cure: what to do where it cannot be read.
        where: its name in messages; default `record`.

    Raises:
        CheckpointError: keepmtp did not write it, or a limit in it is none.
    """
    if record is None:
        return Gates()
    try:
        return Gates.model_validate(read_record(record, where=where, cure=cure).recipe.whole.get("gates") or {})
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, ("recipe", "gates", *first["loc"])))
        raise CheckpointError(
            where or record, f"{place} must be a gate's limit", got=first["msg"], cure=cure
        ) from error


def protocols_in(record: Path | None, *, cure: str, where: object = None) -> tuple[Evaluation, ...]:
    """The protocols in a checkpoint's keepmtp.json, a task each; the default one where there is none.

    Args:
        record: the file.
        cure: what to do where it cannot be read.
        where: its name in messages; default `record`.

    Raises:
        CheckpointError: keepmtp did not write it, or a protocol in it is none.
    """
    if record is None:
        return (Evaluation(),)
    made = read_record(record, where=where, cure=cure).recipe.whole
    try:
        return listed(TypeAdapter(Evaluations).validate_python(made.get("evaluation") or {}))
    except ValidationError as error:
        raise CheckpointError(
            where or record, "must be keepmtp's own record", got=first_fault(error), cure=cure
        ) from error


# --- findings ---------------------------------------------------------------------------------------------------------


def _findings(check: CheckData | None, serve: ServeCheck | None) -> ReasonFact:
    """No error in config.json, headers and values, and no output that drafting changes."""
    if errors := _errors(check, "static", "values"):
        says = f"{errors[0].where}: {errors[0].says.rstrip('.')}{more(len(errors), 'error')}."
        return ReasonFact(gate="findings", verdict="regression", says=says)
    if serve and (changes := _changed_outputs(serve)):
        says = f"Drafting changes what is written: {changes}"
        return ReasonFact(gate="findings", verdict="regression", says=says)
    if check is None:
        says = "Not checked: `keepmtp check CHECKPOINT --record` does."
        return ReasonFact(gate="findings", verdict="infeasible", says=says)
    warnings = sum(found.severity == "warning" for found in check.findings)
    also = f"; {warnings} warning{'s' * (warnings != 1)}" if warnings else ""
    return ReasonFact(gate="findings", verdict="pass", says=f"No error in config.json and the headers{also}.")


def _changed_outputs(serve: ServeCheck) -> str:
    """The first output that drafting changes without a near-tie, and how many are equal; "" if none is changed."""
    compared, near = 0, 0
    far: list[tuple[str, Run, Parting]] = []
    for served in serve.served:
        for run in served.runs:
            if run.partings is None:
                continue
            compared += len(run.outputs)
            near += sum(parting.is_near_tie for parting in run.partings)
            far += [(served.role, run, parting) for parting in run.partings if not parting.is_near_tie]
    if not far:
        return ""
    role, run, parting = far[0]
    ties = f", {near} part at a near-tie (gap up to {GAP_TOLERANCE:g})" if near else ""
    gap = "unknown, more than the likeliest few" if parting.gap is None else f"{parting.gap:.3f}"
    others = f" and {len(far) - 1} more" if len(far) > 1 else ""
    return (
        f"{compared - near - len(far)} of {compared} outputs equal those without drafting{ties}; "
        f"{role} with k={run.k} leaves it in prompt {parting.prompt} at token {parting.at}: "
        f"{parting.token} instead of {parting.plain_token}, log-probability gap {gap}{others}."
    )


def _errors(check: CheckData | None, *origins: Origin) -> list[Finding]:
    found = check.findings if check else ()
    return [each for each in found if each.severity == "error" and each.origin in origins]


# --- loads ------------------------------------------------------------------------------------------------------------


def _loads(
    check: CheckData | None, serve: ServeCheck | None, evaluation: EvaluationFact | None, bench: BenchFact | None
) -> ReasonFact:
    """vLLM takes every tensor, on pretended GPUs or in a server of the checkpoint's own bytes."""
    loads = check.dry if check else ()
    if failed := [load for load in loads if not load.ok]:
        first = (
            f"A dry load fails on {places(failed[:1], is_named=True)}: {_why_it_fails(failed[0], check).rstrip('.')}"
        )
        says = f"{first}{more(len(failed), 'dry load')}."
        return ReasonFact(gate="loads", verdict="regression", says=says)
    if dead := _dead_servers(serve):
        says = f"{dead[0].rstrip('.')}{more(len(dead), 'server')}."
        return ReasonFact(gate="loads", verdict="regression", says=says)
    served = [each.checkpoint.as_served for each in (serve, evaluation) if each]
    if bench and any(cell.repetitions for cell in bench.checkpoint.cells):
        served.append(bench.checkpoint.as_served)
    is_native = "native" in served
    copy = next((as_served for as_served in served if as_served != "native"), "")
    if not loads and not is_native:
        got = f"only a {copy} was served" if copy else "nothing has loaded it"
        cure = "`keepmtp check CHECKPOINT --gpu sm100 --record` lets vLLM load it without a GPU."
        return ReasonFact(gate="loads", verdict="infeasible", says=f"Not tried: {got}. {cure}")
    ways = [f"vLLM's own classes take every tensor on {places(loads, is_named=True)}."] if loads else []
    if is_native:
        ways.append("Its own bytes were served.")
    elif copy:
        ways.append(f"Served was only a {copy}.")
    return ReasonFact(gate="loads", verdict="pass", says=" ".join(ways))


def _dead_servers(serve: ServeCheck | None) -> list[str]:
    """What went wrong with the checkpoint's servers, a sentence each; a source's may fail without any fault here."""
    runs = serve.checkpoint.runs if serve else ()
    dead = [f"The server with k={run.k} did not come up: {run.error}" for run in runs if not run.loaded]
    return dead + [f"The server with k={run.k} ran with {run.unwritten[0]} unwritten" for run in runs if run.unwritten]


def _why_it_fails(load: DryLoad, check: CheckData | None) -> str:
    """vLLM's words where it raised, else the first error of keepmtp's own account."""
    if load.failure:
        return f"{load.failure.type}: {load.failure.words}" if load.failure.type else load.failure.words
    errors = _errors(check, "dry")
    if errors:
        return f"{errors[0].where}: {errors[0].says}"
    return f"{load.num_errors} errors in keepmtp's own account of it"
