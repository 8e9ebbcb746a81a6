"""Exactly which bytes a checkpoint is, and whether its files are still the ones that were opened.

In: a checkpoint folder. Out: an `Identity`: SHA-256 of every file, and one number over all of them.
Every result names the identity it was measured on. A report takes results of one identity only, and
an upload sends only files of the report's identity. And a `FileStamp` for each file, by which a
change during a run is noticed without reading it.

Easy to get wrong: a file's size and time of change say little. `cp -p` or `touch -r` give them to
another file, and a file may change twice within the clock's step.
"""

import hashlib
import os
import shlex
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationError

from ..recipes.errors import CheckpointError
from ..recipes.frozen import Advance, Bar, unwatched
from .fact import Count, Fact
from .files import naming_file, own_files, refuse_strange, write_whole
from .record import RECORD, is_draft_alone
from .safetensors_file import open_regular

CACHE = ".hashes.json"
_BLOCK_BYTES = 1 << 20
_MAX_NAMED = 5
# A file that changed just before it was read may change again within the clock's step, so its hash
# is not kept. Times of change are as coarse as the file system's clock: 2 s on FAT, a second on
# some network file systems.
_SETTLED_NS = 3_000_000_000


class FileFact(Fact):
    """One file of the checkpoint."""

    num_bytes: Count
    sha256: str


class Identity(Fact):
    """Exactly these bytes.

    Attributes:
        sha256: over a line "sha256 bytes name" for each file, sorted by name: one number for the
            checkpoint.
        files: every file of it, by path with forward slashes.
    """

    sha256: str
    files: Mapping[str, FileFact]


class FileStamp(Fact):
    """A file as the file system knows it."""

    num_bytes: int
    inode: int  # another one where another file took its place
    mtime_ns: int
    # The time of the inode's own change, which nobody sets: later where the file was written over,
    # and where it got a hard link more or less.
    ctime_ns: int
    num_links: int = Field(repr=False)

    def is_unwritten(self, now: "FileStamp") -> bool:
        """Whether nobody wrote to the file between the two states. Where links came or went, its
        ctime says nothing.
        """
        if now.num_links != self.num_links:
            same = {"ctime_ns": self.ctime_ns, "num_links": self.num_links}
            now = now.model_copy(update=same)
        return now == self


class _Seen(Fact):
    """A file as it was found; `sha256` once it was read."""

    num_bytes: int
    mtime_ns: int
    sha256: str = ""


class _Cache(Fact):
    """The cache file; `files` by absolute path, so that source and checkpoint may share one."""

    version: Literal[1]
    files: Mapping[str, _Seen]


def identify(folder: Path, *, cache: Path | None = None, watch: Bar | None = None) -> Identity:
    """The bytes of one checkpoint.

    Every regular file counts, and a link counts as the file it points to. Hidden files and folders
    and `*.partial` do not count: they belong to tools, not to the checkpoint.

    Args:
        folder: with config.json.
        cache: evidence folder whose `.hashes.json` keeps hashes; it is made if there is none. None:
            nothing is kept.
        watch: opened only if there is something to read.

    Raises:
        CheckpointError: no config.json, a link to nowhere or to a folder, or a file that changes
            while it is read.
    """
    settled = time.time_ns() - _SETTLED_NS
    known = _read_cache(cache)
    files = _files(folder, known)
    # The largest come first, so that no thread has a large one left at the end.
    unread = list[tuple[int, str]]()
    for path, file in files.items():
        if not file.sha256:
            unread.append((file.num_bytes, path))
    unread.sort(reverse=True)
    if not unread:
        return _identity(folder, files)
    if cache is not None:
        for path in (cache, cache / CACHE):
            refuse_strange(path)
    stop = threading.Event()
    with (
        (watch or unwatched)(sum(num_bytes for num_bytes, _ in unread)) as advance,
        ThreadPoolExecutor(os.cpu_count()) as pool,
    ):
        try:
            jobs = {}
            for _, path in unread:
                jobs[path] = pool.submit(_read, path, files[path], advance, stop)
            for path, job in jobs.items():
                file = job.result()
                files[path] = file
                if file.mtime_ns < settled:
                    known[path] = file
        finally:  # an error or Ctrl-C does not wait for terabytes
            stop.set()
            pool.shutdown(cancel_futures=True)
    if cache is not None:
        text = _Cache(version=1, files=dict(sorted(known.items()))).model_dump_json(indent=2)
        write_whole(cache / CACHE, text + "\n")
    return _identity(folder, files)


def remembered(folder: Path, *, cache: Path) -> Identity | None:
    """The bytes of a checkpoint from kept hashes alone; None where a file has none, or another size
    or time by now.

    Raises:
        CheckpointError: as `identify`.
    """
    files = _files(folder, _read_cache(cache))
    for file in files.values():
        if not file.sha256:
            return None
    return _identity(folder, files)


