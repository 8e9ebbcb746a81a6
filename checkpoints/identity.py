"""Exactly which bytes a checkpoint is: SHA-256 of every file of its folder, and one number over all
of them.

In: a checkpoint folder. Out: an `Identity`. Every result names the identity it was measured on.
A report takes results of one identity only, and an upload sends only files of the report's
identity.

Easy to get wrong: a cache keeps each hash with the file's size and time of change, so that 700 GB
is read once. A file that changed just before it was read may change again within the clock's step,
so its hash is not kept.
"""

import hashlib
import os
import shlex
import stat
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ..recipes.errors import CheckpointError
from .files import refuse_name, write_whole
from .safetensors_file import open_regular

ReadingBar = Callable[[int], AbstractContextManager[Callable[[int], None]]]
"""Takes the number of bytes to read and returns a context. Its value is called with bytes read,
from any thread.
"""

CACHE = ".hashes.json"
_BLOCK_BYTES = 1 << 20
_MAX_NAMED = 5
_MAX_JSON_BYTES = 1 << 30
# Times of change are as coarse as the file system's clock: 2 s on FAT, a second on some network
# file systems.
_SETTLED_NS = 3_000_000_000


class FileFact(BaseModel):
    """One file of the checkpoint."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    num_bytes: Annotated[int, Field(ge=0, lt=2**63)]
    sha256: str


class Identity(BaseModel):
    """Exactly these bytes.

    Attributes:
        sha256: over a line "sha256 bytes name" for each file, sorted by name: one number for the
            checkpoint.
        files: every file of it, by path with forward slashes.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    sha256: str
    files: Mapping[str, FileFact]


class _Seen(BaseModel):
    """A file as it was found; `sha256` once it was read."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    num_bytes: int
    mtime_ns: int
    sha256: str = ""

    def is_as(self, before: "_Seen | None") -> bool:
        """Whether it has the size and the time of change that it had before."""
        return before is not None and (self.num_bytes, self.mtime_ns) == (
            before.num_bytes,
            before.mtime_ns,
        )


class _Cache(BaseModel):
    """The cache file; `files` by absolute path, so that source and checkpoint may share one."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    version: int
    files: Mapping[str, _Seen]


def identify(
    folder: Path, *, cache: Path | None = None, watch: ReadingBar | None = None
) -> Identity:
    """The bytes of one checkpoint.

    Every regular file counts, and a link counts as the file it points to. Hidden files and folders
    and `*.partial` do not count: they belong to tools, not to the checkpoint.

    Args:
        folder: with config.json.
        cache: evidence folder whose `.hashes.json` keeps hashes; it is made if there is none. None:
            nothing is kept.
        watch: a progress bar; opened only if there is something to read.

    Raises:
        CheckpointError: no config.json, a link to nowhere or to a folder, or a file that changes
            while it is read.
    """
    settled = time.time_ns() - _SETTLED_NS
    files = dict(sorted(_files(folder)))
    known = {} if cache is None else _read_cache(cache / CACHE)
    unread = {path: file for path, file in files.items() if not file.is_as(known.get(path))}
    if unread:
        known |= _read_all(unread, watch)
        if cache is not None:
            kept = {
                path: file
                for path, file in sorted(known.items())
                if path not in unread or file.mtime_ns < settled
            }
            write_whole(
                cache / CACHE, _Cache(version=1, files=kept).model_dump_json(indent=2) + "\n"
            )
    return _identity(folder, {path: known[path] for path in files})


def remembered(folder: Path, *, cache: Path) -> Identity | None:
    """The bytes of a checkpoint from kept hashes alone; None where a file has none, or another size
    or time by now.

    Raises:
        CheckpointError: as `identify`.
    """
    known, files = _read_cache(cache / CACHE), dict(_files(folder))
    if not all(file.is_as(known.get(path)) for path, file in files.items()):
        return None
    return _identity(folder, {path: known[path] for path in files})


def _identity(folder: Path, files: Mapping[str, _Seen]) -> Identity:
    whole = Path(os.path.abspath(folder))
    facts = {}
    for path, file in files.items():
        name = Path(path).relative_to(whole).as_posix()
        if "\n" in name:
            raise CheckpointError(
                repr(name), "a file's name must be one line", got="a line break", cure="Rename it"
            )
        facts[name] = FileFact(num_bytes=file.num_bytes, sha256=file.sha256)
    return identity_of(facts)


def identity_of(files: Mapping[str, FileFact]) -> Identity:
    """The identity of files whose hashes are known."""
    ordered = dict(sorted(files.items()))
    lines = "".join(f"{fact.sha256} {fact.num_bytes} {name}\n" for name, fact in ordered.items())
    return Identity(sha256=hashlib.sha256(lines.encode()).hexdigest(), files=ordered)


def measured_anew(folder: Path) -> str:
    """The commands that measure a checkpoint again from the beginning."""
    return f"`keepmtp check {shlex.quote(str(folder))} --record`, serve-check, eval and card"


