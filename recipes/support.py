"""Which families can be calibrated: what transformers' classes said of each release's names.

In: a family. Out: a `Support`: whether its backbone and its MTP block can be calibrated, and what
the draft was compared with.

The answers for backbones are in calibrated_families.json, which tests/helpers/support.py writes: it
binds transformers' class to the names of every release that has a recipe. `keepmtp ls` and `keepmtp
plan` read it, so neither torch nor a download is needed.

Easy to get wrong: an MTP block is calibrated on its backbone's states. Where the backbone cannot be
built, a `Draft` in the family's table is of no use.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from .family import Family

SUPPORT_FILE = Path(__file__).parent / "calibrated_families.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Support:
    """What keepmtp does with a family besides planning, writing and checking, which it does with
    all of them.

    Attributes:
        backbone: why the backbone cannot be calibrated; "" if it can.
        mtp: why the MTP block can be neither calibrated nor measured; "" if it can.
        proof: what the draft was compared with, a `Proof`; "" if there is none.
    """

    backbone: str
    mtp: str
    proof: str


def support_of(family: Family) -> Support:
    """What can be calibrated of a family; the answer for its first release counts for all of
    them.
    """
    tried = iter(_reasons().get(family.model_type, {}).values())
    backbone = family.no_backbone or next(tried, "no release of it has a recipe, so none was tried")
    mtp = backbone or family.no_draft
    return Support(backbone=backbone, mtp=mtp, proof=family.draft.proof if family.draft else "")


def why_not_calibrated(family: Family, model: str) -> str:
    """Why the backbone of a recipe's model cannot be calibrated; "" if it can, or if it was not
    tried.
    """
    reasons = _reasons().get(family.model_type, {})
    return reasons.get(model, next(iter(reasons.values()), ""))


@cache
def _reasons() -> Mapping[str, Mapping[str, str]]:
    """Family -> model -> why its backbone cannot be calibrated, or ""."""
    return json.loads(SUPPORT_FILE.read_text(encoding="utf-8"))
