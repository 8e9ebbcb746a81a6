"""Shards that an earlier run finished: which bytes they had, and what they were made from.

In: a shard that was written, or one that an earlier run left. Out: a file of hashes, or the reason why the shard must
be written again.

Easy to get wrong: that a file has a shard's name says nothing about its bytes. A disk may have lost some, and the
source may have become another one. A source file whose state is the same is believed. Of any other, the tensors that
the shard was made from are read again: so a source may be moved, and a release that took its place is found.
"""

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError
from torch import Tensor

from ..checkpoints.files import WORK, write_whole
from ..checkpoints.safetensors_file import Entry, FileLayout
from ..checkpoints.source import Source
from ..checkpoints.unchanged import FileStamp
from ..checkpoints.values import read_bytes
from ..recipes.errors import CheckpointError
from ..recipes.family import HFName
from .plan import Plan, Shard

_BLOCK_BYTES = 1 << 20


class FinishedShard(BaseModel):
    """What is kept about a shard.

    Attributes:
        written: a hash over its header and the bytes of its tensors.
        read: SHA-256 of every source tensor that it was made from, as it was read.
        files: the source files that they were in, as they were when the source was opened.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    written: str
    read: Mapping[HFName, str]
    files: Mapping[str, FileStamp]


class HashedReads:
    """Reads tensors of a source for one shard, and keeps the hash of each.

    A tensor is read whole, or in pieces that follow each other; perhaps more than once.
    """

    def __init__(self, source: Source) -> None:
        self.source = source
        self.sums: dict[HFName, str] = {}
        self._begun: dict[HFName, tuple[hashlib._Hash, int]] = {}

    def __call__(self, entry: Entry, *, offset: int = 0, length: int | None = None) -> Tensor:
        """Bytes of a tensor, as U8; see `read_bytes`.

        Raises:
            CheckpointError: the file ends early, or has other bytes than at the first reading.
        """
        raw = read_bytes(self.source, entry, offset=offset, length=length)
        digest, position = self._begun.pop(entry.name, (None, 0)) if offset else (hashlib.sha256(), 0)
        assert digest is not None and position == offset, f"{entry.name}: pieces must follow each other"
        digest.update(raw.numpy().data)
        if offset + len(raw) < entry.num_bytes:
            self._begun[entry.name] = digest, offset + len(raw)
        elif self.sums.setdefault(entry.name, digest.hexdigest()) != digest.hexdigest():
            rule, got = f"{entry.name} must not change during a run", "other bytes at the second reading"
            raise CheckpointError(f"{self.source.where}/{entry.file}", rule, got=got, cure="Run the same command again")
        return raw


def finished_path(folder: Path, shard: Shard) -> Path:
    """The file of hashes for a shard of an unfinished output."""
    return folder / WORK / f"{shard.file}.json"


def remember(path: Path, plan: Plan, *, written: str, read: Mapping[HFName, str]) -> None:
    """Write a shard's file of hashes."""
    files = sorted({plan.entries[name].file for name in read})
    states = {file: plan.source.states[file] for file in files if file in plan.source.states}
    write_whole(path, FinishedShard(written=written, read=dict(sorted(read.items())), files=states).model_dump_json())


def fault_of(
    plan: Plan, shard: Shard, folder: Path, layout: FileLayout, *, is_stopped: Callable[[], bool] = lambda: False
) -> str:
    """Why a shard that is there must be written again; "" if it is what this run would write.

    Args:
        plan: of this run.
        shard: its file is in `folder`.
        folder: of the unfinished output.
        layout: of the shard's file.
        is_stopped: asked between two tensors; True ends with "" at once.
    """
    try:
        known = FinishedShard.model_validate_json(finished_path(folder, shard).read_bytes())
    except (FileNotFoundError, ValidationError):
        return "no hashes of it were kept"
    if _written_in(folder / shard.file, shard, layout, is_stopped) != known.written:
        return "its bytes are not those that were written"
    again = HashedReads(plan.source)
    for name, wanted in known.read.items():
        entry = plan.entries.get(name)
        if entry is None:
            return f"the source has no {name} any more"
        state = plan.source.states.get(entry.file)
        if is_stopped() or (state is not None and known.files.get(entry.file) == state):
            continue
        for offset in range(0, entry.num_bytes, _BLOCK_BYTES):
            again(entry, offset=offset, length=min(_BLOCK_BYTES, entry.num_bytes - offset))
        if entry.num_bytes and again.sums[name] != wanted:
            return f"{entry.file} of the source has another {name}"
    return ""


def written_sum(header: bytes, sums: Mapping[HFName, bytes]) -> str:
    """One hash over a shard's header and the hashes of its tensors' bytes."""
    digest = hashlib.sha256(header)
    for name in sorted(sums):
        digest.update(sums[name])
    return digest.hexdigest()


def _written_in(path: Path, shard: Shard, layout: FileLayout, is_stopped: Callable[[], bool]) -> str:
    """The same of a file; "" if its header or its length is another."""
    sums: dict[HFName, bytes] = {}
    with open(path, "rb", buffering=0) as file:
        if path.stat().st_size != layout.num_bytes or file.read(len(layout.header)) != layout.header:
            return ""
        for output in shard.outputs:  # in the order of their bytes
            if is_stopped():
                return ""
            digest, left = hashlib.sha256(), output.num_bytes
            while left and (block := file.read(min(_BLOCK_BYTES, left))):
                digest.update(block)
                left -= len(block)
            sums[output.name] = digest.digest()
    return written_sum(layout.header, sums)
