"""docs/tables/sglang.md: which outputs of keepmtp resolve in SGLang too, and why the others cannot.

    make docs    writes it

In: keepmtp's plans of every release at tiny size, in both dialects. Out: the text, and how many
resolve.
"""

import re
from collections import Counter
from pathlib import Path

import good
import releases
from keepmtp.checkpoints.sglang import VERSION
from keepmtp.checkpoints.sglang.names import sglang_spelling
from keepmtp.quantize.plan.configs import config_of
from keepmtp.recipes.conventions import Format
from keepmtp.recipes.errors import RecipeError
from keepmtp.recipes.family_view import FamilyView, Place
from keepmtp.recipes.schemes import SCHEMES
from pages import numbered, table, with_part

DOCS = Path(__file__).parents[2] / "docs" / "tables" / "sglang.md"
PAIRS = {
    "compressed-tensors": (
        ("NVFP4", "bf16"),
        ("FP8_DYNAMIC", "bf16"),
        ("FP8_DYNAMIC", "FP8_DYNAMIC"),
        ("FP8_BLOCK", "bf16"),
        ("W4A16", "bf16"),
        ("W4A16", "W4A16"),
    ),
    "modelopt": (("NVFP4", "bf16"), ("NVFP4", "NVFP4"), ("FP8", "bf16"), ("FP8", "FP8")),
}
REFUSED = "-"


def names(view: FamilyView, place: Place) -> tuple[str, ...]:
    """Under which SGLang may ask about a module; expert 0 is the one of routed experts."""
    stem, paths = sglang_spelling(view, place)
    return tuple(stem + path.replace("{e}", "0") for path in paths)


def obstacle(model: str, scheme: str, mtp: str, format: Format) -> str:
    """Why an output does not resolve in SGLang; "" where it does, REFUSED where keepmtp makes no
    such plan.
    """
    try:
        return next(iter(config_of(good.planned(model, scheme, mtp, format=format)).obstacles), "")
    except RecipeError:
        return REFUSED


def cells(format: Format) -> dict[str, list[str]]:
    """For each release, the obstacle of each pair."""
    return {
        model: [obstacle(model, *pair, format) for pair in PAIRS[format]]
        for model in releases.MODELS
    }


def counted(format: Format) -> Counter[str]:
    """How many outputs resolve, do not, or are refused."""
    words = {"": "yes", REFUSED: REFUSED}
    return Counter(words.get(cell, "no") for row in cells(format).values() for cell in row)


def text() -> str:
    """What the page has after its words."""
    parts = [f"SGLang {VERSION}."]
    reasons: dict[str, int] = {}
    for format, pairs in PAIRS.items():
        found, count = cells(format), counted(format)
        total = count["yes"] + count["no"]
        parts += [f"## {format}", f"{count['yes']} of {total} outputs resolve in both."]
        rows = []
        for model, row in found.items():
            rows.append([model, *(_word(cell, reasons) for cell in row)])
        parts.append(table(["release", *(f"{scheme} / {mtp}" for scheme, mtp in pairs)], rows))
    parts += ["## Reasons", numbered(f"SGLang: {reason}" for reason in reasons)]
    return "\n\n".join(parts)


def _word(cell: str, reasons: dict[str, int]) -> str:
    if cell in ("", REFUSED):
        return cell or "yes"
    scheme = "|".join(sorted(SCHEMES, key=len, reverse=True))
    alike = re.sub(rf"(?<=is in )(?:{scheme})|(?<=\()(?:{scheme})(?=\))", "a scheme", cell)
    return str(reasons.setdefault(alike, len(reasons) + 1))


if __name__ == "__main__":
    DOCS.write_text(with_part(DOCS, text()))
