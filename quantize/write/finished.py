"""Shards that an earlier run finished: which bytes they had, and what they were made from.

In: a shard that was written, or one that an earlier run left. Out: a file of hashes, or the reason
why the shard must be written again.

Easy to get wrong: that a file has a shard's name says nothing about its bytes. A disk may have lost
some, so they are read again; and the source may have become another one, so the stamps of its files
are compared. Hashes of what is read would say more of a source that was moved, but they double the
work, and a shard is written again as fast as compared.
"""

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from ...checkpoints.files import WORK, write_whole
from ...checkpoints.identity import FileStamp
from ...checkpoints.safetensors_file import FileLayout
from ...recipes.family import HFName
from ..plan.plan import Plan, Shard

_BLOCK_BYTES = 1 << 20


class FinishedShard(BaseModel):
    """What is kept about a shard.

    Attributes:
        written: a hash over its header and the bytes of its tensors.
        files: the source files that it was made from, as they were when the source was opened.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    written: str
    files: Mapping[str, FileStamp]


def finished_path(folder: Path, shard: Shard) -> Path:
    """The file of hashes for a shard of an unfinished output."""
    return folder / WORK / f"{shard.file}.json"


def remember(path: Path, plan: Plan, shard: Shard, *, written: str) -> None:
    """Write a shard's file of hashes."""
    write_whole(
        path, FinishedShard(written=written, files=_files_of(plan, shard)).model_dump_json()
    )


def fault_of(
    plan: Plan,
    shard: Shard,
    folder: Path,
    layout: FileLayout,
    *,
    is_stopped: Callable[[], bool] = lambda: False,
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
    for file, stamp in _files_of(plan, shard).items():
        if known.files.get(file) != stamp:
            return f"{file} of the source is another file now, or was written to"
    return ""


def _files_of(plan: Plan, shard: Shard) -> dict[str, FileStamp]:
    """The source files that a shard is made from, as they were when the source was opened."""
    names = {name for unit in shard.units for tensor in unit for name in tensor.inputs}
    files = sorted({plan.entries[name].file for name in names})
    return {file: plan.source.states[file] for file in files if file in plan.source.states}


def written_sum(header: bytes, sums: Mapping[HFName, bytes]) -> str:
    """One hash over a shard's header and the hashes of its tensors' bytes."""
    digest = hashlib.sha256(header)
    for name in sorted(sums):
        digest.update(sums[name])
    return digest.hexdigest()


def _written_in(
    path: Path, shard: Shard, layout: FileLayout, is_stopped: Callable[[], bool]
) -> str:
    """The same of a file; "" if its header or its length is another."""
    sums: dict[HFName, bytes] = {}
    with open(path, "rb", buffering=0) as file:
        if (
            path.stat().st_size != layout.num_bytes
            or file.read(len(layout.header)) != layout.header
        ):
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
