"""Scratch folders: they go with their process, and what a killed one has left goes with the
next.
"""

import subprocess
import sys
from pathlib import Path

from keepmtp.checkpoints.scratch import ScratchFolder

HOLDER = """
import sys
from pathlib import Path
from keepmtp.checkpoints.scratch import ScratchFolder
held = ScratchFolder("copy-", Path(sys.argv[1]))
(held.path / "weights").write_text("x")
print(held.path, flush=True)
sys.stdin.read()
"""


def holder(folder: Path) -> tuple[subprocess.Popen[str], Path]:
    words = [sys.executable, "-c", HOLDER, str(folder)]
    process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def test_it_goes_with_its_context(tmp_path):
    with ScratchFolder("copy-", tmp_path) as folder:
        (folder / "weights").write_text("x")
        assert (
            folder.parent == tmp_path
            and folder.name.startswith("copy-")
            and folder.stat().st_mode & 0o77 == 0
        )
    assert not list(tmp_path.iterdir())


def test_it_goes_with_its_process(tmp_path):
    process, folder = holder(tmp_path)
    assert folder.is_dir()
    process.communicate("")
    assert process.returncode == 0 and not list(tmp_path.iterdir())


def test_what_a_killed_run_left_is_removed_and_what_a_running_one_holds_is_kept(tmp_path):
    killed, left = holder(tmp_path)
    running, held = holder(tmp_path)
    (tmp_path / "copy-of-mine.txt").touch()
    (tmp_path / "copy-elsewhere").symlink_to(tmp_path.parent)
    killed.kill()
    killed.communicate()
    assert left.is_dir()
    with ScratchFolder("copy-", tmp_path) as folder:
        assert {path.name for path in tmp_path.iterdir()} == {
            held.name,
            folder.name,
            "copy-of-mine.txt",
            "copy-elsewhere",
        }
    assert (held / "weights").is_file() and tmp_path.parent.is_dir()
    running.communicate("")
