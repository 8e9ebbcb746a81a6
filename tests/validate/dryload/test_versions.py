"""A version's Python is fetched once, whole or not at all; what cannot be had is one sentence.

The index is a folder with a wheel that was made up. A real wheel is a `full` test.
"""

import importlib.util
import os
import signal
import subprocess
import sys
import time
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
from keepmtp.recipes.errors import KeepMTPError, RecipeError, VLLMError
from keepmtp.recipes.runtimes.vllm import KNOWN
from keepmtp.validate.dryload.versions import cache_folder, cached, had_vllms
from real_vllm import CPU

OWN = replace(CPU, python=Path(sys.executable))
KILLED = """
import os, sys, time
from pathlib import Path
from keepmtp.validate.dryload.versions import had_vllms
import test_versions
os.sync = lambda: (Path(sys.argv[1]).touch(), time.sleep(600))
had_vllms(["9.1.0"], test_versions.OWN)[0]
"""


def made_wheel(
    folder: Path,
    version: str = "9.1.0",
    *,
    requires: str = ">=3.8",
    package: str = "vllm",
    others: str = "torch==9.9",
) -> Path:
    folder.mkdir(exist_ok=True)
    wheel = folder / f"vllm-{version}-py3-none-any.whl"
    info = f"vllm-{version}.dist-info"
    about = f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\nRequires-Python: {requires}\n"
    about += f"Requires-Dist: {others}\n"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as packed:
        packed.writestr(f"{package}/__init__.py", f"__version__ = '{version}'\n")
        packed.writestr(f"{package}/configs/E=8.json", "{}")
        packed.writestr(f"{package}/third_party/tml_fa4/a.py", "")
        packed.writestr(f"{package}/_C.abi3.so", b"compiled" * 1000)
        packed.writestr(f"{info}/METADATA", about)
        packed.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
    return wheel


@pytest.fixture(autouse=True)
def index(tmp_path, monkeypatch) -> Path:
    """The only one that pip asks; it has 9.1.0."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    made_wheel(tmp_path / "index")
    return tmp_path / "index"


def in_cache() -> list[str]:
    return sorted(path.name for path in cache_folder().iterdir())


def test_it_is_fetched_once(index, monkeypatch):
    """Its Python, without what no dry load imports; then no index is asked."""
    (wheel,) = index.iterdir()
    said = []
    (vllm,) = had_vllms(["9.1"], OWN, progress=said.append)[0]
    assert said == ["vLLM 9.1.0: fetching its Python, once"]
    assert vllm == replace(OWN, version="9.1.0", site=cache_folder() / "9.1.0", distribution="vllm")
    files = {path.name for path in vllm.site.rglob("*") if path.is_file()}
    assert files == {"__init__.py", "METADATA"}
    wheel.unlink()
    assert had_vllms(["9.1.0,9.1", "9.1.0"], OWN, progress=said.append)[0] == [vllm]
    assert len(said) == 1 and in_cache() == cached() == ["9.1.0"]


def test_what_need_not_be_fetched():
    assert had_vllms([], OWN)[0] == [OWN] == had_vllms([OWN.version], OWN)[0]


def test_all_are_those_that_are_known(index):
    for version in KNOWN:
        made_wheel(index, version)
    assert [each.version for each in had_vllms(["all"], OWN)[0]] == list(KNOWN)


def test_a_kill_leaves_no_half_folder(tmp_path):
    waits = tmp_path / "waits"
    words = [sys.executable, "-c", KILLED, str(waits)]
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    with subprocess.Popen(words, env=os.environ | {"PYTHONPATH": path}) as process:
        while not waits.exists() and process.poll() is None:
            time.sleep(0.1)
        process.send_signal(signal.SIGKILL)
    (left,) = in_cache()
    assert left.startswith(".9.1.0-") and not cached()
    (vllm,) = had_vllms(["9.1.0"], OWN)[0]
    assert in_cache() == ["9.1.0"] and vllm.site


def test_two_runs_at_once_leave_one_folder(monkeypatch):
    """The second is done while the first one waits for its disk."""

    def second() -> None:
        monkeypatch.setattr(os, "sync", lambda: None)
        had_vllms(["9.1.0"], OWN)[0]

    monkeypatch.setattr(os, "sync", second)
    (vllm,) = had_vllms(["9.1.0"], OWN)[0]
    assert in_cache() == ["9.1.0"] and vllm.site


def site(folder: Path) -> Path:
    (folder / "vllm").mkdir(parents=True)
    (folder / "vllm" / "__init__.py").touch()
    return folder


def test_a_folder_or_a_wheel_by_path(tmp_path):
    """An image's site-packages, a fork's checkout, a nightly's wheel: each says its version."""
    image = site(tmp_path / "image")
    (image / "vllm-9.3.0+fork.dist-info").mkdir()
    (image / "vllm-9.3.0+fork.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: vllm\nVersion: 9.3.0+fork\n"
    )
    fork = site(tmp_path / "fork")
    (fork / "vllm" / "_version.py").write_text("__version__ = version = '9.4.0.dev3+g12'\n")
    nightly = made_wheel(tmp_path / "wheels", "9.2.0rc1.dev5")
    found = had_vllms([str(image), f"{fork},{nightly}"], OWN)[0]
    assert [each.version for each in found] == ["9.3.0+fork", "9.4.0.dev3+g12", "9.2.0rc1.dev5"]
    assert [each.site for each in found[:2]] == [image, fork]
    assert had_vllms([str(nightly)], OWN)[0] == found[2:] and len(in_cache()) == 1


