"""One call of the command that the campaign makes: a folder, what is changed in it, and words."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

from edits import Edit


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One call of the command.

    Attributes:
        kind: a key of KINDS.
        base: a name of corpus.py: the folder that is copied.
        edits: what is changed in the copy.
        words: the command line; {} is the copied folder.
        reads_weights: whether status 0 claims that the weights' files are good.
        name: of the copied folder.
        writes: files in the copied folder that the verb may change.
        call: in place of the command.
        also: further faults, from the case, the folder and the exit status.
        begun: the call of the system below OUT.partial at which a first run was killed; 0: no run.
        changes: the one at which the source's last shard is written to; 0: never.
    """

    kind: str = ""
    base: str
    edits: tuple[Edit, ...]
    words: tuple[str, ...]
    reads_weights: bool = True
    name: str = "in"
    writes: tuple[str, ...] = ()
    call: Callable[[], None] | None = None
    also: "Callable[[Case, Path, int], list[str]]" = lambda case, folder, status: []
    begun: int = 0
    changes: int = 0

    def without(self, number: int) -> "Case":
        return replace(self, edits=self.edits[:number] + self.edits[number + 1 :])

    def __str__(self) -> str:
        """The case in words, enough to make it by hand."""
        changes = "; ".join(edit.says for edit in self.edits) or "nothing changed"
        named = f", called {self.name!a},"
        if self.name == "in":
            named = ""
        return (
            f"[{self.kind}] keepmtp {' '.join(self.words)} on {self.base!r}{named} where {changes}"
        )


def some(rng: Random, make_edit: Callable[[], Edit]) -> tuple[Edit, ...]:
    """Mostly one edit, sometimes two or three."""
    return tuple(make_edit() for _ in range(rng.choice((1, 1, 1, 2, 3))))
