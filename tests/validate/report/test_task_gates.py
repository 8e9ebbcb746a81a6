"""The gates on all tasks together, each with a twin that is broken on purpose; recovery, and what
the page shows.
"""

import evaluations
from evaluations import Answers, several
from keepmtp.recipes.protocol import Gates
from keepmtp.validate.report import tables
from keepmtp.validate.report.html import render

LIMITS = Gates(min_mean_recovery=0.98, max_worst_drop=0.02)
FILTER = "flexible-extract"
GOOD = Answers(both=900, only_source=8, only_checkpoint=8, neither=84)
BAD = Answers(both=600, only_source=60, only_checkpoint=10, neither=330)
TASKS = ("gsm8k", "gsm8k_platinum")


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
