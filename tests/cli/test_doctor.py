"""`keepmtp doctor`: what is here, what is not, and what is broken; asked of real environments."""

import json
import re
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
import typer
from commands import ROOT, keepmtp, ran
from keepmtp.cli import doctor
from keepmtp.recipes.extras import install_command, requirements
from keepmtp.recipes.runtimes.vllm import KNOWN
from keepmtp.validate.facts import vllm_env
from printed import printed
from tables import cases, table

DRY = "dry load on a pretended GPU"
VLLM_SITE = next((ROOT / ".venv-vllm").glob("lib/python*/site-packages"), None)


@pytest.fixture(autouse=True)
def no_vllm_is_named(monkeypatch) -> None:
    monkeypatch.delenv("VLLM_PYTHON", raising=False)


def diagnosis(*, status: int = 0, **environment: str) -> dict:
    return json.loads(ran("doctor --json", status=status, **environment))


def can(told: dict, what: str) -> bool:
    (ability,) = [ability for ability in told["abilities"] if ability["what"] == what]
    assert ability["can"] or ability["why"], "a no has its reason"
    return ability["can"]


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
    assert told["ok"] and told["broken"] == [] and VLLM_SITE is not None
    (info,) = VLLM_SITE.glob("vllm[-_]*.dist-info")
    assert info.name.endswith(f"-{told['vllm']['version']}.dist-info")
    assert {name: version(name) for name in ("torch", "jinja2")}.items() <= told["packages"].items()
    assert told["known_vllm"] == {"read": list(KNOWN), "tested": ["0.32.0"]}
    for what in ("plan, static check", "HTML report", "packing weights, without data", DRY):
        assert can(told, what)


def test_people_read_what_is_missing_with_its_cure(monkeypatch, capsys):
    """keepmtp alone, without its extras; commands on lines of their own, to be pasted."""
    lacks = {
        extra: (sorted(needed.name for needed in requirements(extra)), install_command(extra))
        for extra in doctor.EXTRAS
    }
    lacks |= {name: (["it"], name) for name in ("cuda", "server", "loaders")} | {"token": ([], "")}
    found = table("cli/test_doctor")["FOUND"]
    found |= {"gpus": found["gpus"] * 8, "abilities": doctor.abilities(lacks)}
    monkeypatch.setattr(doctor, "diagnose", lambda: found)
    with pytest.raises(typer.Exit) as ended:
        doctor.doctor()
    assert ended.value.exit_code == 2
    printed("doctor.txt", re.sub(r"\S+/bin/python\S* -m", "PYTHON -m", capsys.readouterr().out))


@pytest.mark.parametrize(
    ("python", "says"), [("/nowhere/python", "/nowhere/python"), (sys.executable, "with vLLM")]
)
def test_a_chosen_vllm_that_is_none_is_broken(python, says):
    told = diagnosis(status=2, VLLM_PYTHON=python)
    assert not told["ok"] and told["vllm"] is None
    assert says in told["broken"][0] and not can(told, DRY)


def test_any_version_will_do(tmp_path):
    told = diagnosis(status=0, VLLM_PYTHON=pretended(tmp_path, "0.99.2"))
    assert told["vllm"]["version"] == "0.99.2"
    assert can(told, DRY) and told["ok"]


def test_without_vllm_nothing_is_broken(tmp_path, monkeypatch):
    """A person who only plans and checks: exit status 0, and the command that would enable the
    rest.
    """
    monkeypatch.delenv("VLLM_PYTHON", raising=False)
    monkeypatch.setattr(vllm_env, "_ROOT", tmp_path)
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "venv"))
    told = doctor.diagnose()
    assert told["vllm"] is None and told["broken"] == [] and "VLLM_PYTHON" in told["no_vllm"]
    assert told["ok"] and can(told, "plan, static check") and not can(told, "real server")
    commands = {ability["what"]: ability["command"] for ability in told["abilities"]}
    assert commands[DRY] == vllm_env.command_for_vllm()
    assert vllm_env.command_for_vllm().startswith(sys.executable)
    monkeypatch.setattr(vllm_env, "_ROOT", ROOT)
    assert vllm_env.command_for_vllm() == "make vllm"


def test_a_vllm_for_cuda_without_a_gpu_cannot_serve(tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_PYTHON", pretended(tmp_path, "0.32.0"))
    told = doctor.diagnose()
    assert can(told, "real server") == (bool(told["gpus"]) or told["vllm"]["build"] == "cpu")


@pytest.mark.few(1)
@cases
def test_a_token_is_found_and_never_shown(name, says, tmp_path):
    secret = "hf_loopbackSecretThatNobodyMayPrint"
    home = {"HF_HOME": str(tmp_path), "HF_TOKEN_PATH": str(tmp_path / "token"), "COLUMNS": "160"}
    home |= {"HF_TOKEN": "", "HUGGING_FACE_HUB_TOKEN": ""}
    without = diagnosis(**home)
    assert without["token"] == "" and without["ok"] and not can(without, "publishing to the Hub")
    if name:
        home[name] = secret
    else:
        (tmp_path / "token").write_text(secret)
    for words in ("doctor", "doctor --json"):
        done = keepmtp(words, **home)
        assert done.returncode == 0 and secret not in done.stdout + done.stderr
        assert says in done.stdout, done.stdout
    assert can(json.loads(done.stdout), "publishing to the Hub")