def _identity(folder: Path, files: Mapping[str, _Seen]) -> Identity:
    facts = {}
    digest = hashlib.sha256()
    for path, file in sorted(files.items()):
        name = Path(path).relative_to(os.path.abspath(folder)).as_posix()
        if "\n" in name:
            raise CheckpointError(
                repr(name), "a file's name must be one line", got="a line break", cure="Rename it"
            )
        facts[name] = FileFact(num_bytes=file.num_bytes, sha256=file.sha256)
        digest.update(f"{file.sha256} {file.num_bytes} {name}\n".encode())
    return Identity(sha256=digest.hexdigest(), files=facts)


def measured_anew(folder: Path) -> str:
    """The commands that measure a checkpoint again from the beginning."""
    name = shlex.quote(str(folder))
    if is_draft_alone(folder / RECORD):
        return f"`keepmtp eval TARGET --draft {name}` and card"
    return f"`keepmtp check {name} --record`, eval and card"


def refuse_other_bytes(folder: Path, measured: Identity, found: Identity) -> None:
    """Refuse a checkpoint whose bytes are not those of its report.

    Raises:
        CheckpointError: names the first files that changed, are new or are gone.
    """
    if measured.sha256 == found.sha256:
        return
    wrong = sorted(dict(measured.files.items() ^ found.files.items()))
    raise CheckpointError(
        folder,
        "must be the bytes that its report is about",
        got=f"another {listed(wrong)}",
        cure=f"Restore them, or measure these: {measured_anew(folder)}",
    )


def listed(words: Sequence[str]) -> str:
    """The first few, and how many more."""
    text = ", ".join(words[:_MAX_NAMED])
    if len(words) > _MAX_NAMED:
        text += f" and {len(words) - _MAX_NAMED} more"
    return text


def file_sha256(path: Path) -> str:
    """SHA-256 of one file, as 64 hexadecimal digits."""
    with open(path, "rb", buffering=0) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def states_of(folder: Path, names: Iterable[str]) -> dict[str, FileStamp]:
    """The states of the files that are there, by name; of a link, of what it leads to."""
    states = {}
    for name in names:
        with suppress(FileNotFoundError):
            found = os.stat(folder / name)
            states[name] = FileStamp(
                num_bytes=found.st_size,
                inode=found.st_ino,
                mtime_ns=found.st_mtime_ns,
                ctime_ns=found.st_ctime_ns,
                num_links=found.st_nlink,
            )
    return states


def _files(folder: Path, known: Mapping[str, _Seen]) -> dict[str, _Seen]:
    """Regular files by absolute path, hidden ones left out; with their hashes where they are as
    they were.
    """
    if not (folder / "config.json").is_file():
        raise CheckpointError(
            folder,
            "must hold a checkpoint",
            got="no config.json",
            cure="Name the folder of a checkpoint",
        )
    files = dict[str, _Seen]()
    for path in own_files(Path(os.path.abspath(folder))):
        with open_regular(path, path, cure="Restore it, or move it away") as file:
            state = os.fstat(file.fileno())
        seen = _Seen(num_bytes=state.st_size, mtime_ns=state.st_mtime_ns)
        before = known.get(str(path), seen)
        if (before.num_bytes, before.mtime_ns) == (seen.num_bytes, seen.mtime_ns):
            seen = before
        files[str(path)] = seen
    return files


def _read(path: str, file: _Seen, advance: Advance, stop: threading.Event) -> _Seen:
    # Not hashlib.file_digest: a shard of 5 GB would be one step of the bar. Updates release the GIL
    # likewise.
    digest = hashlib.sha256()
    block = bytearray(_BLOCK_BYTES)
    view = memoryview(block)
    done = 0
    with naming_file(Path(path)), open(path, "rb", buffering=0) as raw:
        # Stop at the size that was found: a file that grows as fast as it is read would never end.
        while done <= file.num_bytes and not stop.is_set():
            count = raw.readinto(block)
            if not count:
                break
            digest.update(view[:count])
            advance(count)
            done += count
        state = os.fstat(raw.fileno())
    if (state.st_size, state.st_mtime_ns) != (file.num_bytes, file.mtime_ns):
        raise CheckpointError(
            path,
            "must not change while it is read",
            got="another size or time",
            cure="Wait until it is written",
        )
    return file.model_copy(update={"sha256": digest.hexdigest()})


def _read_cache(folder: Path | None) -> dict[str, _Seen]:
    """The kept hashes; a cache that cannot be read has none, and is written again."""
    if folder is None:
        return {}
    path = folder / CACHE
    try:
        with open_regular(path, path) as file:
            return dict(_Cache.model_validate_json(file.read()).files)
    except (CheckpointError, OSError, ValidationError):
        return {}
