"""The kinds of fuzz cases in which a stranger was at an output's own names, or writes to the source
during the run.

In: a random generator. Out: a `Case`, as in kinds.py, which lists these too; and a command that
does something else at one step.
"""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import corpus
import cures
import edits
import warm
from case import Case
from edits import ODD, Edit

STEPS = 60
"""A small run is over by then."""


def planted(rng: Random) -> Case:
    """A thing at a name that is written or removed, often after a run that was killed."""
    line, places = rng.choice(list(ODD["planted"].items()))
    edit = plant(rng.choice(places), rng.choice(ODD["things"]))
    return case(rng, line, edit, begun=rng.choice((0, STEPS, rng.randrange(STEPS))))


def changing(rng: Random) -> Case:
    """The source is written to at some step."""
    line = rng.choice([line for line in ODD["planted"] if "TO" in line or "/lost" in line])
    edit = Edit("no file is linked to the base", _own)
    return case(rng, line, edit, changes=rng.randrange(1, STEPS), also=_not_refused, writes=("",))


def case(rng: Random, line: str, edit: Edit, **named: Any) -> Case:
    base, dialect = rng.choice(list(cures.BASES.items()))
    words = tuple(line.replace("TO", cures.OTHER[dialect]).split())
    if "NAME" in line:
        base = corpus.MEASURED
    return Case(base=base, edits=(edit,), words=words, reads_weights=False, **named)


def plant(place: str, thing: str) -> Edit:
    def do(folder: Path) -> None:
        path = Path(f"{folder}{place}")
        beside = folder.parent / "beside"
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            path.rename(beside / "was")
        if thing == "a FIFO":
            os.mkfifo(path)
        elif thing == "another user's folder":
            path.mkdir()
            os.chown(path, 1, 1)
        elif thing == "a hard link":
            os.link(beside / "secret", path)
        else:
            path.symlink_to(beside / thing.removeprefix("a link to "))

    return Edit(f"{{}}{place} is {thing}", do)


def _own(folder: Path) -> None:
    for path in folder.rglob("*.safetensors"):
        edits.replace(path, path.read_bytes())


def interrupted(step: int, do: Callable[[], object]) -> Callable[[], None]:
    """The command, which does this when it comes to a file below an unfinished output for the
    step-th time.
    """
    left = [do, *[lambda: None] * (step - 1)]

    def at_event(event: str, arguments: tuple[object, ...]) -> None:
        if left and event.startswith(("open", "os.")) and ".out.partial/" in str(arguments[0]):
            left.pop()()

    def call() -> None:
        sys.addaudithook(at_event)
        warm.main()

    return call


def change(source: Path) -> None:
    """Write into its last shard."""
    with open(max(source.glob("*.safetensors")), "r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x55")
    (source.parent / "changed").touch()


def _not_refused(case: Case, folder: Path, status: int) -> list[str]:
    if (folder / "changed").exists() and not status:
        return ["takes a source that has changed"]
    return []
