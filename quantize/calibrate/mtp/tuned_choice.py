"""`mtp: tuned`: the block trained, and written only if it is shown to draft better than the same block untrained.

In: the results of policies over a finished backbone pass. Out: a `TunedFact`, and the plan of the block to be written.

Easy to get wrong: what it is compared with. Not with the release, which a block rounded to fewer bits rarely reaches,
but with what would be written otherwise: the same schemes without training, with the same backbone, on held-out text
that neither has seen. Where training is not shown to help, the untrained block is written, and the record says so.
"""

import json
import time
from collections.abc import Callable

from ....recipes.errors import RecipeError
from ...plan.plan import Plan, make_plan
from ...run.progress import ProgressCallback, progress_since
from ...run.statistics import read_metadata
from .accepted import FEWEST_SEQUENCES, Kept
from .facts import DIGITS, TunedFact
from .mtp_policy import PolicyResults, num_blocks

_REPORTS = 50
_SHOWN = 10  # parts of the steps: the losses of the first and of the last are averaged


def tuned_choice(results: PolicyResults, progress: ProgressCallback | None) -> tuple[TunedFact, Plan]:
    """Train the block, or take what an earlier run has trained, and choose.

    Raises:
        RecipeError: the loss is not finite.
    """
    plan, confidence = results.plan, results.plan.recipe.gates.confidence
    settings = plan.recipe.mtp_tuned
    assert settings is not None
    untuned = without_tuning(plan)
    before = results.measured(untuned)
    after = results.tuned(plan, _reporter(results, progress))
    gain, of_released = (after.limits_of(other, confidence) for other in (before, results.unquantized()))
    losses = json.loads(read_metadata(results.statistics(plan)[0])["losses"])
    count = max(1, len(losses) // _SHOWN)
    is_better = gain.low > 1
    fact = TunedFact(
        policy=settings.mtp,
        steps=settings.steps,
        batch_size=settings.batch_size,
        learning_rate=settings.learning_rate,
        seed=settings.seed,
        loss=settings.loss,
        draft_steps=settings.draft_steps,
        first_loss=round(sum(losses[:count]) / count, DIGITS),
        last_loss=round(sum(losses[-count:]) / count, DIGITS),
        before=before.fact(),
        after=after.fact(),
        **_limits("gain", gain),
        **_limits("of_released", of_released),
        confidence=confidence,
        chosen=is_better,
    )
    return fact, plan if is_better else untuned


def without_tuning(plan: Plan) -> Plan:
    """The plan of the same schemes without training."""
    recipe = plan.recipe.resolved(plan.recipe.mtp_policy)
    return make_plan(recipe, plan.source, shard_bytes=plan.shard_bytes, trust_remote_code=plan.trust_remote_code)


def refuse_untrainable(plan: Plan) -> None:
    """Refuse a block that cannot be trained: known from the headers.

    Raises:
        RecipeError: there are several blocks, or no tensor of the block is left to train.
    """
    cure = "Give `mtp` a scheme, or auto"
    if (count := num_blocks(plan)) > 1:
        rule = "mtp: tuned must be for a model with one MTP block"
        raise RecipeError(plan.recipe.name, rule, got=f"{count} blocks", cure=cure)
    if not any(tensor.tuned for tensor in plan.tensors):
        rule = "mtp_tuned must leave something of the block to train"
        raise RecipeError(plan.recipe.name, rule, got="no tensor", cure="Shorten mtp_tuned.frozen")


def refuse_too_few_sequences(plan: Plan, num_sequences: int) -> None:
    """Refuse held-out text on which no block is shown to be better, whatever it drafts: before hours of work.

    Raises:
        RecipeError: it says how many are needed.
    """
    if num_sequences < FEWEST_SEQUENCES:
        rule = f"mtp: tuned needs {FEWEST_SEQUENCES} held-out sequences to compare blocks on"
        raise RecipeError(plan.recipe.name, rule, got=num_sequences, cure="Raise calibration.held_out")


def _limits(name: str, kept: Kept) -> dict[str, float]:
    return {name: round(kept.value, DIGITS), f"{name}_at_least": round(kept.low, DIGITS)}


def _reporter(results: PolicyResults, progress: ProgressCallback | None) -> Callable[[int, int], None]:
    """What is called after each step, and reports each fiftieth of them: a log has a line for each report."""
    backbone, settings, started = results.backbone, results.plan.recipe.mtp_tuned, time.monotonic()
    assert settings is not None

    def report(first: int, done: int) -> None:
        if progress and (done == settings.steps or not done % -(-settings.steps // _REPORTS)):
            step = progress_since(
                started,
                "tuning",
                done=done,
                total=settings.steps,
                num_here=done - first,
                tokens=settings.batch_size * backbone.data.ids.shape[1],
                device=backbone.skeleton.device,
            )
            progress(step)

    return report
