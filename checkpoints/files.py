"""Files that are whole or not there, and folders that one run at a time may use.

In: a path, and text or a file that a caller has filled. Out: the file under its own name. It is on
the disk itself, so it survives a power cut. And `ScratchFolder`: a folder for what is needed only
while a run lasts.

Easy to get wrong: a file that is written under its own name. A reader, or the next run, can then
find half of it. Each file here has the name NAME.partial until it is whole.
"""

import errno
import fcntl
import os
import re
import shutil
import stat
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryFile, gettempdir, mkdtemp

from ..recipes.errors import CheckpointError, RecipeError, counted, size_in_words

WORK = ".keepmtp"
"""A hidden folder in an unfinished output, for what the next run needs."""


AGAIN = "run the same command again: it goes on where it was"
DEAD = "Its file system has failed: mount it again, or check the disk"
"""What to do where a disk does not answer, as the start of a sentence."""
_CURES = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), f"Make room, and {AGAIN}"),
    **dict.fromkeys((errno.EIO, errno.ESTALE, errno.EROFS, errno.ENODEV), f"{DEAD}, and {AGAIN}"),
}
# What a file system says that cannot make a link: another disk, links that are not allowed or too
# many.
_NO_LINK = frozenset({errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP, errno.EACCES})


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


def own_files(folder: Path) -> Iterator[Path]:
    """The files of a checkpoint, and links to files. Hidden ones and `*.partial` belong to tools.

    Raises:
        CheckpointError: a folder that cannot be read, a link to one, or a name that no JSON file
            can hold: its bytes are no UTF-8.
    """

    def refuse(error: OSError) -> None:
        raise CheckpointError(
            error.filename, "must be readable", got=error.strerror, cure="Check its permissions"
        )

    for root, folders, names in os.walk(folder, onerror=refuse):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in folders:
            path = Path(root, name)
            if path.is_symlink():
                raise CheckpointError(
                    path,
                    "must be a file or a folder of its own",
                    got="a link to a folder",
                    cure="Replace it by the folder",
                )
        for name in names:
            if not name.startswith(".") and not name.endswith(".partial"):
                path = Path(root, name)
                _encoded(str(path), path, "every name must be UTF-8", "Rename it")
                yield path


