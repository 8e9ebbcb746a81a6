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
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from ....checkpoints.files import making
from ....recipes.errors import CheckpointError, GateError, RecipeError, counted
from ....recipes.frozen import Json
from ....recipes.schema import TUNED, MtpAuto, candidates_for
from ...plan.plan import Plan
from ...plan.tensor_plan import outputs_of
from ...run.progress import ProgressCallback, reporter
from ...run.statistics import read_metadata
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
from .facts import CandidateFact, GainFact, KeptFact, MeasuredFact, MtpFact, Side, TunedFact
from .mtp_block import bound_block
from .mtp_policy import PolicyResults, is_served_changed, num_blocks


def mtp_pass(
    plan: Plan,
    backbone: Backbone,
    *,
    refusal: RecipeError | CheckpointError | None = None,
    progress: ProgressCallback | None = None,
) -> tuple[Plan, MtpFact]:
    """Calibrate, measure, and choose for `mtp: auto`; train and choose for `mtp: tuned`.

    Args:
        plan: what `backbone` was calibrated for; its recipe may still say auto.
        backbone: the finished pass.
        refusal: why the block cannot be run, as `refuse_mtp` found; None if it can.
        progress: called after each policy.

    Returns: the plan with one policy for the block, and what is known of it.

    Raises:
        RecipeError: under `mtp: auto` and `mtp: tuned` the held-out text says nothing about this
            model; or the loss of training is not finite.
        CheckpointError: NaN in the block, or a module that is never called.
        GateError: no candidate keeps what the recipe asks for.
    """
    with fitting(plan, "the head and a sequence", backbone.skeleton.device):
        source = target(backbone, "source")
        served = target(backbone, "served", reference=source)
    results = PolicyResults(plan=plan, source=source, served=served)
    final = plan
    candidates: tuple[CandidateFact, ...] = ()
    tuned: TunedFact | None = None
    # The released model's, that with the quantized backbone, and with the block as it is written.
    of_release = of_backbone = of_both = None
    unmeasured = str(refusal or "")
    try:
        if refusal is None:
            if plan.recipe.mtp == TUNED:
                tuned, final = tune(results, progress)
            elif plan.recipe.mtp_auto:
                candidates, final = choose(results, plan.recipe.mtp_auto, progress)
            of_both = results.measured(final)
            of_backbone = results.measured()
            of_release = results.released()
    except NothingCounts as error:
        if plan.recipe.measures_mtp:
            raise
        # Not worth hours of work: by then the block is calibrated, and only a figure is missing.
        unmeasured = str(error)
    rows = [_row(source, "source", of_release), _row(served, "source", of_backbone)]
    kept_of_block = None
    files = []
    if refusal is None:
        if is_served_changed(final):
            kept_of_block = _kept(of_both, of_backbone)
            is_tuned = tuned is not None and tuned.chosen
            rows.append(_row(served, "tuned" if is_tuned else "quantized", of_both))
        if final.may_calibrate_mtp:
            files = results.statistics(final)
    _publish(backbone, files)
    if tuned is not None:  # the recipe stays what it is, and `tuned` says what became of it
        final = replace(final, recipe=plan.recipe)
    return final, MtpFact(
        mtp=final.recipe.mtp_policy,
        rows=tuple(rows),
        agreement=served.agreement,
        candidates=candidates,
        tuned=tuned,
        of_backbone=_kept(of_backbone, of_release),
        of_block=kept_of_block,
        unmeasured=unmeasured,
    )


def _row(backbone: Target, mtp: Side, measured: Acceptance | None) -> MeasuredFact:
    """A backbone with a block; without the block's acceptance where it was not measured."""
    figures: Json = {"backbone": "source"}
    if backbone.reference is not None:
        figures = {"backbone": "quantized", "divergence": backbone.divergence}
    return MeasuredFact(
        mtp=mtp,
        perplexity=backbone.perplexity,
        acceptance=measured and measured.fact(),
        **figures,
    )


def _kept(own: Acceptance | None, before: Acceptance | None) -> KeptFact | None:
    """Where the most are drafted; None where nothing was measured, or too few sequences count."""
    if own is None or before is None:
        return None
    values, reaches = own.compared(before, 0.975)  # two-sided 95 %
    if reaches[-1] == math.inf:
        return None
    return KeptFact(kept=float(values[-1]), reach=float(reaches[-1]))


