"""The best word for each unit under a limit: a multiple-choice knapsack, and how far from the best it may be.

In: for each unit its options, each with a cost and a loss, and what all may cost. Out: an option for each unit, and a
bound below which no choice can be.

The bound is that of the relaxed problem, in which one unit may be cut in two (Sinha and Zoltners, "The Multiple-Choice
Knapsack Problem", 1979): along the convex hulls of all units the steps are taken in the order of what they gain a byte.
Without the step that is cut, these steps are a choice. A second one comes from dynamic programming over the sums that
no other sum beats in both cost and loss (Nemhauser and Ullmann, 1969); it is exact as long as there are no more of them
than `MOST_SUMS`, and thinned beyond, keeping true costs. The better of the two is returned.

Easy to get wrong: rounding costs to steps of a grid throws budget away in every unit. Here costs are whole numbers
throughout.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

MOST_SUMS = 20_000
"""Sums that are kept after each unit: 100 KB for a unit."""

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


def best_packing(units: Sequence[Sequence[CostAndLoss]], room: int, *, most_sums: int = MOST_SUMS) -> Packing:
    """The choice with the smallest loss that fits, or one as near to it as `gap` says.

    Args:
        units: the options of each; the cheapest of all units together must fit.
        room: what all may cost.
        most_sums: more make it slower and nearer to the best.
    """
    by_steps, bound = _by_steps(units, room)
    by_sums, is_exact = _by_sums(units, room, most_sums)
    found = [(_total(units, chosen), chosen) for chosen in (by_sums, by_steps)]
    (cost, loss), chosen = min(found, key=lambda each: (each[0][1], each[0][0]))
    return Packing(chosen=tuple(chosen), cost=cost, loss=loss, bound=loss if is_exact else min(bound, loss))


def _total(units: Sequence[Sequence[CostAndLoss]], chosen: Sequence[int]) -> CostAndLoss:
    picked = [options[number] for options, number in zip(units, chosen, strict=True)]
    return sum(cost for cost, _ in picked), float(sum(loss for _, loss in picked))


# --- steps along the hulls --------------------------------------------------------------------------------------------


def _by_steps(units: Sequence[Sequence[CostAndLoss]], room: int) -> tuple[list[int], float]:
    """A choice, and the bound."""
    hulls = [_hull(options) for options in units]
    chosen, left = [hull[0] for hull in hulls], room
    steps: list[tuple[float, int, int, int, float]] = []
    for unit, (options, hull) in enumerate(zip(units, hulls, strict=True)):
        left -= options[hull[0]][0]
        for before, after in pairwise(hull):
            cost, gain = options[after][0] - options[before][0], options[before][1] - options[after][1]
            steps.append((-gain / cost, unit, after, cost, gain))
    loss = _total(units, chosen)[1]
    bound, closed = loss, set[int]()
    is_bounded = False
    # A unit's steps come in the order of its hull, for each gains less a byte than the one before.
    for rate, unit, after, cost, gain in sorted(steps):
        if not is_bounded:
            bound -= gain if cost <= left else -rate * left
            is_bounded = cost > left
        if unit not in closed and cost <= left:
            chosen[unit], left = after, left - cost
        else:
            closed.add(unit)
    return chosen, max(0.0, bound)


def _hull(options: Sequence[CostAndLoss]) -> list[int]:
    """The numbers of the options on the lower convex hull, from the cheapest."""
    hull: list[int] = []
    for number in sorted(range(len(options)), key=lambda number: (options[number][0], options[number][1])):
        cost, loss = options[number]
        if hull and loss >= options[hull[-1]][1]:
            continue
        while len(hull) > 1 and _slope(options, hull[-2], hull[-1]) >= _slope(options, hull[-1], number):
            hull.pop()
        if hull and cost == options[hull[-1]][0]:
            hull.pop()
        hull.append(number)
    return hull


def _slope(options: Sequence[CostAndLoss], one: int, other: int) -> float:
    """Loss a byte from one option to a larger one; below 0."""
    return (options[other][1] - options[one][1]) / max(1, options[other][0] - options[one][0])


# --- sums -------------------------------------------------------------------------------------------------------------


def _by_sums(units: Sequence[Sequence[CostAndLoss]], room: int, most: int) -> tuple[list[int], bool]:
    """A choice, and whether there can be no better one."""
    costs, losses = np.zeros(1, dtype=np.int64), np.zeros(1)
    cheapest = [min(cost for cost, _ in options) for options in units]
    left = sum(cheapest)
    trail: list[tuple[np.ndarray, np.ndarray]] = []
    is_exact = True
    for options, least in zip(units, cheapest, strict=True):
        left -= least
        size = len(costs)
        all_costs = np.concatenate([costs + cost for cost, _ in options])
        all_losses = np.concatenate([losses + loss for _, loss in options])
        kept = _unbeaten(all_costs, all_losses, room - left)
        if len(kept) > most:
            kept, is_exact = _thinned(all_costs[kept], kept, most), False
        costs, losses = all_costs[kept], all_losses[kept]
        trail.append((kept % size, kept // size))
    place, chosen = len(costs) - 1, []
    for before, option in reversed(trail):
        chosen.append(int(option[place]))
        place = int(before[place])
    return chosen[::-1], is_exact


def _unbeaten(costs: np.ndarray, losses: np.ndarray, room: int) -> np.ndarray:
    """The places of the sums that fit and that no cheaper one beats, by cost."""
    order = np.lexsort((losses, costs))
    order = order[costs[order] <= room]
    best = np.minimum.accumulate(losses[order])
    is_better = np.concatenate([[True], losses[order][1:] < best[:-1]])
    return order[is_better]


def _thinned(costs: np.ndarray, places: np.ndarray, most: int) -> np.ndarray:
    """Of each stretch of costs the last sum, which has the smallest loss there; and the cheapest of all."""
    low, high = int(costs[0]), int(costs[-1])
    stretch = (costs - low) * (most - 1) // max(1, high - low)
    is_last = np.concatenate([stretch[1:] != stretch[:-1], [True]])
    is_last[0] = True
    return places[is_last]
