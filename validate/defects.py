"""What vLLM itself cannot do with an MTP draft, whatever the checkpoint holds.

In: a `Failure` of a dry load and the family. Out: the known defect it is, or None. A defect is told as vLLM's, with the
version, so that nobody looks for the fault in the checkpoint.
"""

import re
from dataclasses import dataclass

from .dry import Failure


@dataclass(frozen=True, slots=True, kw_only=True)
class Defect:
    """A defect of a vLLM release.

    Attributes:
        versions: releases that have it.
        families: model_types concerned; empty for any.
        words: regular expression on "<exception>: <message> [<file:line>]".
        says: what happens.
        cure: what a person can do about it.
    """

    versions: tuple[str, ...]
    families: tuple[str, ...]
    words: str
    says: str
    cure: str


DEFECTS = (
    Defect(
        versions=("0.32.0",), families=("step3p5", "step3p7"), words=r"IndexError: .*models/step3p5\.py",
        says="the draft's config keeps one layer_types entry for each decoder layer and none for the MTP layers",
        cure="Remove layer_types from the config.json you serve, or use a later vLLM",
    ),
)  # fmt: skip


def known_defect(failure: Failure, *, family: str, version: str) -> Defect | None:
    """The defect behind a failure."""
    text = f"{failure.type}: {failure.words} [{failure.at}]"
    for defect in DEFECTS:
        is_concerned = version in defect.versions and (not defect.families or family in defect.families)
        if is_concerned and re.search(defect.words, text, re.DOTALL):
            return defect
    return None
