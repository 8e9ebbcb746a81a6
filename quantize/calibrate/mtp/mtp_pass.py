"""The MTP pass: the block calibrated on the backbone's last hidden states, measured, and perhaps
chosen.

In: a plan and its finished backbone pass. Out: the plan with the MTP policy decided, what every
policy that was tried would have cost and kept, and the statistics of the block next to those of the
backbone.

Easy to get wrong: acceptance is lost in two places, by rounding the backbone and by rounding the
block. Both are measured apart, and a policy is judged by both together, against the released model.
A trained block is compared with something else: not with the release, which a block rounded to
fewer bits rarely reaches, but with what would be written otherwise, the same schemes without
training, on held-out text that neither has seen.
"""

import math
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from operator import add, itemgetter
from pathlib import Path
from typing import Any

from ....checkpoints.files import making
from ....recipes.errors import CheckpointError, GateError, RecipeError
from ....recipes.schema import TUNED, MtpAuto, candidates_for
from ...plan.plan import Plan, make_plan
from ...run.progress import ProgressCallback, progress_since
from ...run.ranks import Ranks
from ...run.statistics import cure_of
from ..data.data import CalibrationData
from ..layers.backbone import Backbone, fitting
from .acceptance import (
    FEWEST_SEQUENCES,
    Acceptance,
    NothingCounts,
    Target,
    fewest_slots,
    target,
)
from .facts import (
    DIGITS,
    CandidateFact,
    GainFact,
    KeptFact,
    MeasuredFact,
    MtpFact,
    Side,
    TunedFact,
)
from .mtp_block import bind_block, build_block
from .mtp_policy import PolicyResults, block_tensors, is_served_changed, num_blocks

SHARES = (1.0, 0.75, 0.5, 0.25)
"""Of the way from the released weights to the trained ones, where held-out text of several kinds
chooses.
"""
_REPORTS = 50  # of a training: a log has a line for each


def mtp_pass(
    plan: Plan, backbone: Backbone, *, progress: ProgressCallback | None = None
) -> tuple[Plan, MtpFact]:
    """Calibrate, measure, and choose for `mtp: auto`; train and choose for `mtp: tuned`.

    Args:
        plan: what `backbone` was calibrated for; its recipe may still say auto.
        backbone: the finished pass.
        progress: called after each policy.

    Returns: the plan with one policy for the block, and what is known of it.

    Raises:
        RecipeError: see `refuse_mtp`; or under `mtp: auto` and `mtp: tuned` the held-out text says
            nothing about this model; or the loss of training is not finite.
        CheckpointError: NaN in the block, or a module that is never called.
        GateError: no candidate keeps what the recipe asks for.
    """
    refuse_mtp(plan)
    with fitting(plan, "the head and a sequence", backbone.skeleton.device):
        source = target(backbone, "source")
        served = target(backbone, "served", reference=source)
    results = PolicyResults(plan=plan, source=source, served=served)
    refusal, final, found = cannot_run(plan), plan, dict[str, Any]()
    found["unmeasured"] = str(refusal or "")
    released = unquantized = own = None
    try:
        if refusal is None:
            if plan.recipe.mtp == TUNED:
                found["tuned"], final = tune(results, progress)
            elif plan.recipe.mtp_auto:
                found["candidates"], final = choose(results, plan.recipe.mtp_auto, progress)
            own, unquantized = results.measured(final), results.measured()
            released = results.released()
    except NothingCounts as error:
        if plan.recipe.measures_mtp:
            raise
        # Not worth hours of work: by then the block is calibrated, and only a figure is missing.
        found["unmeasured"] = str(error)
    rows = [_row(source, "source", released), _row(served, "source", unquantized)]
    is_tuned = "tuned" in found and found["tuned"].chosen
    if released and unquantized:
        found["of_backbone"] = _kept(unquantized, released)
    if refusal is None and is_served_changed(final):
        if own and unquantized:
            found["of_block"] = _kept(own, unquantized)
        rows.append(_row(served, "tuned" if is_tuned else "quantized", own))
    needs_files = refusal is None and _depends_on_batches(final)
    _publish(backbone, results.statistics(final) if needs_files else ())
    if "tuned" in found:  # the recipe stays what it is, and `tuned` says what became of it
        final = replace(final, recipe=plan.recipe)
    agreement = round(served.agreement, DIGITS)
    return final, MtpFact(mtp=final.recipe.mtp_policy, rows=(*rows,), agreement=agreement, **found)


