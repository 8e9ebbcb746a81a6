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
        written: a hash over its header and the hashes of its tensors' bytes.
        files: the source files that it was made from, as they were when the source was opened.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    written: str
    files: Mapping[str, FileStamp]


def _made_from(
    plan: Plan, shard: Shard, header: bytes, sums: Mapping[HFName, bytes]
) -> FinishedShard:
    digest = hashlib.sha256(header)
    for name in sorted(sums):
        digest.update(sums[name])
    read = {
        plan.entries[name].file for unit in shard.units for tensor in unit for name in tensor.inputs
    }
    files = {file: plan.source.states[file] for file in sorted(read) if file in plan.source.states}
    return FinishedShard(written=digest.hexdigest(), files=files)


def remember(
    plan: Plan, shard: Shard, folder: Path, header: bytes, sums: Mapping[HFName, bytes]
) -> None:
    """Write a shard's file of hashes, from the header of its file and the hashes of its tensors'
    bytes.
    """
    text = _made_from(plan, shard, header, sums).model_dump_json()
    write_whole(folder / WORK / f"{shard.file}.json", text)


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
        is_stopped: asked between two tensors; True ends with any answer at once.
    """
    try:
        raw = (folder / WORK / f"{shard.file}.json").read_bytes()
        known = FinishedShard.model_validate_json(raw)
    except (FileNotFoundError, ValidationError):
        return "no hashes of it were kept"
    path, sums = folder / shard.file, dict[HFName, bytes]()
    with open(path, "rb", buffering=0) as file:
        header = file.read(len(layout.header))
        for output in shard.outputs:  # in the order of their bytes
            digest, left = hashlib.sha256(), output.num_bytes
            while left and not is_stopped() and (block := file.read(min(_BLOCK_BYTES, left))):
                digest.update(block)
                left -= len(block)
            sums[output.name] = digest.digest()
        is_longer = file.read(1)
    now = _made_from(plan, shard, header, sums)
    if is_longer or now.written != known.written:
        return "its bytes are not those that were written"
    for file, stamp in now.files.items():
        if known.files.get(file) != stamp:
            return f"{file} of the source is another file now, or was written to"
    return ""
