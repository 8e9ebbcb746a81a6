"""The speed matrix on the page and in its charts: every figure is the report's, and what was not
measured is said.
"""

import re

import benches
import reports
from keepmtp.recipes.protocol import Gates
from keepmtp.validate.facts.benched import BenchFact
from keepmtp.validate.report import html
from keepmtp.validate.report.charts import charts, svg
from keepmtp.validate.report.tables import cells, ks_of, recommendation

COPY = {"as_served": "BF16 copy of the same weights", "reason": "no kernel"}


def text_of(page: str) -> str:
    section = page[page.index('<section id="bench">') :].replace("<wbr>", "")
    return " ".join(re.sub(r"<[^>]+>", " ", section).split())


def own(bench: BenchFact, **changes: object) -> BenchFact:
    return bench.model_copy(update={"checkpoint": bench.checkpoint.model_copy(update=changes)})


def test_the_page_has_the_matched_matrix():
    page = html.render(reports.benched(benches.bench_fact(), Gates(min_speedup=1.2)))
    text = text_of(page)
    for wanted in (
        "Tokens a second: checkpoint, served as it is",
        "1 at once best 3 193.0 ± 3.9 1.82 20.0 5.2 90.0 81.0 72.9 3.44",
        "162.1 ± 3.2 1.53",
        "Tokens a second: source, served as it is",
        "1 at once 0 63.5 ± 1.3",
        "1 at once: k=3, 1.82 times as fast as k=0: its slowest repetition, 189.1 tokens a second",
        "8 at once: k=0: no larger k is faster than k=0 beyond the spread of the repetitions.",
        "k=1, 8 at once: 90.0 % of the drafts are accepted, and it is slower than k=0",
        "NVIDIA H200 (140 GiB)",
        "880 prompts of qualitative.jsonl",
    ):
        assert wanted in text, wanted
    assert "at least 1.2 times as many tokens a second with drafting" in " ".join(page.split())
    assert page.count('class="chart"') == 1 and "failed" not in text


def test_a_report_without_it_has_no_such_section():
    assert 'id="bench"' not in html.render(reports.bare())


def test_a_cell_that_failed_is_said():
    bench = benches.bench_fact(with_source=False)
    cells = (
        *bench.checkpoint.cells[:2],
        benches.cell(2, (), error="the server died: CUDA out of memory"),
    )
    text = text_of(html.render(reports.benched(own(bench, cells=cells))))
    assert "1 at once best 1 152.7 ± 3.1 1.44" in text and "1 at once 2 failed" in text
    assert "checkpoint, k=2, 1 at once: no figure. the server died: CUDA out of memory." in text


def test_a_copy_is_said_to_be_one():
    full = reports.benched(own(benches.bench_fact(with_source=False), **COPY))
    assert full.verdict.label == "Served"
    assert "NOT its own bytes: a BF16 copy" in text_of(html.render(full))


def test_rows_and_chart():
    bench = benches.bench_fact()
    assert ks_of(bench) == (0, 1, 2, 3, 4)
    rows = cells(bench.checkpoint).rows
    loads = ("1 at once", "8 at once")
    assert [row[0] for row in rows] == [load for load in loads for _ in ks_of(bench)]
    assert [row[1] for row in rows[:5]] == ["0", "1", "2", "best 3", "4"]
    chart = charts(reports.benched(bench))["speed"]
    assert svg(chart) == svg(chart) and "8 at once" in svg(chart), "equal charts, equal bytes"
    assert chart.alt.startswith(
        "1 at once: k=0 1.00, k=1 1.44, k=2 1.70, k=3 1.82, k=4 1.53; 8 at once: k=0 1.00"
    )


def test_what_cannot_be_drawn_is_left_out():
    alone = own(benches.bench_fact(with_source=False), cells=(benches.cell(0, [5.0, 6.0]),))
    assert "speed" not in charts(reports.benched(alone))
    one = own(alone, cells=(benches.cell(1, [5.0]),))
    assert recommendation(one.checkpoint.recommended[0]).startswith(
        "1 at once: no k is recommended: one repetition"
    )
    assert "no k is recommended" in text_of(html.render(reports.benched(one)))
