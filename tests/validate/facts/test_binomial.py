"""The exact limits against the distribution that they are of, the paired difference against
published figures; and how often either is wrong, counted out.
"""

from collections.abc import Iterator
from functools import cache
from statistics import NormalDist

import numpy as np
import pytest
from keepmtp.recipes.errors import RecipeError
from keepmtp.validate.facts import binomial
from keepmtp.validate.facts.binomial import difference_limits, limits, ratio_limits, sign_test
from keepmtp.validate.facts.paired import PairedFact, one_sided, paired
from scipy.stats import binom, binomtest, multinomial


@pytest.mark.parametrize("confidence", [0.6, 0.999])
@pytest.mark.parametrize(
    "successes, trials",
    [
        (0, 1),
        (3, 10),
        (154, 154),
        (31731, 40000),
        (999999, 1000000),
    ],
)
def test_the_limits_are_those_of_the_binomial_distribution(successes, trials, confidence):
    """With the lower limit as its share, so many or more are as seldom as it says; likewise with
    the upper one.
    """
    lower, upper = limits(successes, trials, confidence)
    assert binom.sf(successes - 1, trials, lower) == pytest.approx(
        1 - confidence if successes else 1.0, rel=1e-6
    )
    assert binom.cdf(successes, trials, upper) == pytest.approx(
        1 - confidence if successes < trials else 1.0, rel=1e-6
    )


@pytest.mark.parametrize(
    "one, other",
    [
        (0, 0),
        (1, 0),
        (3, 3),
        (30, 12),
    ],
)
def test_the_sign_test_is_a_fair_coins(one, other):
    wanted = binomtest(one, one + other).pvalue if one + other else 1.0
    assert sign_test(one, other) == pytest.approx(wanted, rel=1e-9)


def test_without_scipy_one_sentence_says_so(monkeypatch):
    binomial._special.cache_clear()
    monkeypatch.setattr(binomial, "find_spec", lambda _: None)
    with pytest.raises(
        RecipeError, match=r"measured share: need scipy; got no scipy\. Run .*keepmtp\[report\]"
    ):
        limits(3, 10, 0.95)


def test_counts_may_be_fractions():
    low, high = limits(9.75, 10, 0.95)
    assert (
        limits(9, 10, 0.95)[0] < low < limits(10, 10, 0.95)[0] and limits(9, 10, 0.95)[1] < high < 1
    )


def test_all_of_n_is_a_power():
    for num in (1, 99, 154, 100_000):
        low = 0.05 ** (1 / num)
        assert limits(num, num, 0.95)[0] == pytest.approx(low, rel=1e-12)
        assert ratio_limits(num, num, num, num, 0.95)[0] == pytest.approx(low, rel=1e-12)
        assert difference_limits(0, 0, num, 0.95)[0] == pytest.approx(low - 1, rel=1e-9)


def test_extremes_have_limits():
    assert ratio_limits(0, 5, 1, 5, 0.95)[0] == 0 and ratio_limits(5, 5, 1, 5, 0.95)[1] > 5
    assert difference_limits(0, 5, 5, 0.95)[0] == -1 and difference_limits(5, 0, 5, 0.95)[1] == 1


@pytest.mark.parametrize("num, of_num", [(50, 50), (100, 200)])
@pytest.mark.parametrize("share", [0.5, 0.9, 0.98, 0.995])
def test_a_ratio_at_the_limit_is_told_wrongly_as_often_as_it_says(num, of_num, share, monkeypatch):
    """Both ends, over all outcomes weighted by their probability: 97 % of the source's share is
    kept.
    """
    monkeypatch.setattr(binomial, "limits", cache(binomial.limits))
    passed, failed = 0.0, 0.0
    for one, chance in outcomes(num, 0.97 * share):
        for other, its_chance in outcomes(of_num, share):
            if other:
                low, high = ratio_limits(one, num, other, of_num, 0.95)
                passed += chance * its_chance * (low >= 0.97)
                failed += chance * its_chance * (high < 0.97)
    assert 0.003 < passed < 0.05 and 0.003 < failed < 0.05, (passed, failed)


def outcomes(num: int, share: float) -> list[tuple[int, float]]:
    """(successes, probability) of all that matter."""
    chances = binom.pmf(range(num + 1), num, share).tolist()
    return [(count, chance) for count, chance in enumerate(chances) if chance > 1e-7]


# --- pairs ----------------------------------------------------------------------------------------


def fact(both: int, only_source: int, only_checkpoint: int, neither: int) -> PairedFact:
    """The `PairedFact` of a two by two table."""
    before = [True] * (both + only_source) + [False] * (only_checkpoint + neither)
    after = [True] * both + [False] * only_source + [True] * only_checkpoint + [False] * neither
    return paired("strict-match", before, after)


@pytest.mark.parametrize(
    "cells, difference, low, high",
    [
        # Cavo et al. 2012: R contingencytables 3.1.0, Wald_CI_AgrestiMin_paired_2x2(cavo_2012).
        ([59, 16, 6, 80], -0.0621, -0.1182, -0.0045),
        # The example of R PropCIs 0.3-0, diffpropci.mp(b = 40, c = 20, n = 160, conf.level = 0.95).
        ([50, 40, 20, 50], -0.125, -0.216, -0.0309),
    ],
)
def test_published_figures(cells, difference, low, high):
    found = fact(*cells)
    stderr = (high - low) / 2 / NormalDist().inv_cdf(0.975)
    assert (found.difference, found.stderr) == pytest.approx((difference, stderr), abs=5e-5)
    assert (found.num, found.only_source, found.only_checkpoint) == (sum(cells), *cells[1:3])


def test_the_stderr_of_many_pairs_is_that_of_their_differences():
    """Far from few, the adjustment is nothing: the usual standard error of a mean."""
    found = fact(6000, 900, 700, 2400)
    mean = (700 - 900) / 10_000
    assert found.stderr == pytest.approx(((1600 / 10_000 - mean**2) / 10_000) ** 0.5, rel=1e-3)


@pytest.mark.parametrize("num", [1, 1319])
def test_equal_answers_are_no_proof(num):
    """No question on which they part: the difference is zero, and its error is not."""
    found = fact(num, 0, 0, 0)
    assert found.difference == 0 and found.stderr > 0
    assert fact(0, num, 0, 0).difference == -1


def test_answers_to_other_questions_are_refused():
    with pytest.raises(ValueError, match="longer"):
        paired("strict-match", [True], [True, False])


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


def tables(num: int, lost: float, gained: float) -> Iterator[tuple[int, int, float]]:
    """(only source, only checkpoint, probability) of every table that matters."""
    most = [min(num, int(3 * num * share + 40)) + 1 for share in (lost, gained)]
    one, other = np.indices(most)
    counts = np.stack([one, other, num - one - other], axis=-1)
    chances = multinomial.pmf(counts, num, [lost, gained, 1 - lost - gained])
    for a, b in np.argwhere(chances > 1e-9).tolist():
        yield a, b, chances[a, b]
