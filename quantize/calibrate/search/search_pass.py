"""The search of `backbone: auto`: sensitivities -> knapsack -> a few plans measured -> a recipe to
carry out.

In: a plan whose recipe leaves groups to a search, and the run's data. Out: the plan of a recipe
without `auto`, and what was tried. All is in `<pass>/search`; a run with another budget uses its
sensitivities again.

Measured are the plan that the knapsack found and a few others (`plans_to_try`): each on the
held-out text, as a server would compute it, a layer at a time. Of those that keep `min_acceptance`,
the one with the smallest sum is taken: divergence of the answers, and `draft_weight` times the
logarithm of the acceptance that it is shown to lose, both in nats.

Easy to get wrong: the search must find the same again after a kill, or the pass after it would
refuse its own folder. So what was found is on disk before that pass begins. And these figures
choose between plans: those in the record are measured again, on the calibrated backbone, whose
input scales are of all calibration text, and whose weights an algorithm such as GPTQ rewrites.

Other searches: modelopt's AutoQuantize scores modules by squared gradients and solves a linear
program, AutoRound's AutoScheme and PrismaQuant choose bits by loss; none of them looks at drafts.
"""

import json
import math
import shutil
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

from ....checkpoints.files import write_whole
from ....recipes.errors import GateError
from ....recipes.frozen import Json
from ....recipes.schema import AUTO
from ...plan.choices import Assignment, Choices, auto_of, choices_of, found_plan, refuse_budget
from ...plan.plan import Plan
from ...run.progress import ProgressCallback
from ...run.ranks import Ranks
from ...write.output import asked
from ..data.claim import left_behind, search_fingerprint
from ..data.data import CalibrationData
from ..layers.backbone import Backbone
from ..layers.forwards import serving
from ..model.states import States
from ..mtp.acceptance import Acceptance, NothingCounts, Target, acceptance, target
from ..mtp.facts import SearchFact, TriedPlanFact
from .candidates import LargestInputs, as_candidate, as_tables
from .sensitivity import SearchRun, Sensitivities

# Part of the loss: when the knapsack's solver may stop. Sensitivities are known to two digits.
_GAP = 1e-6


def search(
    plan: Plan,
    data: CalibrationData,
    folder: Path,
    *,
    ranks: Ranks,
    can_draft: bool = True,
    progress: ProgressCallback | None = None,
) -> tuple[Plan, SearchFact]:
    """Find the plan of a recipe with `backbone: auto`, resuming what an earlier run left in
    `folder`.

    Args:
        plan: over a local source; its recipe has a number for `batch_size`.
        data: of the run.
        folder: of searches alone; on several nodes one that all of them see.
        ranks: who shares the text.
        can_draft: whether the model has an MTP block that can be run (`refuse_mtp`).
        progress: called after each layer of each sweep.

    Returns: the plan to be calibrated and written, and the record of the search.

    Raises:
        RecipeError: the budget is too small.
        CheckpointError: the model has no gradients, or computes NaN.
        GateError: no plan keeps `min_acceptance`.
    """
    choices = choices_of(plan.recipe, plan.source)
    refuse_budget(choices)
    # A search of something else has a folder of its own, and loses nothing.
    folder = folder / ranks.of_first(lambda: search_fingerprint(plan, data, ranks.size)[:16])
    key = asked(plan.recipe)[:16]
    stored = folder / f"found-{key}.json"
    plans = folder / f"plans-{key}"
    found = left_behind(stored, ranks)
    if found is None:
        run = SearchRun(choices, data, folder, ranks, can_draft=can_draft, progress=progress)
        assignment, fact = _found(run, plans)
        found = {"assignment": assignment, "fact": fact.model_dump(mode="json")}
        if ranks.is_first:
            write_whole(stored, json.dumps(found, indent=1))
            shutil.rmtree(plans, ignore_errors=True)
        ranks.wait()
    made = found_plan(plan, choices, found["assignment"])
    return made, SearchFact.model_validate(found["fact"])