def _row(backbone: Target, mtp: Side, found: Acceptance | None) -> MeasuredFact:
    """A backbone with a block; without the block's acceptance where it was not measured."""
    row: dict[str, Any] = {"mtp": mtp, "perplexity": round(backbone.perplexity, 6)}
    row["acceptance"] = found and found.fact()
    of_kinds = dict[str, Target]()
    kinds = backbone.backbone.data.rows_of_kinds
    if len(kinds) > 1:
        of_kinds = {kind: backbone.of_rows(rows) for kind, rows in kinds.items()}
    row["perplexity_of_kind"] = {kind: round(one.perplexity, 6) for kind, one in of_kinds.items()}
    if backbone.reference is None:
        return MeasuredFact(backbone="source", **row)
    row["divergence"] = round(backbone.divergence, 6)
    row["divergence_of_kind"] = {kind: round(one.divergence, 6) for kind, one in of_kinds.items()}
    return MeasuredFact(backbone="quantized", flips=round(1 - backbone.agreement, DIGITS), **row)


def _kept(own: Acceptance, before: Acceptance) -> KeptFact | None:
    """Where the most are drafted; None where too few sequences count."""
    values, reaches = own.compared(before, 0.975)  # two-sided 95 %
    if reaches[-1] == math.inf:
        return None
    return KeptFact(kept=round(values[-1], DIGITS), reach=round(reaches[-1], DIGITS))


def _publish(backbone: Backbone, files: Sequence[Path]) -> None:
    """Copy a policy's statistics next to the backbone's, in place of those of another policy."""
    if backbone.ranks.is_first:
        for file in files:
            if not file.is_file():
                rule = "must hold what was measured with its block"
                raise CheckpointError(file, rule, got="no file", cure=cure_of(file))
        folder = backbone.folder / "statistics"
        folder.mkdir(exist_ok=True)
        for path in folder.glob("mtp-*"):
            path.unlink()
        for index, file in enumerate(files):
            with making(folder / f"mtp-{index:05d}.safetensors") as copy:
                shutil.copyfile(file, copy)
    backbone.ranks.wait()


# --- mtp: auto ------------------------------------------------------------------------------------


