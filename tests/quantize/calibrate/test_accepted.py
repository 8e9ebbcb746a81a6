"""What is kept of acceptance, and how sure that is: against games whose true share is known."""

import pytest
import torch
from keepmtp.quantize.calibrate.mtp.acceptance import Acceptance, fewest_slots, unseen

LEAST = 0.97


def accepted(reached: list[list[float]], right: list[list[float]], *, rows: int = 1) -> Acceptance:
    """Equal sequences with these counts, by tokens drafted a step."""
    size = len(reached)
    counts = torch.zeros(rows, 2, size, size, dtype=torch.float64)
    for k in range(size):
        counts[:, 0, k, : k + 1] = torch.tensor(reached[k], dtype=torch.float64)
        counts[:, 1, k, : k + 1] = torch.tensor(right[k], dtype=torch.float64)
    return Acceptance(num_slots=int(rows * reached[0][0]), counts=counts)


def played(kept: float, *, slots: int, rows: int, seed: int) -> tuple[Acceptance, Acceptance]:
    """Two blocks on one text: the first keeps that share of what the second has accepted, in the
    long run.

    Sequences are not equally hard, and the first has some drafts accepted where the second has
    none.
    """
    draw, length = torch.Generator().manual_seed(seed), slots // rows
    share = (0.8 + 0.1 * torch.randn(rows, 1, generator=draw)).clamp(0.3, 0.99)
    theirs = torch.rand(rows, length, generator=draw) < share
    gained = 0.02
    lost = 1 - kept + (1 - share) / share * gained
    luck = torch.rand(rows, length, generator=draw)
    own = torch.where(theirs, luck >= lost, luck < gained)
    counts = [
        torch.stack([torch.full((rows,), float(length)), each.sum(dim=1).float()], dim=1)
        for each in (own, theirs)
    ]
    first, second = (
        Acceptance(num_slots=slots, counts=each.double()[:, :, None, None]) for each in counts
    )
    return first, second


def test_what_is_kept_is_the_least_over_all_lengths_of_a_draft():
    best = accepted([[10.0], [10.0, 9.0]], [[9.0], [9.0, 8.1]])
    worse = accepted([[10.0], [10.0, 9.0]], [[9.0], [9.0, 0.0]])
    assert best.by_position(2) == pytest.approx((0.9, 0.81)) and best.mean_accepted_length(
        2
    ) == pytest.approx(2.71)
    assert best.kept_of(best, 0.95).value == 1.0
    assert worse.by_position(1) == best.by_position(1) and worse.kept_of(
        best, 0.95
    ).value == pytest.approx(0.9 / 1.71)
    again = Acceptance.read(best.as_json())
    assert again.num_slots == 10 and torch.equal(again.counts, best.counts)


def test_of_nothing_all_is_kept():
    none, half = (accepted([[4.0]], [[right]]) for right in (0.0, 2.0))
    assert half.kept_of(none, 0.95).value == none.kept_of(none, 0.95).value == 1.0
    assert none.kept_of(half, 0.95).value == 0.0


@pytest.mark.parametrize(
    ("kept", "slots", "fewest", "most"),
    [
        (0.96, 500, 0.0, 0.05),
        (0.97, 500, 0.0, 0.10),
        (0.97, 4000, 0.0, 0.08),
        (0.98, 4000, 0.80, 1.0),
    ],
)
def test_a_block_passes_as_often_as_the_confidence_says(kept, slots, fewest, most):
    """A bare estimate lets one that keeps 96 % pass in every fourth run of 500 slots."""
    games = [played(kept, slots=slots, rows=16, seed=seed) for seed in range(200)]
    found = [own.kept_of(theirs, 0.95) for own, theirs in games]
    passed = sum(each.low >= LEAST for each in found) / len(found)
    assert fewest <= passed <= most
    by_estimate = sum(each.value >= LEAST for each in found) / len(found)
    assert by_estimate > passed


def test_the_slots_that_it_names_would_tell():
    """So many slots show it about every other time: the estimate is then as often above as
    below.
    """
    games = [played(0.985, slots=600, rows=16, seed=seed) for seed in range(60)]
    needed = [own.kept_of(theirs, 0.95).needed_slots(LEAST) for own, theirs in games]
    told = sorted(each for each in needed if each is not None)
    assert all(each > 600 for each in told)
    middle = 16 * (told[len(told) // 2] // 16)
    more = [played(0.985, slots=middle, rows=16, seed=100 + seed) for seed in range(60)]
    assert sum(own.kept_of(theirs, 0.95).low >= LEAST for own, theirs in more) >= 0.4 * len(more)


def test_without_a_loss_the_number_of_slots_speaks():
    """The jackknife sees no error where all sequences are equal; 98 slots of which none is lost
    allow 3 %.
    """
    for slots, is_shown in ((96, False), (112, True)):
        perfect = accepted([[slots / 16]], [[slots / 16]], rows=16)
        found = perfect.kept_of(perfect, 0.95)
        assert found.value == 1.0 and (found.low >= LEAST) is is_shown
        assert found.needed_slots(LEAST) == (None if is_shown else fewest_slots(LEAST, 0.95))
    assert fewest_slots(LEAST, 0.95) == 99 and unseen(99, 0.95) < 0.03 < unseen(98, 0.95)


def test_few_sequences_tell_nothing():
    """The twin: any number of slots, in three texts."""
    perfect = accepted([[10_000.0]], [[10_000.0]], rows=3)
    found = perfect.kept_of(perfect, 0.95)
    assert found.low == 0.0 and found.needed_slots(0.5) is None
