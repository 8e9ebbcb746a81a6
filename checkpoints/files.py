"""Files that are whole or not there, and folders that one run at a time may use.

In: a path, and text or a file that a caller has filled. Out: the file under its own name. It is on
the disk itself, so it survives a power cut.

Easy to get wrong: a file that is written under its own name. A reader, or the next run, can then
find half of it. Each file here has the name NAME.partial until it is whole.
"""

import errno
import fcntl
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..recipes.errors import CheckpointError, RecipeError, size_in_words

WORK = ".keepmtp"
"""A hidden folder in an unfinished output, for what the next run needs."""


AGAIN = "run the same command again: it goes on where it was"
DEAD = "Its file system has failed: mount it again, or check the disk"
"""What to do where a disk does not answer, as the start of a sentence."""
_CURES = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), f"Make room, and {AGAIN}"),
    **dict.fromkeys((errno.EIO, errno.ESTALE, errno.EROFS, errno.ENODEV), f"{DEAD}, and {AGAIN}"),
}


def partial_path(path: Path) -> Path:
    """The name of a file or a folder until it is whole."""
    return path.with_name(f"{path.name}.partial")


def final_path(partial: Path) -> Path:
    """The name that `partial` gets when it is whole."""
    return partial.with_name(partial.name.removesuffix(".partial"))


def within(folder: Path, name: str) -> Path:
    """The path for a file that is written into a folder, under a name that a stranger may have
    chosen.

    Every name from a checkpoint, an index, a record or the Hub comes through here before a byte is
    written. The folders that the name has in it are made.

    Raises:
        CheckpointError: the path would not be inside the folder, also by a link in it.
    """
    path = folder / name
    home = Path(os.path.realpath(folder))
    if "\0" in name or home not in Path(os.path.realpath(path)).parents:
        raise CheckpointError(
            folder,
            "every file of an output must lie in its folder",
            got=repr(name),
            cure="Rename it",
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def refuse_name(path: Path) -> None:
    """Refuse a name that no JSON file can hold.

    Raises:
        CheckpointError: its bytes are no UTF-8.
    """
    try:
        os.fspath(path).encode()
    except UnicodeEncodeError as error:
        raise CheckpointError(
            path,
            "every name must be UTF-8",
            got=ascii(error.object[error.start : error.end]),
            cure="Rename it",
        ) from error


def complete(path: Path) -> None:
    """Give the file or folder at `partial_path(path)` its own name; an older file of that name is
    replaced.
    """
    partial = partial_path(path)
    sync(partial)
    os.replace(partial, path)
    sync(path.absolute().parent)


def write_whole(path: Path, text: str) -> Path:
    """Write a text file so that a reader finds the old one or the new one, never a part; returns
    `path`.

    Raises:
        CheckpointError: the folder cannot be written to, or the text has a name whose bytes are no
            UTF-8.
    """
    try:
        raw = text.encode()
    except UnicodeEncodeError as error:
        raise CheckpointError(
            path,
            "every name in it must be UTF-8",
            got=ascii(text[error.start : error.end]),
            cure="Rename what is called so",
        ) from error
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial_path(path).write_bytes(raw)
        complete(path)
    except OSError as error:
        raise unwritable(path, error) from error
    return path


def unwritable(path: Path, error: Exception) -> CheckpointError:
    """The refusal for a file that cannot be written.

    Args:
        path: of the file.
        error: the system's, or a library's that has the system's number in its words: "(os error
            28)".
    """
    found = re.search(r"\(os error (\d+)\)", str(error))
    number = getattr(error, "errno", None) or 0
    got = str(error)
    if found:
        number = int(found[1])
    if number:
        got = os.strerror(number)
    return CheckpointError(
        path, "must be writable", got=got, cure=_CURES.get(number, "Choose another folder")
    )


def write_at(descriptor: int, data: bytearray | memoryview, position: int) -> None:
    """Write all of it at a place of an open file: the system may take a part at a time."""
    view = memoryview(data)
    while view:
        count = os.pwrite(descriptor, view, position)
        view = view[count:]
        position = position + count


def sync(path: Path) -> None:
    """Wait until a file's bytes, or a folder's names, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with naming_file(path):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def naming_file(path: Path) -> Iterator[None]:
    """An OSError without a file's name, such as a full disk's, gets this one."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise


@contextmanager
def held(folder: Path, rule: str) -> Iterator[None]:
    """Lock a folder against other runs for as long as the context lasts; it is made if there is
    none.

    The kernel holds the lock for this process, and frees it when the process ends, killed or not.
    The folder itself is
    locked: a lock file would stay in it, or next to it, after the run.

    Raises:
        RecipeError: another run has locked it. The message has `rule`.
    """
    descriptor = _locked(folder)
    if descriptor is None:
        raise RecipeError(
            folder, rule, got="another run at work", cure="Wait for it, or choose another OUT"
        )
    try:
        yield
    finally:
        os.close(descriptor)


def is_held(folder: Path) -> bool:
    """Whether a run has locked this folder."""
    if not folder.is_dir():
        return False
    descriptor = _locked(folder)
    if descriptor is not None:
        os.close(descriptor)
    return descriptor is None


def _locked(folder: Path) -> int | None:
    """An open descriptor with the lock on the folder that has this name now; None if another run
    has it.
    """
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:  # the run that had it gave it its final name just now
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(descriptor), os.stat(folder)):
                return descriptor
        except FileNotFoundError:
            pass
        except BlockingIOError:
            os.close(descriptor)
            return None
        os.close(descriptor)


def refuse_small_disk(out: Path, needed: int, *, cure: str) -> None:
    """Refuse a disk with too little room; the nearest folder of `out` that exists is asked.

    Args:
        out: what will be written.
        needed: bytes.
        cure: what to do.

    Raises:
        RecipeError: says how much is needed and how much is missing.
    """
    parent = next(path for path in (out.absolute(), *out.absolute().parents) if path.is_dir())
    missing = needed - shutil.disk_usage(parent).free
    if missing > 0:
        raise RecipeError(
            out,
            f"{size_in_words(needed)} must be free on its disk",
            got=f"{missing:,} bytes too little",
            cure=cure,
        )
