"""Exactly which bytes a checkpoint is: SHA-256 of every file of its folder, and one number over all of them.

In: a checkpoint folder. Out: an `Identity`. Every result names the identity it was measured on.
A report takes results of one identity only, and an upload sends only files of the report's identity.

Easy to get wrong: a cache keeps each hash with the file's size and time of change, so that 700 GB is read once. A file
that changed just before it was read may change again within the clock's step, so its hash is not kept.
"""

import hashlib
import json
import os
import shlex
import stat
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ..recipes.errors import CheckpointError
from .files import refuse_name, write_whole
from .safetensors_file import open_regular

ReadingBar = Callable[[int], AbstractContextManager[Callable[[int], None]]]
"""Takes the number of bytes to read and returns a context. Its value is called with bytes read, from any thread."""

CACHE = ".hashes.json"
_BLOCK_BYTES = 1 << 20
_MAX_NAMED = 5
_MAX_JSON_BYTES = 1 << 30
# Times of change are as coarse as the file system's clock: 2 s on FAT, a second on some network file systems.
_SETTLED_NS = 3_000_000_000


class FileFact(BaseModel):
    """One file of the checkpoint."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    num_bytes: Annotated[int, Field(ge=0, lt=2**63)]
    sha256: str


class Identity(BaseModel):
    """Exactly these bytes.

    Attributes:
        sha256: over a line "sha256 bytes name" for each file, sorted by name: one number for the checkpoint.
        files: every file of it, by path with forward slashes.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    sha256: str
    files: Mapping[str, FileFact]


@dataclass(frozen=True, slots=True, kw_only=True)
class _File:
    """A file as it was found; `path` on this machine."""

    path: Path
    num_bytes: int
    mtime_ns: int


class _Known(BaseModel):
    """A hash in the cache, and the file's state when it was read."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    num_bytes: int
    mtime_ns: int
    sha256: str


class _Cache(BaseModel):
    """The cache file; `files` by absolute path, so that source and checkpoint may share one."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    version: int
    files: Mapping[str, _Known]


def identify(
    folder: Path,
    *,
    cache: Path | None = None,
    fresh: bool = False,
    threads: int | None = None,
    watch: ReadingBar | None = None,
) -> Identity:
    """The bytes of one checkpoint.

    Every regular file counts, and a link counts as the file it points to. Hidden files and folders and `*.partial` do
    not count: they belong to tools, not to the checkpoint.

    Args:
        folder: with config.json.
        cache: evidence folder whose `.hashes.json` keeps hashes; it is made if there is none. None: nothing is kept.
        fresh: read every byte again, and keep the new hashes.
        threads: files read at the same time; default one for each core.
        watch: a progress bar; opened only if there is something to read.

    Raises:
        CheckpointError: no config.json, a link to nowhere or to a folder, or a file that changes while it is read.
    """
    settled = time.time_ns() - _SETTLED_NS
    files = dict(sorted(_files(folder)))
    known = {} if cache is None else _read_cache(cache / CACHE)
    seen = {} if fresh else known
    hashes: dict[str, str] = {}
    for name, file in files.items():
        entry = seen.get(_key(file))
        if entry and _is_same(entry, file):
            hashes[name] = entry.sha256
    unread = {name: file for name, file in files.items() if name not in hashes}
    if unread:
        hashes |= _read_all(unread, threads or os.cpu_count() or 1, watch)
        if cache is not None:
            kept = dict(known)
            for name, file in unread.items():
                kept.pop(_key(file), None)
                if file.mtime_ns < settled:
                    entry = _Known(num_bytes=file.num_bytes, mtime_ns=file.mtime_ns, sha256=hashes[name])
                    kept[_key(file)] = entry
            _write_cache(cache / CACHE, kept)
    facts = {name: FileFact(num_bytes=file.num_bytes, sha256=hashes[name]) for name, file in files.items()}
    return identity_of(facts)


def remembered(folder: Path, *, cache: Path) -> Identity | None:
    """The bytes of a checkpoint from kept hashes alone; None where a file has none, or another size or time by now.

    Raises:
        CheckpointError: as `identify`.
    """
    known, facts = _read_cache(cache / CACHE), {}
    for name, file in _files(folder):
        entry = known.get(_key(file))
        if entry is None or not _is_same(entry, file):
            return None
        facts[name] = FileFact(num_bytes=file.num_bytes, sha256=entry.sha256)
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


