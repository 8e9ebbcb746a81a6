"""GPUs by their names: memory, peak rate of BF16 products, and bandwidth of memory.

In: a name that people type, or a number of GiB. Out: a `Card`.

Easy to get wrong: makers print rates with sparsity, which are twice these.

Source: NVIDIA's datasheets of A100 80GB SXM, L40S, H100 SXM, H200 SXM, HGX B200 and HGX B300 (dense BF16).
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from ...recipes.errors import RecipeError, did_you_mean

GB = 10**9


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """A GPU: bytes of memory, operations and bytes a second. A rate of 0 is not known."""

    name: str
    memory_bytes: int
    flops: float = 0.0
    bandwidth: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GPU:
    """One NVIDIA GPU as nvidia-smi lists it; `capability` like "9.0", memory 0 where it is not known."""

    name: str
    capability: str
    memory_gib: float
    free_gib: float = 0.0


CARDS: Mapping[str, Card] = {
    card.name: card
    for card in (
        Card(name="A100", memory_bytes=80 * GB, flops=312e12, bandwidth=2.039e12),
        Card(name="4090", memory_bytes=24 * GB),
        Card(name="5090", memory_bytes=32 * GB),
        Card(name="L40S", memory_bytes=48 * GB, flops=362e12, bandwidth=0.864e12),
        Card(name="H100", memory_bytes=80 * GB, flops=989e12, bandwidth=3.35e12),
        Card(name="H200", memory_bytes=141 * GB, flops=989e12, bandwidth=4.8e12),
        Card(name="B200", memory_bytes=180 * GB, flops=2250e12, bandwidth=8e12),
        Card(name="B300", memory_bytes=270 * GB, flops=2250e12, bandwidth=8e12),
    )
}


def card_of(word: str) -> Card:
    """The card that a person means by a name or by a number of GiB.

    Raises:
        RecipeError: it is neither.
    """
    named = next((card for name, card in CARDS.items() if name in re.split(r"[\s_-]|RTX", word.upper())), None)
    if named is not None:
        return named
    try:
        gib = float(word)
    except ValueError:
        gib = 0.0
    if not 0 < gib < 10_000:
        names = ", ".join(CARDS)
        rule = f"must be a number of GiB, or one of {names}"
        cure = did_you_mean(word, CARDS, otherwise="Write 80 or H100, for example")
        raise RecipeError("--gpu-memory", rule, got=repr(word), cure=cure)
    return Card(name=f"GPUs of {gib:g} GiB", memory_bytes=int(gib * 2**30))
