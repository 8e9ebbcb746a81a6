"""`make gpu-kit VLLM=0.33.0`: what a machine with a GPU, PyTorch and no network lacks to serve with
vLLM, in parts that can be carried to it.

In: the package index, and a list of what the machine has (gpu_machine.json, or --has). Out, in a
folder: `vllm-VERSION-smSM-cpPYTHON.json`, and its parts. The parts end to end are a tar in xz with
two folders of Python packages: `vllm`, whose libraries hold CUDA code of one architecture alone, and
`keepmtp`, what keepmtp needs itself. The JSON file names the parts with their hashes, and everything
that was left out with the reason. gpu_unpack.py puts it together.

Easy to get wrong: compiled packages must be the other machine's, so nothing is asked of this Python
but to download. And vLLM pins its own compressed-tensors, which is not the one that keepmtp needs.
"""

import argparse
import hashlib
import json
import lzma
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections import defaultdict
from collections.abc import Iterable, Mapping
from email import message_from_bytes
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

from fatbin import trimmed
from gpu_unpack import FOLDERS, FORM
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parent.parent
HERE = Path(__file__).parent
OURS = ("quantize", "calibrate")  # extras of keepmtp that the proof needs
GLIBC = ("2_17", "2_24", "2_27", "2_28", "2_31", "2_34", "2_35")
# What vLLM requires and the kit does not bring, whatever the machine has. -> why.
OF_MACHINE = ("numpy", "setuptools", "torch", "torchaudio", "torchvision", "triton")
OTHER_GPUS = "kernels for other GPUs or models"
LEFT_OUT = {
    **dict.fromkeys(OF_MACHINE, "the machine's own serves"),
    "nvidia-cuda-cccl": "the machine's own compiler serves",
    "nvidia-cuda-nvcc": "the machine's own compiler serves",
    "flashinfer-python": "compiles at run time; FLASH_ATTN and PyTorch's sampler serve without it",
    "fastsafetensors": "another loader of weights",
    "instanttensor": "another loader of weights",
    "torchcodec": "sound and video",
    "pynvvideocodec": "sound and video",
    "nvidia-cudnn-frontend": OTHER_GPUS,
    "nvidia-cutlass-dsl": OTHER_GPUS,
    "quack-kernels": OTHER_GPUS,
    "tilelang": OTHER_GPUS,
    "tokenspeed-mla": OTHER_GPUS,
}
# Files of vLLM's wheel: of which architectures they are of use, none for no GPU at all. -> why.
FILES_LEFT_OUT: dict[str, tuple[str, str]] = {
    "vllm/vllm-rs": ("", "a front end that is not started"),
    "vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so": ("80 86 89 100 120", "FlashAttention 3 is here"),
    "vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so": ("90", "it has code for sm90 alone"),
    "vllm/third_party/fmha_sm100": ("100", "for sm100 alone"),
}


class KitError(ValueError):
    """What stops a kit, in one sentence."""


def main() -> None:
    """Build a kit and say what is in it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("vllm", help="Version, such as 0.33.0.")
    parser.add_argument("--sm", type=int, default=90, help="90 for sm90.")
    parser.add_argument("--python", default="3.12", help="The other machine's.")
    parser.add_argument("--part-mb", type=float, default=38)
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu-kit")
    parser.add_argument("--has", type=Path, default=HERE / "gpu_machine.json")
    parser.add_argument(
        "--carry", action="append", default=[], help="A package that is left out else."
    )
    chosen = parser.parse_args()
    try:
        manifest = build(chosen)
    except KitError as error:
        print(f"error: gpu-kit: {error}", file=sys.stderr)
        sys.exit(2)
    for name, why in manifest["left_out"].items():
        print(f"left out: {name} ({why})")
    for part in manifest["parts"]:
        print(f"{chosen.out / part['name']}: {part['bytes'] / 1e6:.1f} MB")
    print(f"{len(manifest['packages'])} packages, {manifest['bytes'] / 1e6:.0f} MB unpacked")


def build(chosen: argparse.Namespace) -> dict[str, Any]:
    """The kit's files; its manifest, which is written last."""
    name = f"vllm-{chosen.vllm}-sm{chosen.sm}-cp{chosen.python.replace('.', '')}"
    scratch = chosen.out / f"{name}.scratch"
    shutil.rmtree(scratch, ignore_errors=True)
    for old in chosen.out.glob(f"{name}.*"):
        old.unlink()
    wheels = Wheels(chosen, scratch, machine_packages(chosen.has))
    ours = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = [*ours["dependencies"]]
    for extra in OURS:
        needed += ours["optional-dependencies"][extra]
    wanted = {"vllm": [f"vllm=={chosen.vllm}"], "keepmtp": needed}
    packages = dict[str, str]()
    for folder in FOLDERS:
        pins = "constraints.txt" if folder == "keepmtp" else "constraints-vllm-cuda.txt"
        packages |= wheels.install(folder, wanted[folder], pinned(ROOT / pins))
    describe(scratch / "keepmtp")
    left_out = wheels.left_out | trim(scratch / "vllm", chosen.sm)
    stream = scratch / "all"
    size = packed(scratch, stream)
    manifest = {
        "form": FORM,
        "name": name,
        "vllm": chosen.vllm,
        "sm": chosen.sm,
        "python": chosen.python,
        "bytes": size,
        "parts": split(stream, chosen.out / name, int(chosen.part_mb * 1e6)),
        "packages": packages,
        "left_out": left_out,
    }
    shutil.rmtree(scratch)
    (chosen.out / f"{name}.json").write_text(json.dumps(manifest, indent=1) + "\n")
    return manifest