def _files(folder: Path) -> Iterator[tuple[str, _File]]:
    """Regular files by their path in the checkpoint, hidden ones left out."""
    cure = "Name the folder of a checkpoint"
    if not (folder / "config.json").is_file():
        raise CheckpointError(folder, "must hold a checkpoint", got="no config.json", cure=cure)
    for root, folders, names in os.walk(folder, onerror=_raise):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in folders:
            if (path := Path(root, name)).is_symlink():
                raise CheckpointError(
                    path,
                    "must be a file or a folder of its own",
                    got="a link to a folder",
                    cure="Replace the link by what it leads to",
                )
        for name in names:
            if not name.startswith(".") and not name.endswith(".partial"):
                yield _file(folder, Path(root, name))


def _file(folder: Path, path: Path) -> tuple[str, _File]:
    refuse_name(path)
    try:
        state = path.stat()
    except FileNotFoundError as error:
        raise CheckpointError(path, "must be a file", got="a link to nowhere", cure="Restore or delete it") from error
    if not stat.S_ISREG(state.st_mode):
        raise CheckpointError(path, "must be a regular file", got="something else", cure="Move it away")
    _refuse_large(path, state.st_size)
    name = path.relative_to(folder).as_posix()
    if "\n" in name:
        raise CheckpointError(repr(name), "a file's name must be one line", got="a line break", cure="Rename it")
    return name, _File(path=path, num_bytes=state.st_size, mtime_ns=state.st_mtime_ns)


def _refuse_large(path: Path, num_bytes: int) -> None:
    """Holes take no room on the disk, and long to be read."""
    if path.suffix == ".json" and num_bytes > _MAX_JSON_BYTES:
        rule = f"a JSON file has at most {_MAX_JSON_BYTES} bytes"
        raise CheckpointError(path, rule, got=num_bytes, cure="Restore it")


def _raise(error: OSError) -> None:
    raise CheckpointError(error.filename, "must be readable", got=error.strerror, cure="Check its permissions")


def _key(file: _File) -> str:
    return os.path.abspath(file.path)


def _is_same(entry: _Known, file: _File) -> bool:
    return (entry.num_bytes, entry.mtime_ns) == (file.num_bytes, file.mtime_ns)


def _read_all(files: Mapping[str, _File], threads: int, watch: ReadingBar | None) -> dict[str, str]:
    """Hash by name. The largest files come first, so that no thread has a large one left at the end."""
    names = sorted(files, key=lambda name: -files[name].num_bytes)
    total = sum(file.num_bytes for file in files.values())
    stop = threading.Event()
    with nullcontext(_ignore) if watch is None else watch(total) as advance, ThreadPoolExecutor(threads) as pool:
        try:
            sums = list(pool.map(lambda name: _read(files[name], advance, stop), names))
        finally:  # an error or Ctrl-C does not wait for terabytes
            stop.set()
            pool.shutdown(cancel_futures=True)
    return dict(zip(names, sums, strict=True))


def _read(file: _File, advance: Callable[[int], None], stop: threading.Event) -> str:
    # Not hashlib.file_digest: a shard of 5 GB would be one step of the bar. Updates release the GIL likewise.
    digest, block = hashlib.sha256(), bytearray(_BLOCK_BYTES)
    view, done = memoryview(block), 0
    try:
        with open(file.path, "rb", buffering=0) as raw:
            # Stop at the size that was found: a file that grows as fast as it is read would never end.
            while (count := raw.readinto(block)) and done <= file.num_bytes and not stop.is_set():
                digest.update(view[:count])
                advance(count)
                done += count
            state = os.fstat(raw.fileno())
    except OSError as error:
        got = error.strerror or repr(error)
        raise CheckpointError(file.path, "must be readable", got=got, cure="Check it") from error
    if (state.st_size, state.st_mtime_ns) != (file.num_bytes, file.mtime_ns):
        raise CheckpointError(
            file.path,
            "must not change while it is read",
            got="another size or time",
            cure="Wait until it is written, and run this again",
        )
    return digest.hexdigest()


def _ignore(_: int) -> None:
    pass


def _read_cache(path: Path) -> Mapping[str, _Known]:
    """The kept hashes; a cache that cannot be read has none, and is written again."""
    try:
        with open_regular(path, path) as file:
            cache = _Cache.model_validate_json(file.read())
    except (CheckpointError, OSError, ValidationError):
        return {}
    return cache.files if cache.version == 1 else {}


def _write_cache(path: Path, files: Mapping[str, _Known]) -> None:
    cache = {"version": 1, "files": {key: entry.model_dump() for key, entry in sorted(files.items())}}
    write_whole(path, json.dumps(cache, indent=2) + "\n")
