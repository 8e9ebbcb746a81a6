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
    found = best_packing(units, room)
    assert found.cost <= room and found.gap < 1e-6
    assert found.loss == pytest.approx(min(fitting), abs=1e-12)
    picked = [options[number] for options, number in zip(units, found.chosen, strict=True)]
    assert (found.cost, found.loss) == (
        sum(c for c, _ in picked),
        pytest.approx(sum(loss for _, loss in picked)),
    )


@pytest.mark.parametrize("share", [0.0, 0.01, 0.3, 0.7, 1.0])
def test_a_large_one_is_near_its_bound_and_fits_to_the_byte(share):
    units = [[(cost * 10**9 + 7, loss) for cost, loss in options] for options in units_of(1, 300)]
    found = best_packing(units, room_of(units, share))
    assert found.cost <= room_of(units, share)
    assert found.bound <= found.loss and found.gap < 1e-5


def test_a_room_that_everything_fits_gives_the_best_of_all():
    units = units_of(2, 40)
    found = best_packing(units, 10**9)
    assert found.loss == 0.0 and found.gap == 0.0
    assert best_packing(units, 10**9).chosen == found.chosen
