"""The judge: what was measured of a checkpoint, whether that is good enough, and why.

In: the check's findings and dry loads, what real servers did, the scores of tasks, speed,
closeness, and the recipe's limits. Out: a `JudgementFact` with a reason for each gate: findings,
loads, acceptance and the first task; drafting where the checkpoint was also asked with MTP off;
lossless where it was asked; and one for each limit that only some recipes have (worst task, speed,
closeness). Its verdict is the worst of theirs: pass, regression, or infeasible where a
measurement is missing or too small.

Easy to get wrong: nothing else judges. A station's module has the reasons of its own gates, and is
asked here; `eval`, the headline and the card take their verdict from here.
"""

from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from ...checkpoints.record import read_record
from ...recipes.errors import CheckpointError, counted, first_fault
from ...recipes.protocol import Evaluation, Evaluations, Gates, listed
from ..facts.binomial import ratio_limits
from ..facts.dry_load import newest, places, versions_in_short, with_cures
from ..facts.findings import errors_of
from ..facts.numbers import percent
from ..facts.results import MEASURED, CheckData, in_order
from ..facts.schema import JudgementFact
from ..facts.served import Judging, StationFact, drafted, has_no_block
from ..facts.settle import (
    BOUND,
    Estimate,
    JudgementWord,
    ReasonFact,
    not_its_own,
    reason,
    settle,
    unmeasured,
    worst,
)


def judge(
    *,
    check: CheckData,
    gates: Gates = Gates(),  # noqa: B008 - it is frozen
    listed_tasks: Collection[str] = (),
    **measured: Any,
) -> JudgementFact:
    """Judge a checkpoint by what was measured; None is what was not.

    Args:
        check: of these bytes, with the dry loads that were made.
        gates: the recipe's limits.
        listed_tasks: of the recipe.
        measured: by the part of report.json what each station gave, which has its own gates.
    """
    parts = in_order(measured)
    reasons = [_findings(check, parts), _loads(check, parts), _acceptance(gates, parts)]
    is_draft = check.target is not None
    is_compared = any(part.is_compared for part in parts)
    judging = Judging(gates=gates, listed=listed_tasks, is_compared=is_compared)
    for station in MEASURED:
        fact = measured.get(station.part)
        # A draft of its own answers nothing, so it has no score.
        if fact or not is_draft:
            reasons += station.reasons(fact, judging)
    if is_draft:
        for number, one in enumerate(reasons):
            says = one.says.replace("CHECKPOINT", "TARGET --draft DRAFT")
            reasons[number] = one.model_copy(update={"says": says})
    return JudgementFact(verdict=worst(reasons), gates=gates, reasons=tuple(reasons))


def verdict_on(judgement: JudgementFact, gates: Iterable[str]) -> JudgementWord:
    """The worst verdict of these gates alone: the part of a judgement that one command measures."""
    wanted = set(gates)
    return worst([one for one in judgement.reasons if one.gate in wanted])


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
    recipe = {}
    if record:
        recipe = read_record(record, where=where, cure=cure).recipe.whole
    read = {}
    for key, form in {"gates": Gates, "evaluation": Evaluations}.items():
        try:
            read[key] = TypeAdapter(form).validate_python(recipe.get(key) or {})
        except ValidationError as error:
            raise CheckpointError(
                where or record,
                f"recipe.{key} must be as a recipe has it",
                got=first_fault(error),
                cure=cure,
            ) from error
    return read["gates"], listed(read["evaluation"])


# --- findings and loads ---------------------------------------------------------------------------


def _findings(check: CheckData, parts: Sequence[StationFact]) -> ReasonFact:
    """No error in config.json, headers and values, and no output that drafting changes."""
    all_errors = errors_of(check.findings)
    # Of dry loads the next gate has the word.
    errors = [error for error in all_errors if error.origin != "dry"]
    if errors:
        says = f"{errors[0].where}: {errors[0].says.rstrip('.')}."
        if len(errors) > 1:
            says += f" Errors in all: {len(errors):,}."
        return reason("findings", "regression", says)
    for part in parts:
        for fault in part.faults():
            return reason("findings", "regression", fault)
    says = "No error in config.json and the headers"
    warnings = len(check.findings) - len(all_errors)
    if warnings:
        says += f"; {counted(warnings, 'warning')}"
    return reason("findings", "pass", f"{says}.")


