"""A stranger's wheel for `check --vllm` ends in one sentence, and only vLLM's Python is kept of it."""

import io
import json
import struct
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
import stub_vllm
from damage import ODD
from data_files import spelled
from keepmtp.recipes.errors import VLLMError
from keepmtp.validate.dryload.loader import DryLoader, Job
from keepmtp.validate.dryload.versions import cache_folder, had_vllms
from real_vllm import CPU

WHEEL = "vllm-9.1.0-py3-none-any.whl"
ABOUT = "vllm-9.1.0.dist-info/METADATA"
NOTED = "vllm/_version.py"
Members = dict[str, bytes]
GOOD: Members = {
    "vllm/__init__.py": b"",
    NOTED: b"__version__ = version = '9.1.0'\n",
    ABOUT: b"Metadata-Version: 2.1\nName: vllm\nVersion: 9.1.0\nRequires-Python: >=3.8\n",
}
# Where a field of the list of members is, after its mark: size in bytes and place.
FIELDS = {"flags": ("<H", 8), "method": ("<H", 10), "packed": ("<I", 20), "size": ("<I", 24)}
FIELDS |= {"name": ("<H", 28), "extra": ("<H", 30), "offset": ("<I", 42)}


def zipped(members: Members) -> bytes:
    raw = io.BytesIO()
    with zipfile.ZipFile(raw, "w", zipfile.ZIP_DEFLATED) as packed:
        for name, content in members.items():
            packed.writestr(name, content)
    return raw.getvalue()


def listed(raw: bytes, at: int, field: str, value: int) -> bytes:
    """The zip with another value in the list of its members, of the member `at`."""
    form, place = FIELDS[field]
    start = 0
    for _ in range(at + 1):
        start = raw.index(b"PK\1\2", start + 1)
    changed = bytearray(raw)
    struct.pack_into(form, changed, start + place, value % 2 ** (8 * struct.calcsize(form)))
    return bytes(changed)


def no_server(path: Path) -> Path:
    """A Python for VLLM_PYTHON that tells versions, serves a checkpoint with answers.json alone, by
    a stub, and loads with vllm/__init__.py alone.
    """
    told = json.dumps(stub_vllm.VERSIONS)
    stub = path.with_name("stub")
    stub.mkdir()
    serves = f'[ -f "$4/answers.json" ] && exec {stub_vllm.stub_vllm(stub, start=0)} "$@"'
    loads = f'*/in_vllm*) exec {sys.executable} -I "$PYTHONPATH/vllm/__init__.py"'
    path.write_text(
        f"#!/bin/sh\ncase \" $* \" in *' serve '*) {serves}; exit 3;; {loads};; esac\necho '{told}'\n"
    )
    path.chmod(0o755)
    return path


WHOLE_WHEEL = zipped(GOOD)
WHOLE = "must be a whole wheel"
SAYS = "must say which version"
BUILDS = "must build models for a pretended sm90; got "
NO_UTF_8 = zipped(GOOD | {"vllm/\u00e9.py": b""}).replace(b"\xc3\xa9", b"\xff\xff")
STRANGE = dict.fromkeys(ODD["members"], b"x = 1\n")


def telling(*told: str | list[tuple[str, int]]) -> bytes:
    """A wheel that says this of its version."""
    about, noted = (spelled(each).encode() for each in told)
    return zipped(GOOD | {ABOUT: about, NOTED: noted})


def running(program: str) -> bytes:
    return zipped(GOOD | {"vllm/__init__.py": program.encode()})


@pytest.fixture
def loaded(tmp_path, monkeypatch):
    """What a wheel ends in: no vLLM is in any, so it is a refusal."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    own = replace(CPU, python=no_server(tmp_path / "python"))

    def load(raw: bytes) -> str:
        (tmp_path / WHEEL).write_bytes(raw)
        with pytest.raises(VLLMError) as caught:
            (vllm,) = had_vllms([str(tmp_path / WHEEL)], own)[0]
            with DryLoader(vllm, gpu="sm90") as process:
                process.load_all([Job(folder=tmp_path)])
        return str(caught.value)

    return load


@pytest.mark.parametrize(
    "raw, says",
    [
        (listed(zipped(GOOD), 0, "flags", 1), WHOLE),
        (NO_UTF_8, WHOLE),
        (telling([("Name: vllm\nVersion: ", 1), ("9", 5000)], ""), SAYS),
        (telling("Name: vllm\nVersion: ../../x\n", ""), SAYS),
        (telling("", [("__version__ = ", 1), ("''", 200_000), ("x", 1)]), SAYS),
        (running(""), f"{BUILDS}exit status 0"),
        *((running(program), BUILDS) for program in ODD["programs"]),
    ],
)
def test_a_hostile_wheel_is_one_sentence(raw, says, loaded):
    told = loaded(raw)
    assert says in told and "\n" not in told and len(told) < 5000, told


def test_only_the_python_of_vllm_is_kept(loaded, tmp_path):
    loaded(zipped(GOOD | STRANGE))
    (site,) = cache_folder().iterdir()
    kept = {path.relative_to(site).as_posix() for path in site.rglob("*") if path.is_file()}
    assert kept == GOOD.keys()
    assert {path.name for path in tmp_path.iterdir()} == {"cache", "python", "stub", WHEEL}
