"""The knapsack against every choice there is, and its bound where nobody can try them all."""

import itertools
import random

import pytest
from keepmtp.quantize.calibrate.search.knapsack import best_packing


def units_of(seed: int, count: int) -> list[list[tuple[int, float]]]:
    """Options that cost more and lose less, mostly; some are good for nothing."""
    draw = random.Random(seed)
    found = []
    for _ in range(count):
        size, loss = draw.randint(1, 40), draw.random()
        options = [(size, loss), (2 * size, loss * draw.random()), (4 * size, 0.0)]
        found.append(draw.sample([*options, (3 * size, loss * 2)], 4))
    return found


def room_of(units, share: float) -> int:
    low, high = (sum(pick(cost for cost, _ in options) for options in units) for pick in (min, max))
    return int(low + share * (high - low))


@pytest.mark.parametrize("seed", range(12))
def test_no_choice_is_better(seed):
    units = units_of(seed, 6)
    room = room_of(units, seed / 11)
    fitting = [
        sum(loss for _, loss in picked)
        for picked in itertools.product(*units)
        if sum(cost for cost, _ in picked) <= room
    ]
    chosen, gap = best_packing(units, room)
    cost, loss = taken(units, chosen)
    assert cost <= room and gap < 1e-6 and loss == pytest.approx(min(fitting), abs=1e-12)


def taken(units, chosen) -> tuple[int, float]:
    picked = [options[number] for options, number in zip(units, chosen, strict=True)]
    return sum(cost for cost, _ in picked), sum(loss for _, loss in picked)


@pytest.mark.parametrize("share", [0.0, 0.01, 0.3, 0.7, 1.0])
def test_a_large_one_is_near_its_bound_and_fits_to_the_byte(share):
    units = [[(cost * 10**9 + 7, loss) for cost, loss in options] for options in units_of(1, 300)]
    chosen, gap = best_packing(units, room_of(units, share))
    assert taken(units, chosen)[0] <= room_of(units, share) and 0 <= gap < 1e-5


def test_a_room_that_everything_fits_gives_the_best_of_all():
    units = units_of(2, 40)
    chosen, gap = best_packing(units, 10**9)
    assert taken(units, chosen)[1] == 0.0 and gap == 0.0
    assert best_packing(units, 10**9)[0] == chosen
