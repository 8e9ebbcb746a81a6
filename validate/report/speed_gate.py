"""The gate on speed: whether drafting makes one request at a time faster, by the repetitions of
`keepmtp bench`.

In: a speed matrix, and the recipe's `min_speedup`. Out: a `ReasonFact`, or none where the recipe
has no such limit.

Easy to get wrong: the estimate of a ratio is no proof. A k passes only if its slowest repetition
reaches the limit against the fastest one without drafting; all of them fail only if no pair of
repetitions reaches it. And the speed of a BF16 copy, or of a CPU, is not the checkpoint's.
"""

from collections.abc import Iterator

from ...recipes.protocol import Gates
from ..facts.benched import BenchCell, BenchFact
from ..facts.schema import ReasonFact
from .headline import counts_bench
from .settle import Estimate, at_least, unmeasured

_MEASURE = "`keepmtp bench CHECKPOINT` measures it"


def speed(gates: Gates, bench: BenchFact | None) -> Iterator[ReasonFact]:
    """The gate, where the recipe has a limit."""
    least = gates.min_speedup
    if least is None:
        return
    if bench is None:
        yield unmeasured("speed", f"Not measured: {_MEASURE}.")
        return
    plain, drafting = _alone(bench)
    why = _why_not_judged(bench, plain, drafting)
    if why or plain is None:
        yield unmeasured("speed", why)
        return
    found = [(cell.k, _times_as_fast(cell, plain)) for cell in drafting]
    settled = [at_least(estimate, least) for _, estimate in found]
    k, best = max(found, key=lambda one: one[1].bounds(1)[0])
    low, high = best.bounds(1)
    says = (
        f"One request at a time on {bench.environment.get('device', '')}: k={k} is "
        f"{best.value:.2f} times as fast as k=0, by the repetitions {low:.2f} to {high:.2f} "
        f"times; at least {least:g} times is asked for."
    )
    if any(each.verdict == "pass" for each in settled):
        yield ReasonFact(gate="speed", verdict="pass", says=says)
    elif all(each.verdict == "regression" for each in settled):
        others = ", ".join(f"k={other}: {each.value:.2f}" for other, each in found if other != k)
        says += f" No other k is faster ({others})." if others else ""
        yield ReasonFact(gate="speed", verdict="regression", says=says)
    else:
        also = (
            "The repetitions are too far apart to tell: measure more of them, on a machine that "
            "does nothing else."
        )
        yield unmeasured("speed", f"{says} {also}")


def _alone(bench: BenchFact) -> tuple[BenchCell | None, list[BenchCell]]:
    """One request at a time with the shortest context that was measured: without drafting, and with
    each k.
    """
    cells = [cell for cell in bench.checkpoint.cells if cell.concurrency == 1 and cell.repetitions]
    plain = min(
        (cell for cell in cells if not cell.k and cell.slowest),
        key=lambda cell: cell.context,
        default=None,
    )
    return plain, [cell for cell in cells if cell.k and plain and cell.load == plain.load]


def _why_not_judged(bench: BenchFact, plain: BenchCell | None, drafting: list[BenchCell]) -> str:
    """Why there is no speed to judge; "" where there is."""
    own = bench.checkpoint
    if not counts_bench(bench):
        device = bench.environment.get("device") or "an unnamed device"
        served = "the checkpoint" if own.as_served == "native" else f"a {own.as_served}"
        return (
            f"Measured was {served} on {device}: that promises no speed on a GPU. {_MEASURE} there."
        )
    if plain is None or not drafting:
        errors = [f" (k={cell.k}: {cell.error.rstrip('.')})" for cell in own.cells if cell.error]
        lack = "k=0 and a k with drafting must both answer one request at a time"
        return (
            f"Nothing to compare: {lack}{errors[0] if errors else ''}. {_MEASURE} with --k 0,1 "
            "--concurrency 1."
        )
    if any(len(cell.repetitions) < 2 for cell in (plain, *drafting)):
        return f"One repetition has no spread, so no speed-up is sure. {_MEASURE} with --repeat 3."
    return ""


def _times_as_fast(cell: BenchCell, plain: BenchCell) -> Estimate:
    """Slowest against fastest, median against median, fastest against slowest; more repetitions
    would not move it.
    """
    rates = [each.tokens_per_second for each in cell.repetitions]
    plain_rates = [each.tokens_per_second for each in plain.repetitions]
    ends = min(rates) / max(plain_rates), max(rates) / min(plain_rates)
    middle = (cell.tokens_per_second or 0.0) / (plain.tokens_per_second or 1.0)
    return Estimate(value=middle, bounds=lambda _: ends, samples=len(rates), unit="repetitions")
