"""The bytes that are sent are those that were hashed (validate/publish/taken.py)."""

import hashlib
import io
import os
import threading
from pathlib import Path

import pytest
from keepmtp.recipes.errors import CheckpointError
from keepmtp.validate.publish import taken
from keepmtp.validate.publish.taken import Compared, Taken, take
from keepmtp.validate.publish.upload_set import LocalFile

BLOCK = 64
CONTENT = bytes(range(256)) * 3 + b"end"


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(taken, "BLOCK_BYTES", BLOCK)


def local(path: Path, content: bytes = CONTENT) -> LocalFile:
    path.write_bytes(content)
    digest = hashlib.sha256(content).hexdigest()
    return LocalFile(name=path.name, path=path, num_bytes=len(content), sha256=digest)


def taken_of(file: LocalFile) -> Taken:
    return take(file, lambda _: None, threading.Event())


@pytest.mark.parametrize("size", [1, BLOCK - 1, BLOCK, BLOCK + 1, 1000])
def test_a_shard_is_read_as_it_is(tmp_path, size):
    held = taken_of(local(tmp_path / "a.safetensors"))
    with Compared(held) as file:
        assert b"".join(iter(lambda: file.read(size), b"")) == CONTENT
        for start in (0, 5, BLOCK, 700):
            assert file.seek(start) == start and file.read(size) == CONTENT[start : start + size] and file.tell()
        assert file.seek(-3, io.SEEK_END) == len(CONTENT) - 3 and file.read() == b"end"


def test_a_shard_is_held_by_its_states_and_a_small_file_by_its_bytes(tmp_path):
    shard, small = taken_of(local(tmp_path / "a.safetensors")), taken_of(local(tmp_path / "a.json"))
    assert shard.content is None and len(shard.states) == -(-len(CONTENT) // BLOCK) + 1
    assert small.content == CONTENT and not small.states
    assert small.git_hash == hashlib.sha1(b"blob %d\0%b" % (len(CONTENT), CONTENT)).hexdigest()


@pytest.mark.parametrize("at", [0, 63, 64, 500, len(CONTENT) - 1])
def test_no_byte_of_a_block_that_changed_is_given_out(tmp_path, at):
    file = local(tmp_path / "a.safetensors")
    held = taken_of(file)
    changed = bytearray(CONTENT)
    changed[at] ^= 1
    file.path.write_bytes(changed)
    given = b""
    with (
        Compared(held) as sent,
        pytest.raises(CheckpointError, match=r"a\.safetensors is another now, while it is sent"),
    ):
        while part := sent.read(10):
            given += part
    assert given == CONTENT[: len(given)] and len(given) <= at // BLOCK * BLOCK


def test_a_shard_that_became_shorter(tmp_path):
    file = local(tmp_path / "a.safetensors")
    held = taken_of(file)
    os.truncate(file.path, 200)
    with Compared(held) as sent, pytest.raises(CheckpointError, match="is another now"):
        sent.read()


@pytest.mark.parametrize("name", ["a.safetensors", "a.json"])
@pytest.mark.parametrize("content", [CONTENT[:-1] + b"!", CONTENT[:-1], CONTENT + b"!"])
def test_another_file_than_was_measured_is_refused(tmp_path, name, content):
    file = local(tmp_path / name)
    file.path.write_bytes(content)
    with pytest.raises(CheckpointError, match=f"must be the bytes that its report is about; got {name} is another"):
        taken_of(file)


@pytest.mark.parametrize("kind", ["link", "pipe", "folder", "nothing"])
def test_only_a_file_of_its_own_is_opened(tmp_path, kind):
    file = local(tmp_path / "a.json")
    (tmp_path / "b.json").write_bytes(CONTENT)
    file.path.unlink()
    {
        "link": lambda: file.path.symlink_to(tmp_path / "b.json"),
        "pipe": lambda: os.mkfifo(file.path),
        "folder": file.path.mkdir,
        "nothing": bool,
    }[kind]()
    with pytest.raises(CheckpointError, match="must be a file of its own"):
        taken_of(file)