def choose(
    results: PolicyResults, auto: MtpAuto, progress: ProgressCallback | None
) -> tuple[tuple[CandidateFact, ...], Plan]:
    """Policies measured from the largest to the smallest, up to the first that is not shown to keep
    enough, and the plan of the last one that is.

    The sizes, and so the order, are known before anything is measured. So all limits together hold
    at the confidence of one: to take a block that keeps too little, the first such block of the
    sequence has to pass (W. Maurer, L. Hothorn, W. Lehmacher, "Multiple comparisons in drug
    clinical trials and preclinical assays: a-priori ordered hypotheses", 1995).

    Where too few slots show it of any candidate, the block stays as released, if that is a
    candidate and the estimate does not speak against it: what is not known costs bytes, never
    drafts.

    Raises:
        GateError: there is none; names the best one.
    """
    recipe, least, data = results.plan.recipe, auto.min_acceptance, results.backbone.data
    groups = set[str]()  # of modules that a recipe decides about
    for tensor in block_tensors(results.plan):
        if not tensor.place.row.why_kept and tensor.place.leaf in ("weight", ""):
            groups.add(tensor.role)
    policies = candidates_for(auto.candidates, groups)
    tokens = data.ids.numel() + data.held_out_ids.numel()
    report = reporter(progress, results.backbone.ranks, "mtp", total=len(policies), tokens=tokens)
    facts: list[CandidateFact] = []
    plans: list[tuple[int, Plan]] = []
    for policy in policies:
        try:
            plan = with_policy(results.plan, policy)
        except RecipeError as error:
            facts.append(
                CandidateFact(policy=policy, bytes=0, kept=0.0, refused=str(error), acceptance=None)
            )
            continue
        size = 0
        for tensor in block_tensors(plan):
            size += sum(output.num_bytes for output in tensor.outputs)
        plans.append((size, plan))
    plans.sort(key=itemgetter(0), reverse=True)
    shown: list[tuple[CandidateFact, Plan]] = []
    likely: list[tuple[CandidateFact, Plan]] = []
    is_over = False
    for size, plan in plans:
        is_rounded = any(tensor.fate == "quantize" for tensor in block_tensors(plan))
        if is_over and is_rounded:  # blocks that are not rounded draft alike: one hypothesis
            continue
        found = results.measured(plan)
        kept, low = found.kept_of(results.released(), recipe.gates.confidence)
        fact = CandidateFact(
            policy=plan.recipe.mtp,
            bytes=size,
            kept=round(kept, DIGITS),
            kept_at_least=round(low, DIGITS),
            acceptance=found.fact(),
        )
        facts.append(fact)
        if low >= least:
            shown.append((fact, plan))
        else:
            is_over = True
            if kept >= least and not is_rounded:
                likely.append((fact, plan))
        report(len(facts))
    if not shown and not likely:
        best = max(facts, key=lambda fact: (fact.acceptance is not None, fact.kept))
        got = f"no candidate that fits the model: {best.refused.removesuffix('.')}"
        if best.acceptance is not None:
            got = f"{best.kept:.1%} at best, at least {best.kept_at_least:.1%}, by {best.title}, "
            got += f"on {best.acceptance.num_slots:,} slots"
        raise GateError(
            recipe.name,
            f"a candidate of mtp: auto must keep {least:.1%} of acceptance, "
            f"at {recipe.gates.confidence:.0%} confidence",
            got=got,
            cure="Quantize less of what loses it, add bf16 to mtp_auto.candidates, raise "
            "calibration.held_out for a surer answer, or lower mtp_auto.min_acceptance",
        )
    # Of two that cost the same, the one that keeps more.
    best, plan = min(shown or likely, key=lambda each: (each[0].bytes, -each[0].kept))
    return tuple(fact.model_copy(update={"chosen": fact is best}) for fact in facts), plan


# --- mtp: tuned -----------------------------------------------------------------------------------


