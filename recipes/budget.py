"""How large a checkpoint may become where a recipe leaves the schemes to a search: `96GiB`.

In: what a recipe writes. Out: bytes of all files of the finished checkpoint.

Easy to get wrong: GB is 10^9 bytes and GiB is 2^30. GPUs are sold by the second and called by the
first.
"""

import re

from .errors import RecipeError

_WRITTEN = re.compile(r"(?P<amount>[0-9]+(?:\.[0-9]+)?) ?(?P<unit>B|[KMGT]i?B)")
_POWERS = {"K": 1, "M": 2, "G": 3, "T": 4}


def read_budget(written: str) -> int:
    """The budget that a recipe writes, in bytes.

    Raises:
        RecipeError: it has no unit, or is nothing.
    """
    match = _WRITTEN.fullmatch(written)
    if match is None or not float(match["amount"]):
        raise RecipeError(
            "",
            "must be bytes of the checkpoint, such as 96GiB",
            got=repr(written),
            cure="Give a number and its unit: B, KB, MiB, GiB or TB",
        )
    unit = match["unit"]
    thousand = 1024 if "i" in unit else 1000
    return int(float(match["amount"]) * thousand ** _POWERS.get(unit[0], 0))
