"""`make gpu-kit` of a wheel of a few bytes, put together by what `make gpu-serve` does first; and the
steps that follow, on a CPU. The true kit is built by hand (docs/gpu.md)."""

import json
import re
import struct
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import fatbin
import gpu_serve
import gpu_unpack
import pytest
from commands import ROOT, captured
from figures import Figure
from gpu_unpack import Machine, Refused
from tables import cases

MACHINE = Machine(python="3.12", torch="2.11.0+cu130", sm=90, gpu_gib=79, main_gib=99, disk_gib=60)
NAME = "vllm-0.33.0-sm90-cp312"
# Kind and architecture of each piece of code, and what stays of it for sm90.
CODES = [[(2, 80, 0), (2, 90, 9), (1, 80, 0)], [(2, 80, 0), (1, 80, 9), (2, 100, 0), (1, 100, 0)]]


def library() -> bytes:
    """Two fatbins, and the magic number in a pointer to one."""
    found = b"ELF" + fatbin.MAGIC + bytes(30)
    for codes in CODES:
        entries = b""
        for kind, architecture, _ in codes:
            head = struct.pack("<HHIQIIII", kind, 0, 64, 9, 0, 0, 0, architecture)
            entries += head.ljust(64, b"\0") + b"x" * 9
        found += fatbin.MAGIC + struct.pack("<HHQ", 1, 16, len(entries)) + entries
    return found


def wheel(folder: Path, name: str, version: str, files: dict[str, bytes], *needs: str) -> None:
    info = f"{name}-{version}.dist-info"
    lines = [f"Name: {name}", f"Version: {version}", *(f"Requires-Dist: {each}" for each in needs)]
    files |= {
        f"{info}/METADATA": "\n".join(["Metadata-Version: 2.1", *lines, ""]).encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": b"",
    }
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as archive:
        for file, content in files.items():
            archive.writestr(file, content)


@pytest.fixture(scope="module")
def index(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("index")
    files = {"vllm/__init__.py": b"x = 1", "vllm/_C.so": library(), "vllm/vllm-rs": b"y"}
    needs = ("torch==2.14.0", "here>=1", "small[big]>=2", "no; python_version < '3.12'")
    wheel(folder, "vllm", "0.33.0", files, *needs)
    wheel(folder, "small", "2.0", {"small.py": b""}, "other; extra == 'big'")
    wheel(folder, "other", "1.0", {"other.py": b""})
    project = (ROOT / "pyproject.toml").read_text()
    has = {*re.findall(r'"([\w-]+)(?:>=[\d.]+)?"[,\]]', project), "here"}
    listed = [{"name": name, "version": ""} for name in has - {"vllm"}]
    (folder / "has.json").write_text(json.dumps(listed))
    return folder


def kit(index: Path, out: Path, *words: str, **more):
    own = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(index), "PIP_CONFIG_FILE": "/dev/null"}
    command = [sys.executable, ROOT / "benchmarks" / "gpu_kit.py", *words, "--out", out]
    return captured([*command, "--has", index / "has.json", "--part-mb", "0.001"], env=own, **more)


@pytest.fixture
def carried(index, tmp_path, monkeypatch) -> Path:
    monkeypatch.setattr(gpu_unpack, "this_machine", lambda _: MACHINE)
    return tmp_path / "kit"


def unpacked(folder: Path, place: Path, monkeypatch, capsys) -> str:
    """What `gpu_unpack.py` says."""
    monkeypatch.setattr(sys, "argv", ["x", "--folder", str(folder), "--place", str(place)])
    try:
        gpu_unpack.main()
    except SystemExit as end:
        assert end.code == 2
    said = capsys.readouterr()
    return said.err or said.out


def test_code_of_one_architecture_stays_where_it_was():
    whole = library()
    kept, zeroed = fatbin.trimmed(whole, 90)
    assert len(kept) == len(whole) and zeroed == 5 * 9 and kept.count(b"x") == 2 * 9
    left = [[kept[code.start] and 9 for code in codes] for codes in fatbin.fatbins(kept)]
    assert left == [[size for *_, size in codes] for codes in CODES]


