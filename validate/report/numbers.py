"""Figures in words, the same on the page, in the reasons of the gates and in the headline."""


def percent(share: float, digits: int = 1) -> str:
    """A share of one as `78.2 %`."""
    return f"{100 * share:.{digits}f} %"


def limit(share: float) -> str:
    """A limit that a person wrote, with no more digits than it has: `97 %`."""
    return f"{100 * share:g} %"


def points(share: float) -> str:
    """A difference of shares without its sign, with no more digits than it needs: `0.5 points`."""
    return f"{100 * share:.2f}".rstrip("0").rstrip(".") + " points"


def size(num_bytes: int) -> str:
    """Bytes, in the unit that leaves two to four digits."""
    for unit, divisor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= divisor:
            return f"{num_bytes / divisor:,.1f} {unit}"
    return f"{num_bytes} bytes"


def more(count: int, noun: str) -> str:
    """What a sentence that names one of `count` says of the others: `, and 2 more errors`."""
    return f", and {count - 1} more {noun}{'s' * (count > 2)}" if count > 1 else ""
