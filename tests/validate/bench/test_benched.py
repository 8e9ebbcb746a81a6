"""Which k a matrix recommends, and what is computed from its counts."""

import pytest
from benches import FLASH, bench_fact, benched, cell
from keepmtp.validate.facts.benched import BenchCell, BenchFact
from pydantic import ValidationError


def test_figures_are_computed_from_counts_and_never_read():
    fact = bench_fact()
    told = fact.model_dump(mode="json")
    best = told["checkpoint"]["cells"][3]
    assert best["tokens_per_second"] == pytest.approx(193.0) and best[
        "acceptance_per_position"
    ] == [0.9, 0.81, 0.729]
    assert best["mean_accepted_length"] == pytest.approx(1 + 0.9 + 0.81 + 0.729)
    best["tokens_per_second"] = 1e6
    assert BenchFact.model_validate(told) == fact


def test_the_publishers_matrix_recommends_three():
    """Four is slower again, and with eight at once none is faster than no drafting."""
    alone, many = benched().recommended
    assert (alone.k, many.k) == (3, 0)
    assert alone.speed_up == pytest.approx(193.0 / 105.9)
    assert "189.1 tokens a second, is faster than the fastest of k=2, 183.5" in alone.says
    assert many.says == "no larger k is faster than k=0 beyond the spread of the repetitions"


def test_a_larger_k_is_not_recommended_within_the_spread():
    """Twins: the same medians; only the spread of the repetitions differs."""
    assert benched(FLASH, spread=0.02).recommended[0].k == 3
    assert benched(FLASH, spread=0.05).recommended[0].k == 2, (
        "k=3 is 7 % faster, and the repetitions are 10 % apart"
    )


def test_one_repetition_recommends_nothing():
    one = benched().model_copy(update={"cells": (cell(0, [100.0]), cell(1, [200.0]))})
    (only,) = one.recommended
    assert only.k is None and "--repeat 3" in only.says


def test_high_acceptance_that_is_slower_is_said_with_its_cell():
    """As in vllm #39680: 96.6 % accepted, and 342 -> 128 tokens a second."""
    slow = benched().model_copy(
        update={"cells": (cell(0, [340, 342, 344]), cell(1, [126, 128, 130], share=0.966))},
    )
    (said,) = slow.slower
    assert (
        said.startswith("k=1, 1 at once: 96.6 % of the drafts are accepted") and "(0.37x)" in said
    )
    fast = slow.model_copy(
        update={"cells": (cell(0, [340, 342, 344]), cell(1, [426, 428, 430], share=0.966))}
    )
    assert fast.slower == ()
    dead = slow.model_copy(
        update={"cells": (cell(0, [340, 342, 344]), cell(1, [126, 128, 130], share=0.01))}
    )
    assert dead.slower == (), "that is another fault"


def test_a_failed_cell_has_no_figure_and_is_not_recommended():
    failed = cell(3, [], error="1 of 16 requests failed")
    one = benched().model_copy(update={"cells": (cell(0, [9, 10, 11]), failed)})
    assert failed.tokens_per_second is None and one.speed_up(failed) is None
    assert one.recommended[0].k == 0 and one.recommended[0].says == "no other k was measured"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"error": "died"}, "either repetitions or an error"),
        ({"repetitions": ()}, "either repetitions or an error"),
        ({"k": 0}, "repetition 0 drafted more than k=0"),
    ],
)
def test_what_no_server_can_have_done_is_refused(change, says):
    good = cell(1, [1.0, 2.0])
    with pytest.raises(ValidationError, match=says):
        BenchCell.model_validate(good.model_dump() | change)
    assert BenchCell.model_validate(good.model_dump()) == good