@pytest.mark.full
def test_a_kit_travels_part_by_part(index, carried, tmp_path, monkeypatch, capsys):
    said = kit(index, carried, "0.33.0", status=0).stdout
    assert "left out: torch (" in said and "left out: vllm/vllm-rs (" in said
    manifest = json.loads((carried / f"{NAME}.json").read_text())
    assert manifest["packages"].keys() == {"vllm/vllm", "vllm/small", "vllm/other"}
    first, *rest = [carried / part["name"] for part in manifest["parts"]]
    assert rest and all(path.stat().st_size <= 1000 for path in (first, *rest))
    contents = {path: path.read_bytes() for path in rest}
    for path in rest:
        path.unlink()
    place = tmp_path / "place"
    said = unpacked(carried, place, monkeypatch, capsys)
    assert said.startswith(
        f"error: gpu-serve: all {1 + len(rest)} parts of {NAME} must be here; got"
    )
    assert f"carry {rest[0].name}" in said and said.count("\n") == 1
    first.unlink()
    rest[0].write_bytes(contents[rest[0]][:-1] + b"?")
    said = unpacked(carried, place, monkeypatch, capsys)
    assert f"{rest[0]} must be the " in said and f" bytes that {NAME}.json names" in said
    assert not [*place.glob("*/unpacked")]
    for path, content in contents.items():
        path.write_bytes(content)
    assert "vLLM 0.33.0: " in unpacked(carried, place, monkeypatch, capsys)
    (folder,) = place.iterdir()
    call = "import vllm, small, torch; print(vllm.__file__, open(vllm.__path__[0] + '/_C.so', 'rb').read().count(b'x'))"
    where, count = captured([folder / "vllm/bin/python", "-c", call], status=0).stdout.split()
    assert Path(where).is_relative_to(folder) and int(count) == 18
    link = folder / "keepmtp/bin/python"
    assert captured([link, "-P", "-c", "import keepmtp"], status=0)
    assert {path.name for path in folder.iterdir()} == {"kit.json", "vllm", "keepmtp"}
    said = unpacked(carried / "none", place, monkeypatch, capsys)
    assert "must hold the JSON file of a kit of one vLLM; got none." in said


@pytest.mark.parametrize("version", ["0.32.0"])
def test_a_wheel_that_is_not_there_is_one_sentence(index, carried, version):
    (line,) = kit(index, carried, version, status=2).stderr.splitlines()
    assert line.startswith(
        "error: gpu-kit: the package index must give every wheel for Python 3.12"
    )
    assert not [*carried.glob("*.json")]


@cases
def test_another_machine_is_one_sentence(changed, said):
    manifest = {"name": NAME, "vllm": "0.33.0", "python": "3.12", "sm": 90, "bytes": 0}
    gpu_unpack.refuse_machine(manifest, MACHINE)
    with pytest.raises(Refused, match=re.escape(said)) as refusal:
        gpu_unpack.refuse_machine(manifest, replace(MACHINE, **changed))
    assert re.fullmatch(r"[^\n;]+; got [^\n;]+\. [^\n]+\.", str(refusal.value))


def test_a_row_joins_the_table_or_replaces_its_own(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(f"a\n{gpu_serve.BEGIN}\nNot taken yet.\n\n{gpu_serve.END}b\n")
    for part, what, measured in (("1", "x", "|"), ("2", "x", "3"), ("1", "x", "4")):
        figure = Figure(part=part, what=what, measured=measured)
        gpu_serve.put_row(page, (*gpu_serve.row(figure), "here"))
    before, table, after = re.split(f"{gpu_serve.BEGIN}|{gpu_serve.END}", page.read_text())
    assert (before, after) == ("a\n", "b\n")
    assert table.split("\n")[3:5] == ["| 1 | x | 4 |  |  | here |", "| 2 | x | 3 |  |  | here |"]


@pytest.mark.full
@pytest.mark.vllm
def test_the_same_steps_run_on_a_cpu(tmp_path):
    page = tmp_path / "gpu.md"
    words = [sys.executable, ROOT / "benchmarks" / "gpu_serve.py", "--device", "cpu", "--small"]
    names = captured([*words, "--list"], status=0).stdout.splitlines()
    done = subprocess.run([*words, "--folder", tmp_path, "--page", page])
    table = page.read_text().partition(gpu_serve.BEGIN)[2]
    assert done.returncode == 0 and "**no**" not in table, table
    assert {row.split(" | ")[0].removeprefix("| ") for row in table.splitlines()} > {*names}