def _found(run: SearchRun, folder: Path) -> tuple[Assignment, SearchFact]:
    choices = run.choices
    recipe = choices.recipe
    sensitivities = run.sensitivities()
    tried = plans_to_try(choices, sensitivities)
    plans = [*map(choices.plan, tried.values())]
    (_, released), *measured = measure_plans(run, plans, folder, sensitivities.largest)
    confidence = recipe.gates.confidence
    others = [drafts for _, drafts in measured if drafts is not None]
    facts = []
    for (title, assignment), (own, drafts) in zip(tried.items(), measured, strict=True):
        shares: Json = {}
        if drafts is not None and released is not None:
            kept, low = drafts.kept_of(released, confidence)
            # What it keeps of another plan's, at most: acceptance is known to a few percent, and
            # without the limit noise would decide.
            most = min(drafts.compared(other, confidence).sum(dim=0).max() for other in others)
            lost = max(0.0, -math.log(max(float(most), 1e-9)))
            shares = {"kept": kept, "kept_at_least": low, "lost": lost}
        facts.append(
            TriedPlanFact(
                title=title,
                bytes=choices.num_bytes(assignment),
                bits=round(choices.bits(assignment), 4),
                predicted=sensitivities.predicted(assignment),
                divergence=own.divergence,
                **shares,
            )
        )
    best = _best(run, facts)
    fact = SearchFact(
        budget=recipe.budget or "",
        candidates=run.auto.candidates,
        asked=asked(recipe),
        units=len(choices.units),
        tokens=run.ids.numel(),
        plans=tuple(each.model_copy(update={"chosen": each is best}) for each in facts),
    )
    return tried[best.title], fact


def plans_to_try(choices: Choices, sensitivities: Sensitivities) -> dict[str, Assignment]:
    """Title -> plan, each plan once, and only those that fit."""
    wanted: list[tuple[str, Assignment]] = [("found", packed(choices, sensitivities, {}))]
    # The best of one word for all units.
    uniform = []
    for word in auto_of(choices.recipe).candidates:
        assignment = choices.uniform(word)
        if choices.fits(assignment):
            uniform.append((f"{word} for all", assignment))
    if uniform:
        wanted.append(min(uniform, key=lambda each: sensitivities.predicted(each[1])))
    # Where the block is searched: it as large and as small as it can be, and the best backbone for
    # that.
    extremes = {"largest block": choices.largest, "smallest block": choices.smallest}
    for title, extreme in extremes.items():
        fixed = {unit.name: extreme[unit.name] for unit in choices.units if unit.part == "mtp"}
        if fixed and choices.fits({**choices.smallest, **fixed}):
            wanted.append((title, packed(choices, sensitivities, fixed)))
    found = {}
    for title, assignment in wanted:
        if assignment not in found.values():
            found[title] = assignment
    return found


def packed(
    choices: Choices, sensitivities: Sensitivities, fixed: Mapping[str, str]
) -> dict[str, str]:
    """The best words by sensitivities, with these for some units."""
    words = []  # of each unit, with cost and loss
    for unit in choices.units:
        own = {}
        for option in unit.options:
            if fixed.get(unit.name, option.word) == option.word:
                loss = sensitivities.predicted({unit.name: option.word})
                own[option.word] = choices.cost(option), loss
        words.append(own)
    numbers = best_packing([[*own.values()] for own in words], choices.room)
    chosen = zip(choices.units, words, numbers, strict=True)
    return {unit.name: [*own][number] for unit, own, number in chosen}


def best_packing(units: Sequence[Sequence[tuple[int, float]]], room: int) -> list[int]:
    """The choice with the smallest loss that fits, or one that is nearly as good: a multiple-choice
    knapsack, solved by SciPy's HiGHS.

    Args:
        units: the options of each, with cost and loss; the cheapest of all units together must fit.
        room: what all may cost.

    Returns: the number of each unit's option.
    """
    costs = []
    losses = []
    unit_of = []
    for number, options in enumerate(units):
        cheapest, _ = min(options)
        room -= cheapest
        for cost, loss in options:
            costs.append(cost - cheapest)
            losses.append(loss)
            unit_of.append(number)
    largest = max(*map(abs, losses), 1e-300)
    is_of_unit = csr_array((np.ones(len(losses)), (unit_of, np.arange(len(losses)))))
    limit = room / max(1, room)
    while True:
        found = milp(
            np.array(losses) / largest,
            integrality=1,
            bounds=Bounds(0, 1),
            constraints=[
                LinearConstraint(is_of_unit, 1, 1),
                LinearConstraint(np.array(costs)[None] / max(1, room), ub=limit),
            ],
            options={"mip_rel_gap": _GAP},
        )
        assert found.x is not None, found.message
        ones = np.flatnonzero(found.x > 0.5)
        # The solver's limits hold up to a tolerance of floating point. Costs are whole numbers:
        # what it chose is added up again, and solved again with less room where it is too much.
        if sum(costs[one] for one in ones) <= room:
            return [int(one) - unit_of.index(number) for number, one in enumerate(ones)]
        limit -= 1e-6


