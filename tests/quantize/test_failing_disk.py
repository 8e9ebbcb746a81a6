"""A disk that fills up, or dies, at every station of a calibrated run: a sentence, nothing lost,
the same bytes.
"""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from commands import ROOT, captured
from failing_disk import STATIONS
from keepmtp.checkpoints.files import unwritable
from keepmtp.cli.exits import refusal_of

SCRIPT = Path(__file__).parent.parent / "helpers" / "failing_disk.py"
OWN_MOUNTS = ["unshare", "--mount", "--map-root-user"]


def can_mount() -> bool:
    """Whether this machine lets a test have a file system of its own."""
    try:
        words = [*OWN_MOUNTS, "mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", "/mnt"]
        return not subprocess.run(words, capture_output=True).returncode
    except FileNotFoundError:
        return False


def ends_of(folder: Path, number: int) -> tuple[dict[str, str], dict]:
    """What the command said at each station, and how all of it ended."""
    words = [sys.executable, str(SCRIPT), str(folder), str(number)]
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "benchmarks")}
    done = captured(words if number else OWN_MOUNTS + words, env=env)
    assert not done.returncode, done.stderr
    *ends, last = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {end["station"]: end["says"] for end in ends}, last


@pytest.mark.full
@pytest.mark.parametrize(
    "number, words",
    [
        (0, ["No space left on device"]),
        (errno.EIO, ["Input/output error", "file system has failed"]),
    ],
    ids=["full", "dead"],
)
def test_a_failing_disk_is_a_sentence_at_every_station_and_nothing_is_lost(number, words, tmp_path):
    if not number and not can_mount():
        pytest.skip("no file system of its own can be mounted here")
    said, last = ends_of(tmp_path, number)
    assert last == {"same": True, "never": []} and said.keys() == STATIONS.keys()
    for station, says in said.items():
        for word in (str(tmp_path), *words, "run the same command again"):
            assert word in says, station


@pytest.mark.parametrize(
    "number", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE, errno.EROFS]
)
def test_each_error_of_a_disk_has_its_cure(number):
    named = str(unwritable(Path("/out/index"), OSError(number, os.strerror(number))))
    by_library = str(unwritable(Path("/out/index"), ValueError(f"I/O error: (os error {number})")))
    assert (
        named == by_library
        and os.strerror(number) in named
        and "run the same command again" in named
    )
    assert "network" not in str(refusal_of(OSError(number, os.strerror(number))))
