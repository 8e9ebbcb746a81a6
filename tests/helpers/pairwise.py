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
    values = [
        # A list of dictionaries or functions gives each case the same object, which may not hash.
        [(name, v if isinstance(v, str | int | Path) else id(v)) for name, v in case.items()]
        for case in cases
    ]
    pairs = [set(combinations(of, 2)) for of in values]
    seen, taken, kept = set[object](), Counter[object](), list[int]()

    def gain(place: int) -> tuple[int, int]:
        return len(pairs[place] - seen), -sum(taken[value] for value in values[place])

    while len(kept) < number and waiting:
        best = max(waiting, key=gain)
        seen |= pairs[best]
        taken.update(values[best])
        waiting.remove(best)
        kept.append(best)
    return kept
