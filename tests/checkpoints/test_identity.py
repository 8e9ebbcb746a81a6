"""One number for exactly these bytes: whatever changes them changes it, and nothing else does."""

import hashlib
import os
import shutil
from contextlib import contextmanager
from pathlib import Path

import pytest
from commands import shell
from data_files import json_of, put_json
from keepmtp.checkpoints.identity import CACHE, identify
from keepmtp.recipes.errors import CheckpointError, RecipeError


@pytest.fixture
def folder(tmp_path) -> Path:
    """A checkpoint of three files and a folder, last touched an hour ago."""
    folder = tmp_path / "made"
    (folder / "encoding").mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(bytes(3_000_000))
    (folder / "encoding/a.py").write_text("1")
    for path in folder.rglob("*"):
        os.utime(path, ns=(1_700_000_000_000_000_000,) * 2)
    return folder


def test_the_number_is_over_a_line_a_file(folder):
    """As README and schema say it, so that anybody can compute it."""
    found = identify(folder)
    lines = ""
    for name in ("config.json", "encoding/a.py", "model.safetensors"):
        content = (folder / name).read_bytes()
        lines += f"{hashlib.sha256(content).hexdigest()} {len(content)} {name}\n"
    assert found.sha256 == hashlib.sha256(lines.encode()).hexdigest()
    assert list(found.files) == ["config.json", "encoding/a.py", "model.safetensors"]


def test_the_place_does_not_matter(folder, tmp_path):
    found = identify(folder)
    moved = shutil.copytree(folder, tmp_path / "elsewhere")
    (moved / "model.safetensors").unlink()
    (moved / "model.safetensors").symlink_to(folder / "model.safetensors")
    assert identify(moved) == found, "a link counts as what it leads to, as in the Hub's cache"


@pytest.mark.parametrize(
    "command, is_other",
    [
        (
            'printf "\\001" | dd of=model.safetensors bs=1 seek=2999999 conv=notrunc status=none',
            True,
        ),
        ("mv encoding code", True),
        ("touch new.txt", True),
        ("rm encoding/a.py", True),
        ("mkdir .cache && echo x > .cache/x", False),
        ("echo x > .gitattributes", False),
        ("echo x > model.safetensors.partial", False),
        ("touch config.json", False),
        ("mkdir empty", False),
    ],
)
def test_what_is_another_checkpoint(command, is_other, folder, tmp_path):
    before = identify(folder, cache=tmp_path / "made.report")
    shell(command, folder)
    assert (identify(folder, cache=tmp_path / "made.report").sha256 != before.sha256) == is_other


def test_a_second_look_reads_nothing(folder, tmp_path):
    """Proved by a cache with another sum in it, which is believed until the file's time says
    otherwise.
    """
    evidence = tmp_path / "made.report"
    read: list[int] = []

    @contextmanager
    def watch(total: int):
        read.append(0)
        yield lambda done: read.__setitem__(-1, read[-1] + done)
        assert read[-1] == total, "told of every byte"

    found = identify(folder, cache=evidence, watch=watch)
    assert read == [3_000_003]
    assert identify(folder, cache=evidence, watch=watch) == found and len(read) == 1
    cache = json_of(evidence / CACHE)
    (name,) = [name for name in cache["files"] if name.endswith("model.safetensors")]
    cache["files"][name]["sha256"] = "0" * 64
    put_json(evidence / CACHE, cache)
    assert identify(folder, cache=evidence).files["model.safetensors"].sha256 == "0" * 64
    os.utime(folder / "model.safetensors", ns=(1_700_000_000_000_000_001,) * 2)
    assert identify(folder, cache=evidence, watch=watch) == found and read[1:] == [3_000_000]


def test_what_was_written_just_now_is_not_remembered(folder, tmp_path):
    """It may be written again within the same tick of the file system's clock."""
    (folder / "config.json").write_text("[]")
    identify(folder, cache=tmp_path / "made.report")
    kept = json_of(tmp_path / "made.report" / CACHE)["files"]
    assert sorted(Path(name).name for name in kept) == ["a.py", "model.safetensors"]


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        '{"version": 2, "files": {}}',
        '{"version": 1, "files": {"a": 1}}',
    ],
)
def test_a_cache_that_cannot_be_read_is_none(content, folder, tmp_path):
    evidence = tmp_path / "made.report"
    found = identify(folder, cache=evidence)
    (evidence / CACHE).write_text(content)
    assert identify(folder, cache=evidence) == found
    assert json_of(evidence / CACHE)["version"] == 1


def test_a_cache_that_is_a_pipe_is_not_waited_for(folder, tmp_path):
    evidence = tmp_path / "made.report"
    evidence.mkdir()
    os.mkfifo(evidence / CACHE)
    with pytest.raises(RecipeError, match="got a pipe"):
        identify(folder, cache=evidence)


def test_source_and_checkpoint_share_a_cache(folder, tmp_path):
    """Files of one name, size and time in two folders are two."""
    other = shutil.copytree(folder, tmp_path / "other")
    (other / "config.json").write_bytes(b"[]")
    os.utime(other / "config.json", ns=(1_700_000_000_000_000_000,) * 2)
    evidence = tmp_path / "made.report"
    assert identify(folder, cache=evidence).sha256 != identify(other, cache=evidence).sha256
    assert len(json_of(evidence / CACHE)["files"]) == 6


@pytest.mark.parametrize(
    "command, says",
    [
        ("rm config.json", "must hold a checkpoint; got no config.json"),
        ("ln -s nowhere lost", "lost: must be a readable file; got No such file"),
        ("ln -s encoding more", "more: .*; got a link to a folder"),
        ("mkfifo pipe", "pipe: must be a regular file"),
    ],
)
def test_what_is_no_checkpoint(command, says, folder):
    shell(command, folder)
    with pytest.raises(CheckpointError, match=says):
        identify(folder)


def test_a_file_that_changes_while_it_is_read(folder):
    @contextmanager
    def watch(_: int):
        def grow(_: int) -> None:
            with open(folder / "config.json", "ab") as file:
                file.write(b" ")

        yield grow

    with pytest.raises(CheckpointError, match=r"config\.json: must not change while it is read"):
        identify(folder, watch=watch)
