"""Figures in words, the same on the page, in the card, in the reasons of the gates and in the
headline.

In: shares of one, and ratios. Out: words. A share has two digits after the point everywhere, so
that the page and the card never give two roundings of one number.
"""


def percent(share: float | None, digits: int = 2) -> str:
    """A share of one as `78.25 %`; `-` where there is none."""
    if share is None:
        return "-"
    return f"{100 * share:.{digits}f} %"


def limit(share: float) -> str:
    """A limit that a person wrote, with no more digits than it has: `97 %`."""
    return f"{100 * share:g} %"


def points(share: float) -> str:
    """A difference of shares, with no more digits than it needs: `0.5 points`."""
    return f"{round(100 * share, 2) + 0.0:g} points"


def nats(value: float) -> str:
    """A divergence, to a tenth of a thousandth."""
    return f"{round(value, 4):g} nats"


def figure(value: float | None) -> str:
    """A ratio or a perplexity, in two digits after the point or in four that count; `-` where there
    is none.
    """
    if value is None:
        return "-"
    if value < 100:
        return f"{value:.2f}"
    return f"{value:.4g}"
