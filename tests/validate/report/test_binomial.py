"""The exact limits against the distribution that they are of, and how often those of a ratio are
wrong, counted out.
"""

from functools import cache
from math import exp, lgamma, log, log1p

import pytest
from keepmtp.recipes.errors import RecipeError
from keepmtp.validate.facts import binomial
from keepmtp.validate.facts.binomial import difference_limits, limits, ratio_limits, sign_test
from scipy.stats import binom, binomtest


@pytest.mark.parametrize("confidence", [0.6, 0.9, 0.95, 0.999])
@pytest.mark.parametrize(
    ("successes", "trials"),
    [(0, 1), (1, 1), (3, 10), (154, 154), (0, 99), (31_731, 40_000), (999_999, 1_000_000)],
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


@pytest.mark.parametrize(("one", "other"), [(0, 0), (1, 0), (3, 3), (9, 2), (30, 12), (500, 400)])
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
        assert limits(num, num, 0.95)[0] == pytest.approx(0.05 ** (1 / num), rel=1e-12)
        assert ratio_limits(num, num, num, num, 0.95)[0] == pytest.approx(
            0.05 ** (1 / num), rel=1e-12
        )
        assert difference_limits(0, 0, num, 0.95)[0] == pytest.approx(
            0.05 ** (1 / num) - 1, rel=1e-9
        )


def test_extremes_have_limits():
    assert ratio_limits(0, 5, 1, 5, 0.95)[0] == 0 and ratio_limits(5, 5, 1, 5, 0.95)[1] > 5
    assert difference_limits(0, 5, 5, 0.95)[0] == -1 and difference_limits(5, 0, 5, 0.95)[1] == 1


@pytest.mark.parametrize(("num", "of_num"), [(50, 50), (150, 150), (100, 200)])
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


def outcomes(num: int, share: float):
    """(successes, probability) of all that matter."""
    for count in range(num + 1):
        ways = lgamma(num + 1) - lgamma(count + 1) - lgamma(num - count + 1)
        chance = exp(ways + count * log(share) + (num - count) * log1p(-share))
        if chance > 1e-7:
            yield count, chance
