"""The search of `backbone: auto`: sensitivities -> knapsack -> a recipe to carry out.

In: a plan whose recipe leaves groups to a search, and the run's data. Out: the plan of a recipe
without `auto`, and what was done. Sensitivities are in `<pass>/search`; a run with another budget
uses them again.

Easy to get wrong: the search must find the same again after a kill, or the pass after it would
refuse its own folder. So every rank takes what the first one finds of the figures on the disk.

Other searches: modelopt's AutoQuantize scores modules by squared gradients and solves a linear
program, AutoRound's AutoScheme and PrismaQuant choose bits by loss; none of them looks at drafts.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

from ...plan.choices import Choices, auto_of, choices_of, found_plan, refuse_budget
from ...plan.plan import Plan
from ...run.progress import ProgressCallback
from ...run.ranks import Ranks
from ...write.output import asked
from ..data.claim import search_fingerprint
from ..data.data import CalibrationData
from ..mtp.facts import SearchFact
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
    """
    choices = choices_of(plan.recipe, plan.source)
    refuse_budget(choices)
    # A search of something else has a folder of its own, and loses nothing.
    folder = folder / ranks.of_first(lambda: search_fingerprint(plan, data, ranks.size)[:16])
    run = SearchRun(choices, data, folder, ranks, can_draft=can_draft, progress=progress)
    sensitivities = run.sensitivities()
    assignment = ranks.of_first(lambda: packed(choices, sensitivities))
    fact = SearchFact(
        budget=choices.recipe.budget or "",
        candidates=auto_of(choices.recipe).candidates,
        asked=asked(plan.recipe),
        units=len(choices.units),
        tokens=run.ids.numel(),
        bytes=choices.num_bytes(assignment),
        predicted=sum(sensitivities.get(pair, 0.0) for pair in assignment.items()),
    )
    return found_plan(plan, choices, assignment), fact


def packed(choices: Choices, sensitivities: Sensitivities) -> dict[str, str]:
    """The best word of each unit by sensitivities."""
    options = []  # of each unit, cost and loss
    for unit in choices.units:
        own = []
        for option in unit.options:
            loss = sensitivities.get((unit.name, option.word), 0.0)
            own.append((option.num_bytes, loss))
        options.append(own)
    found = {}
    numbers = best_packing(options, choices.recipe.size_limit - choices.fixed_bytes)
    for unit, number in zip(choices.units, numbers, strict=True):
        found[unit.name] = unit.options[number].word
    return found


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