def tune(results: PolicyResults, progress: ProgressCallback | None) -> tuple[TunedFact, Plan]:
    """Train the block, or take what an earlier run has trained, and choose.

    It is written only if no kind of held-out text is shown to be drafted worse than by the same
    block untrained, and the mean of all kinds is shown to be drafted better.

    What is learned on one kind costs the others. Of several kinds the text therefore chooses how
    far the weights go from the released ones to the trained ones (M. Wortsman et al., "Robust
    fine-tuning of zero-shot models", 2022), and the limits are those of as many tries.

    Raises:
        RecipeError: the loss is not finite, or a kind of text says nothing about this model.
    """
    plan, backbone, settings = results.plan, results.backbone, results.plan.recipe.mtp_tuned
    assert settings is not None
    untuned, confidence = with_policy(plan, plan.recipe.mtp_policy), plan.recipe.gates.confidence
    tokens = settings.batch_size * backbone.data.ids.shape[1]
    report = reporter(progress, backbone.ranks, "tuning", total=settings.steps, tokens=tokens)
    before, kinds = results.measured(untuned), backbone.data.rows_of_kinds
    for kind, rows in kinds.items():
        num_rows = int(before.of_rows(rows).counts[:, 0, 0, 0].count_nonzero())
        if num_rows < FEWEST_SEQUENCES:
            raise NothingCounts(
                f"{plan.recipe.name}: {kind or 'calibration.dataset'}",
                f"{FEWEST_SEQUENCES} held-out sequences must have tokens that are the model's own "
                "choice",
                got=num_rows,
                cure="Raise calibration.held_out, or name another dataset",
            )
    own = {"steps", "batch_size", "learning_rate", "relative_rate", "seed", "loss", "draft_steps"}
    shares = [settings.share or 1.0]
    if settings.share is None and len(kinds) > 1:
        shares = list(SHARES)
    judged: list[tuple[TunedFact, Plan, bool]] = []
    for share in shares:
        at = settings
        if share < 1:
            at = settings.model_copy(update={"share": share})
        tried = replace(plan, recipe=plan.recipe.model_copy(update={"mtp_tuned": at}))
        after = results.measured(tried, report)
        figures, is_better = gains(before, after, kinds, confidence, len(shares))
        fact = TunedFact(
            policy=settings.mtp,
            **settings.model_dump(include=own),
            share=share,
            before=before.fact(),
            after=after.fact(),
            **figures,
            confidence=confidence,
            chosen=False,
        )
        judged.append((fact, tried, is_better))
    results.forget_training(plan)
    # First that no kind is worse, then what is gained.
    fact, tried, is_better = max(judged, key=lambda each: (min(1.0, each[0].worst), each[0].gain))
    if is_better:
        return fact.model_copy(update={"chosen": True}), tried
    return fact, untuned


def gains(
    before: Acceptance,
    after: Acceptance,
    kinds: Mapping[str, Sequence[int]],
    confidence: float,
    num_tries: int,
) -> tuple[dict[str, Any], bool]:
    """Of a tuned block: by kind, and the mean over them, whose limit holds
    for all of so many tries; and whether it is better.
    """
    sure = 1 - (1 - confidence) / num_tries
    values: list[list[float]] = []
    reaches: list[list[float]] = []
    of_kinds: list[tuple[float, float, float]] = []
    for rows in kinds.values():
        own, theirs = after.of_rows(rows), before.of_rows(rows)
        gains, reach = own.compared(theirs, confidence)
        of_kinds.append((*own.kept_of(theirs, confidence), min(map(add, gains, reach))))
        values.append(gains)
        reaches.append(own.compared(theirs, sure)[1])
    # Kinds have texts of their own, so their errors are independent.
    means, lows = list[float](), list[float]()
    for of_k, reach in zip(zip(*values, strict=True), zip(*reaches, strict=True), strict=True):
        means.append(math.fsum(of_k) / len(kinds))
        lows.append(means[-1] - math.hypot(*reach) / len(kinds))
    low, facts = max(0.0, min(lows)), list[GainFact]()
    for (kind, rows), (gain, least, most) in zip(kinds.items(), of_kinds, strict=True):
        facts.append(
            GainFact(
                kind=kind,
                sequences=len(rows),
                gain=round(gain, DIGITS),
                gain_at_least=round(least, DIGITS),
                gain_at_most=round(most, DIGITS),
            )
        )
    figures: dict[str, Any] = {"gain": round(min(means), DIGITS)}
    figures["gain_at_least"] = round(low, DIGITS)
    figures["kinds"] = tuple(facts)
    return figures, low > 1 and all(most >= 1 for *_, most in of_kinds)


def with_policy(plan: Plan, policy: str | dict[str, str]) -> Plan:
    """The plan of the same recipe with this policy for the block.

    Raises:
        RecipeError: the policy does not fit the model.
    """
    return make_plan(
        plan.recipe.resolved(policy),
        plan.source,
        shard_bytes=plan.shard_bytes,
        trust_remote_code=plan.trust_remote_code,
    )


