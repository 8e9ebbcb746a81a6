"""One safetensors file: its header, read and checked, or made for a file that is about to be written.

In: a file, or the tensors that a file will hold. Out: for every tensor its dtype, shape and byte range. No torch is
needed; `recipes.schemes.DTYPE_BITS` has the dtypes, and `dequantize.TORCH_DTYPES` what PyTorch calls them.

Easy to get wrong: a file may be shorter than its header says, and safetensors finds that out only when it maps the
file. `read_header` compares both at once.

Source: the format in safetensors 0.8 README.md. The library's own reader gives no byte ranges, and its writer needs all
tensors in memory: so both are here, and statistics, which are small, are written by the library.
"""

import json
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any

from ..recipes.errors import CheckpointError
from ..recipes.family import HFName
from ..recipes.schemes import DTYPE_BITS, num_bytes

AGAIN = "Download the shard again"
_MAX_HEADER_BYTES = 100_000_000  # safetensors' own limit
_METADATA = "__metadata__"


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One tensor in a safetensors file; `start` is counted from the file's first byte."""

    name: HFName
    file: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FileHeader:
    """What a file's header says: its tensors by name, and the writer's own words."""

    entries: Mapping[HFName, Entry]
    metadata: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class FileLayout:
    """A file that is about to be written.

    Attributes:
        header: its first bytes.
        starts: where each tensor starts, counted from the file's first byte.
        num_bytes: of the whole file.
    """

    header: bytes
    starts: Mapping[HFName, int]
    num_bytes: int


def read_header(path: Path, where: str) -> FileHeader:
    """The header of one safetensors file, checked against the file's size.

    Args:
        path: the file.
        where: its name in messages.

    Raises:
        CheckpointError: no safetensors file, a dtype that is not known, or tensors that do not fill the file.
    """
    size = path.stat().st_size
    header, data_start = _parse(path, where, size)
    try:
        entries = _entries_of(header, path.name, data_start)
        metadata = dict(header.get(_METADATA) or {})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _no_header(where, error) from error
    _refuse_gaps(entries, data_start, size, where)
    return FileHeader(entries=entries, metadata=metadata)


def lay_out(tensors: Iterable[tuple[HFName, str, tuple[int, ...]]]) -> FileLayout:
    """A file of these tensors (name, dtype, shape), one after the other in this order.

    Readers map a file, so tensors with wider dtypes should come first.
    """
    header: dict[str, Any] = {_METADATA: {"format": "pt"}}
    offsets: dict[HFName, int] = {}
    end = 0
    for name, dtype, shape in tensors:
        offsets[name], end = end, end + num_bytes(dtype, shape)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offsets[name], end]}
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    first = 8 + len(raw)
    return FileLayout(
        header=struct.pack("<Q", len(raw)) + raw,
        starts={name: first + offset for name, offset in offsets.items()},
        num_bytes=first + end,
    )


def fill(into: memoryview, file: FileIO, entry: Entry, *, where: object, offset: int = 0, cure: str = AGAIN) -> None:
    """Fill `into` with one tensor's bytes from `offset` on.

    A plain read, not a map: mapped pages of a 5 GB shard would count as this process's memory until it is closed.

    Args:
        into: as long as what is wanted.
        file: opened without a buffer.
        entry: the tensor.
        where: the file's name in messages.
        offset: from the tensor's first byte.
        cure: what to do where the file ends early.

    Raises:
        CheckpointError: the file ends early.
    """
    file.seek(entry.start + offset)
    while into:
        count = file.readinto(into)
        if not count:
            raise CheckpointError(where, f"{entry.name} must be whole", got="end of file", cure=cure)
        into = into[count:]


def sort_metadata(path: Path) -> None:
    """Put a file's metadata in order: safetensors 0.8 writes it in another order each time.

    The same run has to leave the same bytes. The header keeps its length.
    """
    with open(path, "r+b") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
        header[_METADATA] = dict(sorted(header[_METADATA].items()))
        file.seek(8)
        file.write(json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode().ljust(length))


def _parse(path: Path, where: str, size: int) -> tuple[Any, int]:
    """The header's JSON, and where in the file the tensors start."""
    with open(path, "rb") as file:
        first = file.read(8)
        length = struct.unpack("<Q", first)[0] if len(first) == 8 else 0
        if not 2 <= length <= min(_MAX_HEADER_BYTES, size):
            rule = "must start with a safetensors header"
            raise CheckpointError(where, rule, got=f"{size} bytes", cure=AGAIN)
        raw = file.read(length)
    try:
        return json.loads(raw), 8 + length
    except ValueError as error:
        raise _no_header(where, error) from error


def _no_header(where: str, error: Exception) -> CheckpointError:
    return CheckpointError(where, "must have a valid safetensors header", got=repr(error), cure=AGAIN)


def _entries_of(header: Mapping[str, Any], file: str, data_start: int) -> dict[HFName, Entry]:
    entries = {}
    for name, info in header.items():
        if name == _METADATA:
            continue
        start, end = info["data_offsets"]
        entries[HFName(name)] = Entry(
            name=HFName(name),
            file=file,
            dtype=info["dtype"],
            shape=tuple(info["shape"]),
            start=data_start + start,
            num_bytes=end - start,
        )
    return entries


def _refuse_gaps(entries: Mapping[HFName, Entry], data_start: int, size: int, where: str) -> None:
    """Refuse tensors that do not fill the file from its header to its end."""
    end = data_start
    last = "its header"
    for entry in sorted(entries.values(), key=lambda entry: entry.start):
        if entry.dtype not in DTYPE_BITS:
            rule = f"{entry.name} must have a known dtype"
            raise CheckpointError(where, rule, got=entry.dtype, cure="Convert it with safetensors first")
        if entry.num_bytes != num_bytes(entry.dtype, entry.shape) or entry.start != end:
            rule = f"{entry.name} must fill {entry.dtype}{list(entry.shape)} without gaps"
            raise CheckpointError(where, rule, got=f"{entry.num_bytes} bytes at {entry.start}", cure=AGAIN)
        end = entry.start + entry.num_bytes
        last = entry.name
    if end != size:
        raise CheckpointError(where, f"must be {end} bytes long to hold {last}", got=f"{size} bytes", cure=AGAIN)
