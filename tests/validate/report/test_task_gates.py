"""The gates on all tasks together, each with a twin that is broken on purpose; recovery, and what
the page shows.
"""

import random

import evaluations
import pytest
from evaluations import Answers, several
from keepmtp.recipes.protocol import Gates
from keepmtp.validate.facts.evaluated import EvaluationFact
from keepmtp.validate.facts.schema import ReasonFact
from keepmtp.validate.report import tables
from keepmtp.validate.report.gates import judge
from keepmtp.validate.report.html import render
from keepmtp.validate.report.recovery import mean_recovery, recovery

LIMITS = Gates(min_mean_recovery=0.98, max_worst_drop=0.02)
FILTER = "flexible-extract"
GOOD = Answers(both=900, only_source=8, only_checkpoint=8, neither=84)
BAD = Answers(both=600, only_source=60, only_checkpoint=10, neither=330)
TASKS = ("gsm8k", "gsm8k_platinum")


def reasons(
    fact: EvaluationFact | None, gates: Gates = LIMITS, listed: tuple[str, ...] = TASKS
) -> dict[str, ReasonFact]:
    judged = judge(gates=gates, check=None, serve=None, evaluation=fact, listed_tasks=listed)
    return {reason.gate: reason for reason in judged.reasons}


def test_good_tasks_pass_both_gates():
    found = reasons(several(("gsm8k_platinum", GOOD), first=GOOD))
    mean, worst = found["mean recovery"], found["worst task"]
    assert mean.verdict == worst.verdict == "pass", (mean, worst)
    assert mean.says.startswith(
        "gsm8k 100.00 %, gsm8k_platinum 100.00 %: 100.00 % of the source's scores on average, at "
        "least 99.4"
    )
    assert (
        "a drop of at most 0.76 points" in worst.says
        and "No other task has a worse bound." in worst.says
    )


def test_a_task_that_lost_much_fails_both_gates_by_its_name():
    """The twin: the first task alone would pass."""
    found = reasons(several(("gsm8k_platinum", BAD), first=GOOD))
    assert found["gsm8k"].verdict == "pass"
    mean, worst = found["mean recovery"], found["worst task"]
    assert mean.verdict == worst.verdict == "regression"
    assert (
        "gsm8k_platinum 92.42 %: 96.21 % of the source's scores on average, at most 97."
        in mean.says
    )
    assert worst.says.startswith(
        "gsm8k_platinum, flexible-extract: 61.00 % of 1,000 questions, the source 66.00 %: 5 "
        "points fewer (only the "
    )


def test_a_limit_that_the_recipe_does_not_have_is_no_gate():
    assert {"mean recovery", "worst task"}.isdisjoint(
        reasons(several(("gsm8k_platinum", BAD)), Gates())
    )


def test_a_mean_without_all_the_recipes_tasks_is_not_judged():
    for fact, says in (
        (several(first=GOOD), "Of the recipe's tasks gsm8k_platinum was not asked."),
        (None, "was not asked. `keepmtp eval"),
        (
            several(("gsm8k_platinum", GOOD), has_source=False),
            "the source was not asked, or gets nothing right",
        ),
    ):
        found = reasons(fact)
        assert found["mean recovery"].verdict == found["worst task"].verdict == "infeasible"
        assert (
            says in found["mean recovery"].says and found["mean recovery"].title == "not measured"
        )


def test_too_few_questions_say_how_many_more():
    few = Answers(both=90, only_source=1, only_checkpoint=1, neither=8)
    found = reasons(several(("gsm8k_platinum", few), first=few))
    for gate in ("mean recovery", "worst task"):
        assert found[gate].verdict == "infeasible" and (found[gate].needed or 0) > 100, found[gate]
        assert "it would pass with about" in found[gate].says


def test_the_interval_of_a_mean_recovery_holds():
    """Drawn 300 times from two tasks whose true recoveries are known: 95 % intervals hold as often
    as they say.
    """
    generator = random.Random(0)
    shares = {"gsm8k": (0.80, 0.04, 0.02, 0.14), "gsm8k_platinum": (0.50, 0.03, 0.03, 0.44)}
    truth = sum((both + mine) / (both + theirs) for both, theirs, mine, _ in shares.values()) / 2
    held = 0
    for _ in range(300):
        drawn = [generator.choices(range(4), weights, k=400) for weights in shares.values()]
        first, second = (
            Answers(
                both=d.count(0),
                only_source=d.count(1),
                only_checkpoint=d.count(2),
                neither=d.count(3),
            )
            for d in drawn
        )
        mean = mean_recovery(several(("gsm8k_platinum", second), first=first).by_task, FILTER)
        assert mean is not None
        held += mean.low <= truth <= mean.high
    # 285 are expected, with a standard deviation of 3.8.
    assert 270 <= held <= 298, held


def test_a_source_that_gets_nothing_right_has_no_recovery():
    nothing = evaluations.evaluation(Answers(both=0, only_source=0, only_checkpoint=5, neither=95))
    assert recovery(nothing, FILTER) is None and mean_recovery([nothing], FILTER) is None


def test_the_page_shows_all_tasks_and_answers_that_never_end():
    fact = several(("gsm8k_platinum", BAD), checkpoint={"num_truncated": 60})
    full = evaluations.judged(fact)
    shown = tables.tasks(fact, FILTER)
    assert shown and [row[0] for row in shown.rows] == [f"{task}, {FILTER}" for task in TASKS] + [
        "mean"
    ]
    assert shown.rows[1][-1] == "0.30 % / 6.00 %" and shown.rows[1][-2].startswith("92.42 % (")
    sentences = list(tables.endless(fact))
    assert len(sentences) == 2 and sentences[1] == (
        "gsm8k_platinum: 6.00 % of the checkpoint's answers reach the limit of 1,024 tokens, of "
        "the source's 0.30 %: "
        "it ends fewer of them."
    )
    html = render(full)
    assert (
        "<h3>All tasks</h3>" in html
        and "92.42 %" in html
        and sentences[1] in html.replace("&#39;", "'")
    )
    assert tables.tasks(evaluations.evaluation(), FILTER) is None
    assert not list(tables.endless(evaluations.evaluation()))


@pytest.mark.parametrize("wanted", ["strict-match", "flexible-extract"])
def test_the_filter_that_counts_is_the_recipes_where_the_task_has_it(wanted):
    fact = several(("gsm8k_platinum", BAD))
    assert all(task.judged_filter(wanted) == wanted for task in fact.by_task)
