"""The speed matrix on the card: the matched table, the k of the serve line, and what a figure does
not promise.
"""

import re
from pathlib import Path

import benches
import cards
import pytest
import reports
from keepmtp.recipes.protocol import Gates
from keepmtp.validate.facts.benched import BenchFact
from keepmtp.validate.report.card_page import page

COPY = {"as_served": "BF16 copy of the same weights", "reason": "no kernel"}
DEVICE = "NVIDIA H200 (140 GiB)"


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    return cards.checkpoint(tmp_path_factory.mktemp("made") / "tiny")


def bench(*, device: str = DEVICE, with_source: bool = True, **own: object) -> BenchFact:
    found = benches.bench_fact(with_source=with_source)
    checkpoint = found.checkpoint.model_copy(update=own)
    return found.model_copy(
        update={"checkpoint": checkpoint, "environment": {"vllm": "0.32.0", "device": device}}
    )


def card_of(made: Path, found: BenchFact, gates: Gates = reports.LIMITS) -> str:
    return page(cards.told(made, reports.benched(found, gates)))


def test_the_card_prints_the_matched_matrix(made):
    text = card_of(made, bench(), Gates(min_speedup=1.2))
    rows = [line for line in text.splitlines() if line.startswith(("| load |", "| 1 at once"))]
    assert len(rows) == 2 * (1 + 5) and "Of this checkpoint, served as it is:" in text
    assert rows[6].startswith("| load | k | tok/s | over k=0 |")
    assert (
        rows[10]
        == "| 1 at once | best 3 | 193.0 ± 3.9 | 1.82 | 20.0 | 5.2 | 90.0 81.0 72.9 | 3.44 |"
    )
    assert "1 at once: k=3, 1.82 times as fast as k=0: its slowest repetition" in text
    assert re.search(
        r"k=1, 8 at once: 90\.0 % of the drafts are accepted, and it is slower than k=0", text
    )
    assert "at least 1.20 times as fast as not drafting" in text and "promises a speed" not in text
    assert "keepmtp bench tiny\n" in text
    assert "| bench, 1 at once | this checkpoint, as it is | 3 | " in text
    assert "Not measured.\n\n## Draft acceptance" not in text


def test_the_serve_line_takes_the_recommended_k(made):
    text = card_of(made, bench())
    assert text.count('"num_speculative_tokens":3') == 2, "for a shell and for Docker"
    assert f"This drafts 3 tokens a step, as bench recommends for 1 at once on {DEVICE}." in text
    slow = benches.benched({0: 342.0, 1: 128.0}).cells
    text = card_of(made, bench(cells=slow))
    assert "vllm serve ORG/tiny\n" in text and "num_speculative_tokens" not in text
    assert "This serves without drafting, as bench recommends for 1 at once" in text


@pytest.mark.parametrize(
    ("changes", "device"), [(COPY, DEVICE), ({}, "CPU: x, 2 cores"), (COPY, "CPU: x, 2 cores")]
)
def test_a_copy_or_a_cpu_recommends_nothing_elsewhere(changes, device, made):
    found = bench(device=device, **changes)
    text = card_of(made, found)
    assert (
        '"num_speculative_tokens":1' in text
        and "This drafts 1 token a step, one for each MTP layer." in text
    )
    assert (
        "Not measured in a way that promises a speed" in text
        and "tokens a second" not in text.lower()
    )
    said = text.partition("## Limitations")[2]
    assert ("Figures of the checkpoint are of a BF16 copy" in said) == bool(changes)
    assert ("No GPU was used" in said) == device.startswith("CPU")


def test_a_cell_that_failed_is_on_the_card(made):
    cells = (*benches.benched().cells[:2], benches.cell(2, (), error="the server died"))
    text = card_of(made, bench(cells=cells, with_source=False))
    assert (
        "| best 1 | 152.7 ± 3.1 | 1.44 |" in text
        and "| 1 at once | 2 | failed |" in text
        and "checkpoint, k=2, 1 at once: no figure. the server" in text
    )
