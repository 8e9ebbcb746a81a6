"""The best word for each unit under a limit: a multiple-choice knapsack, and how far from the best
it may be.

In: for each unit its options, each with a cost and a loss, and what all may cost. Out: an option
for each unit, and a bound below which no choice can be. SciPy's HiGHS solves it by branch and
bound.

Easy to get wrong: the solver's numbers are floating point, and its limits hold up to a tolerance.
Costs are whole numbers, so what it chose is added up again, and solved again with less room where
it is too much.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

_GAP = 1e-6
"""Part of the loss: when the solver may stop. Sensitivities are known to two digits."""

CostAndLoss = tuple[int, float]
"""Cost and loss of an option."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """A choice.

    Attributes:
        chosen: the number of each unit's option.
        cost, loss: in all.
        bound: no choice that fits has a smaller loss.
    """

    chosen: tuple[int, ...]
    cost: int
    loss: float
    bound: float

    @property
    def gap(self) -> float:
        """The part of the loss that a better choice could save at most."""
        return 0.0 if self.loss <= self.bound else (self.loss - self.bound) / self.loss


def best_packing(units: Sequence[Sequence[CostAndLoss]], room: int) -> Packing:
    """The choice with the smallest loss that fits, or one as near to it as `gap` says.

    Args:
        units: the options of each; the cheapest of all units together must fit.
        room: what all may cost.
    """
    cheapest = [min(cost for cost, _ in options) for options in units]
    left = room - sum(cheapest)
    unit_of = np.repeat(np.arange(len(units)), [len(options) for options in units])
    extra = np.array(
        [
            cost - least
            for options, least in zip(units, cheapest, strict=True)
            for cost, _ in options
        ]
    )
    losses = np.array([loss for options in units for _, loss in options])
    largest = max(float(np.abs(losses).max()), 1e-300)
    is_of_unit = csr_array((np.ones(len(unit_of)), (unit_of, np.arange(len(unit_of)))))
    limit = 1.0
    while True:
        found = milp(
            losses / largest,
            integrality=1,
            bounds=Bounds(0, 1),
            constraints=[
                LinearConstraint(is_of_unit, 1, 1),
                LinearConstraint(extra[None] / max(1, left), ub=left / max(1, left) * limit),
            ],
            options={"mip_rel_gap": _GAP},
        )
        assert found.x is not None, found.message
        ones = np.flatnonzero(found.x > 0.5)
        if int(extra[ones].sum()) <= left:
            break
        limit -= 1e-6
    starts = np.searchsorted(unit_of, np.arange(len(units)))
    loss = float(sum(losses[ones]))
    return Packing(
        chosen=tuple(int(place) for place in ones - starts),
        cost=sum(cheapest) + int(extra[ones].sum()),
        loss=loss,
        bound=min(loss, max(0.0, found.mip_dual_bound * largest)),
    )
