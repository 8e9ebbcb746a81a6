"""The MTP pass: the block calibrated on the backbone's last hidden states, measured, and under `mtp: auto` chosen.

In: a plan and its finished backbone pass. Out: an `MtpPass`: the plan with the MTP policy decided, the statistics of
its block next to those of the backbone, and what every policy that was tried would have cost and kept.

Easy to get wrong: acceptance is lost in two places, by rounding the backbone and by rounding the block. Both are
measured apart, and a policy is judged by both together, against the released model.
"""

import json
import math
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from ....checkpoints.files import complete, partial_path
from ....recipes.errors import CheckpointError, GateError, RecipeError
from ....recipes.family import HFName
from ....recipes.schema import TUNED, MtpAuto, candidates_for
from ...plan.plan import Plan, make_plan
from ...run.progress import CalibrationStep, ProgressCallback, progress_since
from ...run.statistics import read_metadata
from ..layers.backbone import Backbone, fitting
from .accepted import FEWEST_SEQUENCES, Acceptance, Kept, fewest_slots
from .facts import DIGITS, CandidateFact, MeasuredFact, Side, TunedFact
from .held_out import NothingCounts
from .mtp_block import bind_block, build_block
from .mtp_policy import PolicyResults, block_schemes, is_served_changed, num_blocks
from .target import Target, agreement, target
from .tuned_choice import refuse_untrainable, tuned_choice


@dataclass(frozen=True, slots=True, kw_only=True)
class MtpPass:
    """What is decided and known about the MTP block.

    Attributes:
        plan: with one policy for the block.
        combinations: released model, quantized backbone with the block as released, and with the quantized block if
            the policy quantizes it.
        agreement: share of held-out slots where the quantized backbone chooses what the released one does.
        candidates: of `mtp: auto`, in the recipe's order.
        tuned: of `mtp: tuned`.
        coverage: module of the block on disk -> tokens that its calibration saw; experts: tokens the router sent them.
        unmeasured: why there is no acceptance; "" if there is.
    """

    plan: Plan
    combinations: tuple[MeasuredFact, ...]
    agreement: float
    candidates: tuple[CandidateFact, ...] = ()
    tuned: TunedFact | None = None
    coverage: Mapping[HFName, int]
    unmeasured: str = ""

    def summary(self) -> dict[str, Any]:
        """Its part of the record's `calibration` block: JSON values only."""
        return {
            "mtp": self.plan.recipe.mtp_policy,
            "rows": [each.model_dump(mode="json") for each in self.combinations],
            "agreement": round(self.agreement, DIGITS),
            "candidates": [each.model_dump(mode="json") for each in self.candidates],
            **({"tuned": self.tuned.model_dump(mode="json")} if self.tuned else {}),
            "unmeasured": self.unmeasured,
        }


def refuse_mtp(plan: Plan) -> None:
    """Refuse an MTP block that has to be run and cannot: known from the headers, before hours of work.

    Raises:
        RecipeError: the block has to be calibrated or chosen, and it cannot be run here, or there is none.
        CheckpointError: likewise, and its tensors are not those of its class.
    """
    refusal = cannot_run(plan)
    if refusal is not None and (plan.recipe.measures_mtp or _depends_on_batches(plan)):
        raise refusal
    if plan.recipe.mtp == TUNED:
        refuse_untrainable(plan)


def mtp_pass(
    plan: Plan, backbone: Backbone, *, written: Tensor | None = None, progress: ProgressCallback | None = None
) -> MtpPass:
    """Calibrate, measure, and choose for `mtp: auto`; train and choose for `mtp: tuned`.

    Args:
        plan: what `backbone` was calibrated for; its recipe may still say auto.
        backbone: the finished pass.
        written: see `acceptance`.
        progress: called after each policy.

    Raises:
        RecipeError: see `refuse_mtp`; or under `mtp: auto` and `mtp: tuned` the held-out text says nothing about this
            model; or the loss of training is not finite.
        CheckpointError: NaN in the block, or a module that is never called.
        GateError: no candidate keeps what the recipe asks for.
    """
    refuse_mtp(plan)
    with fitting(plan, "the head and a sequence", backbone.skeleton.device):
        source = target(backbone, "source")
        served = target(backbone, "served", reference=(backbone, "source"))
    same = agreement(source, served)
    refusal = cannot_run(plan)
    if refusal is not None:
        _publish(backbone, ())
        without = _combinations(source, served, None, None)
        return MtpPass(plan=plan, combinations=without, agreement=same, coverage={}, unmeasured=str(refusal))
    results = PolicyResults(plan=plan, backbone=backbone, source=source, served=served, written=written)
    tried, tuned, final, unmeasured = (), None, plan, ""
    try:
        if plan.recipe.mtp == TUNED:
            tuned, final = tuned_choice(results, progress)
        else:
            tried, final = _chosen(results, progress)
        combinations = _combinations(source, served, results.released(), results.unquantized(), *_last(results, final))
    except NothingCounts as error:
        if plan.recipe.measures_mtp:
            raise
        # No reason to lose hours of work: by then the block is calibrated, and only a figure is missing.
        unmeasured = str(error)
        combinations = _combinations(source, served, *[None] * (3 if is_served_changed(plan) else 2))
    files = results.statistics(final) if _depends_on_batches(final) else ()
    _publish(backbone, files)
    if tuned is not None:  # the recipe stays what it is, and `tuned` says what became of it
        combinations = (*combinations[:2], *(_as_tuned(row, tuned) for row in combinations[2:]))
        final = replace(final, recipe=plan.recipe)
    return MtpPass(
        plan=final,
        combinations=combinations,
        agreement=same,
        coverage=_coverage(files),
        unmeasured=unmeasured,
        candidates=tried,
        tuned=tuned,
    )


