"""The paired difference against published figures, and how often its bounds are right, counted out
exactly.
"""

from functools import cache
from math import exp, lgamma, log

import pytest
from keepmtp.validate.facts import binomial
from keepmtp.validate.facts.paired import one_sided, paired


def fact(
    both: int, only_source: int, only_checkpoint: int, neither: int, *, confidence: float = 0.95
):
    """The `PairedFact` of a two by two table."""
    cells = (
        (True, True, both),
        (True, False, only_source),
        (False, True, only_checkpoint),
        (False, False, neither),
    )
    pairs = [(before, after) for before, after, count in cells for _ in range(count)]
    return paired(
        "strict-match",
        [pair[0] for pair in pairs],
        [pair[1] for pair in pairs],
        confidence=confidence,
    )


@pytest.mark.parametrize(
    ("cells", "difference", "low", "high"),
    [
        # Cavo et al. 2012: R contingencytables 3.1.0, Wald_CI_AgrestiMin_paired_2x2(cavo_2012).
        ((59, 16, 6, 80), -0.0621, -0.1182, -0.0045),
        # The example of R PropCIs 0.3-0, diffpropci.mp(b = 40, c = 20, n = 160, conf.level = 0.95).
        ((50, 40, 20, 50), -0.1250, -0.2160, -0.0309),
    ],
)
def test_published_figures(cells, difference, low, high):
    found = fact(*cells)
    assert (found.difference, found.low, found.high) == pytest.approx(
        (difference, low, high), abs=5e-5
    )
    assert (found.both, found.only_source, found.only_checkpoint, found.neither) == cells
    assert fact(*cells, confidence=0.9).low > found.low


def test_the_stderr_of_many_pairs_is_that_of_their_differences():
    """Far from few, the adjustment is nothing: the usual standard error of a mean."""
    found = fact(6000, 900, 700, 2400)
    mean = (700 - 900) / 10_000
    assert found.stderr == pytest.approx(((1600 / 10_000 - mean**2) / 10_000) ** 0.5, rel=1e-3)


@pytest.mark.parametrize("num", [1, 20, 1319])
def test_equal_answers_are_no_proof(num):
    """No question on which they part: the difference is zero, and the interval is not."""
    found = fact(num, 0, 0, 0)
    assert found.difference == 0 and found.low < 0 < found.high and found.stderr > 0
    assert found.high == -found.low <= 1
    assert fact(0, num, 0, 0).low == -1 if num == 1 else fact(0, num, 0, 0).difference == -1


@pytest.mark.parametrize(("source", "checkpoint"), [([], []), ([True], [True, False])])
def test_answers_to_other_questions_are_refused(source, checkpoint):
    with pytest.raises(ValueError, match=r"question|shorter|longer"):
        paired("strict-match", source, checkpoint)


# Shares of questions that only the source, and only the checkpoint, answers right: few, as after
# quantization.
SHARES = [(0.01, 0.01), (0.02, 0.01), (0.03, 0.01), (0.03, 0.03), (0.05, 0.03), (0.08, 0.05)]


@pytest.mark.parametrize("num", [100, 300])
@pytest.mark.parametrize("shares", SHARES)
def test_the_interval_holds_the_truth_as_often_as_it_says(num, shares):
    """Over all tables of `num` questions, weighted by their probability; the plain interval is
    short where few part.
    """
    truth = shares[1] - shares[0]
    held, plain = 0.0, 0.0
    for lost, gained, chance in tables(num, *shares):
        found = fact(0, lost, gained, num - lost - gained)
        held += chance * (found.low <= truth <= found.high)
        error = ((lost + gained) / num - found.difference**2) ** 0.5 / num**0.5
        plain += chance * (abs(found.difference - truth) <= 1.96 * error)
    assert 0.94 <= held <= 0.998
    assert plain <= held
    if (num, shares) == (100, (0.02, 0.01)):
        assert plain < 0.9 < 0.95 < held


@pytest.mark.few(2)
@pytest.mark.parametrize("num", [200, 500, 1319])
@pytest.mark.parametrize("gained", [0.0, 0.005, 0.02])
def test_how_often_a_loss_at_the_limit_goes_through(num, gained, monkeypatch):
    """A gate at 95 % lets through 5 % at most, also where every question on which they part is a
    loss.
    """
    monkeypatch.setattr(binomial, "limits", cache(binomial.limits))
    passed, failed = 0.0, 0.0
    for lost, won, chance in tables(num, 0.02 + gained, gained):
        low, high = one_sided(fact(0, lost, won, num - lost - won), 0.95)
        passed += chance * (low >= -0.02)
        failed += chance * (high < -0.02)
    assert 0.005 < passed < 0.05 and failed < 0.05, (passed, failed)


def tables(num: int, lost: float, gained: float):
    """(only source, only checkpoint, probability) of every table that matters."""
    for a in range(num + 1):
        for b in range(num - a + 1):
            if gained == 0 and b:
                break
            chance = (
                lgamma(num + 1)
                - lgamma(a + 1)
                - lgamma(b + 1)
                - lgamma(num - a - b + 1)
                + a * log(lost)
                + (b * log(gained) if gained else 0.0)
                + (num - a - b) * log(1 - lost - gained)
            )
            if chance > log(1e-9):
                yield a, b, exp(chance)
            elif b > 3 * num * gained + 20:
                break
        if a > 3 * num * lost + 40:
            break
