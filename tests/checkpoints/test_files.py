"""Whole-file writes and locks: what a reader, and the next run, find after a run that was
killed.
"""

import subprocess
import sys
from pathlib import Path

import pytest
from keepmtp.checkpoints.files import complete, held, partial_path, write_whole
from keepmtp.recipes.errors import CheckpointError, RecipeError

HOLDER = """
import sys, time
from pathlib import Path
from keepmtp.checkpoints.files import held
with held(Path(sys.argv[1]), "one run"):
    print("held", flush=True)
    time.sleep(600)
"""


def test_a_file_has_its_own_name_once_it_is_whole(tmp_path):
    path = tmp_path / "deep" / "a.json"
    assert write_whole(path, "one") == path and path.read_text() == "one"
    partial_path(path).write_text("tw")
    assert path.read_text() == "one", "what a killed run has left is not read"
    write_whole(path, "two")
    assert path.read_text() == "two" and [found.name for found in path.parent.iterdir()] == [
        "a.json"
    ]


def test_a_folder_has_its_own_name_once_it_is_whole(tmp_path):
    partial_path(tmp_path / "out").mkdir()
    (partial_path(tmp_path / "out") / "config.json").write_text("{}")
    complete(tmp_path / "out")
    assert [path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.json")] == [
        "out/config.json"
    ]


def test_what_cannot_be_written_leaves_the_old_file(tmp_path):
    path = tmp_path / "a.json"
    path.write_text("old")
    partial_path(path).mkdir()
    with pytest.raises(
        CheckpointError, match=r"a\.json: must be writable; got Is a directory\. Choose another"
    ):
        write_whole(path, "new")
    assert path.read_text() == "old"


@pytest.fixture
def holder(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait()


def test_a_lock_ends_with_its_holder(holder, tmp_path):
    """Also with kill -9; and it leaves no file."""
    with (
        pytest.raises(RecipeError, match="one run; got another run at work"),
        held(Path(tmp_path), "one run"),
    ):
        pass
    holder.kill()
    holder.wait()
    with held(tmp_path, "one run"):
        assert not list(tmp_path.iterdir())
