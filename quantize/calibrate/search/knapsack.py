"""The best word for each unit under a limit: a multiple-choice knapsack, solved by SciPy's HiGHS.

In: for each unit its options, each with a cost and a loss, and what all may cost. Out: an option
for each unit, and how far from the best the choice may be.

Easy to get wrong: the solver's numbers are floating point, and its limits hold up to a tolerance.
Costs are whole numbers, so what it chose is added up again, and solved again with less room where
it is too much.
"""

from collections.abc import Sequence

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

_GAP = 1e-6
"""Part of the loss: when the solver may stop. Sensitivities are known to two digits."""


def best_packing(
    units: Sequence[Sequence[tuple[int, float]]], room: int
) -> tuple[list[int], float]:
    """The choice with the smallest loss that fits, or one that is nearly as good.

    Args:
        units: the options of each, with cost and loss; the cheapest of all units together must fit.
        room: what all may cost.

    Returns: the number of each unit's option, and the part of the loss that a better choice could
        save at most.
    """
    costs, losses, unit_of = [], [], []
    for number, options in enumerate(units):
        cheapest = min(cost for cost, _ in options)
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
        if sum(costs[one] for one in ones) <= room:
            break
        limit -= 1e-6
    loss = sum(losses[one] for one in ones)
    saved = loss - max(0.0, found.mip_dual_bound * largest)
    gap = saved / loss if saved > 0 else 0.0
    return [int(one) - unit_of.index(number) for number, one in enumerate(ones)], gap