def refuse_other_bytes(folder: Path, measured: Identity, found: Identity) -> None:
    """Refuse a checkpoint whose bytes are not those of its report.

    Raises:
        CheckpointError: names the first files that changed, are new or are gone.
    """
    if measured.sha256 == found.sha256:
        return
    wrong = [
        f"{name} is {'not there' if name not in found.files else 'another'}"
        for name, fact in measured.files.items()
        if found.files.get(name) != fact
    ]
    wrong += [f"{name} is new" for name in found.files if name not in measured.files]
    raise CheckpointError(
        folder,
        "must be the bytes that its report is about",
        got=listed(wrong),
        cure=f"Restore them, or measure these: {measured_anew(folder)}",
    )


def listed(words: Sequence[str]) -> str:
    """The first few, and how many more."""
    more = f" and {len(words) - _MAX_NAMED} more" if len(words) > _MAX_NAMED else ""
    return ", ".join(words[:_MAX_NAMED]) + more


def file_sha256(path: Path) -> str:
    """SHA-256 of one file, as 64 hexadecimal digits.

    Raises:
        CheckpointError: a JSON file that is longer than any.
    """
    _refuse_large(path, path.stat().st_size)
    with open(path, "rb", buffering=0) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _files(folder: Path) -> Iterator[tuple[str, _Seen]]:
    """Regular files by absolute path, hidden ones left out."""
    cure = "Name the folder of a checkpoint"
    if not (folder / "config.json").is_file():
        raise CheckpointError(folder, "must hold a checkpoint", got="no config.json", cure=cure)
    for root, folders, names in os.walk(folder, onerror=_raise):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in folders:
            if (path := Path(root, name)).is_symlink():
                rule, cure = (
                    "must be a file or a folder of its own",
                    "Replace the link by what it leads to",
                )
                raise CheckpointError(path, rule, got="a link to a folder", cure=cure)
        for name in names:
            if not name.startswith(".") and not name.endswith(".partial"):
                path = Path(root, name)
                yield os.path.abspath(path), _seen(path)


def _seen(path: Path) -> _Seen:
    refuse_name(path)
    try:
        state = path.stat()
    except FileNotFoundError as error:
        raise CheckpointError(
            path, "must be a file", got="a link to nowhere", cure="Restore or delete it"
        ) from error
    if not stat.S_ISREG(state.st_mode):
        raise CheckpointError(
            path, "must be a regular file", got="something else", cure="Move it away"
        )
    _refuse_large(path, state.st_size)
    return _Seen(num_bytes=state.st_size, mtime_ns=state.st_mtime_ns)


def _refuse_large(path: Path, num_bytes: int) -> None:
    """Holes take no room on the disk, and long to be read."""
    if path.suffix == ".json" and num_bytes > _MAX_JSON_BYTES:
        rule = f"a JSON file has at most {_MAX_JSON_BYTES} bytes"
        raise CheckpointError(path, rule, got=num_bytes, cure="Restore it")


def _raise(error: OSError) -> None:
    raise CheckpointError(
        error.filename, "must be readable", got=error.strerror, cure="Check its permissions"
    )


def _read_all(files: Mapping[str, _Seen], watch: ReadingBar | None) -> dict[str, _Seen]:
    """The files with their hashes. The largest come first, so that no thread has a large one left
    at the end.
    """
    paths = sorted(files, key=lambda path: -files[path].num_bytes)
    bar = (
        watch(sum(file.num_bytes for file in files.values()))
        if watch
        else nullcontext(lambda _: None)
    )
    stop = threading.Event()
    with bar as advance, ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        try:
            read = list(pool.map(lambda path: _read(path, files[path], advance, stop), paths))
        finally:  # an error or Ctrl-C does not wait for terabytes
            stop.set()
            pool.shutdown(cancel_futures=True)
    return dict(zip(paths, read, strict=True))


def _read(path: str, file: _Seen, advance: Callable[[int], None], stop: threading.Event) -> _Seen:
    # Not hashlib.file_digest: a shard of 5 GB would be one step of the bar. Updates release the GIL
    # likewise.
    digest, block = hashlib.sha256(), bytearray(_BLOCK_BYTES)
    view, done = memoryview(block), 0
    try:
        with open(path, "rb", buffering=0) as raw:
            # Stop at the size that was found: a file that grows as fast as it is read would never
            # end.
            while (count := raw.readinto(block)) and done <= file.num_bytes and not stop.is_set():
                digest.update(view[:count])
                advance(count)
                done += count
            state = os.fstat(raw.fileno())
    except OSError as error:
        raise CheckpointError(
            path, "must be readable", got=error.strerror or repr(error), cure="Check it"
        ) from error
    if (state.st_size, state.st_mtime_ns) != (file.num_bytes, file.mtime_ns):
        rule, cure = (
            "must not change while it is read",
            "Wait until it is written, and run this again",
        )
        raise CheckpointError(path, rule, got="another size or time", cure=cure)
    return file.model_copy(update={"sha256": digest.hexdigest()})


def _read_cache(path: Path) -> dict[str, _Seen]:
    """The kept hashes; a cache that cannot be read has none, and is written again."""
    try:
        with open_regular(path, path) as file:
            cache = _Cache.model_validate_json(file.read())
    except (CheckpointError, OSError, ValidationError):
        return {}
    return dict(cache.files) if cache.version == 1 else {}
