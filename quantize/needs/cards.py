"""GPUs by their names, and how much memory they have.

In: a name that people type, or a number of GiB. Out: a name and bytes.

Source: NVIDIA's datasheets of A10, A40, A100 80GB SXM, L40S, H100 SXM, H200 SXM, HGX B200 and HGX
B300.
"""

import re
from collections.abc import Mapping

from ...recipes.errors import RecipeError, did_you_mean
from ...recipes.frozen import frozen

# Name -> memory in GB, of 10^9 bytes.
CARDS: Mapping[str, int] = {
    "3090": 24,
    "A10": 24,
    "A40": 48,
    "A100": 80,
    "4090": 24,
    "5090": 32,
    "L40S": 48,
    "H100": 80,
    "H200": 141,
    "B200": 180,
    "B300": 270,
}


@frozen
class GPU:
    """One NVIDIA GPU as nvidia-smi lists it; `capability` like "9.0", memory 0 where it is not
    known.
    """

    name: str
    capability: str
    memory_gib: float
    free_gib: float = 0.0


def card_of(word: str) -> tuple[str, int]:
    """The card that a person means by a name or by a number of GiB, and its bytes of memory.

    Raises:
        RecipeError: it is neither.
    """
    one = re.sub(
        r"^\d+ ?x ?", "", word, flags=re.IGNORECASE
    )  # of `8xH100`; needs are counted in GPUs
    for name in re.split(r"[\s_-]|RTX", one.upper()):
        if name in CARDS:
            return name, CARDS[name] * 10**9
    number = re.fullmatch(r"(\d{1,4}(?:\.\d+)?) ?(?:GI?B?)?", word, re.IGNORECASE)
    if number and float(number[1]):
        return f"GPUs of {float(number[1]):g} GiB", int(float(number[1]) * 2**30)
    names = [name for name in CARDS if name[0] in word[:1].upper()]  # V100 is no slip for H100
    raise RecipeError(
        "--gpu-memory",
        f"must be a number of GiB, or one of {', '.join(CARDS)}",
        got=repr(word),
        cure=did_you_mean(word, names, otherwise="Write 80 or H100, for example"),
    )
