"""The gate on speed: whether drafting makes one request at a time faster, by the repetitions of `keepmtp bench`.

In: a speed matrix, and the recipe's `min_speedup`. Out: a `ReasonFact`, or none where the recipe has no such limit.

Easy to get wrong: the estimate of a ratio is no proof. A k passes only if its slowest repetition reaches the limit
against the fastest one without drafting; all of them fail only if no pair of repetitions reaches it. And the speed of
a BF16 copy, or of a CPU, is not the checkpoint's.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ...recipes.protocol import Gates
from ..facts.benched import BenchCell, Benched, BenchFact
from ..facts.schema import ReasonFact
from .headline import counts_bench

_ALONE = 1
_MEASURE = "`keepmtp bench CHECKPOINT` measures it"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Faster:
    """How many times as fast one k is as no drafting: at least, in the middle, and at most."""

    k: int
    least: float
    middle: float
    most: float


def speed(gates: Gates, bench: BenchFact | None) -> Iterator[ReasonFact]:
    """The gate, where the recipe has a limit."""
    if gates.min_speedup is None:
        return
    if why := _why_not_judged(bench):
        yield ReasonFact(gate="speed", verdict="infeasible", says=why)
        return
    assert bench is not None, "_why_not_judged() says so"
    yield _judged(gates.min_speedup, _faster(bench.checkpoint), bench)


def _why_not_judged(bench: BenchFact | None) -> str:
    """Why there is no speed to judge; "" where there is."""
    if bench is None:
        return f"Not measured: {_MEASURE}."
    own = bench.checkpoint
    if own.as_served != "native":
        return f"Measured was a {own.as_served}: its speed is not the checkpoint's. {_MEASURE} on a GPU."
    if not counts_bench(bench):
        device = bench.environment.get("device") or "an unnamed device"
        return f"Measured on {device}: that promises no speed on a GPU. {_MEASURE} there."
    plain = _plain(own)
    if plain is None:
        got = next((cell.error for cell in own.cells if (cell.k, cell.concurrency) == (0, _ALONE)), "")
        why = f"the server without drafting failed: {got}" if got else "k=0 was not measured with one request at a time"
        return f"Nothing to compare with: {why}. {_MEASURE} with --k 0,1 --concurrency 1."
    drafting = _drafting(own, plain)
    if not drafting:
        failed = next((f" (k={cell.k}: {cell.error})" for cell in own.cells if cell.k and cell.error), "")
        return f"No server with drafting answered one request at a time{failed}. {_MEASURE}."
    if any(len(cell.repetitions) < 2 for cell in (plain, *drafting)):
        return f"One repetition has no spread, so no speed-up is sure. {_MEASURE} with --repeat 3."
    return ""


def _judged(least: float, found: Sequence[_Faster], bench: BenchFact) -> ReasonFact:
    best = max(found, key=lambda one: one.least)
    on = bench.environment.get("device", "")
    says = (
        f"One request at a time on {on}: k={best.k} is {best.middle:.2f} times as fast as k=0, by the repetitions "
        f"{best.least:.2f} to {best.most:.2f} times; at least {least:g} times is asked for."
    )
    if best.least >= least:
        return ReasonFact(gate="speed", verdict="pass", says=says)
    if all(one.most < least for one in found):
        others = ", ".join(f"k={one.k}: {one.middle:.2f}" for one in found if one is not best)
        also = f" No other k is faster ({others})." if others else ""
        return ReasonFact(gate="speed", verdict="regression", says=says + also)
    also = " The repetitions are too far apart to tell: measure more of them, on a machine that does nothing else."
    return ReasonFact(gate="speed", verdict="infeasible", says=says + also)


def _faster(own: Benched) -> list[_Faster]:
    plain = _plain(own)
    assert plain is not None and plain.slowest and plain.tokens_per_second and plain.fastest, (
        "_why_not_judged() says so"
    )
    return [
        _Faster(
            k=cell.k,
            least=(cell.slowest or 0.0) / plain.fastest,
            middle=(cell.tokens_per_second or 0.0) / plain.tokens_per_second,
            most=(cell.fastest or 0.0) / plain.slowest,
        )
        for cell in _drafting(own, plain)
    ]


def _plain(own: Benched) -> BenchCell | None:
    """One request at a time without drafting, with the shortest context that was measured."""
    cells = [cell for cell in own.cells if (cell.k, cell.concurrency) == (0, _ALONE) and cell.repetitions]
    return min(cells, key=lambda cell: cell.context, default=None)


def _drafting(own: Benched, plain: BenchCell) -> list[BenchCell]:
    return [cell for cell in own.cells if cell.k and cell.load == plain.load and cell.repetitions]
