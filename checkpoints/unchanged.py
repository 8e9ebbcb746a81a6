"""Whether the files of a checkpoint are still the ones that were opened.

In: a folder and names. Out: a `FileStamp` for each, and a refusal if one is another later.

Easy to get wrong: size and time of change can be given to another file, by `cp -p` or `touch -r`.
The inode shows that a file took the place of another; the time of the inode's own change, which
nobody sets, that it was written over. A hard link more or less changes that time as well.
"""

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from ..recipes.errors import CheckpointError


class FileStamp(BaseModel):
    """A file as the file system knows it; two states of one file are equal if nobody wrote to it in
    between.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    num_bytes: int
    inode: int
    mtime_ns: int
    ctime_ns: int


def state_of(path: Path) -> FileStamp | None:
    """The state of one file, through links; None if there is none."""
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return None
    return FileStamp(
        num_bytes=found.st_size,
        inode=found.st_ino,
        mtime_ns=found.st_mtime_ns,
        ctime_ns=found.st_ctime_ns,
    )


def states_of(folder: Path, names: Iterable[str]) -> dict[str, FileStamp]:
    """The states of the files that are there, by name."""
    states = {name: state_of(folder / name) for name in names}
    return {name: state for name, state in states.items() if state is not None}


def changed_since(
    folder: Path, states: Mapping[str, FileStamp], *, is_linked: bool = False
) -> list[str]:
    """Names of files that are not as they were; `is_linked` where this run has given them further
    names.
    """
    passed_over = {"ctime_ns"} if is_linked else set()
    return [
        name
        for name, state in states.items()
        if _but(state_of(folder / name), passed_over) != _but(state, passed_over)
    ]


def _but(state: FileStamp | None, passed_over: set[str]) -> object:
    return state and state.model_dump(exclude=passed_over)


def refuse_changed(
    folder: Path, states: Mapping[str, FileStamp], *, cure: str, is_linked: bool = False
) -> None:
    """Refuse a checkpoint that was written to since it was opened.

    Raises:
        CheckpointError: names the files.
    """
    if changed := changed_since(folder, states, is_linked=is_linked):
        more = f" and {len(changed) - 3} more" if changed[3:] else ""
        raise CheckpointError(
            folder,
            "the source must not change during a run",
            got=f"another {', another '.join(changed[:3])}{more}",
            cure=cure,
        )
