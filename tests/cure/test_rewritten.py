"""New folders from finished ones: links, new shards, the index, kills at every step, and what is
refused.
"""

import json
import os
import struct
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from commands import shell
from data_files import cases, json_of, put_json
from keepmtp.checkpoints.files import WORK, partial_path
from keepmtp.checkpoints.proposal import CONFIG, Proposal
from keepmtp.checkpoints.source import INDEX, open_source
from keepmtp.cure.rewritten import Rewritten, rewrite
from keepmtp.recipes.errors import CheckpointError, RecipeError
from outputs import digests, ended_at


def shard(path: Path, tensors: dict[str, bytes]) -> None:
    header, end = {}, 0
    for name, data in tensors.items():
        header[name] = {"dtype": "U8", "shape": [len(data)], "data_offsets": [end, end + len(data)]}
        end += len(data)
    raw = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + b"".join(tensors.values()))


@pytest.fixture
def old(tmp_path) -> Path:
    folder = tmp_path / "old"
    (folder / "more").mkdir(parents=True)
    shard(folder / "a.safetensors", {"one": b"1111", "two": b"22"})
    shard(folder / "b.safetensors", {"three": b"333"})
    shard(folder / "mtp.safetensors", {"four": b"4"})
    index = {
        "metadata": {"by": "x"},
        "weight_map": {"one": "a.safetensors", "two": "a.safetensors"},
    }
    index["weight_map"]["three"] = "b.safetensors"
    put_json(folder / INDEX, index)
    (folder / "config.json").write_text('{"model_type": "x"}')
    for name in ("keepmtp.json", "recipe.yaml", "modeling_x.py", "more/notes.txt", ".token"):
        (folder / name).write_text(name)
    return folder


def changed(old: Path) -> Proposal:
    """Another config, `two` in another shape, no `three`, and `four` in the index."""
    source = open_source(old)
    proposal = Proposal(source)
    proposal.set(CONFIG, ("model_type",), "y", "why")
    two = source.entries["two"]
    proposal.retensor(two, replace(two, shape=(2, 1)), "why")
    proposal.retensor(source.entries["three"], None, "why")
    proposal.index("mtp.safetensors", "why")
    return proposal


def made(proposal: Proposal, out: Path) -> Rewritten:
    return rewrite(proposal, out)


def test_what_did_not_change_is_linked_and_the_old_folder_stays(old, tmp_path):
    before, out = digests(old), tmp_path / "out"
    written = made(changed(old), out)
    assert written.new == ("a.safetensors", "config.json", INDEX)
    assert written.kept == ("modeling_x.py", "more/notes.txt", "mtp.safetensors")
    assert (out / "mtp.safetensors").samefile(old / "mtp.safetensors")
    assert digests(old) == before and not partial_path(out).exists()
    assert sorted(digests(out)) == sorted({*written.new, *written.kept, f"{WORK}/plan.sha256"}), (
        "no record, no hidden file of the old folder, no b.safetensors"
    )
    found = open_source(out)
    assert {name: entry.file for name, entry in found.entries.items()} == {
        "one": "a.safetensors",
        "two": "a.safetensors",
        "four": "mtp.safetensors",
    }
    assert json_of(out / INDEX)["metadata"] == {"by": "x", "total_size": 7}
    assert found.entries["two"].shape == (2, 1)
    assert (out / "a.safetensors").read_bytes().endswith(b"111122")
    warns = (
        "3 new, 3 kept. Unchanged files are hard links: an edit of one in place edits the source's"
    )
    assert warns in written.sentence
    whole, again = digests(out), made(changed(old), out)
    assert again.is_from_before and "finished before" in again.sentence
    assert again.new == written.new and digests(out) == whole


@cases
def test_a_folder_that_is_no_longer_what_it_wrote_is_never_overwritten(old, tmp_path, command):
    made(changed(old), tmp_path / "out")
    shell(command, tmp_path)
    left = digests(tmp_path / "out")
    with pytest.raises(RecipeError, match="never overwritten"):
        made(changed(old), tmp_path / "out")
    assert digests(tmp_path / "out") == left


def test_what_a_link_leads_to_is_never_tidied(old, tmp_path):
    made(changed(old), tmp_path / "out")
    os.rename(tmp_path / "out" / WORK, tmp_path / "mine")
    (tmp_path / "mine" / "notes.txt").touch()
    (tmp_path / "out" / WORK).symlink_to(tmp_path / "mine")
    with pytest.raises(RecipeError, match=rf"out/{WORK}: .*; got a link"):
        made(changed(old), tmp_path / "out")
    assert (tmp_path / "mine" / "notes.txt").exists()


