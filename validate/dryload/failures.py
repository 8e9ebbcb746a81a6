"""What is known of failures with checkpoints like these: one table for `explain` and for the dry
load's verdict.

In: a line of a log, or `<exception>: <message> [<file:line>]`; the table is failures.toml. Out: the
`KnownFailure` that it tells of, with the name in it.

Easy to get wrong: a defect ends with a release. A dry load asks about those of its own vLLM and of
its family alone. The file has neither the words that all defects begin with nor the version that
cures them: both are added here.
"""

import re
import tomllib
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Literal

from ...checkpoints.fact import Fact
from ...recipes.runtimes.vllm import KNOWN, holds
from ..facts.dry_load import LoadFailure

FailureKind = Literal["dry_load", "sglang", "other_builds", "failures", "defects"]
# The parts that a log is compared with, in this order: what SGLang raised is looked up in the first
# alone.
IN_LOGS: tuple[FailureKind, ...] = ("sglang", "other_builds", "failures", "defects")
DEFECTS_FIRST: tuple[FailureKind, ...] = ("sglang", "other_builds", "defects", "failures")


class KnownFailure(Fact):
    """One failure.

    Attributes:
        name: what it is called here.
        words: regular expressions; the group `tensor`, if one has it, is a name in vLLM or on disk.
        says: what happened, and why.
        cure: what to do.
        where: the entry of the config that it means; {named} is the name in the words, {count} the
            key that counts the MTP layers.
        command: the words after `keepmtp` that cure it or look closer; "" for none.
        versions: of vLLM that have it, as a PEP 440 specifier.
        concerns: the same for people, where it takes more words.
        sources: public threads, or numbers of docs/failures.md.
        families, dialects: model_types and quantization dialects concerned; () for any.
        rules: rules of the check that confirm it on a checkpoint.
        cure_in_vllm: the function of validate/keepmtp_cures that mends it where vLLM runs; "" for
            none.
    """

    name: str
    words: tuple[str, ...] = ()
    says: str
    cure: str
    where: str = ""
    command: str = ""
    versions: str = ">=0.32"
    concerns: str = ""
    sources: str = "dry loads of vLLM 0.32.0"
    families: tuple[str, ...] = ()
    dialects: tuple[str, ...] = ()
    rules: tuple[str, ...] = ()
    cure_in_vllm: str = ""

    @property
    def is_general(self) -> bool:
        """Whether other faults end in the same words."""
        return self.concerns.startswith("this is general")

    def as_defect(self) -> "KnownFailure":
        """With what is true of all defects: whose it is, and the version that cures it."""
        says, cure = f"a defect of vLLM, not of the checkpoint: {self.says}", self.cure
        for before, version in pairwise(KNOWN):
            if holds(self.versions, before) and not holds(self.versions, version):
                cure += f"; vLLM {version} does not have it"
        return self.model_copy(update={"says": says, "cure": cure})


@cache
def known() -> Mapping[str, tuple[KnownFailure, ...]]:
    """The table, in the order in which its rows are tried."""
    table = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
    found = {kind: tuple(map(KnownFailure.model_validate, rows)) for kind, rows in table.items()}
    return found | {"defects": tuple(map(KnownFailure.as_defect, found["defects"]))}


def cures_in_vllm(family: str, dialect: str, version: str) -> tuple[str, ...]:
    """The cures of what a version of vLLM gets wrong about a family in a dialect."""
    found = []
    for defect in known()["defects"]:
        is_its = family in defect.families and dialect in (defect.dialects or (dialect,))
        if defect.cure_in_vllm and is_its and holds(defect.versions, version):
            found.append(defect.cure_in_vllm)
    return tuple(dict.fromkeys(found))


def known_failure(
    text: str,
    *,
    kinds: Sequence[FailureKind] = IN_LOGS,
    family: str = "",
    dialect: str = "",
    version: str = "",
) -> tuple[KnownFailure, str] | None:
    """The failure that a text tells of, and the name in it ("" for none).

    Args:
        text: a line of a log, or `<exception>: <message> [<file:line>]`.
        kinds: parts of the table, in the order in which they are tried.
        family, dialect: of the checkpoint; what only others have is passed over. "" where it is
            not known.
        version: of vLLM; what only others have is passed over. "" where it is not known.
    """
    for kind in kinds:
        for failure in known()[kind]:
            if family and failure.families and family not in failure.families:
                continue
            if dialect and failure.dialects and dialect not in failure.dialects:
                continue
            if version and not holds(failure.versions, version):
                continue
            for words in failure.words:
                if match := re.search(words, text):
                    return failure, match.groupdict().get("tensor") or ""
    return None


def text_of(failure: LoadFailure) -> str:
    """The exception of a dry load, as the table's expressions want it."""
    return f"{failure.type}: {' '.join(failure.words.split())} [{failure.at}]"


def known_defect(
    failure: LoadFailure, *, family: str, dialect: str, version: str
) -> KnownFailure | None:
    """vLLM's own defect that caused a failure of the dry load."""
    found = known_failure(
        text_of(failure),
        kinds=("defects",),
        family=family or "unknown",
        dialect=dialect or "unknown",
        version=version,
    )
    if found is None:
        return None
    says = found[0].says.replace("vLLM", f"vLLM {version}", 1)
    return found[0].model_copy(update={"says": says})
