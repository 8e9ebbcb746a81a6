"""`keepmtp doctor`: what is here, and what is not; asked of real environments."""

import json
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from commands import ROOT, ran
from keepmtp.cli import doctor
from keepmtp.recipes import extras
from keepmtp.validate.facts import vllm_env

VLLM_SITE = next((ROOT / ".venv-vllm").glob("lib/python*/site-packages"), None)


@pytest.fixture(autouse=True)
def no_vllm_is_named(monkeypatch) -> None:
    monkeypatch.delenv("VLLM_PYTHON", raising=False)


def diagnosis(*, status: int = 0, **environment: str) -> dict:
    return json.loads(ran("doctor --json", status=status, **environment))


def pretended(tmp_path: Path, number: str) -> str:
    """This Python, with a package called vllm of that version beside it."""
    site = tmp_path / "site"
    (site / "vllm").mkdir(parents=True)
    (site / "vllm" / "__init__.py").touch()
    info = site / f"vllm-{number}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {number}\n")
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH="{site}" exec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    return str(python)


@pytest.mark.skipif(VLLM_SITE is None, reason="no .venv-vllm: `make test` makes it")
def test_this_machine():
    told = diagnosis()
    assert told["ok"] and told["missing"] == {} and VLLM_SITE is not None
    (info,) = VLLM_SITE.glob("vllm[-_]*.dist-info")
    assert info.name.endswith(f"-{told['vllm']['vllm']}.dist-info")
    assert {name: version(name) for name in ("torch", "jinja2")}.items() <= told["packages"].items()


def test_people_read_what_is_missing_with_its_cure(monkeypatch, capsys):
    """Commands on lines of their own, to be pasted."""
    known = extras.version

    def without_scipy(name: str) -> str:
        if name == "scipy":
            raise extras.PackageNotFoundError(name)
        return known(name)

    monkeypatch.setattr(extras, "version", without_scipy)
    doctor.doctor()
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "keepmtp   0.1.0"
    assert f"  {extras.install_command('quantize')}" == said[said.index("missing: quantize") + 1]


@pytest.mark.parametrize(
    ("python", "says"), [("/nowhere/python", "/nowhere/python"), (sys.executable, "with vLLM")]
)
def test_a_chosen_vllm_that_is_none_is_broken(python, says):
    told = diagnosis(status=2, VLLM_PYTHON=python)
    assert not told["ok"] and says in told["vllm"] and "vllm" in told["missing"]


def test_any_version_will_do(tmp_path):
    told = diagnosis(status=0, VLLM_PYTHON=pretended(tmp_path, "0.99.2"))
    assert told["vllm"]["vllm"] == "0.99.2" and told["ok"]


def test_without_vllm_nothing_is_broken(tmp_path, monkeypatch):
    """A person who only plans and checks: exit status 0, and the command that brings one."""
    monkeypatch.setattr(vllm_env, "_ROOT", tmp_path)
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "venv"))
    told = doctor.diagnose()
    assert told["ok"] and "VLLM_PYTHON" in told["vllm"]
    assert told["missing"]["vllm"] == vllm_env.command_for_vllm()
    assert vllm_env.command_for_vllm().startswith(sys.executable)
    monkeypatch.setattr(vllm_env, "_ROOT", ROOT)
    assert vllm_env.command_for_vllm() == "make vllm"
