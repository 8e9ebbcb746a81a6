"""The figures of closeness in words, the same for the terminal, the page and the card.

In: a `ClosenessFact`. Out: names with figures, and sentences.

Easy to get wrong: a figure without its error, its number of tokens, or whether it is a lower bound,
is no figure.
"""

from collections.abc import Iterator

from ..facts.binomial import limits
from ..facts.closeness import ClosenessFact
from .numbers import percent

_CONFIDENCE = 0.95


def divergence_in_words(fact: ClosenessFact) -> str:
    """`0.0123 ± 0.0004 nats a token`."""
    error = "" if fact.stderr is None else f" ± {fact.stderr:.2g}"
    return f"{'' if fact.is_exact else 'at least '}{fact.divergence:.3g}{error} nats a token"


def flips_in_words(fact: ClosenessFact) -> str:
    """`2.10 % (1.92 to 2.30)`, the interval at 95 % confidence."""
    trials = fact.effective_tokens
    low, high = limits(fact.flip_rate * trials, trials, 1 - (1 - _CONFIDENCE) / 2)
    return f"{percent(fact.flip_rate)} ({100 * low:.2f} to {100 * high:.2f})"


def sentence(fact: ClosenessFact) -> str:
    """The one of the card."""
    return (
        f"{divergence_in_words(fact)} from the source on {fact.tokens:,} tokens of held-out text; "
        f"the most likely token differs at {flips_in_words(fact)}"
    )


def figures(fact: ClosenessFact) -> Iterator[tuple[str, str]]:
    """Name and figure, the most telling first."""
    yield "divergence from the source", divergence_in_words(fact)
    yield "of a token: median, 99th percentile", f"{fact.median:.3g}, {fact.percentile_99:.3g} nats"
    yield "the most likely token differs", flips_in_words(fact)
    before, after = (f"{one.perplexity:.4g}" for one in fact.predicted)
    yield "perplexity: source, checkpoint", f"{before}, {after}"
    yield "tokens compared", f"{fact.tokens:,} in {fact.windows:,} windows"
    whole = "all" if fact.is_exact else f"the likeliest {fact.top:,} of"
    yield "predicted tokens compared", f"{whole} {fact.vocabulary:,}"


def notes(fact: ClosenessFact) -> Iterator[str]:
    """What a reader should know, a sentence or two each."""
    yield (
        f"Text: {fact.text}, in windows of at most {fact.window:,} tokens. ±: one standard error, "
        "over windows; in brackets the 95 % interval, by Korn and Graubard."
    )
    if fact.against:
        yield fact.against
    if not fact.is_exact:
        yield (
            f"The rest of the vocabulary, {percent(fact.outside)} of the source's probability, "
            "counts as one token, so the divergence is a lower bound."
        )
    for one in fact.predicted:
        if one.as_served != "native":
            yield f"The {one.role} was served as a {one.as_served}: {one.reason}."
        if one.repeated:
            yield (
                f"Asked the same again, the {one.role}'s server was {one.repeated:.2g} nats a "
                "token from itself: less than that is rounding."
            )
