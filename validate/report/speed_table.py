"""A speed matrix as page and card print it: k across and loads down, and what is recommended for each load.

In: a `BenchFact`. Out: rows and sentences.

Easy to get wrong: a matrix is matched only if every cell of a row had the same requests. A k that one model was not
asked with, or whose server failed, has no figure there and says so.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from ..facts.benched import BenchCell, Benched, BenchFact, RecommendedK, words_of
from ..facts.served import AsServed, Role


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedCell:
    """One k under one load.

    Attributes:
        rate: tokens a second, the median of the repetitions; None where there is no figure.
        spread: half the distance from the slowest to the fastest repetition.
        speed_up: over k=0 under the same load; None for k=0, or without it.
        is_recommended: for this load.
        error: why there is no figure; "" where there is one, or nobody asked for it.
    """

    rate: float | None = None
    spread: float = 0.0
    speed_up: float | None = None
    is_recommended: bool = False
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedRow:
    """One model under one load; `cells` are those of `ks_of`, in its order."""

    model: Role
    as_served: AsServed
    load: str
    cells: tuple[SpeedCell, ...]


def ks_of(bench: BenchFact) -> tuple[int, ...]:
    """Every k of the matrix, ascending."""
    return tuple(sorted({cell.k for model in bench.benched for cell in model.cells}))


def speed_rows(bench: BenchFact) -> Iterator[SpeedRow]:
    """The source's rows first, then the checkpoint's; loads in the order in which they were measured."""
    ks = ks_of(bench)
    for model in bench.benched:
        for load in model.loads:
            best = next((row.k for row in model.recommended if (row.concurrency, row.context) == load), None)
            cells = tuple(_cell(model, k, load, is_recommended=k == best) for k in ks)
            yield SpeedRow(model=model.role, as_served=model.as_served, load=words_of(load), cells=cells)


def recommendation(row: RecommendedK) -> str:
    """`1 at once: k=3, 1.82 times as fast as k=0: its slowest repetition, ...`."""
    load = words_of((row.concurrency, row.context))
    if row.k is None:
        return f"{load}: no k is recommended: {row.says}."
    gain = f", {row.speed_up:.2f} times as fast as k=0" if row.k and row.speed_up else ""
    return f"{load}: k={row.k}{gain}: {row.says}."


def failures(bench: BenchFact) -> Iterator[str]:
    """A sentence for each cell without a figure."""
    for model in bench.benched:
        for cell in model.cells:
            if cell.error:
                yield f"{model.role}, k={cell.k}, {words_of(cell.load)}: no figure. {cell.error.rstrip('.')}."


def _cell(model: Benched, k: int, load: tuple[int, int], *, is_recommended: bool) -> SpeedCell:
    found: BenchCell | None = next((cell for cell in model.cells if (cell.k, cell.load) == (k, load)), None)
    if found is None or found.tokens_per_second is None:
        return SpeedCell(error=found.error if found else "")
    return SpeedCell(
        rate=found.tokens_per_second,
        spread=((found.fastest or 0.0) - (found.slowest or 0.0)) / 2,
        speed_up=model.speed_up(found) if k else None,
        is_recommended=is_recommended,
    )
