"""Figures in words, the same on the page, in the card, in the reasons of the gates and in the
headline.

In: shares of one and bytes. Out: words. A share has two digits after the point everywhere, so that
the page and the card never give two roundings of one number.

Easy to get wrong: the limit of a share. Rounded to the nearest it may say more than was found, so a
lower limit goes `down` and an upper one `up`.
"""

import math


def percent(share: float | None, digits: int = 2) -> str:
    """A share of one as `78.25 %`; `-` where there is none."""
    return "-" if share is None else f"{100 * share:.{digits}f} %"


def down(share: float) -> float:
    """A lower limit, rounded to what `percent` and `points` show: never above it."""
    return math.floor(1e4 * share) / 1e4


def up(share: float) -> float:
    """An upper limit, rounded to what `percent` and `points` show: never below it."""
    return math.ceil(1e4 * share) / 1e4


def limit(share: float) -> str:
    """A limit that a person wrote, with no more digits than it has: `97 %`."""
    return f"{100 * share:g} %"


def points(share: float) -> str:
    """A difference of shares without its sign, with no more digits than it needs: `0.5 points`."""
    return f"{100 * share:.2f}".rstrip("0").rstrip(".") + " points"


def signed(share: float) -> str:
    """The same with its sign and always two digits, and without the word: `-0.50`."""
    return f"{100 * share:+.2f}"


def figure(value: float | None) -> str:
    """A ratio or a perplexity, in two digits after the point or in four that count; `-` where there
    is none.
    """
    if value is None:
        return "-"
    return f"{value:.2f}" if value < 100 else f"{value:.4g}"


def count(number: int) -> str:
    """A whole number."""
    return f"{number:,}"


def size(num_bytes: int | None) -> str:
    """Bytes, in the unit that leaves two to four digits; `-` where they are not known."""
    if num_bytes is None:
        return "-"
    for unit, divisor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= divisor:
            return f"{num_bytes / divisor:,.1f} {unit}"
    return f"{num_bytes} bytes"


def more(count: int, noun: str) -> str:
    """What a sentence that names one of `count` says of the others: `, and 2 more errors`."""
    return f", and {count - 1} more {noun}{'s' * (count > 2)}" if count > 1 else ""
