"""Files that are whole or not there, and folders that one run at a time may use.

In: a path, and text or a file that a caller has filled. Out: the file under its own name. It is on the disk itself, so
it survives a power cut.

Easy to get wrong: a file that is written under its own name. A reader, or the next run, can then find half of it. Each
file here has the name NAME.partial until it is whole.
"""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..recipes.errors import CheckpointError, RecipeError


def partial_path(path: Path) -> Path:
    """The name of a file or a folder until it is whole."""
    return path.with_name(f"{path.name}.partial")


def complete(path: Path) -> None:
    """Give the file or folder at `partial_path(path)` its own name; an older file of that name is replaced."""
    partial = partial_path(path)
    sync(partial)
    os.replace(partial, path)
    sync(path.absolute().parent)


def write_whole(path: Path, text: str) -> Path:
    """Write a text file so that a reader finds the old one or the new one, never a part; returns `path`.

    Raises:
        CheckpointError: the folder cannot be written to.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial_path(path).write_text(text, encoding="utf-8")
        complete(path)
    except OSError as error:
        got = error.strerror or repr(error)
        raise CheckpointError(path, "must be writable", got=got, cure="Make room, or choose another folder") from error
    return path


def sync(path: Path) -> None:
    """Wait until a file's bytes, or a folder's names, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def held(folder: Path, rule: str) -> Iterator[None]:
    """Lock a folder against other runs for as long as the context lasts.

    The kernel holds the lock for this process, and frees it when the process ends, killed or not. The folder itself is
    locked: a lock file would stay in it, or next to it, after the run.

    Raises:
        RecipeError: another run has locked it. The message has `rule`.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            cure = "Wait for it, or choose another OUT"
            raise RecipeError(folder, rule, got="another run at work", cure=cure) from error
        yield
    finally:
        os.close(descriptor)
