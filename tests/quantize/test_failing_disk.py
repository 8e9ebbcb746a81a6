"""A disk that fills up, or dies, at every station of a calibrated run: a sentence, nothing lost,
the same bytes.

    python test_failing_disk.py FOLDER NUMBER     the run itself; one JSON line for each of its ends

Without a number of an error the folder is a file system of its own, which this process mounts and
fills to the last byte when a station begins: each error is the kernel's. With a number the kernel's
fsync is asked to give that one back, which is how a disk says that it is gone. After each end the
same command is run again, with room again, until the output is whole.

Easy to get wrong: a station that is never reached fails nothing. The last line says which were not.
"""

import errno
import hashlib
import json
import os
import re
import subprocess
import sys
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import GLM, ROOT, captured
from f32_products import multiply_in_f32
from keepmtp import api
from keepmtp.checkpoints import files
from keepmtp.checkpoints.files import unwritable
from keepmtp.cli.exits import foreseen, refusal_of
from keepmtp.recipes.errors import KeepMTPError

STATIONS = {
    "states": r"states/00002\.partial",
    "statistics": r"\.calibration/statistics$|layer-00001\.safetensors",
    "MTP figures": r"\.calibration/mtp/",
    "shards": r"model-00001-.*\.safetensors",
    "index": r"index\.json",
    "record": r"keepmtp\.json",
}
_Usage = namedtuple("_Usage", "total used free")


class Fault:
    """State: which stations have failed; at the first call of another one the fault begins, until
    `mend`.
    """

    def __init__(self, folder: Path, number: int) -> None:
        self.folder, self.number, self.station = folder, number, ""
        self.failed: set[str] = set()
        self._filler = folder / "filler"
        self._fsync = os.fsync
        if number:
            os.fsync = self.fsync
        else:
            sys.addaudithook(self.at_event)

    def at_event(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Called by Python for each file that is opened and each folder that is made."""
        if (
            event in ("open", "os.mkdir")
            and isinstance(arguments[0], str | os.PathLike)
            and not self.station
        ):
            self._begin(os.fspath(arguments[0]))
            if self.station:
                self._fill()

    def fsync(self, descriptor: int) -> None:
        """Like the kernel's, but for the station that fails."""
        if not self.station:
            self._begin(os.readlink(f"/proc/self/fd/{descriptor}"))
        if self.station:
            raise OSError(self.number, os.strerror(self.number))
        self._fsync(descriptor)

    def mend(self) -> None:
        """Room again, or a disk that answers."""
        self.station = ""
        self._filler.unlink(missing_ok=True)

    def _begin(self, path: str) -> None:
        for station, pattern in STATIONS.items():
            if (
                station not in self.failed
                and path.startswith(str(self.folder))
                and re.search(pattern, path)
            ):
                self.station = station
                self.failed.add(station)
                return

    def _fill(self) -> None:
        with open(self._filler, "wb", buffering=0) as file:
            try:
                while True:
                    file.write(bytes(4096))
            except OSError as error:
                assert error.errno == errno.ENOSPC, error


def main(folder: Path, number: int) -> None:
    """Run, fail, mend, and run again; print how each run ended."""
    torch.set_num_threads(1)
    multiply_in_f32()
    os.chdir(ROOT)
    plan = api.plan("tiny-glm4-moe.nvfp4-mtp-nvfp4", source=str(GLM))
    whole = api.quantize(plan, folder / "whole").out
    if not number:
        folder = folder / "disk"
        folder.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(folder)], check=True)
    # Others fill the disk after the run has looked at it.
    files.shutil.disk_usage = lambda _: _Usage(10**12, 0, 10**12)
    fault = Fault(folder, number)
    for _ in range(2 * len(STATIONS)):
        try:
            api.quantize(plan, folder / "out")
        except (KeepMTPError, *foreseen()) as error:
            refusal = error if isinstance(error, KeepMTPError) else refusal_of(error)
            print(json.dumps({"station": fault.station, "says": str(refusal)}), flush=True)
            fault.mend()
            continue
        break
    same = _sums(folder / "out") == _sums(whole)
    print(json.dumps({"same": same, "never": sorted(STATIONS.keys() - fault.failed)}), flush=True)


def _sums(folder: Path) -> dict[str, str]:
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.glob("*.safetensors")
    }


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
    words = [sys.executable, __file__, str(folder), str(number)]
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
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


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
