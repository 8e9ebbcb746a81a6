"""The gate closeness: both limits, at the recipe's confidence, by windows."""

import closenesses
import numpy as np
import pytest
from keepmtp.validate.facts.binomial import student
from keepmtp.validate.report import tables
from scipy import stats


@pytest.fixture(scope="module")
def fact(tmp_path_factory):
    """0.01 nats a token and 2 % flips, over 4,000 tokens in 40 windows."""
    return closenesses.closeness(tmp_path_factory.mktemp("found"))


def test_students_quantile_is_scipys():
    for freedom in (1, 2, 5, 39, 500):
        for confidence in (0.6, 0.9, 0.95, 0.999):
            assert student(confidence, freedom) == pytest.approx(
                stats.t.ppf(confidence, freedom), rel=1e-9
            )


def test_the_error_is_over_windows(fact, tmp_path):
    """As if each window were one draw: a thousand equal tokens in a window are no more than one."""
    means = [0.01 * (0.8 + 0.1 * (number % 5)) for number in range(40)]
    assert fact.stderr == pytest.approx(np.std(means, ddof=1) / np.sqrt(40))
    assert fact.divergence == pytest.approx(np.mean(means))
    same = [
        closenesses.window(number, [0.0] * 100, range(100) if number % 2 else ())
        for number in range(40)
    ]
    assert closenesses.fact_of(
        closenesses.compared(tmp_path, same)
    ).effective_tokens == pytest.approx(39)


def test_the_sentence_of_the_card(fact):
    assert tables.closeness_in_short(fact).startswith(
        "at least 0.01 ± 0.00023 nats a token from the source on 4,000 tokens of held-out"
    )
    assert "the most likely token differs at 1.98 % (1." in tables.closeness_in_short(fact)
    assert (
        dict(tables.closeness(fact).rows)["predicted tokens compared"]
        == "the likeliest 512 of 151,936"
    )
    assert any(
        "so the divergence is a lower bound" in note for note in tables.closeness_notes(fact)
    )
