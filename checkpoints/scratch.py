"""Folders for what is needed only while a run lasts; those that a killed run has left are removed
by the next one.

In: how the folder's name starts, and where it is. Out: a `ScratchFolder`, a context manager that
holds its path.

Easy to get wrong: an old folder may belong to a run that is still at work. The kernel holds a lock
on each of them for as long as its process lives, and a folder gets its name only once it is locked.
"""

import fcntl
import os
import shutil
import weakref
from contextlib import suppress
from pathlib import Path
from tempfile import gettempdir, mkdtemp

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
            folder: where it is made; default the system's folder for such things.
        """
        parent = folder or Path(gettempdir())
        remove_left(prefix, parent)
        made = Path(mkdtemp(prefix=_NEW, dir=parent))
        lock = os.open(made, os.O_RDONLY)
        fcntl.flock(lock, fcntl.LOCK_EX)
        self.path = made.rename(made.with_name(prefix + made.name.removeprefix(_NEW)))
        self.remove = weakref.finalize(self, _remove, self.path, lock)

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
