"""One line that says what a recipe does, made from its words, where nobody has written one.

In: a recipe's words. Out: "NVFP4A16 experts, FP8_DYNAMIC attention/dense_mlp, MTP block bf16; no calibration".
"""

from collections.abc import Mapping


def summary_of(backbone: Mapping[str, str], mtp: str | Mapping[str, str], *, is_calibrated: bool) -> str:
    """The summary of a recipe with these words; groups that have the same word stand together."""
    block = mtp if isinstance(mtp, str) else _said(mtp)
    parts = [*filter(None, [_said(backbone)]), f"MTP block {block}"]
    return ", ".join(parts) + ("" if is_calibrated else "; no calibration")


def _said(words: Mapping[str, str]) -> str:
    groups: dict[str, list[str]] = {}
    for group, word in words.items():
        groups.setdefault(word, []).append(group)
    return ", ".join(f"{word} {'/'.join(names)}" for word, names in groups.items())
