"""Which cases of a large product `make test` has: nothing else would notice that some values are
never among them.
"""

from itertools import combinations, product

from pairwise import pairwise

VALUES = {"model": range(3), "scheme": range(4), "dialect": range(5)}
CASES = [dict(zip(VALUES, values, strict=True)) for values in product(*VALUES.values())]


def kept(number: int, *names: str) -> set[tuple[int, ...]]:
    """The values of these parameters that occur together in so many cases."""
    together = set()
    for place in pairwise(CASES, number):
        together.add(tuple(CASES[place][name] for name in names))
    return together


def test_few_cases_have_every_value_and_enough_have_every_pair():
    for name, values in VALUES.items():
        assert kept(5, name) == {*product(values)}
    for one, other in combinations(VALUES, 2):
        assert kept(20, one, other) == {*product(VALUES[one], VALUES[other])}