def _last(results: PolicyResults, final: Plan) -> tuple[Acceptance, ...]:
    """The acceptance of the block that is written, where it is another than the release's."""
    if any(tensor.tuned for tensor in final.tensors):
        return (results.tuned(final),)
    return (results.measured(final),) if is_served_changed(final) else ()


def _as_tuned(row: MeasuredFact, tuned: TunedFact) -> MeasuredFact:
    return row.model_copy(update={"mtp": "tuned"}) if tuned.chosen else row


def _combinations(source: Target, served: Target, *acceptances: Acceptance | None) -> tuple[MeasuredFact, ...]:
    """Released, with the block as released, and with the quantized block if there is a third acceptance."""
    sides: Sequence[tuple[Literal["source", "quantized"], Side, Target]] = (
        ("source", "source", source),
        ("quantized", "source", served),
        ("quantized", "quantized", served),
    )
    return tuple(
        MeasuredFact(
            backbone=backbone,
            mtp=mtp,
            perplexity=round(target.perplexity, 6),
            divergence=None if target is source else round(target.divergence, 6),
            flips=None if target is source else round(1 - agreement(source, target), DIGITS),
            acceptance=found.fact() if found else None,
        )
        for (backbone, mtp, target), found in zip(sides, acceptances, strict=False)
    )


def _coverage(files: Sequence[Path]) -> dict[HFName, int]:
    found: dict[HFName, int] = {}
    for file in files:
        found |= json.loads(read_metadata(file)["coverage"])
    return found


# --- candidates -----------------------------------------------------------------------------------------------------


def _chosen(results: PolicyResults, progress: ProgressCallback | None) -> tuple[tuple[CandidateFact, ...], Plan]:
    """The candidates of `mtp: auto` and the plan of the one to be written; the recipe's own plan without auto."""
    auto = results.plan.recipe.mtp_auto
    if auto is None:
        results.measured(results.plan)
        return (), results.plan
    tried, chosen = choose(results, auto, progress)
    if chosen is None:
        raise _nothing_is_enough(results, auto, tried)
    return tried, chosen


def choose(
    results: PolicyResults, auto: MtpAuto, progress: ProgressCallback | None
) -> tuple[tuple[CandidateFact, ...], Plan | None]:
    """Every policy measured, and the plan of the cheapest that is shown to keep enough; None if there is none.

    Where too few slots show it of any candidate, the block stays as released, if that is a candidate and the estimate
    does not speak against it: what is not known costs bytes, never drafts.
    """
    plan, confidence = results.plan, results.plan.recipe.gates.confidence
    policies = candidates_for(auto.candidates, _groups(plan))
    tried: list[CandidateFact] = []
    plans: dict[int, Plan] = {}
    kept: dict[int, Kept] = {}  # all digits, unlike the record's
    started = time.monotonic()
    for number, policy in enumerate(policies):
        try:
            plans[number] = make_plan(
                plan.recipe.resolved(policy),
                plan.source,
                shard_bytes=plan.shard_bytes,
                trust_remote_code=plan.trust_remote_code,
            )
        except RecipeError as error:
            tried.append(CandidateFact(policy=policy, bytes=0, kept=0.0, refused=str(error), acceptance=None))
            continue
        found = results.measured(plans[number])
        kept[number] = found.limits_of(results.released(), confidence)
        tried.append(
            CandidateFact(
                policy=policy,
                bytes=_num_bytes(plans[number]),
                kept=round(kept[number].value, DIGITS),
                kept_at_least=round(kept[number].low, DIGITS),
                needed_slots=kept[number].needed_slots(auto.min_acceptance),
                acceptance=found.fact(),
            )
        )
        if progress:
            progress(_step(results.backbone, len(tried), len(policies), started))
    enough = [number for number in plans if kept[number].is_shown(auto.min_acceptance)]
    if not enough:
        as_released = [number for number in plans if not block_schemes(plans[number])]
        enough = [number for number in as_released if kept[number].value >= auto.min_acceptance]
    if not enough:
        return tuple(tried), None
    # Of two that cost the same, the one that keeps more.
    best = min(enough, key=lambda number: (tried[number].bytes, -kept[number].value))
    tried[best] = tried[best].model_copy(update={"chosen": True})
    return tuple(tried), plans[best]


