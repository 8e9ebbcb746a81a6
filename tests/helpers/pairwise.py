"""Which cases of a large product `make test` has."""

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path


def pairwise(cases: Sequence[Mapping[str, object]], number: int) -> list[int]:
    """The places of `number` cases: each adds the most pairs of values that none before it has, and
    among equals the values that were taken least; then those at even distances come first.
    """
    even = [place * len(cases) // number for place in range(number)]
    waiting = list(dict.fromkeys([*even, *range(len(cases))]))
    values = [_values(case) for case in cases]
    pairs = [set(combinations(own, 2)) for own in values]
    seen = set[object]()
    taken = Counter[object]()
    kept = list[int]()

    def gain(place: int) -> tuple[int, int]:
        before = sum(taken[value] for value in values[place])
        return len(pairs[place] - seen), -before

    while len(kept) < number and waiting:
        best = max(waiting, key=gain)
        seen |= pairs[best]
        taken.update(values[best])
        waiting.remove(best)
        kept.append(best)
    return kept


def _values(case: Mapping[str, object]) -> list[tuple[str, object]]:
    """The values of a case that tell it from others."""
    values = list[tuple[str, object]]()
    for name, value in case.items():
        # A list of dictionaries or functions gives each case the same object, which may not hash.
        if not isinstance(value, str | int | Path):
            value = id(value)
        values.append((name, value))
    return values
