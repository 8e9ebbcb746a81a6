"""Headers that are written here against the safetensors library, and the tables of dtypes against
each other.
"""

import json
import os
import socket
import tracemalloc
from pathlib import Path

import pytest
from keepmtp.checkpoints.safetensors_file import fill, lay_out, read_header, sort_metadata
from keepmtp.recipes.errors import CheckpointError
from keepmtp.recipes.family import HFName
from keepmtp.recipes.schemes import DTYPE_BITS
from safetensors import SafetensorError, safe_open

torch = pytest.importorskip("torch")
safetensors = pytest.importorskip("safetensors.torch")
from keepmtp.checkpoints.values import TORCH_DTYPES  # noqa: E402


def test_every_dtype_has_one_name_and_one_size():
    assert {dtype: 8 * TORCH_DTYPES[dtype].itemsize for dtype in TORCH_DTYPES} == dict(DTYPE_BITS)


def test_a_file_is_laid_out_as_the_library_reads_it(tmp_path):
    tensors = {
        "b.weight": torch.arange(6.0).reshape(2, 3),
        "a.\u00fc": torch.tensor([1, 2], dtype=torch.int8),
    }
    layout = lay_out(
        (HFName(name), "F32" if value.is_floating_point() else "I8", tuple(value.shape))
        for name, value in tensors.items()
    )
    path = tmp_path / "a.safetensors"
    path.write_bytes(
        layout.header + b"".join(value.numpy().tobytes() for value in tensors.values())
    )
    assert path.stat().st_size == layout.num_bytes and len(layout.header) % 8 == 0
    found = safetensors.load_file(path)
    assert found.keys() == tensors.keys() and all(
        torch.equal(found[name], tensors[name]) for name in tensors
    )
    header = read_header(path, "a")
    assert {name: entry.start for name, entry in header.entries.items()} == layout.starts
    assert header.metadata == {"format": "pt"}


def test_metadata_is_in_order_and_nothing_else_changes(tmp_path):
    path = tmp_path / "a.safetensors"
    words = {f"key{number}": "\u00fc" * number for number in (7, 3, 9, 1, 5)}
    safetensors.save_file({"a": torch.arange(5)}, path, metadata=words)
    size = path.stat().st_size
    sort_metadata(path)
    assert path.stat().st_size == size and list(read_header(path, "a").metadata) == sorted(words)
    assert torch.equal(safetensors.load_file(path)["a"], torch.arange(5))


def test_a_file_that_has_become_shorter(tmp_path):
    path = tmp_path / "a.safetensors"
    safetensors.save_file({"a": torch.arange(5)}, path)
    (entry,) = read_header(path, "a").entries.values()
    path.write_bytes(path.read_bytes()[:-1])
    with (
        open(path, "rb", buffering=0) as file,
        pytest.raises(CheckpointError, match="x: a must be whole; got end of"),
    ):
        fill(memoryview(bytearray(entry.num_bytes)), file, entry, where="x")
    with pytest.raises(CheckpointError, match=r"x: must be \d+ bytes long to hold a; got"):
        read_header(path, "x")


@pytest.mark.parametrize(
    "header", [[], {"a": 1}, {"a": {"dtype": "F32", "shape": [1]}}, {"__metadata__": 7}]
)
def test_a_header_that_is_none(header, tmp_path):
    raw = json.dumps(header).encode().ljust(64)
    with pytest.raises(CheckpointError, match="x: must have a valid safetensors header; got"):
        read_header(written(tmp_path, raw), "x")


def written(folder: Path, raw: bytes, data: int = 0) -> Path:
    path = folder / "a.safetensors"
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + bytes(data))
    return path


