from itertools import combinations, product

import pytest
from pairwise import pairwise

VALUES = {"model": range(3), "scheme": range(4), "dialect": range(5)}
CASES = [dict(zip(VALUES, values, strict=True)) for values in product(*VALUES.values())]


@pytest.mark.parametrize("number", [5, 10, 30])
def test_few_cases_have_every_value(number):
    kept = pairwise(CASES, number)
    assert len({*kept}) == number
    for name, values in VALUES.items():
        assert {CASES[place][name] for place in kept} == {*values}


def test_enough_cases_have_every_pair_of_values():
    kept = [CASES[place] for place in pairwise(CASES, 20)]
    for one, other in combinations(VALUES, 2):
        found = {(case[one], case[other]) for case in kept}
        assert found == {*product(VALUES[one], VALUES[other])}


def test_values_that_do_not_hash_are_told_apart():
    rows = [{"gpu": "sm90"}, {"gpu": "sm90"}, {"gpu": "sm100"}, {"gpu": "sm100"}]
    cases = [{"row": row, "words": words} for row in rows for words in "ab"]
    kept = pairwise(cases, 4)
    assert {id(cases[place]["row"]) for place in kept} == {id(row) for row in rows}
    assert {cases[place]["words"] for place in kept} == {*"ab"}
