"""The gate closeness: both limits, at the recipe's confidence, by windows."""

import closenesses
import numpy as np
import pytest
from keepmtp.recipes.protocol import Gates
from keepmtp.validate.facts.binomial import student
from keepmtp.validate.facts.closeness import ClosenessFact
from keepmtp.validate.facts.schema import ReasonFact
from keepmtp.validate.report import tables
from keepmtp.validate.report.gates import judge
from keepmtp.validate.report.sampled_gates import closeness
from scipy import stats


@pytest.fixture(scope="module")
def fact(tmp_path_factory):
    """0.01 nats a token and 2 % flips, over 4,000 tokens in 40 windows."""
    return closenesses.closeness(tmp_path_factory.mktemp("found"))


def reason_of(gates: Gates, fact: ClosenessFact) -> ReasonFact:
    (found,) = closeness(gates, fact)
    return found


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


@pytest.mark.parametrize(
    ("limits", "verdict", "says"),
    [
        ({"max_divergence": 0.02}, "pass", "0.01 nats a token from the source, at most 0.01"),
        ({"max_divergence": 0.005}, "regression", "at least 0.00"),
        (
            {"max_divergence": 0.0101},
            "infeasible",
            "Too few to tell: at these figures it would pass with about ",
        ),
        (
            {"max_flips": 0.03},
            "pass",
            "The first choice is another at 1.98 % of the tokens, at most 2.",
        ),
        ({"max_flips": 0.01}, "regression", "at least 1."),
        (
            {"max_flips": 0.0199},
            "infeasible",
            "Too few to tell: at these figures it would pass with about ",
        ),
        (
            {"max_flips": 0.03, "max_divergence": 0.005},
            "regression",
            "may be lost. The first choice is another",
        ),
        (
            {"max_flips": 0.01, "max_divergence": 0.02},
            "regression",
            "compared as one. The first choice is another",
        ),
    ],
)
def test_a_limit_is_judged_by_a_bound(limits, verdict, says, fact):
    reason = reason_of(Gates(**limits), fact)
    assert reason.verdict == verdict and says in reason.says, reason.says
    assert (reason.needed is not None) == (verdict == "infeasible")
    if reason.needed:
        assert reason.needed > fact.tokens


def test_the_gate_is_there_only_where_the_recipe_asks(fact):
    nothing = {"check": None, "serve": None, "evaluation": None}
    assert "closeness" not in [
        each.gate for each in judge(gates=Gates(), closeness=fact, **nothing).reasons
    ]
    judged = judge(gates=Gates(max_flips=0.01), **nothing)
    reason = next(each for each in judged.reasons if each.gate == "closeness")
    assert reason.verdict == "infeasible" and "keepmtp closeness CHECKPOINT" in reason.says


def test_one_window_has_no_error(tmp_path):
    one = closenesses.fact_of(closenesses.compared(tmp_path, closenesses.spread(1)))
    reason = reason_of(Gates(max_divergence=1.0), one)
    assert one.stderr is None and reason.verdict == "infeasible" and "one window" in reason.says


def test_a_lower_bound_and_a_copy_are_said(tmp_path):
    found = closenesses.compared(tmp_path, closenesses.spread())
    reason = reason_of(Gates(max_divergence=0.02), closenesses.fact_of(found, is_copy=True))
    assert reason.verdict == "pass", "as the other gates judge a copy"
    assert "It is a lower bound: 1.00 % of the source's probability" in reason.says
    assert reason.says.endswith("packed kernels and quantized activations were not tried.")
    whole = closenesses.compared(tmp_path, closenesses.spread(), top=closenesses.VOCABULARY)
    assert (
        "lower bound" not in reason_of(Gates(max_divergence=0.02), closenesses.fact_of(whole)).says
    )


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
