"""Headers that are written here against the safetensors library, and the tables of dtypes against each other."""

import json

import pytest
from keepmtp.checkpoints.safetensors_file import fill, lay_out, read_header, sort_metadata
from keepmtp.recipes.errors import CheckpointError
from keepmtp.recipes.family import HFName
from keepmtp.recipes.schemes import DTYPE_BITS

torch = pytest.importorskip("torch")
safetensors = pytest.importorskip("safetensors.torch")
from keepmtp.checkpoints.values import TORCH_DTYPES  # noqa: E402


def test_every_dtype_has_one_name_and_one_size():
    assert {dtype: 8 * TORCH_DTYPES[dtype].itemsize for dtype in TORCH_DTYPES} == dict(DTYPE_BITS)


def test_a_file_is_laid_out_as_the_library_reads_it(tmp_path):
    tensors = {"b.weight": torch.arange(6.0).reshape(2, 3), "a.\u00fc": torch.tensor([1, 2], dtype=torch.int8)}
    layout = lay_out(
        (HFName(name), "F32" if value.is_floating_point() else "I8", tuple(value.shape))
        for name, value in tensors.items()
    )
    path = tmp_path / "a.safetensors"
    path.write_bytes(layout.header + b"".join(value.numpy().tobytes() for value in tensors.values()))
    assert path.stat().st_size == layout.num_bytes and len(layout.header) % 8 == 0
    found = safetensors.load_file(path)
    assert found.keys() == tensors.keys() and all(torch.equal(found[name], tensors[name]) for name in tensors)
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
    with open(path, "rb", buffering=0) as file, pytest.raises(CheckpointError, match="x: a must be whole; got end of"):
        fill(memoryview(bytearray(entry.num_bytes)), file, entry, where="x")
    with pytest.raises(CheckpointError, match=r"x: must be \d+ bytes long to hold a; got"):
        read_header(path, "x")


@pytest.mark.parametrize("header", [[], {"a": 1}, {"a": {"dtype": "F32", "shape": [1]}}, {"__metadata__": 7}])
def test_a_header_that_is_none(header, tmp_path):
    raw = json.dumps(header).encode().ljust(64)
    path = tmp_path / "a.safetensors"
    path.write_bytes(len(raw).to_bytes(8, "little") + raw)
    with pytest.raises(CheckpointError, match="x: must have a valid safetensors header; got"):
        read_header(path, "x")
