"""New shards of a rewritten checkpoint: tensors with new bytes, and tensors of other shards under new names.

In: `NewTensor`s. Out: a safetensors file, written part by part, on the disk.

Easy to get wrong: vLLM reads whole files that the index names, so a tensor must not stay in an old shard when it is
written in a new one. A touched shard is written again, whole, under its own name (`shard_again`).
"""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ..checkpoints.files import naming_file
from ..checkpoints.safetensors_file import Entry, lay_out
from ..checkpoints.source import Source, read
from ..recipes.errors import CheckpointError
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


def as_it_was(entry: Entry) -> NewTensor:
    """The old tensor."""
    return NewTensor(name=entry.name, dtype=entry.dtype, shape=entry.shape, data=entry)


def shard_again(source: Source, file: str, changes: Mapping[HFName, NewTensor | None]) -> list[NewTensor]:
    """The tensors of an old shard, with those in `changes` in another form; None leaves one out."""
    found = (entry for entry in (*source.entries.values(), *source.unindexed.values()) if entry.file == file)
    tensors = (changes.get(entry.name, as_it_was(entry)) for entry in sorted(found, key=lambda entry: entry.start))
    return [tensor for tensor in tensors if tensor is not None]


def write_shard(
    path: Path, tensors: Iterable[NewTensor], source: Source, *, written: Callable[[int], None] = lambda count: None
) -> str:
    """Write a shard; returns its name. Wider dtypes come first, since readers map the file.

    Args:
        path: of the new file.
        tensors: what it holds.
        source: the checkpoint, on this machine, that has the old tensors.
        written: called with numbers of bytes.

    Raises:
        CheckpointError: an old file ends early, or a tensor has another number of bytes than its shape.
    """
    in_order: Sequence[NewTensor] = sorted(tensors, key=lambda tensor: -DTYPE_BITS[tensor.dtype])
    layout = lay_out((tensor.name, tensor.dtype, tensor.shape) for tensor in in_order)
    with naming_file(path), open(path, "xb", buffering=0) as file:
        _all(file.fileno(), layout.header)
        for tensor in in_order:
            _refuse_other_size(path, tensor)
            for part in _parts(source, tensor):
                _all(file.fileno(), part)
                written(len(part))
        os.fsync(file.fileno())
    return path.name


def _parts(source: Source, tensor: NewTensor) -> Iterable[bytes | memoryview]:
    """A tensor's bytes, part by part."""
    if isinstance(tensor.data, bytes):
        yield tensor.data
        return
    if tensor.convert is not None:
        whole = bytearray(tensor.data.num_bytes)
        read(source, tensor.data, memoryview(whole))
        converted = tensor.convert(bytes(whole))
        assert len(converted) == tensor.num_bytes, tensor.name
        yield converted
        return
    buffer = memoryview(bytearray(min(_PART, tensor.num_bytes)))
    for offset in range(0, tensor.num_bytes, _PART):
        part = buffer[: min(_PART, tensor.num_bytes - offset)]
        read(source, tensor.data, part, offset=offset)
        yield part


def _all(descriptor: int, data: bytes | memoryview) -> None:
    """Write all of it: a write without a buffer may take a part."""
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def _refuse_other_size(path: Path, tensor: NewTensor) -> None:
    have = len(tensor.data) if isinstance(tensor.data, bytes) else tensor.data.num_bytes
    if have != tensor.num_bytes and tensor.convert is None:
        rule = f"{tensor.name} must have {tensor.num_bytes} bytes as {tensor.dtype}{list(tensor.shape)}"
        raise CheckpointError(path, rule, got=have, cure="Check the checkpoint that it comes from")


def renamed(entry: Entry, name: str) -> NewTensor:
    """The old tensor under another name."""
    return replace(as_it_was(entry), name=HFName(name))
