"""What `make gpu-serve` does first on a machine with a GPU: put the parts of a kit together outside
the checkout, and start a program over it.

In: the folder with a kit's JSON file and those of its parts that have been carried here so far. Out:
two environments over the packages of this Python, for vLLM and for keepmtp, and the program that is
named after `--`, run by the second with VLLM_PYTHON as the first. While parts are missing, those that
are here are kept, since the folder may hold only the next ones when it runs again.

Easy to get wrong: this runs before anything is installed, so it imports nothing but PyTorch. And a
machine that is too small, or a part of another kit, must be found before the first file is written.
"""

import argparse
import compileall
import hashlib
import io
import json
import lzma
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FORM = 1
FOLDERS = ("vllm", "keepmtp")
ROOT = Path(__file__).parent.parent
GIB = 2**30
# Libraries of vLLM 0.26.0 to 0.33.0 load over this PyTorch; nothing older was tried.
OLDEST_TORCH = (2, 11)
# What the largest step takes: a model of 7 billion weights, and what is made of it.
MEMORY_GIB = 24
DISK_GIB = 40
_BLOCK = 2**20


class Refused(ValueError):
    """Why the kit does not fit this machine or is not whole, in one sentence."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What a kit must fit.

    Attributes:
        python: "3.12".
        torch: its version.
        sm: of the GPU, 90 for sm90; 0 where PyTorch sees none.
        gpu_gib, main_gib, disk_gib: memory of the GPU and of the machine, and room on the disk, as
            far as they are free.
    """

    python: str
    torch: str
    sm: int
    gpu_gib: float
    main_gib: float
    disk_gib: float


def main() -> None:
    """Unpack, then become the program that is named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "gpu-kit")
    parser.add_argument("--place", type=Path, required=True, help="Outside the checkout.")
    parser.add_argument("--vllm", default="", help="Of several kits.")
    parser.add_argument("words", nargs="*", help="A program and its words.")
    chosen = parser.parse_args()
    try:
        manifest = find_kit(chosen.folder, chosen.vllm)
        place = chosen.place.expanduser().resolve() / kit_id(manifest)
        refuse_inside(place)
        place.mkdir(parents=True, exist_ok=True)
        if not (place / "keepmtp").is_dir():
            refuse_machine(manifest, this_machine(place))
            keep_parts(manifest, chosen.folder, place)
            unpack(manifest, place)
    except Refused as error:
        print(f"error: gpu-serve: {error}", file=sys.stderr)
        sys.exit(2)
    python, vllm_python = (place / name / "bin" / "python" for name in ("keepmtp", "vllm"))
    print(f"vLLM {manifest['vllm']}: {vllm_python}", flush=True)
    if chosen.words:
        os.environ["VLLM_PYTHON"] = str(vllm_python)
        os.environ["GPU_KIT"] = str(place / "kit.json")
        os.execv(python, [str(python), *chosen.words])


def find_kit(folder: Path, vllm: str) -> dict[str, Any]:
    """The kit's JSON file, of the version that is asked for if there are several."""
    found = dict[str, Path]()
    for path in sorted(folder.glob("vllm-*.json")):
        version = path.name.split("-")[1]
        if vllm in ("", version):
            found[version] = path
    if len(found) != 1:
        names = ", ".join(path.name for path in sorted(folder.glob("vllm-*.json")))
        wanted = f"of vLLM {vllm}" if vllm else "of one vLLM"
        raise Refused(
            f"{folder} must hold the JSON file of a kit {wanted}; got {names or 'none'}. "
            "Carry it here beside its parts, or name one with VLLM."
        )
    (path,) = found.values()
    try:
        manifest = json.loads(path.read_text())
        is_kit = manifest["form"] == FORM and manifest["parts"] and manifest["name"] == path.stem
    except (ValueError, LookupError, TypeError):
        is_kit = False
        manifest = {}
    if not is_kit:
        raise Refused(
            f"{path} must be what `make gpu-kit` of this checkout has written; got something else. "
            "Carry it again."
        )
    return manifest


def kit_id(manifest: Mapping[str, Any]) -> str:
    """A name that two kits share only if their bytes are the same."""
    hashes = "".join(part["sha256"] for part in manifest["parts"])
    return f"{manifest['name']}-{hashlib.sha256(hashes.encode()).hexdigest()[:8]}"


def refuse_inside(place: Path) -> None:
    """What is in the checkout may be carried along again, or be taken away."""
    if place.is_relative_to(ROOT):
        raise Refused(f"GPU_PLACE must be outside the checkout; got {place}. Name another folder.")


def this_machine(place: Path) -> Machine:
    """What PyTorch and the system say."""
    import torch

    sm, free = 0, 0
    if torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability()
        sm = 10 * major + minor
        free, _ = torch.cuda.mem_get_info()
    return Machine(
        python=f"{sys.version_info.major}.{sys.version_info.minor}",
        torch=torch.__version__,
        sm=sm,
        gpu_gib=free / GIB,
        main_gib=available() / GIB,
        disk_gib=shutil.disk_usage(place).free / GIB,
    )