def describe(site: Path) -> None:
    """What keepmtp says of itself: its verbs ask what an extra needs. The checkout joins it there."""
    own = distribution("keepmtp")
    info = site / f"keepmtp-{own.version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(own.metadata.as_string())


def machine_packages(path: Path) -> dict[str, str]:
    """Name -> version, "" where it is not known; of `pip list --format=json`."""
    try:
        listed = json.loads(path.read_text())
        return {canonicalize_name(each["name"]): each["version"] for each in listed}
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise KitError(
            f"HAS must be a file that `pip list --format=json` wrote; got {path} ({error}). "
            "Run that on the other machine."
        ) from error


def pinned(path: Path) -> dict[str, str]:
    """Name -> version, of a constraints file."""
    lines = [line.partition("==") for line in path.read_text().splitlines() if "==" in line]
    return {canonicalize_name(name): version for name, _, version in lines}


class Wheels:
    """Downloads wheels for the other machine, and installs them into folders.

    Attributes:
        left_out: what was required and is not brought, and why.
    """

    def __init__(self, chosen: argparse.Namespace, scratch: Path, has: Mapping[str, str]):
        self._folder = chosen.out / "wheels"
        self._scratch = scratch
        self._has = has
        self._carried = {canonicalize_name(name) for name in chosen.carry}
        self._python = chosen.python
        words = ["--only-binary", ":all:", "--implementation", "cp", "--python-version"]
        self._target = [*words, chosen.python, "--platform", "manylinux2014_x86_64"]
        for glibc in GLIBC:
            self._target += ["--platform", f"manylinux_{glibc}_x86_64"]
        self.left_out = dict[str, str]()

    def install(
        self, folder: str, wanted: Iterable[str], pins: Mapping[str, str]
    ) -> dict[str, str]:
        """Everything that is wanted and what that requires, less what the machine has; name ->
        version.
        """
        specifiers = defaultdict[str, SpecifierSet](SpecifierSet)
        extras = defaultdict[str, set[str]](set)
        asked = [Requirement(each) for each in wanted]
        found = dict[str, Path]()
        while asked:
            again = set[str]()
            for requirement in asked:
                name = canonicalize_name(requirement.name)
                if self._comes_along(requirement, name):
                    grown = not requirement.extras <= extras[name]
                    specifiers[name] &= requirement.specifier
                    extras[name] |= requirement.extras
                    if name not in found or grown or not _fits(found[name], specifiers[name]):
                        again.add(name)
            found |= self._download({name: specifiers[name] for name in again}, pins)
            asked = []
            for name in again:
                asked += self._required_by(found[name], extras[name])
        (self._scratch / folder).mkdir(parents=True, exist_ok=True)
        if found:
            words = ["install", "--no-index", "--no-deps", "--no-compile"]
            self._pip(
                [*words, "--target", str(self._scratch / folder), *self._target], found.values()
            )
        return {f"{folder}/{name}": _version(path) for name, path in sorted(found.items())}

    def _comes_along(self, requirement: Requirement, name: str) -> bool:
        """Whether the kit brings it; says so in `left_out` if it should and does not."""
        if name in self._carried:
            return True
        if name in LEFT_OUT:
            self.left_out[name] = LEFT_OUT[name]
            return False
        if name not in self._has:
            return name != "keepmtp"
        version = self._has[name]
        return bool(version) and not requirement.specifier.contains(version, prereleases=True)

    def _download(
        self, specifiers: Mapping[str, SpecifierSet], pins: Mapping[str, str]
    ) -> dict[str, Path]:
        """A wheel for each name. Where a pin fits, it is taken: one tested set."""
        if not specifiers:
            return {}
        words = list[str]()
        for name, specifier in sorted(specifiers.items()):
            pin = pins.get(name)
            if pin and specifier.contains(pin, prereleases=True):
                specifier = SpecifierSet(f"=={pin}")
            words.append(f"{name}{specifier}")
        own = (
            self._folder
            / hashlib.sha256(" ".join([self._python, *words]).encode()).hexdigest()[:12]
        )
        if not own.is_dir():
            partial = self._scratch / "download"
            self._pip(["download", "--no-deps", "-d", str(partial), *self._target], words)
            self._folder.mkdir(parents=True, exist_ok=True)
            partial.rename(own)
        return {_name(path): path for path in own.glob("*.whl")}

    def _required_by(self, wheel: Path, extras: set[str]) -> list[Requirement]:
        """What a wheel requires on the other machine."""
        with zipfile.ZipFile(wheel) as archive:
            (name,) = [
                each
                for each in archive.namelist()
                if re.fullmatch(r"[^/]*\.dist-info/METADATA", each)
            ]
            metadata = message_from_bytes(archive.read(name))
        machine = {
            "python_version": self._python,
            "python_full_version": f"{self._python}.0",
            "implementation_name": "cpython",
            "platform_python_implementation": "CPython",
            "platform_machine": "x86_64",
            "platform_system": "Linux",
            "sys_platform": "linux",
            "os_name": "posix",
        }
        found = list[Requirement]()
        for line in metadata.get_all("Requires-Dist", []):
            requirement = Requirement(line)
            marker = requirement.marker
            wanted = ["", *sorted(extras)]
            if not marker or any(marker.evaluate({**machine, "extra": each}) for each in wanted):
                found.append(requirement)
        return found

    def _pip(self, words: list[str], rest: Iterable[str | Path]) -> None:
        command = [
            sys.executable,
            "-m",
            "pip",
            "--disable-pip-version-check",
            "-qqq",
            *words,
            *rest,
        ]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            said = [line for line in done.stderr.splitlines() if line.startswith("ERROR: ")]
            got = said[-1].removeprefix("ERROR: ") if said else f"exit status {done.returncode}"
            raise KitError(
                f"the package index must give every wheel for Python {self._python} on x86-64; "
                f"got: {got.rstrip('.')}. Name what the machine has with HAS, or another VLLM."
            )


