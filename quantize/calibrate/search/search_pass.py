"""The search of `backbone: auto`: sensitivities -> knapsack -> a few plans measured -> the recipe
that is carried out.

In: a plan whose recipe leaves groups to a search, and the run's data. Out: a `Found`: the plan of a
recipe without `auto`, its text, and what was tried. All is in `<pass>/search`; a run with another
budget uses its sensitivities again.

Measured are the plan that the knapsack found, the best of one word for all units that fits, and,
where the block is searched, the best plans with the block as large and as small as it can be. Of
those that keep `min_acceptance`, the one with the smallest sum is taken: divergence of the answers,
and `draft_weight` times the logarithm of what is lost of the release's acceptance, both in nats.

Easy to get wrong: the search must find the same again after a kill, or the pass after it would
refuse its own folder. So what was found is on disk before that pass begins.

Other searches: modelopt's AutoQuantize scores modules by squared gradients and solves a linear
program, AutoRound's AutoScheme and PrismaQuant choose bits by loss; none of them looks at drafts.
"""

import json
import math
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ....checkpoints.files import write_whole
from ....recipes.errors import GateError
from ...plan.choices import Assignment, Choices, choices_of, refuse_budget, rows_looked_at
from ...plan.found_recipe import found_plan, found_text
from ...plan.plan import Plan
from ...run.progress import ProgressCallback, progress_since
from ...run.ranks import Ranks
from ...write.output import asked
from ..data.claim import search_fingerprint
from ..data.data import CalibrationData
from ..model.skeleton import Skeleton
from ..mtp.facts import DIGITS, SearchFact, TriedPlanFact
from ..mtp.mtp_pass import cannot_run
from .knapsack import best_packing
from .measured_plans import measure_plans
from .sensitivity import SearchRun, Sensitivities


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What a search found.

    Attributes:
        plan: to be calibrated and written.
        text: its recipe, as a file.
        fact: for the record.
    """

    plan: Plan
    text: str
    fact: SearchFact


def search(
    plan: Plan,
    data: CalibrationData,
    folder: Path,
    *,
    ranks: Ranks,
    progress: ProgressCallback | None = None,
) -> Found:
    """Find the plan of a recipe with `backbone: auto`, resuming what an earlier run left in
    `folder`.

    Args:
        plan: over a local source; its recipe has a number for `batch_size`.
        data: of the run.
        folder: of searches alone; on several nodes one that all of them see.
        ranks: who shares the text.
        progress: called after each layer of each sweep.

    Raises:
        RecipeError: the budget is too small.
        CheckpointError: the model has no gradients, or computes NaN.
        GateError: no plan keeps `min_acceptance`.
    """
    choices = choices_of(plan.recipe, plan.source, trust_remote_code=plan.trust_remote_code)
    refuse_budget(choices)
    # A search of something else has a folder of its own, and loses nothing.
    folder = folder / ranks.of_first(lambda: search_fingerprint(plan, data, ranks.size)[:16])
    key = asked(plan.recipe)[:16]
    kept, plans = folder / f"found-{key}.json", folder / f"plans-{key}"
    found = ranks.of_first(lambda: json.loads(kept.read_text()) if kept.is_file() else None)
    if found is None:
        found = _found(search_run(choices, data, folder, ranks, progress), plans)
        if ranks.is_first:
            kept.parent.mkdir(parents=True, exist_ok=True)
            write_whole(kept, json.dumps(found, indent=1))
            shutil.rmtree(plans, ignore_errors=True)
        ranks.wait()
    made = found_plan(choices, found["assignment"], shard_bytes=plan.shard_bytes)
    return Found(
        plan=made, text=found_text(made.recipe), fact=SearchFact.model_validate(found["fact"])
    )


def search_run(
    choices: Choices,
    data: CalibrationData,
    folder: Path,
    ranks: Ranks,
    progress: ProgressCallback | None = None,
) -> SearchRun:
    """A search that reports its progress."""
    skeleton = Skeleton(choices.base, device=ranks.device)
    tokens = data.ids[: rows_looked_at(choices.recipe)].numel()
    done, started = 0, time.monotonic()

    def step() -> None:
        nonlocal done
        done += 1
        if progress and ranks.is_first:
            total = 3 * len(skeleton) + 1
            progress(
                progress_since(
                    started,
                    "search",
                    done=done,
                    total=total,
                    num_here=done,
                    tokens=tokens,
                    device=ranks.device,
                )
            )

    return SearchRun(
        choices=choices,
        data=data,
        place=folder,
        skeleton=skeleton,
        ranks=ranks,
        has_block=cannot_run(choices.base) is None,
        step=step,
    )


def _found(run: SearchRun, folder: Path) -> dict[str, Any]:
    """The assignment and the fact, as JSON values."""
    choices, recipe, auto = run.choices, run.recipe, run.auto
    sensitivities = run.sensitivities()
    tried, gap = plans_to_try(run, sensitivities)
    # All of the held-out text where acceptance must be shown; else not more of it than there is
    # text for the sensitivities, for every plan takes a pass.
    data, rows = run.data, rows_looked_at(recipe)
    if not auto.min_acceptance:
        written = None if data.held_out_written is None else data.held_out_written[:rows]
        data = replace(data, held_out_ids=data.held_out_ids[:rows], held_out_written=written)
    plans = [choices.plan(each) for each in tried.values()]
    released, *measured = measure_plans(run, plans, data, folder, sensitivities.largest)
    facts = []
    for (title, assignment), own in zip(tried.items(), measured, strict=True):
        kept: dict[str, Any] = {}
        if own.drafts is not None and released.drafts is not None:
            found = own.drafts.kept_of(released.drafts, recipe.gates.confidence)
            kept = {"kept": round(found.value, DIGITS), "kept_at_least": round(found.low, DIGITS)}
        facts.append(
            TriedPlanFact(
                title=title,
                bytes=choices.num_bytes(assignment),
                bits=round(choices.bits(assignment), 4),
                predicted=round(sensitivities.predicted(assignment), 7),
                divergence=round(max(0.0, own.target.divergence), 7),
                **kept,
            )
        )
    best = _best(run, facts)
    fact = SearchFact(
        budget=recipe.budget or "",
        candidates=auto.candidates,
        asked=asked(recipe),
        units=len(choices.units),
        tokens=sensitivities.num_tokens,
        gap=round(gap, DIGITS),
        plans=tuple(each.model_copy(update={"chosen": each is best}) for each in facts),
    )
    return {"assignment": tried[best.title], "fact": fact.model_dump(mode="json")}


def plans_to_try(
    run: SearchRun, sensitivities: Sensitivities
) -> tuple[dict[str, Assignment], float]:
    """Title -> plan, each plan once, and only those that fit; and how far the first may be from the
    best.
    """
    choices = run.choices
    assignment, gap = packed(choices, sensitivities, {})
    tried: list[tuple[str, Assignment]] = [("found", assignment)]
    uniform = [(f"{word} for all", choices.uniform(word)) for word in run.auto.candidates]
    uniform = [(title, each) for title, each in uniform if choices.fits(each)]
    if uniform:
        tried.append(min(uniform, key=lambda each: sensitivities.predicted(each[1])))
    for title, extreme in (
        ("largest block", choices.largest),
        ("smallest block", choices.smallest),
    ):
        fixed = {unit.name: extreme[unit.name] for unit in choices.units if unit.part == "mtp"}
        if fixed and choices.fits({**choices.smallest, **fixed}):
            tried.append((title, packed(choices, sensitivities, fixed)[0]))
    found: dict[str, Assignment] = {}
    for title, each in tried:
        if each not in found.values():
            found[title] = each
    return found, gap


def packed(
    choices: Choices, sensitivities: Sensitivities, fixed: Mapping[str, str]
) -> tuple[dict[str, str], float]:
    """The best words by sensitivities, with these for some units; and the part of the loss that
    others could save.
    """
    units = []
    for unit in choices.units:
        options = [
            option for option in unit.options if fixed.get(unit.name, option.word) == option.word
        ]
        units.append(
            [
                (choices.cost(option), sensitivities.loss(unit.name, option.word))
                for option in options
            ]
        )
    packing = best_packing(units, choices.room)
    words = {}
    for unit, number in zip(choices.units, packing.chosen, strict=True):
        words[unit.name] = fixed.get(unit.name) or unit.options[number].word
    return words, packing.gap


def _best(run: SearchRun, facts: Sequence[TriedPlanFact]) -> TriedPlanFact:
    """The plan to be taken, of those that keep enough: the one that loses the fewest nats."""
    auto, least, confidence = run.auto, run.auto.min_acceptance, run.recipe.gates.confidence
    enough = [each for each in facts if least is None or (each.kept_at_least or 0.0) >= least]
    if not enough:
        best = max(facts, key=lambda each: each.kept_at_least or 0.0)
        raise GateError(
            run.recipe.name,
            f"a plan under the budget must keep {least:.1%} of acceptance, at {confidence:.0%} "
            "confidence",
            got=f"{best.kept or 0.0:.1%} at best, at least {best.kept_at_least or 0.0:.1%}, by "
            f"{best.title}",
            cure="Raise budget, draft_weight or calibration.held_out, or lower "
            "backbone_auto.min_acceptance",
        )

    def score(fact: TriedPlanFact) -> tuple[float, float]:
        lost = 0.0 if fact.kept is None else -math.log(min(1.0, max(fact.kept, 1e-9)))
        # Text that cannot tell two plans apart leaves it to the sensitivities.
        return fact.divergence + auto.draft_weight * lost, fact.predicted

    return min(enough, key=score)
