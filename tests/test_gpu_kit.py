"""`make gpu-kit` of a wheel of a few bytes, put together by what `make gpu-serve` does first; and its
steps on a CPU. The true kit is built by hand (docs/gpu.md).
"""

import json
import re
import struct
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import fatbin
import gpu_serve
import gpu_unpack
import pytest
from commands import ROOT, captured
from gpu_unpack import Machine
from tables import cases, table

MACHINE = Machine(python="3.12", torch="2.11.0+cu130", sm=90, gpu_gib=79, main_gib=99, disk_gib=60)
NAME = "vllm-0.33.0-sm90-cp312"
# Kind and architecture of each piece of code in two fatbins; one of each is for sm90.
CODES = [[(2, 80), (2, 90), (1, 80)], [(2, 80), (1, 80), (2, 100), (1, 100)]]
METADATA = "Metadata-Version: 2.1\nName: {0}\nVersion: {1}\n"
WHEEL = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"


def library() -> bytes:
    found = fatbin.MAGIC + bytes(30)
    for codes in CODES:
        entries = b""
        for kind, architecture in codes:
            head = struct.pack("<HHIQIIII", kind, 0, 64, 9, 0, 0, 0, architecture)
            entries += head.ljust(64, b"\0") + b"x" * 9
        found += fatbin.MAGIC + struct.pack("<HHQ", 1, 16, len(entries)) + entries
    return found


@pytest.fixture
def carried(tmp_path, monkeypatch) -> Path:
    """A kit in parts of 1,000 bytes."""
    for name, version, needs in table("test_gpu_kit")["wheels"]:
        info = f"{name}-{version}.dist-info"
        with zipfile.ZipFile(tmp_path / f"{name}-{version}-py3-none-any.whl", "w") as archive:
            archive.writestr(f"{info}/METADATA", METADATA.format(name, version) + needs)
            archive.writestr(f"{info}/WHEEL", WHEEL)
            archive.writestr(f"{info}/RECORD", "")
            archive.writestr(f"{name}/__init__.py", "")
            archive.writestr(f"{name}/_C.so", library())
            program = zipfile.ZipInfo(f"{name}/compiler")
            program.external_attr = 0o100755 << 16
            archive.writestr(program, "#!/bin/sh\n")
    project = (ROOT / "pyproject.toml").read_text()
    names = {*re.findall(r'"([\w-]+)(?:>=[\d.]+)?"[,\]]', project)} - {"vllm"}
    has = tmp_path / "has.json"
    kit = tmp_path / "kit"
    has.write_text(json.dumps([{"name": name, "version": ""} for name in names]))
    own = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path), "PIP_CONFIG_FILE": "/dev/null"}
    words = ["0.33.0", "--out", kit, "--has", has, "--part-mb", "0.001"]
    told = captured([sys.executable, ROOT / "benchmarks/gpu_kit.py", *words], env=own, status=0)
    assert "left out: torch (" in told.stdout
    monkeypatch.setattr(gpu_unpack, "this_machine", lambda _: MACHINE)
    monkeypatch.setattr(sys, "argv", ["", "--folder", str(kit), "--place", str(tmp_path / "place")])
    return kit


@pytest.mark.full
def test_a_kit_travels_part_by_part(carried, tmp_path, capsys):
    def refused() -> str:
        with pytest.raises(SystemExit):
            gpu_unpack.main()
        assert not [*tmp_path.glob("place/*/unpacked")]
        return capsys.readouterr().err

    first, *rest = sorted(carried.glob("*.part*"))
    contents = {path: path.read_bytes() for path in rest}
    for path in rest:
        path.unlink()
    said = refused()
    assert f"all {1 + len(rest)} parts of {NAME} must be here; got {first.name}. " in said
    first.unlink()  # it is kept
    rest[0].write_bytes(contents[rest[0]][:-1])
    assert f"{rest[0]} must be the " in refused()
    for path, content in contents.items():
        path.write_bytes(content)
    gpu_unpack.main()
    (folder,) = (tmp_path / "place").iterdir()
    assert {path.name for path in folder.iterdir()} == {"kit.json", "vllm", "keepmtp"}
    seen = "import small, other, torch, vllm; print(open(vllm.__path__[0] + '/_C.so', 'rb').read())"
    code = captured([folder / "vllm/bin/python", "-c", seen], status=0).stdout
    assert code.count("x" * 9) == len(CODES)
    (vllm,) = folder.glob("vllm/lib/*/site-packages/vllm")
    captured([vllm / "compiler"], status=0)
    assert [*vllm.glob("__pycache__/__init__.*.pyc")], "compiled once, not by each first server"
    captured([folder / "keepmtp/bin/python", "-P", "-m", "keepmtp", "ls"], status=0)


@cases
def test_another_machine_is_one_sentence(changed, said):
    manifest = {"name": NAME, "vllm": "0.33.0", "python": "3.12", "sm": 90, "bytes": 0}
    gpu_unpack.refuse_machine(manifest, MACHINE)
    with pytest.raises(gpu_unpack.Refused, match=re.escape(said)):
        gpu_unpack.refuse_machine(manifest, replace(MACHINE, **changed))


@pytest.mark.full
@pytest.mark.vllm
def test_the_same_steps_run_on_a_cpu(tmp_path):
    page = tmp_path / "gpu.md"
    words = [sys.executable, ROOT / "benchmarks/gpu_serve.py", "--device", "cpu", "--small"]
    captured([*words, "--folder", tmp_path, "--page", page], status=0)
    table = page.read_text().partition(gpu_serve.BEGIN)[2].splitlines()
    rows = "\n".join(row for row in table if "NVIDIA" not in row)  # those of a GPU stay
    names = captured([*words, "--list"], status=0).stdout.splitlines()
    assert [name for name in names if f"\n| {name} |" not in rows] == [] and "**no**" not in rows