def measure_plans(
    run: SearchRun,
    plans: Sequence[Plan],
    folder: Path,
    largest: Mapping[int, LargestInputs],
) -> list[tuple[Target, Acceptance | None]]:
    """The released model, and each plan: its predictions on held-out text, and its drafts where a
    block can be run.

    A layer is loaded once and becomes one plan after the other. The states of each plan are a
    stream of its own, in a folder that looks like that of a finished backbone pass.

    Args:
        run: the search.
        plans: of its choices.
        folder: for the states of each plan, and of the released model.
        largest: of the inputs of each layer's linear layers; -1 - i for block i, and the number of
            layers for the head.

    Raises:
        NothingCounts: no slot of the text counts, and acceptance decides.
    """
    skeleton = run.skeleton
    ranks = run.ranks
    sides = []
    for number, plan in enumerate((None, *plans)):
        place = folder / f"{number:02d}"
        states = States(place / "states", ranks)
        states.tidy()
        own = Backbone(folder=place, skeleton=skeleton, data=run.data, ranks=ranks, states=states)
        sides.append((plan, "served" if plan else "source", own))
    for index in range(min(side.states.num_done() for *_, side in sides), len(skeleton)):
        binding = skeleton.bind_layer(index)
        path = f"{skeleton.layer_path}.{index}."
        with skeleton.layer(index):
            for plan, stream, backbone in sides:
                if backbone.states.num_done() > index:  # before a kill
                    continue
                candidate = as_candidate(skeleton.model, plan, binding, path, largest[index])
                with candidate, backbone.states.writing(index + 1) as outputs:
                    backbone.run(stream, index, outputs, serving(skeleton.model))
        run.report(2 * len(skeleton) + 2 + index)
    measured = []
    blocks = run.blocks()
    reference = None
    for plan, stream, backbone in sides:
        drafts = None
        with ExitStack() as stack:
            stack.enter_context(as_tables(skeleton, plan, largest[len(skeleton)]))
            own = target(backbone, stream, reference=reference)
            reference = reference or own
            for number, block in enumerate(blocks):
                seen = largest.get(-1 - number, {})
                stack.enter_context(as_candidate(block, plan, block.binding, "", seen))
            try:
                if blocks:
                    drafts = acceptance(own, blocks)
            except NothingCounts:
                if run.choices.recipe.mtp == AUTO or run.auto.min_acceptance:
                    raise
        measured.append((own, drafts))
    return measured


def _best(run: SearchRun, facts: Sequence[TriedPlanFact]) -> TriedPlanFact:
    """The plan to be taken, of those that keep enough: the one that is shown to lose the fewest
    nats.
    """
    recipe = run.choices.recipe
    least = run.auto.min_acceptance or 0.0

    def kept(fact: TriedPlanFact) -> float:
        return fact.kept_at_least or 0.0

    enough = [each for each in facts if kept(each) >= least]
    if not enough:
        best = max(facts, key=kept)
        raise GateError(
            recipe.name,
            f"a plan under the budget must keep {least:.1%} of acceptance, at "
            f"{recipe.gates.confidence:.0%} confidence",
            got=f"at least {kept(best):.1%} at best, by {best.title}",
            cure="Raise budget, draft_weight or calibration.held_out, or lower "
            "backbone_auto.min_acceptance",
        )

    def score(fact: TriedPlanFact) -> tuple[float, float]:
        # Text that cannot tell two plans apart leaves it to the sensitivities.
        return fact.divergence + run.auto.draft_weight * fact.lost, fact.predicted

    return min(enough, key=score)
