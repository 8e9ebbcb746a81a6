"""The gate closeness: divergence from the source and flips on held-out text, as served, against the recipe's limits.

In: a `ClosenessFact` and the limits. Out: a `ReasonFact`, where there is a limit.

Easy to get wrong: tokens of one window are not independent. The bound of a mean is Student's over windows, and that of
a share is Clopper and Pearson's over as many independent positions as would tell as much (Korn and Graubard). A
divergence from a part of the vocabulary is a lower bound: a limit that it fails is failed, and where it passes the
reason says how much probability was not compared token by token.
"""

from collections.abc import Sequence

from ...recipes.protocol import Gates
from ..facts.binomial import limits, student
from ..facts.closeness import ClosenessFact
from ..facts.schema import JudgementWord, ReasonFact
from .numbers import limit, percent
from .sampled_gates import not_its_own, settle, too_few

_WORST_FIRST: tuple[JudgementWord, ...] = ("regression", "infeasible", "pass")
_Settled = tuple[JudgementWord, int | None, str]


def closeness_reasons(gates: Gates, closeness: ClosenessFact | None) -> tuple[ReasonFact, ...]:
    """The worse of both limits, and what was found for each; none where the recipe has no limit."""
    is_judged = gates.max_divergence is not None or gates.max_flips is not None
    return (_reason(gates, closeness),) if is_judged else ()


def _reason(gates: Gates, closeness: ClosenessFact | None) -> ReasonFact:
    if closeness is None:
        says = "Not measured: `keepmtp closeness CHECKPOINT --source SOURCE` does."
        return ReasonFact(gate="closeness", verdict="infeasible", says=says)
    found = [
        *([_divergence(gates.max_divergence, gates.confidence, closeness)] if gates.max_divergence is not None else []),
        *([_flips(gates.max_flips, gates.confidence, closeness)] if gates.max_flips is not None else []),
    ]
    verdicts: list[JudgementWord] = [verdict for verdict, _, _ in found]
    verdict = min(verdicts, key=_WORST_FIRST.index)
    says = f"On {closeness.tokens:,} tokens of held-out text in {closeness.windows:,} windows: "
    says += " ".join(words for _, _, words in found)
    says += _farthest(closeness) if verdict == "regression" else ""
    says += not_its_own(is_native=closeness.checkpoint.as_served == "native")
    return ReasonFact(gate="closeness", verdict=verdict, says=says, needed=_needed(found))


def _divergence(most: float, confidence: float, fact: ClosenessFact) -> _Settled:
    if fact.stderr is None:
        says = f"{nats(fact.divergence)} a token from the source, in one window, which has no standard error."
        return "infeasible", None, f"{says} Use text for more windows."
    stderr, reach = fact.stderr, student(confidence, fact.windows - 1)

    def bounds(times: float) -> tuple[float, float]:
        wide = reach * stderr / times**0.5
        return most - fact.divergence - wide, most - fact.divergence + wide

    verdict, needed = settle(most - fact.divergence, bounds, fact.tokens)
    low, high = (most - each for each in reversed(bounds(1)))
    bound = f"at least {nats(max(0.0, low))}" if verdict == "regression" else f"at most {nats(high)}"
    says = (
        f"{nats(fact.divergence)} a token from the source, {bound} at {limit(confidence)} confidence (one-sided, over "
        f"windows); at most {most:g} nats may be lost."
    )
    if not fact.is_exact and verdict == "pass":
        says += (
            f" It is a lower bound: {percent(fact.outside)} of the source's probability lies on tokens that were "
            "compared as one."
        )
    return _with_too_few(verdict, needed, says, is_good=fact.divergence < most)


def _flips(most: float, confidence: float, fact: ClosenessFact) -> _Settled:
    def bounds(times: float) -> tuple[float, float]:
        trials = times * fact.effective_tokens
        low, high = limits(fact.flip_rate * trials, trials, confidence)
        return most - high, most - low

    verdict, needed = settle(most - fact.flip_rate, bounds, fact.tokens)
    low, high = (most - each for each in reversed(bounds(1)))
    bound = f"at least {percent(low)}" if verdict == "regression" else f"at most {percent(high)}"
    says = (
        f"The first choice is another at {percent(fact.flip_rate)} of the tokens, {bound} at {limit(confidence)} "
        f"confidence (one-sided, Clopper-Pearson, as {fact.effective_tokens:,.0f} independent tokens); at most "
        f"{limit(most)} may be."
    )
    return _with_too_few(verdict, needed, says, is_good=fact.flip_rate < most)


def nats(value: float) -> str:
    """A divergence, in three digits that count."""
    return f"{value:.3g} nats"


def _farthest(fact: ClosenessFact) -> str:
    """The position that is farthest off."""
    if not fact.worst:
        return ""
    worst = fact.worst[0]
    return (
        f" Farthest off is token {worst.at} of window {worst.window}: the source predicts {worst.source!r} and the "
        f"checkpoint {worst.checkpoint!r}."
    )


def _with_too_few(verdict: JudgementWord, needed: int | None, says: str, *, is_good: bool) -> _Settled:
    also = too_few("tokens", needed, also="", is_good=is_good) if verdict == "infeasible" else ""
    return verdict, needed, says + also


def _needed(found: Sequence[_Settled]) -> int | None:
    """Tokens that settle both, where that is a matter of tokens."""
    open_ones = [needed for verdict, needed, _ in found if verdict == "infeasible"]
    numbers = [needed for needed in open_ones if needed is not None]
    return max(numbers) if numbers and len(numbers) == len(open_ones) else None
