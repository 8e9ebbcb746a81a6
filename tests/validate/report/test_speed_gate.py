"""The gate on speed: it judges the spread, not the estimate, and nothing but the checkpoint on a
GPU.
"""

import re
from collections.abc import Sequence

import pytest
from benches import bench_fact, benched, cell
from keepmtp.recipes.protocol import Gates
from keepmtp.validate.facts.benched import BenchCell, BenchFact
from keepmtp.validate.facts.schema import ReasonFact
from keepmtp.validate.report.gates import judge

COPY = {"as_served": "BF16 copy of the same weights", "reason": "no kernel"}


def fact(*cells: BenchCell, device: str = "NVIDIA H200 (140 GiB)", **own: object) -> BenchFact:
    found = bench_fact(with_source=False)
    checkpoint = found.checkpoint.model_copy(update={**({"cells": cells} if cells else {}), **own})
    return found.model_copy(update={"checkpoint": checkpoint, "environment": {"device": device}})


def judged(bench: BenchFact | None, least: float | None = 1.0) -> ReasonFact | None:
    found = judge(
        gates=Gates(min_speedup=least), check=None, serve=None, evaluation=None, bench=bench
    )
    return next((reason for reason in found.reasons if reason.gate == "speed"), None)


def two(plain: Sequence[float], drafting: Sequence[float], k: int = 1) -> BenchFact:
    return fact(cell(0, plain), cell(k, drafting))


def test_a_recipe_without_a_limit_has_no_such_gate():
    assert judged(fact(), None) is None and judged(None, None) is None


def test_the_matched_matrix_passes():
    """DeepSeek-V4-Flash: k=3 is 193.0 over 105.9 tokens a second, with 2 % of spread each way."""
    reason = judged(fact())
    assert reason and reason.verdict == "pass" and reason.needed is None
    assert reason.says == (
        "One request at a time on NVIDIA H200 (140 GiB): k=3 is 1.82 times as fast as k=0, by "
        "the repetitions "
        "1.75 to 1.90 times; at least 1 times is asked for."
    )
    assert judged(fact(), 1.75).verdict == "pass"


def test_the_twin_accepts_much_and_is_slower():
    """vllm #39680: 96.6 % of the drafts accepted, 342 -> 128 tokens a second."""
    slow = fact(*benched({0: 342.0, 1: 210.0, 3: 128.0}).cells)
    reason = judged(slow)
    assert reason and reason.verdict == "regression"
    assert (
        "k=1 is 0.61 times as fast as k=0" in reason.says
        and "No other k is faster (k=3: 0.37)." in reason.says
    )
    assert judged(fact(), 2.0).verdict == "regression", "no repetition of any k is twice as fast"


@pytest.mark.parametrize(
    ("plain", "drafting", "verdict"),
    [
        ([100, 101], [102, 104], "pass"),
        ([100, 103], [102, 104], "infeasible"),
        ([100, 103], [99, 101], "infeasible"),
        ([102, 103], [99, 101], "regression"),
    ],
)
def test_the_spread_decides(plain, drafting, verdict):
    reason = judged(two(plain, drafting))
    assert reason and reason.verdict == verdict
    assert ("too far apart to tell" in reason.says) == (verdict == "infeasible")


@pytest.mark.parametrize(
    ("bench", "says"),
    [
        (None, "Not measured: `keepmtp bench CHECKPOINT` measures it."),
        (
            fact(**COPY),
            "Measured was a BF16 copy of the same weights on NVIDIA H200 .* promises no speed",
        ),
        (
            fact(device="CPU: x, 2 cores"),
            "Measured was the checkpoint on CPU: x, 2 cores: that promises no speed",
        ),
        (fact(device=""), "on an unnamed device"),
        (fact(cell(1, [2, 2])), "k=0 and a k with drafting must both answer one request at a time"),
        (
            fact(cell(0, [1, 1], concurrency=8), cell(1, [2, 2], concurrency=8)),
            "k=0 and a k with drafting must",
        ),
        (
            fact(cell(0, [], error="out of memory."), cell(1, [2, 2])),
            r"at a time \(k=0: out of memory\)\.",
        ),
        (fact(cell(0, [1, 1]), cell(1, [], error="KeyError")), r"at a time \(k=1: KeyError\)\."),
        (fact(cell(0, [1, 1]), cell(1, [9])), "One repetition has no spread"),
    ],
)
def test_what_is_not_the_checkpoints_speed_never_passes(bench, says):
    reason = judged(bench)
    assert reason and reason.verdict == "infeasible" and re.search(says, reason.says), reason
    assert reason.title == "not measured"


def test_the_shortest_context_is_judged():
    long = [cell(0, [10.0, 10.0], context=8192), cell(1, [5.0, 5.0], context=8192)]
    reason = judged(fact(*long, cell(0, [10.0, 10.0]), cell(1, [20.0, 20.0])))
    assert reason and reason.verdict == "pass" and "2.00 times" in reason.says


def test_a_server_that_was_timed_has_loaded_it():
    for bench, verdict in (
        (fact(), "pass"),
        (fact(**COPY), "infeasible"),
        (fact(cell(0, [], error="x")), "infeasible"),
    ):
        found = judge(gates=Gates(), check=None, serve=None, evaluation=None, bench=bench).reasons
        assert next(reason.verdict for reason in found if reason.gate == "loads") == verdict