def available() -> int:
    """Bytes of main memory that programs can have; what only caches files is among them."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0


def refuse_machine(manifest: Mapping[str, Any], machine: Machine) -> None:
    """The first thing that this machine lacks."""
    name, built = manifest["name"], f"Build another with make gpu-kit VLLM={manifest['vllm']}"
    numbers = machine.torch.split("+")[0].split(".")
    oldest = ".".join(map(str, OLDEST_TORCH))
    if machine.python != manifest["python"]:
        raise Refused(
            f"GPU_PYTHON must be the Python {manifest['python']} that kit {name} is for; got "
            f"{machine.python}. {built} GPU_PYTHON_VERSION={machine.python}."
        )
    if (int(numbers[0]), int(numbers[1])) < OLDEST_TORCH:
        raise Refused(
            f"PyTorch must be {oldest} or newer for the libraries of vLLM {manifest['vllm']}; got "
            f"{machine.torch}. Name another Python with GPU_PYTHON."
        )
    if not machine.sm:
        raise Refused(
            f"PyTorch must see a GPU; got PyTorch {machine.torch} without one. Run it on a machine "
            "with a GPU, or try the program itself with make gpu-serve DEVICE=cpu SMALL=1."
        )
    if machine.sm != manifest["sm"]:
        raise Refused(
            f"the GPU must be the sm{manifest['sm']} that kit {name} has code for; got "
            f"sm{machine.sm}. {built} SM={machine.sm}."
        )
    disk_gib = DISK_GIB + 2 * manifest["bytes"] / GIB
    rooms = (
        ("memory of the GPU", machine.gpu_gib, MEMORY_GIB),
        ("main memory", machine.main_gib, MEMORY_GIB),
        ("room on the disk of GPU_PLACE", machine.disk_gib, disk_gib),
    )
    for what, got, least in rooms:
        if got < least:
            raise Refused(
                f"{what} must be {least:.0f} GiB or more, free; got {got:.1f} GiB. Free some, or "
                "take another machine."
            )


def keep_parts(manifest: Mapping[str, Any], folder: Path, place: Path) -> None:
    """Copy the parts that are here to where they stay.

    Raises:
        Refused: one is not what the JSON file names, or some are still missing.
    """
    kept, missing = list[str](), list[str]()
    for part in manifest["parts"]:
        copy, carried = place / part["name"], folder / part["name"]
        if not copy.is_file() and carried.is_file():
            if sha256_of(carried) != part["sha256"]:
                raise Refused(
                    f"{carried} must be the {part['bytes']:,} bytes that {manifest['name']}.json "
                    f"names by their SHA-256; got {carried.stat().st_size:,} others. Carry it "
                    "again, of the same kit."
                )
            partial = place / "partial"
            shutil.copyfile(carried, partial)
            partial.rename(copy)
        if copy.is_file():
            kept.append(part["name"])
        else:
            missing.append(part["name"])
    if missing:
        raise Refused(
            f"all {len(manifest['parts'])} parts of {manifest['name']} must be here; got "
            f"{', '.join(kept) or 'none'}. What was carried is kept in {place}: carry "
            f"{', '.join(missing)} and run it again."
        )


def sha256_of(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class Joined(io.RawIOBase):
    """Blocks of bytes as one file."""

    def __init__(self, blocks: Iterator[bytes]):
        self._blocks = blocks
        self._rest = b""

    def readable(self) -> bool:
        return True

    def readinto(self, into: Any) -> int:
        if not self._rest:
            self._rest = next(self._blocks, b"")
        count = min(len(into), len(self._rest))
        into[:count] = self._rest[:count]
        self._rest = self._rest[count:]
        return count


def blocks_of(paths: list[Path]) -> Iterator[bytes]:
    for path in paths:
        with open(path, "rb") as file:
            while block := file.read(_BLOCK):
                yield block


def unpack(manifest: Mapping[str, Any], place: Path) -> None:
    """Make both environments; keepmtp's is there last, and only when all is."""
    unpacked, made = place / "unpacked", place / "made"
    for old in (unpacked, made, place / "vllm"):
        shutil.rmtree(old, ignore_errors=True)
    parts = [place / part["name"] for part in manifest["parts"]]
    try:
        with (
            lzma.open(io.BufferedReader(Joined(blocks_of(parts)))) as stream,
            tarfile.open(fileobj=stream, mode="r|") as archive,
        ):
            archive.extractall(unpacked, filter="data")
    except (lzma.LZMAError, tarfile.TarError, EOFError) as error:
        raise Refused(
            f"the parts in {place} must be a tar in xz; got {error}. Remove that folder and carry "
            "them again."
        ) from error
    (place / "kit.json").write_text(json.dumps(manifest))
    for folder in FOLDERS:
        site = environment(made, place / folder)
        (unpacked / folder).mkdir(parents=True, exist_ok=True)
        for path in (unpacked / folder).iterdir():
            path.rename(site / path.name)
        if folder == "keepmtp":
            (site / "keepmtp").symlink_to(ROOT)
        # Once, with all cores: else each of the first servers does it for itself.
        compileall.compile_dir(site, quiet=2, workers=0)
        made.rename(place / folder)
    for path in (unpacked, *parts):
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def environment(made: Path, final: Path) -> Path:
    """A virtual environment under a first name: its own packages come before those of this Python;
    the folder for them.
    """
    words = [sys.executable, "-m", "venv", "--without-pip", str(made)]
    subprocess.run(words, check=True)
    (site,) = made.glob("lib/python*/site-packages")
    lines = [
        f"import site; site.addsitedir({path!r})\n"
        for path in sys.path
        if path.endswith(("site-packages", "dist-packages"))
    ]
    (site / "machine.pth").write_text("".join(lines))
    return site


if __name__ == "__main__":
    main()
