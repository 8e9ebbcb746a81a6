"""A stranger's wheel for `check --vllm` ends in one sentence, and only vLLM's Python is kept of it."""

import io
import json
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


def zipped(members: Members) -> bytes:
    raw = io.BytesIO()
    with zipfile.ZipFile(raw, "w", zipfile.ZIP_DEFLATED) as packed:
        for name, content in members.items():
            packed.writestr(name, content)
    return raw.getvalue()


def encrypted(raw: bytes) -> bytes:
    """The zip whose list of members says so of the first."""
    changed = bytearray(raw)
    changed[raw.index(b"PK\1\2") + 8] |= 1
    return bytes(changed)


def no_server(path: Path) -> Path:
    """A Python for VLLM_PYTHON that tells versions, serves a checkpoint with answers.json alone, by
    a stub, and loads with vllm/__init__.py alone.
    """
    told = json.dumps(stub_vllm.VERSIONS)
    stub = path.with_name("stub")
    stub.mkdir()
    serves = f'[ -f "$4/answers.json" ] && exec {stub_vllm.stub_vllm(stub, start=0)} "$@"'
    loads = f'*in_vllm*) exec {sys.executable} -I "$PYTHONPATH/vllm/__init__.py"'
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
        (encrypted(zipped(GOOD)), WHOLE),
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
