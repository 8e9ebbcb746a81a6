"""One safetensors file: its header, judged and read, or made for a file that is about to be
written.

In: a file, the bytes of a header, or the tensors that a file will hold. Out: for every tensor its
dtype, shape and byte range. No torch is needed; `recipes.schemes.DTYPE_BITS` has the dtypes, and
`values.TORCH_DTYPES` what PyTorch calls them.

Easy to get wrong: what a header is, decides the safetensors library alone, because vLLM reads files
with it. Python's own JSON takes more: UTF-16, NaN, a name twice. So the library judges first, and
only a header that it takes is read here.

Source: the format in safetensors 0.8 README.md. The library's own reader gives no byte ranges, and
its writer needs all tensors in memory: so both are here, and statistics, which are small, are
written by the library.
"""

import json
import os
import stat
import struct
from collections.abc import Iterable, Mapping
from io import FileIO
from pathlib import Path
from typing import Any, BinaryIO

from ..recipes.errors import CheckpointError
from ..recipes.family import HFName
from ..recipes.frozen import Json, Shape, frozen
from ..recipes.schemes import DTYPE_BITS, num_bytes

AGAIN = "Download the shard again"
LENGTH_BYTES = 8
"""A file starts with the length of its header in so many bytes."""
_MAX_HEADER_BYTES = 100_000_000  # safetensors' own limit
_METADATA = "__metadata__"
_RIGHT = b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}'


@frozen
class Entry:
    """One tensor in a safetensors file; `start` is counted from the file's first byte."""

    name: HFName
    file: str
    dtype: str
    shape: Shape
    start: int
    num_bytes: int


@frozen
class FileHeader:
    """What a file's header says: its tensors by name, and the writer's own words."""

    entries: Mapping[HFName, Entry]
    metadata: Mapping[str, str]


@frozen
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


def total_bytes(tensors: Iterable[Any]) -> int:
    """Of entries, or of tensors that will be written."""
    return sum(tensor.num_bytes for tensor in tensors)


def read_header(path: Path, where: str) -> FileHeader:
    """The header of one safetensors file, checked against the file's size.

    Args:
        path: the file.
        where: its name in messages.

    Raises:
        CheckpointError: no regular file, no header that safetensors takes, a dtype that is not
            known, or tensors that do not fill the file.
    """
    with open_regular(path, where) as file:
        size = os.fstat(file.fileno()).st_size
        raw = file.read(header_length(file.read(LENGTH_BYTES), size, where))
    return parse_header(raw, file=path.name, num_bytes=size, where=where)


def header_length(first: bytes, num_bytes: int, where: str) -> int:
    """How many bytes of JSON follow the first 8 bytes of a file of `num_bytes`.

    Raises:
        CheckpointError: more than the file has, or more than safetensors reads.
    """
    length = 0
    if len(first) == LENGTH_BYTES:
        (length,) = struct.unpack("<Q", first)
    if not 2 <= length <= min(_MAX_HEADER_BYTES, num_bytes - LENGTH_BYTES):
        raise CheckpointError(
            where,
            "must start with a safetensors header",
            got=f"a length of {length} in a file of {num_bytes} bytes",
            cure=AGAIN,
        )
    return length


def parse_header(raw: bytes, *, file: str, num_bytes: int, where: str) -> FileHeader:
    """What a header says.

    Args:
        raw: its JSON, without the 8 bytes of its length.
        file: the file's name.
        num_bytes: of the whole file.
        where: the file's name in messages.

    Raises:
        CheckpointError: safetensors does not take it, a dtype that is not known, or the tensors do
            not fill the file.
    """
    # The library gets the header as a file that ends after it. Of a right header it then says that
    # the tensors' bytes are missing, and it says so last of all.
    complaint = _complaint(raw)
    if complaint not in ("", _complaint(_RIGHT)):
        raise CheckpointError(
            where, "must have a valid safetensors header", got=complaint, cure=AGAIN
        )
    header = json.loads(raw)  # of a name that is there twice, the last, as safetensors takes it
    metadata = header.pop(_METADATA, None) or {}
    entries: dict[HFName, Entry] = {}
    first = end = LENGTH_BYTES + len(raw)
    last = "its header"
    for name, info in header.items():
        # The library takes a tensor's three values also without their keys.
        if isinstance(info, dict):
            info = (info["dtype"], info["shape"], info["data_offsets"])
        dtype, shape, (start, stop) = info
        if dtype not in DTYPE_BITS:
            raise CheckpointError(
                where,
                f"{name} must have a known dtype",
                got=dtype,
                cure="Convert it with safetensors first",
            )
        if first + stop > end:
            end = first + stop
            last = name
        entries[name] = Entry(
            name=name,
            file=file,
            dtype=dtype,
            shape=tuple(shape),
            start=first + start,
            num_bytes=stop - start,
        )
    if end != num_bytes:
        raise CheckpointError(
            where, f"must be {end} bytes long to hold {last}", got=f"{num_bytes} bytes", cure=AGAIN
        )
    return FileHeader(entries=entries, metadata=metadata)


def open_regular(path: Path, where: object, *, cure: str = "") -> BinaryIO:
    """Open a file to read it; a pipe, a socket, a device or a folder is refused and never waited
    for.

    Raises:
        CheckpointError: no regular file, or one that cannot be opened.
    """
    try:
        # Without O_NONBLOCK, a pipe would be waited for.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError) as error:
        got = getattr(error, "strerror", None) or str(error)
        cure = cure or "Check the file"
        raise CheckpointError(where, "must be a readable file", got=got, cure=cure) from error
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return open(descriptor, "rb")
    os.close(descriptor)
    cure = cure or "Replace it by the file"
    raise CheckpointError(where, "must be a regular file", got="another kind", cure=cure)


def lay_out(tensors: Iterable[tuple[HFName, str, Shape]]) -> FileLayout:
    """A file of these tensors (name, dtype, shape), one after the other in this order, and a
    writer's own words.

    Readers map a file, so tensors with wider dtypes should come first.
    """
    header: Json = {_METADATA: {"format": "pt"}}
    starts: dict[HFName, int] = {}
    end = 0
    for name, dtype, shape in tensors:
        starts[name] = end
        end = end + num_bytes(dtype, shape)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [starts[name], end]}
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    first = LENGTH_BYTES + len(raw)
    starts = {name: first + offset for name, offset in starts.items()}
    return FileLayout(
        header=struct.pack("<Q", len(raw)) + raw, starts=starts, num_bytes=first + end
    )


def fill(
    into: memoryview,
    file: FileIO,
    entry: Entry,
    *,
    where: object,
    offset: int = 0,
    cure: str = AGAIN,
) -> None:
    """Fill `into` with one tensor's bytes from `offset` on.

    A plain read, not a map: mapped pages of a 5 GB shard would count as this process's memory until
    it is closed.

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
            raise CheckpointError(
                where, f"{entry.name} must be whole", got="end of file", cure=cure
            )
        into = into[count:]


def _complaint(raw: bytes) -> str:
    """What safetensors says of a file with this header and nothing after it; "" if it takes the
    file.
    """
    from safetensors import SafetensorError, deserialize

    try:
        deserialize(struct.pack("<Q", len(raw)) + raw)
    except SafetensorError as error:
        return str(error).removeprefix("Error while deserializing: ")
    return ""