def _loads(check: CheckData, parts: Sequence[StationFact]) -> ReasonFact:
    """vLLM takes every tensor, on pretended GPUs or in a server of the checkpoint's own bytes."""
    # An older vLLM that cannot load it is no fault of the checkpoint: the card says which can.
    loads = newest(check.dry)
    # vLLM's own defect, which a cure mends where it is served, is no fault of the checkpoint.
    failed = [load for load in loads if not (load.ok or load.cures)]
    if failed:
        why = failed[0].error.rstrip(".")
        says = f"A dry load fails on {places(failed, is_named=True)}: {why}."
        return reason("loads", "regression", says)
    for part in parts:
        failure = part.failure()
        if failure:
            return reason("loads", "regression", failure)
    served = [part.native_or_copy for part in parts if part.native_or_copy]
    ways = []
    if loads:
        where = f"{places(loads, is_named=True)}{with_cures(loads)}"
        ways.append(f"vLLM's own classes take every tensor on {where}.")
        versions = versions_in_short(check.dry)
        if versions:
            ways.append(f"vLLM {versions}.")
    if "native" in served:
        ways.append("Its own bytes were served.")
    elif served:
        ways.append(f"Served was only a {served[0]}.")
    if loads or "native" in served:
        return reason("loads", "pass", " ".join(ways))
    cure = "`keepmtp check CHECKPOINT --gpu sm100 --record` lets vLLM load it without a GPU."
    return unmeasured("loads", " ".join(["Not tried.", *ways, cure]))


# --- drafts ---------------------------------------------------------------------------------------


def _acceptance(gates: Gates, parts: Sequence[StationFact]) -> ReasonFact:
    """The share of the source's acceptance, on the first task's questions or else on the prompts of
    acceptance.
    """
    # Those that also asked the source come first.
    measured = next(iter(drafted(parts)), None)
    if measured is None or measured.source is None:
        says = "Not measured of both source and checkpoint: `keepmtp eval CHECKPOINT` does."
        if has_no_block(parts):
            says = (
                "The source has no MTP block and was served with MTP off, so there is nothing to "
                "compare with: `keepmtp fix SOURCE --from RELEASE --out WHOLE` puts the block "
                "back, and `keepmtp eval CHECKPOINT --source WHOLE` compares."
            )
        return unmeasured("acceptance", says)
    where = f"On {measured.what} with k={measured.k}"
    source = measured.source
    mine = measured.checkpoint.acceptance
    theirs = source.acceptance
    if mine is None:
        says = f"{where}, the checkpoint drafted nothing, and the source did."
        return reason("acceptance", "regression", says)
    if not theirs:
        says = f"{where}, none of the source's own drafted tokens was accepted."
        return unmeasured("acceptance", says)

    def bounds(times: float) -> tuple[float, float]:
        # Drafts are taken as independent: within an answer that makes the bounds too near, between
        # two models' answers to one question too far.
        ours = times * measured.checkpoint.trials(measured.k)
        others = times * source.trials(measured.k)
        return ratio_limits(mine * ours, ours, theirs * others, others, gates.confidence)

    estimate = Estimate(
        value=mine / theirs,
        bounds=bounds,
        samples=measured.num_asked,
        unit=measured.unit,
        says=f"{where}: {percent(mine)} of {measured.checkpoint.draft_tokens:,} drafted tokens "
        f"accepted, {percent(theirs)} of the source's. That is {percent(mine / theirs)} of it",
        how=f"{BOUND}, a draft as one trial",
        shown=percent,
        also=not_its_own(measured.as_served),
    )
    return settle("acceptance", estimate, gates.min_acceptance, gates, is_floor=True)