def _name(wheel: Path) -> str:
    return canonicalize_name(wheel.name.split("-")[0])


def _version(wheel: Path) -> str:
    return wheel.name.split("-")[1]


def _fits(wheel: Path, specifier: SpecifierSet) -> bool:
    return specifier.contains(Version(_version(wheel)), prereleases=True)


def trim(site: Path, sm: int) -> dict[str, str]:
    """Leave out files of vLLM, and CUDA code of other architectures; what that was, and why."""
    left_out = dict[str, str]()
    for name, (architectures, why) in FILES_LEFT_OUT.items():
        path = site / name
        if path.exists() and str(sm) not in architectures.split():
            left_out[name] = why
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()
    saved = 0
    for path in sorted(site.rglob("*.so")):
        library = path.read_bytes()
        kept, zeroed = trimmed(library, sm)
        if zeroed:
            path.write_bytes(kept)
            saved += zeroed
    if saved:
        left_out["CUDA code of other architectures"] = f"{saved / 1e6:.0f} MB"
    return left_out


def packed(scratch: Path, out: Path) -> int:
    """Both folders in one tar in xz, the same bytes each time; the bytes that it unpacks to."""
    size = 0
    with lzma.open(out, "wb", preset=6) as file, tarfile.open(fileobj=file, mode="w") as archive:
        for folder in FOLDERS:
            # Wheels name their programs in bin; nothing is started from there.
            shutil.rmtree(scratch / folder / "bin", ignore_errors=True)
            for path in sorted((scratch / folder).rglob("*")):
                if path.is_file():
                    size += path.stat().st_size
                    info = tarfile.TarInfo(str(path.relative_to(scratch)))
                    info.size = path.stat().st_size
                    if os.access(path, os.X_OK):  # humming starts a compiler of its own
                        info.mode = 0o755
                    with open(path, "rb") as content:
                        archive.addfile(info, content)
    return size


def split(stream: Path, name: Path, most: int) -> list[dict[str, Any]]:
    """Cut a file into parts of at most so many bytes: each part's name, bytes and SHA-256."""
    count = max(1, -(-stream.stat().st_size // most))
    parts = list[dict[str, Any]]()
    with open(stream, "rb") as file:
        for number in range(1, count + 1):
            content = file.read(most)
            path = name.with_name(f"{name.name}.part{number}of{count}")
            path.write_bytes(content)
            hashed = hashlib.sha256(content).hexdigest()
            parts.append({"name": path.name, "bytes": len(content), "sha256": hashed})
    os.unlink(stream)
    return parts


if __name__ == "__main__":
    main()
