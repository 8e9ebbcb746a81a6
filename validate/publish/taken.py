"""The bytes that are sent are those that were hashed: small files are held in memory, and shards are compared again.

In: a file of the checkpoint, with the hash that the report has of it. Out: a `Taken`, and from it what huggingface_hub
reads while it sends.

Easy to get wrong: a file that is hashed, and then opened again to be sent, can be another one by then. A small file is
read once. A shard is too large to hold. So SHA-256 keeps its state after each block while the shard is hashed, and each
block that is sent must lead from the state before it to the state after it. That costs no second hash, and a part that
is sent again begins at any block.
"""

import hashlib
import io
import os
import stat
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from huggingface_hub import CommitOperationAdd
from huggingface_hub.lfs import UploadInfo

from ...checkpoints.identity import ReadingBar
from ...recipes.errors import CheckpointError

if TYPE_CHECKING:
    from .upload_set import LocalFile

BLOCK_BYTES = 8 << 20
SMALL_BYTES = 64 << 20
"""Files up to this size are held in memory, if they are no shards."""
_AGAIN = "Wait until nothing writes to it, and run the same command again"
Advance = Callable[[int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """A file as it was hashed.

    Attributes:
        content: of a small file; None for a shard.
        states: of a shard: SHA-256 after no block, after one, and so on.
        git_hash: git's hash of the file; "" for a shard, which the Hub never stores as a small file.
    """

    local: "LocalFile"
    content: bytes | None = None
    states: Sequence[Any] = ()
    git_hash: str = ""

    def operation(self, reached: Callable[[str, int], None]) -> CommitOperationAdd:
        """What huggingface_hub sends: bytes, or a shard that is compared while it is read.

        Args:
            reached: called with a shard's name and the number of its bytes that were read, from any thread.
        """
        if self.content is not None:
            return CommitOperationAdd(path_in_repo=self.local.name, path_or_fileobj=self.content)
        shard = _Shard(path_in_repo=self.local.name, path_or_fileobj=b"")
        shard.open = lambda: Compared(self, lambda at: reached(self.local.name, at))
        with shard.open() as file:
            sample = file.read(512)
        sha256 = bytes.fromhex(self.local.sha256)
        shard.upload_info = UploadInfo(size=self.local.num_bytes, sample=sample, sha256=sha256)
        # huggingface_hub 1.33 sends an open file by LFS. By Xet it sends paths, which hf_xet reads by itself, so that
        # nothing could be compared on the way.
        shard.path_or_fileobj = io.BufferedIOBase()  # pyright: ignore[reportAttributeAccessIssue]
        return shard


class _Shard(CommitOperationAdd):
    """A shard for huggingface_hub; each time it is sent, it is opened anew."""

    open: "Callable[[], Compared]"

    @contextmanager
    def as_file(self, with_tqdm: bool = False) -> "Iterator[BinaryIO]":
        with self.open() as file:
            yield file  # pyright: ignore[reportReturnType] # BufferedIOBase has all that is used


def open_plain(path: Path) -> BinaryIO:
    """Open a file to read, but no link, and nothing that waits or is endless, such as a pipe.

    Raises:
        CheckpointError: it is not a regular file, or cannot be read.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        got = "a link" if path.is_symlink() else error.strerror
        raise CheckpointError(path, "must be a file of its own", got=got, cure="Put the file there") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise CheckpointError(path, "must be a file of its own", got="something else", cure="Put the file there")
    return os.fdopen(descriptor, "rb", buffering=0)  # pyright: ignore[reportReturnType] # FileIO is one


def take_all(files: Mapping[str, "LocalFile"], *, watch: ReadingBar | None = None) -> dict[str, Taken]:
    """Read every file once, and keep what is needed to send exactly these bytes.

    Raises:
        CheckpointError: names the first file that is not what was measured.
    """
    names = sorted(files, key=lambda name: -files[name].num_bytes)
    total = sum(local.num_bytes for local in files.values() if local.content is None)
    with nullcontext(_ignore) if watch is None else watch(total) as advance:
        pool = ThreadPoolExecutor(os.cpu_count() or 1)
        stop = threading.Event()
        try:
            taken = list(pool.map(lambda name: take(files[name], advance, stop), names))
        finally:  # an error or Ctrl-C does not wait for terabytes
            stop.set()
            pool.shutdown(cancel_futures=True)
    return dict(zip(names, taken, strict=True))


def take(local: "LocalFile", advance: Advance, stop: threading.Event) -> Taken:
    """Read one file, and refuse it if it is not what was measured.

    Raises:
        CheckpointError: another size or hash; a link.
    """
    if local.content is not None:
        return Taken(local=local, content=local.content, git_hash=git_hash(local.content))
    is_small = local.num_bytes <= SMALL_BYTES and not local.name.endswith(".safetensors")
    digest, states, blocks = hashlib.sha256(), [], []
    with open_plain(local.path) as file:
        num_bytes = 0
        states.append(digest.copy())
        while not stop.is_set() and num_bytes <= local.num_bytes and (block := _read_block(file)):
            digest.update(block)
            advance(len(block))
            num_bytes += len(block)
            if is_small:
                blocks.append(block)
            else:
                states.append(digest.copy())
    if (num_bytes, digest.hexdigest()) != (local.num_bytes, local.sha256):
        raise _other(local, f"{local.name} is another")
    if is_small:
        content = b"".join(blocks)
        return Taken(local=local, content=content, git_hash=git_hash(content))
    return Taken(local=local, states=tuple(states))


def git_hash(content: bytes) -> str:
    """Git's hash of a file; the Hub has no other hash of a small one."""
    return hashlib.sha1(b"blob %d\0%b" % (len(content), content), usedforsecurity=False).hexdigest()


def _read_block(file: BinaryIO) -> bytes:
    """A whole block, or what is left."""
    parts, left = [], BLOCK_BYTES
    while left and (part := file.read(left)):
        parts.append(part)
        left -= len(part)
    return b"".join(parts)


def _other(local: "LocalFile", got: str) -> CheckpointError:
    return CheckpointError(local.path.parent, "must be the bytes that its report is about", got=got, cure=_AGAIN)


def _ignore(_: int) -> None:
    pass


class Compared(io.BufferedIOBase):
    """A shard that is read to be sent; each block is compared with the hash before a byte of it is given out.

    Raises:
        CheckpointError: (`read`) the file is not what was hashed any more.
    """

    def __init__(self, taken: Taken, reached: Advance = _ignore) -> None:
        super().__init__()
        self._taken, self._reached = taken, reached
        self._file = open_plain(taken.local.path)
        self._at = 0
        self._number, self._block = -1, b""

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._taken.local.num_bytes}[whence]
        self._at = max(0, start + offset)
        return self._at

    def read(self, size: int | None = -1) -> bytes:
        """So many bytes, fewer only at the end."""
        whole = self._taken.local.num_bytes
        end = whole if size is None or size < 0 else min(whole, self._at + size)
        parts = []
        while self._at < end:
            number, start = divmod(self._at, BLOCK_BYTES)
            self._load(number)
            part = self._block[start : start + end - self._at]
            parts.append(part)
            self._at += len(part)
        self._reached(self._at)
        return b"".join(parts)

    def close(self) -> None:
        self._file.close()
        super().close()

    def _load(self, number: int) -> None:
        if number == self._number:
            return
        self._file.seek(number * BLOCK_BYTES)
        block = _read_block(self._file)
        digest = self._taken.states[number].copy()
        digest.update(block)
        if digest.digest() != self._taken.states[number + 1].digest():
            raise _other(self._taken.local, f"{self._taken.local.name} is another now, while it is sent")
        self._number, self._block = number, block