@pytest.mark.parametrize(
    "others, unmet",
    [
        ("transformers<5.18.0,>=5.10.4", "transformers<5.18.0,>=5.10.4, not 5.19.0"),
        ("transformers>=5.10.4", ""),
        ("compressed-tensors==0.17.0", "compressed-tensors==0.17.0, not 0.16.0"),
        ("torch==2.14.0", ""),
        ("transformers is wanted", ""),
    ],
)
def test_what_it_requires_and_the_environment_has_otherwise(others, unmet, index):
    wheel = made_wheel(index, "9.7.0", others=others)
    own = replace(OWN, torch="2.13.0", transformers="5.19.0", compressed_tensors="0.16.0")
    (vllm,) = had_vllms([str(wheel)], own)[0]
    assert vllm.unmet == unmet


# --- Bad input ------------------------------------------------------------------------------------


def wrong_hash(index: Path, monkeypatch) -> str:
    (wheel,) = index.glob("*.whl")
    page = index / "index.html"
    page.write_text(f'<a href="{wheel.as_uri()}#sha256={"0" * 64}">{wheel.name}</a>')
    monkeypatch.setenv("PIP_FIND_LINKS", str(page))
    return "9.1.0"


def no_network(index: Path, monkeypatch) -> str:
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "1")
    return "9.1.0"


def no_pip(index: Path, monkeypatch) -> str:
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "pip" else real(name)
    )
    return "9.1.0"


def other_platform(index: Path, monkeypatch) -> str:
    (wheel,) = index.iterdir()
    wheel.rename(index / "vllm-9.1.0-cp38-abi3-win_arm64.whl")
    return "9.1.0"


def cut(index: Path, monkeypatch) -> str:
    (wheel,) = index.iterdir()
    wheel.write_bytes(wheel.read_bytes()[:-40])
    return str(wheel)


def cut_in_the_middle(index: Path, monkeypatch) -> str:
    (wheel,) = index.iterdir()
    data = bytearray(wheel.read_bytes())
    data[46] ^= 255
    wheel.write_bytes(data)
    return str(wheel)


def of_another_package(index: Path, monkeypatch) -> str:
    return str(made_wheel(index, "9.5.0", package="sglang"))


def made_for_a_later_python(index: Path, monkeypatch) -> str:
    made_wheel(index, "9.6.0", requires=">=4")
    return "9.6.0"


@pytest.mark.parametrize(
    ("given", "says", "cure"),
    [
        (lambda *_: "9.0.9", "fetched by pip; got No matching distribution found", "the version"),
        (wrong_hash, "fetched by pip; got THESE PACKAGES DO NOT MATCH THE HASHES", "FILE.whl"),
        (no_network, "fetched by pip; got No matching distribution", "has no version yet"),
        (no_pip, "fetched by pip; got none in the environment of", "ensurepip"),
        (other_platform, "fetched by pip; got No matching distribution found", "FILE.whl"),
        (cut, "must be a whole wheel; got File is not a zip file", "Download it again"),
        (cut_in_the_middle, "must be a whole wheel; got Error -3", "Download it again"),
        (of_another_package, "must be a wheel of vLLM; got no vllm/ in it", "Name one"),
        (made_for_a_later_python, "made for Python >=4; got Python 3", "Set VLLM_PYTHON"),
        (lambda index, _: str(index), "must hold vllm/ with its Python files", "lies in"),
        (lambda *_: "0.2", "must be 0.31.0 or newer; got 0.2", f"0.31.0 to {KNOWN[-1]}"),
        (lambda *_: "newest", "must be a version of vLLM, `all`, a folder", KNOWN[-1]),
    ],
)
def test_what_cannot_be_had_is_one_sentence(given, says, cure, index, monkeypatch):
    word = given(index, monkeypatch)
    with pytest.raises(KeepMTPError) as caught:
        had_vllms([word], OWN)[0]
    told = str(caught.value)
    assert isinstance(caught.value, RecipeError if word == "newest" else VLLMError)
    assert says in told and cure in told and "\n" not in told, told
    assert not cached() or cached() == ["9.6.0"]


def test_one_that_cannot_be_had_leaves_the_others():
    found, missing = had_vllms(["9.0.9,9.1.0", "0.28"], OWN)
    assert [each.version for each in found] == ["9.1.0"]
    assert [str(error.where) for error in missing] == ["vLLM 9.0.9", "--vllm"]


def test_a_site_must_say_its_version(tmp_path):
    with pytest.raises(VLLMError, match="must say which version it is; got neither metadata nor"):
        had_vllms([str(site(tmp_path / "checkout"))], OWN)