def _encoded(text: str, path: Path, rule: str, cure: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        got = ascii(text[error.start : error.end])
        raise CheckpointError(path, rule, got=got, cure=cure) from error


def refuse_strange(path: Path, *, below: bool = False, is_alone: bool = False) -> None:
    """Refuse what was put at a name that keepmtp writes or removes, such as a link, which leads
    elsewhere.

    Args:
        path: such a name; there may be nothing.
        below: whether all names in this folder are such names, too.
        is_alone: whether a file is written where it is, so that no hard link may share its bytes.

    Raises:
        RecipeError: no file or folder, or not this user's.
    """
    left = [path]
    for each in left:
        with suppress(FileNotFoundError):  # of a run that is at work
            state = each.lstat()
            got = ""
            if stat.S_ISLNK(state.st_mode):
                got = "a link"
            elif not (stat.S_ISDIR(state.st_mode) or stat.S_ISREG(state.st_mode)):
                got = "a pipe or a device"
            elif state.st_uid != os.geteuid() and state.st_uid != _owner_in(each.parent):
                got = "another user's"
            elif is_alone and stat.S_ISREG(state.st_mode) and state.st_nlink > 1:
                got = "a hard link"
            if got:
                raise RecipeError(
                    each,
                    "what keepmtp writes or removes must be a file or a folder of your own",
                    got=got,
                    cure="Move it away",
                )
            if below and stat.S_ISDIR(state.st_mode):
                left += each.iterdir()


def _owner_in(folder: Path) -> int:
    """The owner of what is made there: a network's disk may give all files one."""
    with TemporaryFile(dir=folder) as made:
        return os.fstat(made.fileno()).st_uid


def fresh(path: Path) -> Path:
    """The path of a file that is written anew: what a killed run left there is gone, so that its
    other names keep their bytes.

    Raises:
        RecipeError: see `refuse_strange`.
    """
    refuse_strange(path)
    path.unlink(missing_ok=True)
    return path


def remove(path: Path) -> None:
    """Remove a file, or a folder with all that is in it; of a link, the link."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@contextmanager
def making(path: Path) -> Iterator[Path]:
    """The name of a file until it is whole. It gets its own at the end; after an error nothing is
    left, since a full disk needs the room.

    Raises:
        RecipeError: see `refuse_strange`.
    """
    refuse_strange(path)
    partial = fresh(partial_path(path))
    try:
        yield partial
        complete(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


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
    raw = _encoded(text, path, "every name in it must be UTF-8", "Rename what is called so")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with making(path) as partial, open(partial, "xb") as file:
            file.write(raw)
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


def _locked(folder: Path) -> int | None:
    """An open descriptor with the lock on the folder that has this name now; None if another run
    has it.
    """
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except FileNotFoundError:  # the run that had it gave it its final name just now
            continue
        try:
            # The kernel frees the lock when this process ends, killed or not. The folder itself is
            # locked: a lock file would stay in it, or next to it, after the run.
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(descriptor), os.lstat(folder)):
                return descriptor
        except FileNotFoundError:
            pass
        except BlockingIOError:
            os.close(descriptor)
            return None
        os.close(descriptor)


def link(old: Path, new: Path) -> None:
    """Give a file a second name, or a copy where it can have none; of a link of the Hub's cache:
    its blob. Who writes into a file of two names writes into both.
    """
    whole = os.path.realpath(old)
    try:
        os.link(whole, new)
    except OSError as error:
        if error.errno not in _NO_LINK:
            raise
        shutil.copyfile(whole, new)
        sync(new)


def note_on_links(folder: Path, names: Iterable[str]) -> str:
    """What whoever edits unchanged files must know of second names; "" for no file."""
    note = ""
    for name in names:
        if os.stat(folder / name).st_nlink > 1:
            return "Unchanged files are hard links: an edit of one in place edits the source's too"
        note = "Unchanged files are copies: OUT's disk can have no links to the source's"
    return note


def can_link(folder: Path, out: Path) -> bool:
    """Whether both are on one disk."""
    return nearest_folder(out).stat().st_dev == folder.stat().st_dev


def nearest_folder(path: Path) -> Path:
    """The folder itself, or the first above it that exists."""
    whole = path.absolute()
    return next(each for each in (whole, *whole.parents) if each.is_dir())


def refuse_small_disk(out: Path, needed: int, *, cure: str) -> None:
    """Refuse a disk with too little room.

    Args:
        out: what will be written.
        needed: bytes.
        cure: what to do.

    Raises:
        RecipeError: says how much is needed and how much is missing.
    """
    missing = needed - shutil.disk_usage(nearest_folder(out)).free
    if missing > 0:
        raise RecipeError(
            out,
            f"{size_in_words(needed)} must be free on its disk",
            got=f"{counted(missing, 'byte')} too little",
            cure=cure,
        )


_NEW = ".keepmtp-new-"


class ScratchFolder:
    """A folder that only this user may open. It goes with its context, or with its process, or with
    the next one.

    Attributes:
        path: the folder.
    """

    def __init__(self, prefix: str, folder: Path | None = None):
        """Make it, after those with the same prefix that no process holds are gone.

        Args:
            prefix: how its name starts.
            folder: where it is made, and made itself; default the system's folder for such things.
        """
        parent = folder or Path(gettempdir())
        parent.mkdir(parents=True, exist_ok=True)
        remove_left(prefix, parent)
        made = Path(mkdtemp(prefix=_NEW, dir=parent))
        lock = os.open(made, os.O_RDONLY)
        fcntl.flock(lock, fcntl.LOCK_EX)
        # It gets its name only once it is locked: without a lock, the next run takes it for one
        # whose process is gone.
        self.path = made.rename(made.with_name(prefix + made.name.removeprefix(_NEW)))
        self.remove = weakref.finalize(self, _remove, self.path, lock)
        self._lock = lock

    def handed_on(self) -> Path:
        """The folder, held by the program that this process is about to become."""
        os.set_inheritable(self._lock, True)
        self.remove.detach()
        return self.path

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *_: object) -> None:
        self.remove()


def remove_left(prefix: str, parent: Path) -> None:
    """Remove scratch folders whose processes are gone."""
    for old in parent.glob(f"{prefix}*"):
        with suppress(OSError):  # it is gone, somebody else's, or at work
            lock = os.open(old, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                if os.fstat(lock).st_uid == os.getuid():
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(old, ignore_errors=True)
            finally:
                os.close(lock)


def _remove(folder: Path, lock: int) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    os.close(lock)