def _publish(backbone: Backbone, files: Sequence[Path]) -> None:
    """Copy a policy's statistics next to the backbone's, in place of those of another policy."""
    if backbone.ranks.is_first:
        for file in files:
            read_metadata(file)  # one that is missing or damaged is refused
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
    recipe = results.plan.recipe
    least = auto.min_acceptance
    data = results.backbone.data
    groups = set[str]()  # of modules that a recipe decides about
    for tensor in results.plan.mtp:
        if not tensor.place.row.why_kept and tensor.place.leaf in ("weight", ""):
            groups.add(tensor.role)
    policies = candidates_for(auto.candidates, groups)
    tokens = data.ids.numel() + data.held_out_ids.numel()
    report = reporter(progress, results.backbone.ranks, "mtp", total=len(policies), tokens=tokens)
    facts = []
    plans = []
    for policy in policies:
        try:
            plans.append(with_policy(results.plan, policy))
        except RecipeError as error:
            facts.append(CandidateFact(policy=policy, bytes=0, kept=0.0, refused=str(error)))
    plans.sort(key=_num_bytes, reverse=True)
    shown = []
    likely = []
    is_over = False
    for plan in plans:
        is_rounded = any(tensor.fate == "quantize" for tensor in plan.mtp)
        if is_over and is_rounded:  # blocks that are not rounded draft alike: one hypothesis
            continue
        measured = results.measured(plan)
        kept, low = measured.kept_of(results.released(), recipe.gates.confidence)
        fact = CandidateFact(
            policy=plan.recipe.mtp,
            bytes=_num_bytes(plan),
            kept=kept,
            kept_at_least=low,
            acceptance=measured.fact(),
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
        # Those that were measured come before those that do not fit.
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
    best, plan = min(shown or likely, key=lambda pair: (pair[0].bytes, -pair[0].kept))
    return tuple(fact.model_copy(update={"chosen": fact is best}) for fact in facts), plan


def _num_bytes(plan: Plan) -> int:
    """Of the block."""
    return sum(output.num_bytes for output in outputs_of(plan.mtp))


# --- mtp: tuned -----------------------------------------------------------------------------------


def tune(results: PolicyResults, progress: ProgressCallback | None) -> tuple[TunedFact, Plan]:
    """Train the block, or take what an earlier run has trained, and choose.

    It is written only if no kind of held-out text is shown to be drafted worse than by the same
    block untrained, and the mean of all kinds is shown to be drafted better.

    Raises:
        RecipeError: the loss is not finite, or a kind of text says nothing about this model.
    """
    plan = results.plan
    backbone = results.backbone
    settings = plan.recipe.mtp_tuned
    assert settings is not None
    confidence = plan.recipe.gates.confidence
    tokens = settings.batch_size * backbone.data.ids.shape[1]
    report = reporter(progress, backbone.ranks, "tuning", total=settings.steps, tokens=tokens)
    untuned = with_policy(plan, plan.recipe.mtp_policy)
    before = results.measured(untuned)
    kinds = backbone.data.rows_of_kinds
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
    after = results.measured(plan, report)
    results.forget_training(plan)
    fact = TunedFact(
        policy=settings.mtp,
        **settings.model_dump(include=own),
        before=before.fact(),
        after=after.fact(),
        **gains(before, after, kinds, confidence),
        confidence=confidence,
    )
    if fact.chosen:
        return fact, plan
    return fact, untuned


def gains(
    before: Acceptance,
    after: Acceptance,
    kinds: Mapping[str, Sequence[int]],
    confidence: float,
) -> Json:
    """The figures of a `TunedFact`: of each kind, and of the mean over them."""
    facts = []
    gains_KN = []  # by kind, and by the number of tokens a step
    reaches_KN = []
    for kind, rows in kinds.items():
        own = after.of_rows(rows)
        theirs = before.of_rows(rows)
        of_kind, reach = own.compared(theirs, confidence)
        gain, least = own.kept_of(theirs, confidence)
        most = float((of_kind + reach).min())
        facts.append(
            GainFact(
                kind=kind,
                sequences=len(rows),
                gain=gain,
                gain_at_least=least,
                gain_at_most=most,
            )
        )
        gains_KN.append(of_kind)
        reaches_KN.append(reach)
    means = torch.stack(gains_KN).mean(dim=0)
    # Kinds have texts of their own, so their errors are independent.
    low = (means - torch.stack(reaches_KN).norm(dim=0) / len(kinds)).min()
    is_worse = any(fact.gain_at_most < 1 for fact in facts)
    return {
        "gain": float(means.min()),
        "gain_at_least": max(0.0, float(low)),
        "kinds": tuple(facts),
        "chosen": bool(low > 1) and not is_worse,
    }


def with_policy(plan: Plan, policy: str | dict[str, str]) -> Plan:
    """The plan of the same recipe with this policy for the block.

    Raises:
        RecipeError: the policy does not fit the model.
    """
    return plan.again(plan.recipe.resolved(policy))


# --- refusals -------------------------------------------------------------------------------------


def refuse_mtp(plan: Plan) -> RecipeError | CheckpointError | None:
    """Refuse an MTP block that has to be run and cannot: known from the headers, before hours of
    work.

    Returns: why it cannot be run where it need not; None if it can.

    Raises:
        RecipeError: the block has to be calibrated, trained or chosen, and it cannot be here, or
            there is none.
        CheckpointError: likewise, and its tensors are not those of its class.
    """
    refusal = cannot_run(plan)
    if refusal is not None and (plan.recipe.measures_mtp or plan.may_calibrate_mtp):
        raise refusal
    if plan.recipe.mtp != TUNED:
        return refusal
    count = num_blocks(plan)
    if count > 1:
        raise RecipeError(
            plan.recipe.name,
            "mtp: tuned must be for a model with one MTP block",
            got=f"{count} blocks",
            cure="Give `mtp` a scheme, or auto",
        )
    if not any(tensor.tuned for tensor in plan.tensors):
        raise RecipeError(
            plan.recipe.name,
            "mtp_tuned must leave something of the block to train",
            got="no tensor",
            cure="Shorten mtp_tuned.frozen",
        )
    return None


def cannot_run(plan: Plan) -> RecipeError | CheckpointError | None:
    """Why the MTP block cannot be run; None if it can."""
    count = num_blocks(plan)
    if not count:
        rule = "an MTP block must be there to be calibrated or measured"
        return RecipeError(plan.recipe.name, rule, got="none in the source", cure="Set mtp: source")
    try:
        for index in range(count):
            bound_block(plan, index)
    except (RecipeError, CheckpointError) as error:
        return error
    return None


def refuse_held_out(plan: Plan, data: CalibrationData) -> None:
    """Refuse held-out text that could show nothing of a candidate or of a trained block.

    That is, were no draft lost: before hours of work.

    Args:
        plan: its recipe says auto or tuned for its block.
        data: of the run.

    Raises:
        RecipeError: it says how much is needed.
    """
    recipe = plan.recipe
    needed = 1
    fewest = 1
    if recipe.mtp_auto is not None:
        needed = fewest_slots(recipe.mtp_auto.min_acceptance, recipe.gates.confidence)
        fewest = FEWEST_SEQUENCES
    slots = data.held_out_ids.numel()
    if data.held_out_written is not None:
        slots = int(data.held_out_written.sum())
    sequences = len(data.held_out_ids)
    of_each = ""
    if recipe.mtp == TUNED:  # each kind is judged alone
        fewest = FEWEST_SEQUENCES
        of_each = " of each dataset"
        counts = Counter(data.held_out_kinds)
        # Of one there may be no sequence at all.
        titles = {*counts, *(texts.title for texts in plan.calibration.mix)}
        if counts:
            sequences = min(counts[title] for title in titles)
    if sequences < fewest or slots < needed:
        raise RecipeError(
            recipe.name,
            f"mtp: {recipe.mtp} needs {fewest} held-out sequences{of_each}, and {needed:,} tokens "
            "of them that a model writes",
            got=f"{counted(sequences, 'sequence')}, {counted(slots, 'token')}",
            cure="Raise calibration.held_out, or name a dataset with assistant turns",
        )
