"""A whole calibrated run whose disk is full, or dead, at each station in turn: `python
failing_disk.py FOLDER [ERRNO]`.

In: an empty folder. Without a number it is a file system of its own, which this process mounts and
fills to the last byte when a station begins: each error is the kernel's. With the number of an
error, the kernel's fsync is asked to give that one back instead, which is how a disk says that it
is gone. Out: one JSON line for each end of the command. After each the same command is run again,
with room again, until the output is whole.

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

import torch
from f32_products import multiply_in_f32
from keepmtp import api
from keepmtp.checkpoints import files
from keepmtp.cli.exits import foreseen, refusal_of
from keepmtp.recipes.errors import KeepMTPError

ROOT = Path(__file__).parent.parent.parent
MODEL = ROOT / "models" / "tiny-glm4-moe"
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
    plan = api.plan("tiny-glm4-moe.nvfp4-mtp-nvfp4", source=str(MODEL))
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


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0)
