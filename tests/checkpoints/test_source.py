"""Headers of local and Hub checkpoints, and each way they can be broken."""

import os
import re
import shutil
from pathlib import Path

import pytest
import torch
from data_files import json_of, put_json
from hub import FIRST_COMMIT
from keepmtp.checkpoints.source import INDEX, download, open_source, read
from keepmtp.recipes.errors import CheckpointError
from releases import source_layout, write_checkpoint, write_shard
from safetensors.torch import load_file


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    config, tensors = source_layout("glm-4.7")
    return write_checkpoint(tmp_path / "source", config, tensors, data="random")


def test_entries_are_what_safetensors_reads(folder):
    """Names, dtypes, shapes and bytes agree with the safetensors library, for every tensor."""
    source = open_source(folder)
    loaded = {}
    for file in sorted(folder.glob("*.safetensors")):
        loaded |= load_file(file)
    assert set(source.entries) == set(loaded)
    for name, entry in source.entries.items():
        assert entry.shape == tuple(loaded[name].shape)
        buffer = bytearray(entry.num_bytes)
        read(source, entry, memoryview(buffer))
        assert buffer == loaded[name].reshape(-1).view(torch.uint8).numpy().tobytes(), name


def refusal(folder: Path | str) -> str:
    with pytest.raises(CheckpointError) as caught:
        open_source(folder)
    message = str(caught.value)
    assert "; got " in message and message.endswith("."), "the house form of an error"
    assert "\n" not in message
    return message


def first_shard(folder: Path) -> Path:
    return min(folder.glob("*.safetensors"))


ODD_NAMES = (
    "|.|/|nope|../nope/x|~/nothing|a/b/c|a//b|-a/b|a/b--c|a/\0|a/\x1b[31m|a/\udc80|a/b?x=1"
    "|http://x/y|a/b@main|a/b\n|\u00fc/\u00e4"
)


@pytest.mark.parametrize("name", [*ODD_NAMES.split("|"), "x" * 5000])
def test_a_name_that_is_no_source(name, tmp_path, monkeypatch):
    """Neither a folder with a checkpoint nor a name that the Hub can have; nothing is asked of the
    Hub.
    """
    monkeypatch.chdir(tmp_path)
    message = refusal(name)
    assert message.isprintable() and len(message) < 6000
    assert "Check its name." in message or name in (".", "/", "http://x/y")


def test_a_file_is_no_source(folder):
    assert "got a file. Name the folder of a checkpoint" in refusal(folder / "config.json")


@pytest.mark.parametrize(
    "file, says",
    [
        ("", "an empty folder"),
        ("adapter_config.json", "adapter_config.json"),
        ("a/config.json", "a"),
    ],
)
def test_what_is_there_instead_is_named(file, says, tmp_path):
    if file:
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_bytes(b"x")
    assert f"has a config.json; got {says}. " in refusal(tmp_path)


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: path.symlink_to("/dev/zero")])
@pytest.mark.parametrize(
    "name", ["config.json", INDEX, "model-00001-of-00002.safetensors", "mtp.safetensors"]
)
def test_what_is_no_file_is_refused_and_not_waited_for(folder, name, make):
    (folder / name).unlink(missing_ok=True)
    make(folder / name)
    assert re.search(
        rf"{name}: .*(must be a regular file; got a|must be in its folder; got a link to)",
        refusal(folder),
    )


INDEXES = {
    "no JSON": b"{",
    "nothing in it": b"{}",
    "a list": b'{"weight_map": ["a"]}',
    "a number for a file": b'{"weight_map": {"a": 7}}',
    "a file elsewhere": b'{"weight_map": {"a": "../model.safetensors"}}',
    "a name of control characters": b'{"weight_map": {"a": "\\u001b[2J\\ud800"}}',
}


@pytest.mark.parametrize("raw", INDEXES.values(), ids=INDEXES)
def test_an_index_that_is_none(folder, raw):
    (folder / INDEX).write_bytes(raw)
    message = refusal(folder)
    assert (
        message.startswith(f"{folder / INDEX}: ") and message.isprintable() and len(message) < 1000
    )


def test_index_naming_a_missing_file(folder):
    shard = first_shard(folder)
    shard.unlink()
    assert f"{shard.name} is missing" in refusal(folder)


def test_index_listing_an_absent_tensor(folder):
    index = json_of(folder / INDEX)
    index["weight_map"]["model.layers.0.ghost.weight"] = first_shard(folder).name
    put_json(folder / INDEX, index)
    assert "model.layers.0.ghost.weight" in refusal(folder)


def test_truncated_shard_names_the_last_tensor(folder):
    shard = first_shard(folder)
    last = max(
        open_source(folder).entries.values(), key=lambda e: (e.file == shard.name, e.start)
    ).name
    with open(shard, "r+b") as file:
        file.truncate(shard.stat().st_size - 10)
    message = refusal(folder)
    assert last in message and shard.name in message


