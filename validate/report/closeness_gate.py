"""The gate closeness: divergence from the source and flips on held-out text, as served, against the
recipe's limits.

In: a `ClosenessFact` and the limits. Out: a `ReasonFact`, where there is a limit.

Easy to get wrong: tokens of one window are not independent. The bound of a mean is Student's over
windows, and that of a share is Clopper and Pearson's over as many independent positions as would
tell as much (Korn and Graubard). A divergence from a part of the vocabulary is a lower bound: a
limit that it fails is failed, and where it passes the reason says how much probability was not
compared token by token.
"""

from collections.abc import Iterator

from ...recipes.protocol import Gates
from ..facts.binomial import limits, student
from ..facts.closeness import ClosenessFact
from ..facts.schema import ReasonFact
from .numbers import limit, percent
from .sampled_gates import BOUND, not_its_own
from .settle import Estimate, Settled, at_most, unmeasured, worst


def closeness_reasons(gates: Gates, closeness: ClosenessFact | None) -> Iterator[ReasonFact]:
    """The worse of both limits, and what was found for each; none where the recipe has no limit."""
    if gates.max_divergence is None and gates.max_flips is None:
        return
    if closeness is None:
        yield unmeasured(
            "closeness", "Not measured: `keepmtp closeness CHECKPOINT --source SOURCE` does."
        )
        return
    found, says = (
        [],
        f"On {closeness.tokens:,} tokens of held-out text in {closeness.windows:,} windows:",
    )
    if gates.max_divergence is not None:
        settled, words = _divergence(gates.max_divergence, gates.confidence, closeness)
        found.append(settled)
        says += words
    if gates.max_flips is not None:
        settled, words = _flips(gates.max_flips, gates.confidence, closeness)
        found.append(settled)
        says += words
    verdict = worst(each.verdict for each in found)
    says += not_its_own(closeness.checkpoint.as_served)
    still_open = [each.needed for each in found if each.verdict == "infeasible"]
    needed = [number for number in still_open if number is not None]
    settles = max(needed) if needed and len(needed) == len(still_open) else None
    yield ReasonFact(gate="closeness", verdict=verdict, says=says, needed=settles)


def _divergence(most: float, confidence: float, fact: ClosenessFact) -> tuple[Settled, str]:
    stderr, figure = fact.stderr, f" {_nats(fact.divergence)} a token from the source,"
    if stderr is None:
        one = Settled(verdict="infeasible", bound=0.0, is_lower=False, needed=None, too_few="")
        return (
            one,
            f"{figure} in one window, which has no standard error. Use text for more windows.",
        )
    reach = student(confidence, fact.windows - 1)

    def bounds(times: float) -> tuple[float, float]:
        wide = reach * stderr / times**0.5
        return fact.divergence - wide, fact.divergence + wide

    estimate = Estimate(value=fact.divergence, bounds=bounds, samples=fact.tokens, unit="tokens")
    found = at_most(estimate, most)
    says = (
        f"{figure} {found.side} {_nats(found.bound)} at {limit(confidence)} confidence "
        f"(one-sided, over windows); at most {most:g} nats may be lost."
    )
    if not fact.is_exact and found.verdict == "pass":
        says += (
            f" It is a lower bound: {percent(fact.outside)} of the source's probability lies on "
            "tokens that were "
        )
        says += "compared as one."
    return found, says + found.open_end()


def _flips(most: float, confidence: float, fact: ClosenessFact) -> tuple[Settled, str]:
    def bounds(times: float) -> tuple[float, float]:
        trials = times * fact.effective_tokens
        return limits(fact.flip_rate * trials, trials, confidence)

    estimate = Estimate(value=fact.flip_rate, bounds=bounds, samples=fact.tokens, unit="tokens")
    found = at_most(estimate, most)
    says = (
        f" The first choice is another at {percent(fact.flip_rate)} of the tokens, {found.side} "
        f"{percent(found.rounded)} at {limit(confidence)} confidence ({BOUND}, as "
        f"{fact.effective_tokens:,.0f} independent tokens); at most {limit(most)} may be."
    )
    return found, says + found.open_end()


def _nats(value: float) -> str:
    return f"{value:.3g} nats"