def refuse_too_little_text(plan: Plan, *, num_sequences: int, num_slots: int) -> None:
    """Refuse held-out text on which `mtp: auto` could show nothing, were no draft lost: before hours of work.

    Args:
        plan: whose recipe says auto, for its block or for all of it.
        num_sequences: of held-out text.
        num_slots: tokens of it that may count.

    Raises:
        RecipeError: it says how many are needed.
    """
    auto = plan.recipe.mtp_auto or plan.recipe.backbone_auto
    assert auto is not None
    if auto.min_acceptance is None:
        return
    needed = fewest_slots(auto.min_acceptance, plan.recipe.gates.confidence)
    if num_sequences < FEWEST_SEQUENCES or num_slots < needed:
        raise RecipeError(
            plan.recipe.name,
            f"mtp: auto needs {FEWEST_SEQUENCES} held-out sequences, and {needed:,} tokens of them that a model writes",
            got=f"{num_sequences} sequences, {num_slots:,} tokens",
            cure="Raise calibration.held_out",
        )


def _nothing_is_enough(results: PolicyResults, auto: MtpAuto, tried: Sequence[CandidateFact]) -> GateError:
    """The refusal where no candidate keeps enough: it names the best one, and where acceptance is lost."""
    recipe = results.plan.recipe
    sure = f"{recipe.gates.confidence:.0%} confidence"
    rule = f"a candidate of mtp: auto must keep {auto.min_acceptance:.1%} of acceptance, at {sure}"
    measured = [each for each in tried if each.acceptance]
    if not measured:
        return GateError(
            recipe.name,
            rule,
            got=f"no candidate that fits the model: {tried[0].refused.removesuffix('.')}",
            cure="Give others in mtp_auto.candidates",
        )
    best = max(measured, key=lambda each: each.kept)
    alone = results.unquantized().kept_of(results.released())
    if alone < auto.min_acceptance:
        cure = (
            f"The quantized backbone keeps {alone:.1%} with the block as released: quantize less of it, or lower "
            "mtp_auto.min_acceptance"
        )
    elif best.needed_slots:
        cure = f"{_more_text(results, best.needed_slots)}, or add bf16 to mtp_auto.candidates"
    else:
        cure = "Add a gentler one to mtp_auto.candidates (bf16), or lower mtp_auto.min_acceptance"
    got = f"{best.kept:.1%} at best, at least {best.kept_at_least:.1%}, by {best.title}"
    return GateError(recipe.name, rule, got=got, cure=cure)


def _more_text(results: PolicyResults, needed: int) -> str:
    calibration, num_slots = results.plan.recipe.calibration, results.released().num_slots
    assert calibration is not None
    sequences = math.ceil(calibration.held_out * needed / num_slots)
    return f"About {needed:,} slots would tell, here are {num_slots:,}: raise calibration.held_out to {sequences:,}"


def _groups(plan: Plan) -> set[str]:
    """Module groups of the block that a recipe decides about."""
    own = [tensor for tensor in plan.tensors if tensor.part == "mtp" and not _is_kept(plan, tensor.name)]
    return {tensor.role for tensor in own}


def _is_kept(plan: Plan, name: HFName) -> bool:
    place = plan.view.place(name)
    return place is None or bool(place.row.why_kept) or place.leaf not in ("weight", "")


def _num_bytes(plan: Plan) -> int:
    return sum(output.num_bytes for tensor in plan.tensors if tensor.part == "mtp" for output in tensor.outputs)


def _depends_on_batches(plan: Plan) -> bool:
    return any(tensor.calibrated or tensor.tuned for tensor in plan.tensors if tensor.part == "mtp")


def cannot_run(plan: Plan) -> RecipeError | CheckpointError | None:
    """Why the MTP block cannot be run; None if it can."""
    count = num_blocks(plan)
    if not count:
        return RecipeError(
            plan.recipe.name,
            "an MTP block must be there to be calibrated or measured",
            got="none in the source",
            cure="Set mtp: source",
        )
    try:
        for index in range(count):
            bind_block(build_block(plan.view, index), plan)
    except (RecipeError, CheckpointError) as error:
        return error
    return None


def _step(backbone: Backbone, done: int, total: int, started: float) -> CalibrationStep:
    return progress_since(
        started,
        "mtp",
        done=done,
        total=total,
        num_here=done,
        tokens=backbone.data.ids.numel() + backbone.data.held_out_ids.numel(),
        device=backbone.skeleton.device,
    )


def _publish(backbone: Backbone, files: Sequence[Path]) -> None:
    """Copy a policy's statistics next to the backbone's, in place of those of another policy."""
    if backbone.ranks.is_first:
        folder = backbone.folder / "statistics"
        folder.mkdir(exist_ok=True)
        for path in folder.glob("mtp-*"):
            path.unlink()
        for index, file in enumerate(file for file in files if file.is_file()):
            copy = folder / f"mtp-{index:05d}.safetensors"
            shutil.copyfile(file, partial_path(copy))
            complete(copy)
    backbone.ranks.wait()
