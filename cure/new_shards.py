"""New shards of a rewritten checkpoint: tensors with new bytes, and tensors of other shards under
new names.

In: `NewTensor`s. Out: a safetensors file, written part by part, on the disk.

Easy to get wrong: vLLM reads whole files that the index names, so a tensor must not stay in an old
shard when it is written in a new one. A touched shard is written again, whole, under its own name.
"""

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from ..checkpoints.files import naming_file
from ..checkpoints.safetensors_file import Entry, lay_out
from ..checkpoints.source import Source, read
from ..recipes.family import HFName
from ..recipes.schemes import DTYPE_BITS, num_bytes

_PART = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class NewTensor:
    """A tensor of a new shard.

    Attributes:
        name: its name there.
        dtype, shape: as safetensors writes them.
        data: its bytes, or the old tensor that has them.
        convert: makes its bytes from the old tensor's; None where they are the same.
    """

    name: HFName
    dtype: str
    shape: tuple[int, ...]
    data: bytes | Entry
    convert: Callable[[bytes], bytes] | None = None

    @property
    def num_bytes(self) -> int:
        """How many bytes it has."""
        return num_bytes(self.dtype, self.shape)

    def bytes_from(self, source: Source) -> bytes:
        """All its bytes.

        Raises:
            CheckpointError: the old file ends early.
        """
        if isinstance(self.data, bytes):
            return self.data
        whole = bytearray(self.data.num_bytes)
        read(source, self.data, memoryview(whole))
        return bytes(whole) if self.convert is None else self.convert(bytes(whole))


def as_it_was(entry: Entry) -> NewTensor:
    """The old tensor."""
    return NewTensor(name=entry.name, dtype=entry.dtype, shape=entry.shape, data=entry)


def write_shard(
    path: Path,
    tensors: Iterable[NewTensor],
    source: Source,
    *,
    written: Callable[[int], None] = lambda count: None,
) -> None:
    """Write a shard. Wider dtypes come first, since readers map the file.

    Args:
        path: of the new file.
        tensors: what it holds.
        source: the checkpoint, on this machine, that has the old tensors.
        written: called with numbers of bytes.

    Raises:
        CheckpointError: an old file ends early.
    """
    in_order = sorted(tensors, key=lambda tensor: -DTYPE_BITS[tensor.dtype])
    layout = lay_out((tensor.name, tensor.dtype, tensor.shape) for tensor in in_order)
    with naming_file(path), open(path, "xb") as file:
        file.write(layout.header)
        for tensor in in_order:
            for part in _parts(source, tensor):
                file.write(part)
                written(len(part))
        file.flush()
        os.fsync(file.fileno())
        assert file.tell() == layout.num_bytes, (
            f"{path}: a tensor's bytes are not those of its shape"
        )


def _parts(source: Source, tensor: NewTensor) -> Iterable[bytes | memoryview]:
    """A tensor's bytes, part by part."""
    if isinstance(tensor.data, bytes) or tensor.convert is not None:
        yield tensor.bytes_from(source)
        return
    buffer = memoryview(bytearray(min(_PART, tensor.num_bytes)))
    for offset in range(0, tensor.num_bytes, _PART):
        part = buffer[: min(_PART, tensor.num_bytes - offset)]
        read(source, tensor.data, part, offset=offset)
        yield part