def reporter(
    progress: ProgressCallback | None, ranks: Ranks, step: str, *, total: int, tokens: int
) -> Callable[[int], None]:
    """What is called after each step, with the number of all that are done.

    Those that were done before the first call count as an earlier run's.
    """
    started, seen = time.monotonic(), list[int]()

    def report(done: int) -> None:
        seen.append(done)
        if progress and ranks.is_first and (done == total or not done % -(-total // _REPORTS)):
            counts = {"done": done, "total": total, "num_here": done + 1 - seen[0]}
            progress(progress_since(started, step, **counts, tokens=tokens, device=ranks.device))

    return report


# --- refusals -------------------------------------------------------------------------------------


def refuse_mtp(plan: Plan) -> None:
    """Refuse an MTP block that has to be run and cannot: known from the headers, before hours of
    work.

    Raises:
        RecipeError: the block has to be calibrated, trained or chosen, and it cannot be here, or
            there is none.
        CheckpointError: likewise, and its tensors are not those of its class.
    """
    refusal = cannot_run(plan)
    if refusal is not None and (plan.recipe.measures_mtp or _depends_on_batches(plan)):
        raise refusal
    if plan.recipe.mtp != TUNED:
        return
    if (count := num_blocks(plan)) > 1:
        rule, got = "mtp: tuned must be for a model with one MTP block", f"{count} blocks"
        raise RecipeError(plan.recipe.name, rule, got=got, cure="Give `mtp` a scheme, or auto")
    if not any(tensor.tuned for tensor in plan.tensors):
        rule = "mtp_tuned must leave something of the block to train"
        cure = "Shorten mtp_tuned.frozen"
        raise RecipeError(plan.recipe.name, rule, got="no tensor", cure=cure)


def cannot_run(plan: Plan) -> RecipeError | CheckpointError | None:
    """Why the MTP block cannot be run; None if it can."""
    count = num_blocks(plan)
    if not count:
        rule = "an MTP block must be there to be calibrated or measured"
        return RecipeError(plan.recipe.name, rule, got="none in the source", cure="Set mtp: source")
    try:
        for index in range(count):
            bind_block(build_block(plan.view, index), plan)
    except (RecipeError, CheckpointError) as error:
        return error
    return None


def refuse_held_out(plan: Plan, data: CalibrationData) -> None:
    """Refuse held-out text that could show nothing of a candidate or of a trained block.

    That is, were no draft lost: before hours of work.

    Args:
        plan: its recipe says auto or tuned for its block, or auto for all of it.
        data: of the run.

    Raises:
        RecipeError: it says how much is needed.
    """
    recipe, needed, fewest = plan.recipe, 1, 1
    auto = recipe.mtp_auto or recipe.backbone_auto
    if auto and auto.min_acceptance is not None:
        needed = fewest_slots(auto.min_acceptance, recipe.gates.confidence)
        fewest = FEWEST_SEQUENCES
    if recipe.mtp == TUNED:
        fewest = FEWEST_SEQUENCES
    slots = data.held_out_ids.numel()
    if data.held_out_written is not None:
        slots = int(data.held_out_written.sum())
    sequences, of_each = len(data.held_out_ids), ""
    if recipe.mtp == TUNED and data.held_out_kinds:  # each kind is judged alone
        kinds = data.rows_of_kinds
        sequences = min(len(kinds.get(texts.title, ())) for texts in plan.calibration.mix)
        sequences = min(sequences, *map(len, kinds.values()))
        of_each = " of each dataset" if len(kinds) > 1 else ""
    if sequences < fewest or slots < needed:
        raise RecipeError(
            recipe.name,
            f"mtp: {recipe.mtp} needs {fewest} held-out sequences{of_each}, and {needed:,} tokens "
            "of them that a model writes",
            got=f"{sequences} sequences, {slots:,} tokens",
            cure="Raise calibration.held_out, or name a dataset with assistant turns",
        )


def _depends_on_batches(plan: Plan) -> bool:
    return any(tensor.calibrated or tensor.tuned for tensor in block_tensors(plan))
