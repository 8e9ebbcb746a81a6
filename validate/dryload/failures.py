"""What is known of failures with checkpoints like these, for the verdict of a dry load.

In: the exception of a dry load, or a `Silence`; the table is failures.toml. Out: the `Failure` or
the `Defect` that it is.

Easy to get wrong: a defect ends with a release. A dry load asks about those of its own vLLM and of
its family alone.
"""

import re
import tomllib
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Literal

from ...checkpoints.dialects.runtime_view import RuntimeView
from ...checkpoints.fact import Fact
from ...recipes.frozen import frozen
from ...recipes.runtimes.vllm import KNOWN, holds
from ..facts.dry_load import LoadFailure

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


class Failure(Fact):
    """A failure that a checkpoint causes.

    Attributes:
        name: what it is called here.
        words: regular expressions.
        cure: what to do.
        where: the entry of the config that it means; "" for the tensor in question.
    """

    name: str
    words: tuple[str, ...] = ()
    cure: str
    where: str = ""

    def is_in(self, text: str) -> bool:
        """Whether a text has its words."""
        return any(re.search(words, text) for words in self.words)


class Defect(Failure):
    """A failure that vLLM causes.

    Attributes:
        silences: what vLLM does of it without a word.
        says: what happened, and why.
        versions: of vLLM that have it, as a PEP 440 specifier; "" for all.
        families, dialects: model_types and quantization dialects concerned; () for any.
        cure_in_vllm: the function of validate/keepmtp_cures that mends it where vLLM runs; "" for
            none.
    """

    silences: tuple[Silence, ...] = ()
    says: str
    versions: str = ""
    families: tuple[str, ...] = ()
    dialects: tuple[str, ...] = ()
    cure_in_vllm: str = ""

    def concerns_this(self, family: str, dialect: str, version: str) -> bool:
        """Whether a checkpoint of this family and dialect can have it with this version of vLLM; a
        dialect of "" is any.
        """
        if self.families and family not in self.families:
            return False
        if dialect and self.dialects and dialect not in self.dialects:
            return False
        return holds(self.versions, version)

    def in_full(self) -> "Defect":
        """With what is true of all defects: whose it is, and the version that cures it."""
        says = f"a defect of vLLM, not of the checkpoint: {self.says}"
        cure = self.cure
        for before, version in pairwise(KNOWN):
            if holds(self.versions, before) and not holds(self.versions, version):
                cure += f"; vLLM {version} does not have it"
        return self.model_copy(update={"says": says, "cure": cure})


@frozen
class Known:
    """The table, each part in the order in which its rows are tried."""

    defects: tuple[Defect, ...]
    failures: tuple[Failure, ...]


@cache
def known() -> Known:
    """The table."""
    table = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
    # The file has neither the words that all defects begin with nor the version that cures.
    defects = [Defect(name=name, **row).in_full() for name, row in table["defects"].items()]
    failures = [Failure(name=name, **row) for name, row in table["failures"].items()]
    return Known(defects=tuple(defects), failures=tuple(failures))


def cures_in_vllm(runtime: RuntimeView, version: str) -> tuple[str, ...]:
    """The cures of what a version of vLLM gets wrong about checkpoints of this family and
    dialect.
    """
    family = runtime.view.family.model_type
    dialect = runtime.draft_dialect.name
    cures = dict[str, None]()
    for defect in known().defects:
        is_of_family = family in defect.families
        if defect.cure_in_vllm and is_of_family and defect.concerns_this(family, dialect, version):
            cures[defect.cure_in_vllm] = None
    return tuple(cures)


def known_failure(text: str) -> Failure | None:
    """The failure of a checkpoint that a text tells of."""
    for failure in known().failures:
        if failure.is_in(text):
            return failure
    return None


def known_defect(failure: LoadFailure, *, family: str, dialect: str, version: str) -> Defect | None:
    """vLLM's own defect that caused a failure of the dry load."""
    text = text_of(failure)
    for defect in known().defects:
        if defect.concerns_this(family, dialect or "unknown", version) and defect.is_in(text):
            says = defect.says.replace("vLLM", f"vLLM {version}", 1)
            return defect.model_copy(update={"says": says})
    return None


def silent_defect(silence: Silence, *, family: str, version: str) -> Defect | None:
    """The defect of a version of vLLM that shows in this silence."""
    for defect in known().defects:
        if not defect.concerns_this(family, "", version):
            continue
        for row in defect.silences:
            if silence.is_like(row):
                return defect
    return None


def text_of(failure: LoadFailure) -> str:
    """The exception of a dry load, as the table's expressions want it."""
    return f"{failure.type}: {' '.join(failure.words.split())} [{failure.at}]"
