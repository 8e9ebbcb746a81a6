"""GPUs by their names, and how much memory they have.

In: a name that people type, or a number of GiB. Out: a `Card`.

Source: NVIDIA's datasheets of A100 80GB SXM, L40S, H100 SXM, H200 SXM, HGX B200 and HGX B300.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from ...recipes.errors import RecipeError, did_you_mean


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """A GPU, and its bytes of memory."""

    name: str
    memory_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GPU:
    """One NVIDIA GPU as nvidia-smi lists it; `capability` like "9.0", memory 0 where it is not
    known.
    """

    name: str
    capability: str
    memory_gib: float
    free_gib: float = 0.0


CARDS: Mapping[str, int] = {
    "A100": 80,
    "4090": 24,
    "5090": 32,
    "L40S": 48,
    "H100": 80,
    "H200": 141,
    "B200": 180,
    "B300": 270,
}
"""Name -> memory in GB, of 10^9 bytes."""


def card_of(word: str) -> Card:
    """The card that a person means by a name or by a number of GiB.

    Raises:
        RecipeError: it is neither.
    """
    for name, size_gb in CARDS.items():
        if name in re.split(r"[\s_-]|RTX", word.upper()):
            return Card(name=name, memory_bytes=size_gb * 10**9)
    try:
        gib = float(word)
    except ValueError:
        gib = 0.0
    if not 0 < gib < 10_000:
        rule = f"must be a number of GiB, or one of {', '.join(CARDS)}"
        cure = did_you_mean(word, CARDS, otherwise="Write 80 or H100, for example")
        raise RecipeError("--gpu-memory", rule, got=repr(word), cure=cure)
    return Card(name=f"GPUs of {gib:g} GiB", memory_bytes=int(gib * 2**30))
