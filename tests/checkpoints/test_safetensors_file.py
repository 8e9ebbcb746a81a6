"""Headers that are written here against the safetensors library, and the tables of dtypes against
each other.
"""

import os
import socket
from pathlib import Path

import pytest
import safetensors.torch as safetensors
import torch
from data_files import table
from keepmtp.checkpoints.safetensors_file import fill, lay_out, read_header
from keepmtp.checkpoints.values import TORCH_DTYPES
from keepmtp.recipes.errors import CheckpointError
from keepmtp.recipes.family import HFName
from keepmtp.recipes.schemes import DTYPE_BITS
from safetensors import SafetensorError, safe_open


def test_every_dtype_has_one_name_and_one_size():
    assert {dtype: 8 * TORCH_DTYPES[dtype].itemsize for dtype in TORCH_DTYPES} == dict(DTYPE_BITS)


def test_a_file_is_laid_out_as_the_library_reads_it(tmp_path):
    floats, bytes_ = torch.arange(6.0).reshape(2, 3), torch.tensor([1, 2], dtype=torch.int8)
    tensors = {"b.weight": floats, "a.\u00fc": bytes_}
    layout = lay_out([(HFName("b.weight"), "F32", (2, 3)), (HFName("a.\u00fc"), "I8", (2,))])
    path = tmp_path / "a.safetensors"
    path.write_bytes(layout.header + floats.numpy().tobytes() + bytes_.numpy().tobytes())
    assert path.stat().st_size == layout.num_bytes and len(layout.header) % 8 == 0
    found = safetensors.load_file(path)
    assert found.keys() == tensors.keys() and all(
        torch.equal(found[name], tensors[name]) for name in tensors
    )
    header = read_header(path, "a")
    assert {name: entry.start for name, entry in header.entries.items()} == layout.starts
    assert header.metadata == {"format": "pt"}


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


def test_a_tensor_behind_four_gib(tmp_path):
    """An offset in 32 bits would read other bytes in silence. The file is a hole but for its end."""
    path, last = tmp_path / "a.safetensors", bytearray(4)
    layout = lay_out([("a", "U8", (2**32,)), ("b", "U8", (4,))])
    path.write_bytes(layout.header)
    with open(path, "r+b", buffering=0) as file:
        os.pwrite(file.fileno(), b"last", layout.starts["b"])
        fill(memoryview(last), file, read_header(path, "a").entries["b"], where="a")
    assert last == b"last"


def written(folder: Path, raw: bytes, data: int = 0) -> Path:
    path = folder / "a.safetensors"
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + bytes(data))
    return path


TENSOR = '"dtype":"F32","shape":[1],"data_offsets":[0,4]'
HEADERS = table("checkpoints/headers") | {
    "deep": [f'{{"a":{{"x":{"[" * 100_000}{"]" * 100_000},@}}}}', 4],
    "a number without end": [f'{{"a":{{"x":{"1" * 100_000},@}}}}', 4],
}


@pytest.mark.parametrize("raw, data", HEADERS.values(), ids=HEADERS)
def test_a_header_is_what_safetensors_says(raw, data, tmp_path):
    path = written(tmp_path, raw.replace("@", TENSOR).encode("latin-1"), data)
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
    [
        "",
        "616263",
        "0000000000000000",
        "ffffffffffffffff",
        "ffffffffffffff00",
        "01e1f50500000000",
        "0a00000000000000 7b7d",
        "6400000000000000 7b7d",
    ],
)
def test_a_length_that_no_header_has(first, tmp_path):
    """The last two are longer than what follows, which would be a header by itself."""
    path = tmp_path / "a.safetensors"
    path.write_bytes(bytes.fromhex(first))
    with pytest.raises(SafetensorError):
        safe_open(path, "pt")
    with pytest.raises(
        CheckpointError, match=r"^x: must start with a safetensors header; got a length of"
    ):
        read_header(path, "x")


def test_what_is_no_file_is_not_opened(tmp_path):
    """A pipe that nobody writes to would be waited for without end."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "nowhere").symlink_to("absent")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "socket"))
    kind, no_file = "must be a regular file; got another kind", "must be a readable file; got "
    words = {
        tmp_path / "pipe": kind,
        tmp_path / "folder": kind,
        tmp_path / "socket": f"{no_file}No such device",
        tmp_path / "loop": f"{no_file}Too many levels",
        tmp_path / "nowhere": f"{no_file}No such file",
        Path("/dev/zero"): kind,
    }
    for path, said in words.items():
        with pytest.raises(CheckpointError, match=f"^x: {said}"):
            read_header(path, "x")
