"""Closeness on the page and in its chart: every figure is the report's, and calibration's is said
to be another.
"""

import re

import closenesses
import pytest
import reports
from keepmtp.recipes.protocol import Gates
from keepmtp.validate.facts.closeness import HISTOGRAM_EDGES
from keepmtp.validate.facts.schema import FullReport
from keepmtp.validate.report import html
from keepmtp.validate.report.gates import judge
from keepmtp.validate.report.report import assemble


@pytest.fixture(scope="module")
def fact(tmp_path_factory):
    return closenesses.closeness(tmp_path_factory.mktemp("found"))


def report(fact, **limits: float) -> FullReport:
    plain = reports.calibrated()
    judged = judge(gates=Gates(**limits), check=None, serve=None, evaluation=None, closeness=fact)
    return plain.model_copy(update={"closeness": fact, "judgement": judged})


def text_of(page: str) -> str:
    section = page[page.index('<section id="closeness">') :]
    section = section[: section.index("</section>")].replace("<wbr>", "")
    return " ".join(re.sub(r"<[^>]+>", " ", section).split())


def test_the_page_has_the_figures_and_says_whose_they_are(fact):
    page = html.render(report(fact, max_divergence=0.02, max_flips=0.03))
    text = text_of(page)
    for wanted in (
        "divergence from the source at least 0.01 ± 0.00023 nats a token",
        "the most likely token differs 1.98 % (1.",
        "perplexity: source, checkpoint 7.389, 8.166",
        "4,000 in 40 windows",
        "counts as one token, so the divergence is a lower bound",
        "None of the texts is a row of calibration.jsonl",
        "The divergence in the section on calibration is another one",
        "0.01 &#34;The sky is&#34; &#34; blue&#34; &#34; blue&#34; &#34; red&#34;",
    ):
        assert wanted in text, (wanted, text)
    whole = " ".join(page.split())
    assert (
        "at most 0.02 nats a token from the source" in whole
        and "At most 3 % of its tokens" in whole
    )


def test_a_report_without_it_has_no_such_section():
    page = html.render(reports.bare())
    assert 'id="closeness"' not in page and "nats a token" not in page


def test_the_histogram_has_every_token(fact):
    assert sum(fact.histogram) == fact.tokens and len(fact.histogram) == len(HISTOGRAM_EDGES) + 1


def test_a_report_may_have_it_alone(fact):
    plain = reports.bare()
    data = reports.check_data(reports.check(reports.MODEL))
    alone = assemble(data, vllm=reports.VLLM, closeness=fact, made_at=reports.AT)
    assert alone.absent == plain.absent and alone.closeness == fact
