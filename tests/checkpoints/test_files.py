"""Whole-file writes, locks and scratch folders: what a reader, and the next run, find after a run
that was killed.
"""

import errno
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from keepmtp.checkpoints import files
from keepmtp.checkpoints.files import (
    ScratchFolder,
    complete,
    held,
    partial_path,
    refuse_strange,
    write_whole,
)
from keepmtp.recipes.errors import CheckpointError, RecipeError

HOLDER = """
import sys
from pathlib import Path
from keepmtp.checkpoints.files import held
from keepmtp.checkpoints.files import ScratchFolder
folder = Path(sys.argv[1])
if sys.argv[2:]:
    own = ScratchFolder("copy-", folder)
    (own.path / "weights").write_text("x")
    print(own.path, flush=True)
    sys.stdin.read()
else:
    with held(folder, "one run"):
        print("held", flush=True)
        sys.stdin.read()
"""
Holder = Callable[..., tuple[subprocess.Popen[str], Path]]


@pytest.fixture
def holder(tmp_path) -> Iterator[Holder]:
    """Starts a process that holds a lock, or with a word a scratch folder, until it gets a line."""
    started = []

    def start(*more: str) -> tuple[subprocess.Popen[str], Path]:
        process = subprocess.Popen(
            [sys.executable, "-c", HOLDER, str(tmp_path), *more],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        assert process.stdout is not None
        return process, Path(process.stdout.readline().strip())

    yield start
    for process in started:
        process.kill()
        process.wait()


def test_a_file_has_its_own_name_once_it_is_whole(tmp_path):
    path = tmp_path / "deep" / "a.json"
    assert write_whole(path, "one") == path and path.read_text() == "one"
    partial_path(path).write_text("tw")
    assert path.read_text() == "one", "what a killed run has left is not read"
    write_whole(path, "two")
    assert path.read_text() == "two" and [*path.parent.iterdir()] == [path]


def test_a_folder_has_its_own_name_once_it_is_whole(tmp_path):
    partial_path(tmp_path / "out").mkdir()
    (partial_path(tmp_path / "out") / "config.json").write_text("{}")
    complete(tmp_path / "out")
    assert [*tmp_path.rglob("*.json")] == [tmp_path / "out" / "config.json"]


def test_what_cannot_be_written_leaves_the_old_file(tmp_path):
    path = tmp_path / "a.json"
    path.write_text("old")
    partial_path(path).mkdir()
    with pytest.raises(
        CheckpointError, match=r"a\.json: must be writable; got Is a directory\. Choose another"
    ):
        write_whole(path, "new")
    assert path.read_text() == "old"


def test_a_full_disk_leaves_nothing_of_a_file(tmp_path, monkeypatch):
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CheckpointError, match="No space left"):
        write_whole(tmp_path / "report.json", "x")
    assert not list(tmp_path.iterdir())


def test_a_hard_link_keeps_its_bytes(tmp_path):
    path, other = tmp_path / "a.json", tmp_path / "other"
    other.write_text("other")
    partial_path(path).hardlink_to(other)
    with pytest.raises(RecipeError, match=r"a\.json\.partial: .*; got a hard link"):
        refuse_strange(tmp_path, below=True, is_alone=True)
    write_whole(path, "new")
    assert other.read_text() == "other"


def test_another_users_folder_is_refused_unless_the_disk_gives_all_files_one_owner(
    tmp_path, monkeypatch
):
    (tmp_path / "a").mkdir()
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    refuse_strange(tmp_path, below=True)
    monkeypatch.setattr(files, "_owner_in", lambda folder: os.getuid() + 1)
    with pytest.raises(RecipeError, match="got another user's"):
        refuse_strange(tmp_path / "a")


def test_a_lock_ends_with_its_holder(holder, tmp_path):
    """Also with kill -9; and it leaves no file."""
    process, _ = holder()
    with (
        pytest.raises(RecipeError, match="one run; got another run at work"),
        held(tmp_path, "one run"),
    ):
        pass
    process.kill()
    process.wait()
    with held(tmp_path, "one run"):
        assert not list(tmp_path.iterdir())


def test_a_scratch_folder_goes_with_its_context(tmp_path):
    with ScratchFolder("copy-", tmp_path) as folder:
        (folder / "weights").write_text("x")
        assert folder.parent == tmp_path and folder.name.startswith("copy-")
        assert folder.stat().st_mode & 0o77 == 0
    assert not list(tmp_path.iterdir())


def test_a_scratch_folder_goes_with_its_process(holder, tmp_path):
    process, folder = holder("scratch")
    assert folder.is_dir()
    process.communicate("")
    assert process.returncode == 0 and not list(tmp_path.iterdir())


def test_what_a_killed_run_left_is_removed_and_what_a_running_one_holds_is_kept(holder, tmp_path):
    (killed, left), (running, kept) = holder("scratch"), holder("scratch")
    others = {tmp_path / "copy-of-mine.txt", tmp_path / "copy-elsewhere"}
    (tmp_path / "copy-of-mine.txt").touch()
    (tmp_path / "copy-elsewhere").symlink_to(tmp_path.parent)
    killed.kill()
    killed.communicate()
    assert left.is_dir()
    with ScratchFolder("copy-", tmp_path) as folder:
        assert {*tmp_path.iterdir()} == {kept, folder} | others
    assert (kept / "weights").is_file() and tmp_path.parent.is_dir()
    running.communicate("")
