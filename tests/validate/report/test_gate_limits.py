"""Each gate of a score is judged by its own limit."""

import pytest
from evaluations import Answers, several
from keepmtp.recipes.protocol import Gates
from keepmtp.validate.report.gates import judge
from reports import UNTRIED

# 15 points of 1,000 questions are lost in each task.
LOST = Answers(both=600, only_source=160, only_checkpoint=10, neither=230)


@pytest.mark.parametrize(
    ("limits", "first", "worst"),
    [
        ({"max_drop": 0.5, "max_worst_drop": 0.01}, "pass", "regression"),
        ({"max_drop": 0.01, "max_worst_drop": 0.5}, "regression", "pass"),
    ],
)
def test_the_worst_task_has_a_limit_of_its_own(limits, first, worst):
    fact = several(("gsm8k_platinum", LOST), first=LOST)
    tasks = [task.protocol.task for task in fact.by_task]
    judged = judge(
        gates=Gates(**limits), check=UNTRIED, serve=None, evaluation=fact, listed_tasks=tasks
    )
    verdicts = {reason.gate: reason.verdict for reason in judged.reasons}
    assert (verdicts["gsm8k"], verdicts["worst task"]) == (first, worst)