def test_a_tensor_never_takes_the_name_of_another(old):
    source = open_source(old)
    proposal = Proposal(source)
    one = source.entries["one"]
    assert not proposal.retensor(one, replace(one, name="three"), "why")
    assert proposal.edits == [] and proposal.files() == {}


class _Killed(BaseException):
    """Ends a run where it is; nothing of keepmtp's catches it."""


def test_ended_at_every_step_the_same_command_gives_the_same_bytes(old, tmp_path, monkeypatch):
    def end() -> None:
        raise _Killed

    made(changed(old), tmp_path / "whole")
    wanted, step, ends, is_whole = digests(tmp_path / "whole"), 0, set(), False
    while not is_whole:
        step += 1
        out = tmp_path / f"out-{step}"
        with monkeypatch.context() as patched, suppress(_Killed):
            ended_at(step, patched, end)
            made(changed(old), out)
            is_whole = True
        ends.add((out.exists(), (out / WORK).exists()))
        assert not out.exists() or digests(out).items() >= wanted.items(), "whole or not there"
        if not out.exists() or (out / WORK / "plan.sha256").exists():
            made(changed(old), out)
        assert digests(out).items() >= wanted.items(), step
    assert step > 25 and {(False, False), (True, True)} <= ends


def test_what_another_run_has_begun_stays(old, tmp_path):
    """It may be hours of a GPU."""
    begun = partial_path(tmp_path / "out")
    (begun / WORK).mkdir(parents=True)
    (begun / WORK / "plan.sha256").write_text("of another run")
    (begun / "model-00001-of-00009.safetensors").write_bytes(b"its work")
    before = digests(begun)
    with pytest.raises(RecipeError, match="an unfinished output can only be resumed"):
        made(changed(old), tmp_path / "out")
    assert digests(begun) == before


@pytest.mark.parametrize("is_dated_back", [False, True])
def test_a_kept_file_that_is_written_to_is_found(old, tmp_path, monkeypatch, is_dated_back):
    """Until the new folder gets its name; one that is dated back, but for while it is linked."""
    shard, step, passed = old / "mtp.safetensors", 0, list[str]()
    calls = [""]

    def write() -> None:
        state = shard.stat()
        with open(shard, "r+b") as file:
            file.seek(-1, os.SEEK_END)
            file.write(b"5")
        if is_dated_back:
            os.utime(shard, ns=(state.st_atime_ns, state.st_mtime_ns))

    while len(calls) >= step:
        step += 1
        out, wanted = tmp_path / f"out-{step}", changed(old)
        with monkeypatch.context() as patched, suppress(CheckpointError):
            calls = ended_at(step, patched, write)
            made(wanted, out)
            passed += calls[step - 1 : step]  # nobody has seen it
    assert passed == ["mkdir", "unlink", "link"] * 3 * is_dated_back + ["fsync", "replace", "fsync"]


def test_a_disk_without_links_gets_copies(old, tmp_path, monkeypatch):
    def no_link(*_: object) -> None:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", no_link)
    written = made(changed(old), tmp_path / "out")
    assert written.kept == ("modeling_x.py", "more/notes.txt", "mtp.safetensors")
    assert (old / "mtp.safetensors").stat().st_nlink == 1
    assert "Unchanged files are copies" in written.sentence
    assert "hard links" not in written.sentence
    assert (tmp_path / "out" / "mtp.safetensors").read_bytes() == (
        old / "mtp.safetensors"
    ).read_bytes()


def test_a_snapshot_of_the_hubs_cache_is_linked_to_its_blobs(old, tmp_path):
    snapshot, blobs = (
        tmp_path / "models--a--b" / "snapshots" / "c0ffee",
        tmp_path / "models--a--b" / "blobs",
    )
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for name in ("a.safetensors", "b.safetensors", "mtp.safetensors", INDEX, "config.json"):
        os.rename(old / name, blobs / name)
        (snapshot / name).symlink_to(f"../../blobs/{name}")
    (snapshot / "original").mkdir()
    (snapshot / "original" / "all.safetensors").symlink_to("../../../blobs/b.safetensors")
    made(changed(snapshot), tmp_path / "out")
    assert (tmp_path / "out" / "original" / "all.safetensors").samefile(blobs / "b.safetensors")
    linked = tmp_path / "out" / "mtp.safetensors"
    assert not linked.is_symlink() and linked.samefile(blobs / "mtp.safetensors")


@cases
def test_what_cannot_be_made_is_refused(old, tmp_path, command, message):
    wanted, out = changed(old), tmp_path / "out"
    shell(command, tmp_path)
    with pytest.raises((CheckpointError, RecipeError), match=message):
        made(wanted, out)
    assert out.exists() == (message == "never overwritten")
    with pytest.raises(RecipeError, match="outside the source"):
        made(wanted, old / "out")
