"""How large a checkpoint may become where a recipe leaves the schemes to a search: `96GiB`, or
`4.75 bits`.

In: what a recipe writes. Out: a `Budget`. Bytes are those of all files of the finished checkpoint.
Bits are those of weights and scales of the modules that the search decides about, divided by the
number of their weights.

Easy to get wrong: GB is 10^9 bytes and GiB is 2^30. GPUs are sold by the second and called by the
first.
"""

import re

from .errors import RecipeError
from .frozen import frozen

_WRITTEN = re.compile(r"(?P<amount>[0-9]+(?:\.[0-9]+)?) ?(?P<unit>bits|B|[KMGT]i?B)")
_POWERS = {"K": 1, "M": 2, "G": 3, "T": 4}


@frozen
class Budget:
    """A limit, of one of two kinds."""

    # Bytes of the finished checkpoint; None where bits are given.
    num_bytes: int | None = None
    # Bits for each weight that the search decides about; None where bytes are given.
    bits: float | None = None


def read_budget(written: str) -> Budget:
    """The budget that a recipe writes.

    Raises:
        RecipeError: it has no unit, or is nothing.
    """
    match = _WRITTEN.fullmatch(written)
    if match is None or not float(match["amount"]):
        raise RecipeError(
            "",
            "must be bytes of the checkpoint or bits of a weight, such as 96GiB or 4.75 bits",
            got=repr(written),
            cure="Give a number and its unit: B, KB, MiB, GiB, TB or bits",
        )
    amount = float(match["amount"])
    unit = match["unit"]
    if unit == "bits":
        return Budget(bits=amount)
    thousand = 1024 if "i" in unit else 1000
    return Budget(num_bytes=int(amount * thousand ** _POWERS.get(unit[0], 0)))
