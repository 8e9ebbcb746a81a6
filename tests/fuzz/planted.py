"""The kinds of fuzz cases in which a stranger was at an output's own names, or writes to the source
during the run.

In: a random generator. Out: a `Case`, as in kinds.py, which lists these too; and the calls that end
or change something at one step.
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

LAST = 60
"""Most steps of a small run."""


def planted(rng: Random) -> Case:
    """A thing at a name that is written or removed, often after a run that was killed."""
    line, places = rng.choice(ODD["planted"])
    begun = rng.choice((0, LAST, rng.randrange(1, LAST)))
    return _case(rng, line, _plant(rng.choice(places), rng.choice(ODD["things"])), begun=begun)


def changing(rng: Random) -> Case:
    """The source is written to at some step."""
    line = rng.choice([line for line, _ in ODD["planted"] if "NAME" not in line])
    changes = rng.randrange(1, LAST)
    return _case(rng, line, Edit("the files are its own", _own), changes=changes, also=_refused)


def _case(rng: Random, line: str, edit: Edit, **named: Any) -> Case:
    base = corpus.MEASURED
    if "NAME" not in line:
        base, dialect = rng.choice(list(cures.BASES.items()))
        line = line.replace("TO", cures.OTHER[dialect])
    words = tuple(line.replace("OTHER", str(corpus.folder(corpus.OTHER))).split())
    return Case(base=base, edits=(edit,), words=words, reads_weights=False, **named)


def _plant(place: str, thing: str) -> Edit:
    def do(folder: Path) -> None:
        path, beside = Path(f"{folder}{place}"), folder.parent / "beside"
        path.parent.mkdir(parents=True, exist_ok=True)
        if os.path.lexists(path):
            path.rename(beside / "was")
        if thing == "a FIFO":
            os.mkfifo(path)
        elif thing == "another user's folder":
            path.mkdir()
            os.chown(path, 1, 1)
        elif thing == "a further name":
            was = beside / "was"
            os.link(was if was.is_file() else beside / "secret", path)
        else:
            path.symlink_to(beside / thing.removeprefix("a link to "))

    return Edit(f"{{}}{place} is {thing}", do)


def _own(folder: Path) -> None:
    """No hard link to the base is left in a case's folder."""
    for path in folder.rglob("*.safetensors"):
        edits.replace(path, path.read_bytes())


# --- steps ----------------------------------------------------------------------------------------


def interrupted(step: int, room: Path, do: Callable[[], object]) -> Callable[[], None]:
    """The command, which does this too when it opens, makes or renames the step-th name below an
    unfinished output.
    """
    left = [do, *[lambda: None] * (step - 1)]

    def at_event(event: str, arguments: tuple[object, ...]) -> None:
        is_below = event.startswith(("open", "os.")) and ".partial/" in str(arguments[0])
        if left and is_below and str(arguments[0]).startswith(str(room)):
            left.pop()()

    def call() -> None:
        sys.addaudithook(at_event)
        warm.main()

    return call


def change(source: Path) -> None:
    """Write another last byte into a shard that is there."""
    shard = max(source.glob("*.safetensors"))
    with open(shard, "r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x55")
    (source.parent / "changed").touch()


def _refused(case: Case, folder: Path, status: int) -> list[str]:
    if (folder / "changed").exists() and not status:
        return ["a source that changed is taken"]
    return []