def test_a_tensor_in_two_indexed_files(folder):
    files = sorted(folder.glob("*.safetensors"))
    shutil.copy(files[0], folder / "model-00003-of-00003.safetensors")
    index = json_of(folder / INDEX)
    name = next(n for n, f in index["weight_map"].items() if f == files[0].name)
    index["weight_map"][name] = "model-00003-of-00003.safetensors"
    put_json(folder / INDEX, index)
    assert "must be in one file only" in refusal(folder)


def test_mtp_in_a_file_that_the_index_forgot(tmp_path):
    """`mtp.safetensors` beside an index that does not list it: seen, and kept apart."""
    config, tensors = source_layout("glm-4.7")
    layers = config["num_hidden_layers"]
    mtp = {
        name: spec for name, spec in tensors.items() if name.startswith(f"model.layers.{layers}.")
    }
    rest = {name: spec for name, spec in tensors.items() if name not in mtp}
    folder = write_checkpoint(tmp_path / "source", config, rest)
    write_shard(folder / "mtp.safetensors", mtp)
    source = open_source(folder)
    assert set(source.unindexed) == set(mtp) and set(source.entries) == set(rest)


def test_without_an_index_all_files_are_read(folder):
    """As vLLM reads them; and nothing is silently absent or there twice."""
    (folder / INDEX).rename(folder / "index")
    every = open_source(folder).entries
    (folder / "index").rename(folder / INDEX)
    assert every == open_source(folder).entries
    (folder / INDEX).unlink()
    first = first_shard(folder)
    copied = shutil.copy(first, folder / "more.safetensors")
    assert "must be in one file only" in refusal(folder)
    Path(copied).unlink()
    first.unlink()
    assert f"{first.name} is missing" in refusal(folder)


def test_one_file_and_more_without_an_index(tmp_path):
    """The MTP block in a file of its own is read too, and a copy of the one file is none more."""
    config, tensors = source_layout("glm-4.7")
    block = {name: tensors.pop(name) for name in [*tensors] if name.startswith("model.layers.3.")}
    folder = write_checkpoint(tmp_path / "source", config, tensors)
    for file in (folder / INDEX, *folder.glob("*.safetensors")):
        file.unlink()
    for name, held in {"model": tensors, "mtp": block, "consolidated": tensors}.items():
        write_shard(folder / f"{name}.safetensors", held)
    source = open_source(folder)
    assert source.entries.keys() == {*tensors, *block} and not source.unindexed
    assert {entry.file for entry in source.entries.values()} == {
        "model.safetensors",
        "mtp.safetensors",
    }


# --- The Hub, spoken on loopback ------------------------------------------------------------------


@pytest.fixture
def hub(folder, serve_hub) -> list[str]:
    """The folder as org/model; the requests that were made."""
    return serve_hub(folder)


def test_hub_headers_come_by_range_requests(hub, folder):
    """A repository's tensors without its weights; then the same source, downloaded, equals the
    folder.
    """
    remote, local = open_source("org/model"), open_source(folder)
    assert remote.revision == FIRST_COMMIT and remote.folder is None
    assert {n: (e.dtype, e.shape, e.num_bytes) for n, e in remote.entries.items()} == {
        n: (e.dtype, e.shape, e.num_bytes) for n, e in local.entries.items()
    }
    assert all("bytes=" in line for line in hub if ".safetensors " in line)
    fetched = download(remote)
    assert (
        fetched.folder is not None
        and fetched.revision == FIRST_COMMIT
        and fetched.entries == local.entries
    )


def test_hub_repository_that_does_not_exist(hub):
    with pytest.raises(
        CheckpointError, match="org/other: must be a folder or a public Hub repository"
    ):
        open_source("org/other")


def test_hub_out_of_reach(hub_at):
    hub_at("http://127.0.0.1:9")  # nothing listens there
    with pytest.raises(
        CheckpointError,
        match=r"org/model: the Hub must be reachable; got .*or name a folder\.",
    ):
        open_source("org/model")


def test_a_header_on_the_hub_is_judged_as_a_local_one(folder, serve_hub):
    """A shard that safetensors refuses, one that is too short, one whose header takes a second
    request.
    """
    shard = first_shard(folder)
    good = shard.read_bytes()
    length = int.from_bytes(good[:8], "little")
    header = good[8 : 8 + length]

    def put(raw: bytes, cut: int = 0) -> Path:
        new = len(raw).to_bytes(8, "little") + raw + good[8 + length :]
        shard.write_bytes(new[: len(new) - cut])
        return folder

    serve_hub(put(header + b" " * 200_000))
    assert open_source("org/model").entries == open_source(folder).entries
    faults = {
        "must have a valid safetensors header": (header.decode().encode("utf-16"), 0),
        "must be .* bytes long to hold": (header, 7),
        "must start with a safetensors header": (b"", 0),
    }
    for words, (raw, cut) in faults.items():
        serve_hub(put(raw, cut))
        with pytest.raises(CheckpointError, match=rf"^org/model/{shard.name}: {words}.*; got"):
            open_source("org/model")
