"""What is known of failures with checkpoints like these: one table for `explain` and for the dry
load's verdict.

In: a line of a log, or `<exception>: <message> [<file:line>]`, or a `Silence`; the table is
failures.toml. Out: the `KnownFailure` that it tells of, with the name in it.

Easy to get wrong: a defect ends with a release. A dry load asks about those of its own vLLM and of
its family alone.
"""

import re
import tomllib
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Literal

from pydantic import Field

from ...checkpoints.fact import Fact
from ...recipes.runtimes.vllm import KNOWN, holds
from ..facts.dry_load import LoadFailure

FailureKind = Literal["dry_load", "sglang", "other_builds", "failures", "defects"]
# The parts that a log is compared with, in this order: what SGLang raised is looked up in the first
# alone.
IN_LOGS: tuple[FailureKind, ...] = ("sglang", "other_builds", "failures", "defects")
DEFECTS_FIRST: tuple[FailureKind, ...] = ("sglang", "other_builds", "defects", "failures")


SilenceKind = Literal["unfilled", "unread", "nameless head"]


class Silence(Fact):
    """What vLLM does without an exception: of a dry load, or as a defect is known by.

    Attributes:
        kind: a parameter that the files do not fill; a tensor that nothing reads; a head that is
            built without a name.
        role: whose; "" in the table for any.
        name: of the parameter, the tensor, or the class. In the table a regular expression.
        elements: how many of a parameter were written, and how many there are; None in the table
            for any.
    """

    kind: SilenceKind
    role: Literal["target", "draft", ""] = ""
    name: str = ""
    elements: tuple[int, int] | None = None

    def is_like(self, known: "Silence") -> bool:
        """Whether it is what a row of the table means."""
        if self.kind != known.kind or known.role not in ("", self.role):
            return False
        if known.elements not in (None, self.elements):
            return False
        return re.search(known.name, self.name) is not None


class KnownFailure(Fact):
    """One failure.

    Attributes:
        name: what it is called here.
        words: regular expressions; the group `tensor`, if one has it, is a name in vLLM or on disk.
        silences: what vLLM does of it without a word.
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
    silences: tuple[Silence, ...] = Field(default=(), exclude=True)
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

    def concerns_this(self, family: str, dialect: str, version: str) -> bool:
        """Whether a checkpoint of this family and dialect can have it with this version of vLLM; ""
        where one of them is not known.
        """
        if family and self.families and family not in self.families:
            return False
        if dialect and self.dialects and dialect not in self.dialects:
            return False
        return not version or holds(self.versions, version)

    def as_defect(self) -> "KnownFailure":
        """With what is true of all defects: whose it is, and the version that cures it."""
        says = f"a defect of vLLM, not of the checkpoint: {self.says}"
        cure = self.cure
        for before, version in pairwise(KNOWN):
            if holds(self.versions, before) and not holds(self.versions, version):
                cure += f"; vLLM {version} does not have it"
        return self.model_copy(update={"says": says, "cure": cure})


@cache
def known() -> Mapping[str, tuple[KnownFailure, ...]]:
    """The table, in the order in which its rows are tried."""
    table = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
    failures = dict[str, tuple[KnownFailure, ...]]()
    for kind, written in table.items():
        rows = [KnownFailure.model_validate(row) for row in written]
        # The file has neither the words that all defects begin with nor the version that cures.
        if kind == "defects":
            rows = [row.as_defect() for row in rows]
        failures[kind] = tuple(rows)
    return failures


def cures_in_vllm(family: str, dialect: str, version: str) -> tuple[str, ...]:
    """The cures of what a version of vLLM gets wrong about a family in a dialect."""
    cures = dict[str, None]()
    for defect in known()["defects"]:
        is_of_family = family in defect.families
        if defect.cure_in_vllm and is_of_family and defect.concerns_this(family, dialect, version):
            cures[defect.cure_in_vllm] = None
    return tuple(cures)


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
            if not failure.concerns_this(family, dialect, version):
                continue
            for words in failure.words:
                match = re.search(words, text)
                if match:
                    return failure, match.groupdict().get("tensor") or ""
    return None


def silent_defect(silence: Silence, *, family: str, version: str) -> KnownFailure | None:
    """The defect of a version of vLLM that shows in this silence."""
    for defect in known()["defects"]:
        if not defect.concerns_this(family, "", version):
            continue
        for row in defect.silences:
            if silence.is_like(row):
                return defect
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
    defect, _ = found
    says = defect.says.replace("vLLM", f"vLLM {version}", 1)
    return defect.model_copy(update={"says": says})