TENSOR = b'"dtype":"F32","shape":[1],"data_offsets":[0,4]'
ONE = b'{"a":{%b}}' % TENSOR
HEADERS = {
    "right": (ONE, 4),
    "spaces after it": (ONE + b"  \n ", 4),
    "no tensors": (b"{}", 0),
    "an empty tensor": (b'{"a":{"dtype":"F32","shape":[0,9],"data_offsets":[0,0]}}', 0),
    "a key of nobody's": (b'{"a":{"x":[[{}]],%b}}' % TENSOR, 4),
    "another order": (
        b'{"b":{"dtype":"U8","shape":[1],"data_offsets":[1,2]},"a":{"dtype":"U8","shape":[],"data_offsets":[0,1]}}',
        2,
    ),
    "metadata": (b'{"__metadata__":{"format":"pt"},"a":{%b}}' % TENSOR, 4),
    "metadata that is null": (b'{"__metadata__":null,"a":{%b}}' % TENSOR, 4),
    "metadata with a number": (b'{"__metadata__":{"format":1},"a":{%b}}' % TENSOR, 4),
    "metadata that is a list": (b'{"__metadata__":["pt"],"a":{%b}}' % TENSOR, 4),
    "metadata twice": (b'{"__metadata__":{},"__metadata__":{},"a":{%b}}' % TENSOR, 4),
    "UTF-16": (ONE.decode().encode("utf-16"), 4),
    "a byte order mark": (b"\xef\xbb\xbf" + ONE, 4),
    "no UTF-8": (ONE.replace(b"a", b"\xff"), 4),
    "half a character": (ONE.replace(b"a", rb"\ud800"), 4),
    "something after it": (ONE + b"{}", 4),
    "cut": (ONE[:-1], 4),
    "a list": (b"[%b]" % ONE, 4),
    "deep": (b'{"a":{"x":%b%b,%b}}' % (b"[" * 100_000, b"]" * 100_000, TENSOR), 4),
    "NaN": (b'{"a":{"x":NaN,%b}}' % TENSOR, 4),
    "a number without end": (b'{"a":{"x":%b,%b}}' % (b"1" * 100_000, TENSOR), 4),
    "true": (ONE.replace(b"[1]", b"[true]"), 4),
    "a negative side": (ONE.replace(b"[1]", b"[-1]"), 4),
    "sides that overflow": (ONE.replace(b"[1]", b"[4294967296,4294967296,1]"), 4),
    "a shape that is too large": (ONE.replace(b"[1]", b"[2]"), 4),
    "an unknown dtype": (ONE.replace(b"F32", b"F99"), 4),
    "a dtype twice": (b'{"a":{"dtype":"I32",%b}}' % TENSOR, 4),
    "a name twice": (
        b'{"\\u0061":{"dtype":"I32","shape":[1],"data_offsets":[0,4]},"a":{%b}}' % TENSOR,
        4,
    ),
    "an overlap": (b'{"a":{%b},"b":{"dtype":"U8","shape":[2],"data_offsets":[3,5]}}' % TENSOR, 5),
    "a gap": (b'{"a":{%b},"b":{"dtype":"U8","shape":[2],"data_offsets":[5,7]}}' % TENSOR, 7),
    "a name with another range": (
        b'{"a":{%b},"a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}' % TENSOR,
        8,
    ),
    "a byte too little": (ONE, 3),
}


@pytest.mark.parametrize(("raw", "data"), HEADERS.values(), ids=HEADERS)
def test_a_header_is_what_safetensors_says(raw, data, tmp_path):
    path = written(tmp_path, raw, data)
    try:
        with safe_open(path, "pt") as file:
            wanted = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - it is no mapping
            wanted = {
                name: (each.get_dtype(), tuple(each.get_shape())) for name, each in wanted.items()
            }
    except SafetensorError:
        with pytest.raises(
            CheckpointError, match=r"^x: must .*; got .*\. Download the shard again\.$"
        ):
            read_header(path, "x")
        return
    found = read_header(path, "x")
    assert {name: (entry.dtype, entry.shape) for name, entry in found.entries.items()} == wanted
    assert all(isinstance(each, str) for pair in found.metadata.items() for each in pair)


def test_a_dtype_that_only_safetensors_knows(tmp_path):
    path = written(tmp_path, b'{"a":{"dtype":"F4","shape":[2],"data_offsets":[0,1]}}', 1)
    with pytest.raises(CheckpointError, match=r"x: a must have a known dtype; got F4. Convert"):
        read_header(path, "x")


@pytest.mark.parametrize(
    "first",
    [b"", b"abc", b"\0" * 8, b"\xff" * 8, b"\xff" * 7 + b"\0", (10**8 + 1).to_bytes(8, "little")],
)
def test_a_length_that_no_header_has(first, tmp_path):
    path = tmp_path / "a.safetensors"
    path.write_bytes(first)
    with pytest.raises(SafetensorError):
        safe_open(path, "pt")
    with pytest.raises(
        CheckpointError, match=r"^x: must start with a safetensors header; got a length of"
    ):
        read_header(path, "x")


def test_more_tensors_than_any_file_has(tmp_path):
    """Names without bytes cost nothing to write; nothing is built from them."""
    names = (
        f'"{number}":{{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}'
        for number in range(250_001)
    )
    path = written(tmp_path, f"{{{','.join(names)}}}".encode())
    tracemalloc.start()
    with pytest.raises(
        CheckpointError,
        match=r"^x: must hold at most 250000 tensors; got more\. Write it in several",
    ):
        read_header(path, "x")
    assert tracemalloc.get_traced_memory()[1] < 2 * path.stat().st_size
    tracemalloc.stop()


def test_what_is_no_file_is_not_opened(tmp_path):
    """A pipe that nobody writes to would be waited for without end."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "nowhere").symlink_to("absent")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "socket"))
    words = {
        "pipe": "must be a regular file; got another kind",
        "folder": "must be a regular file; got another kind",
        "socket": "must be a readable file; got No such device",
        "loop": "must be a readable file; got Too many levels",
        "nowhere": "must be a readable file; got No such file",
    }
    for name, said in words.items():
        with pytest.raises(CheckpointError, match=rf"^x: {said}"):
            read_header(tmp_path / name, "x")
    with pytest.raises(CheckpointError, match=r"^x: must be a regular file; got another kind"):
        read_header(Path("/dev/zero"), "x")
