"""`make follow` tells what another vLLM changes: here from made-up versions, and from 0.31 over 0.32
to 0.33 from wheels.
"""

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import follow
import pytest
from commands import ROOT
from keepmtp.recipes.errors import VLLMError
from keepmtp.validate.dryload.versions import chosen_vllms
from keepmtp.validate.facts.vllm_env import find_vllm
from releases import MODELS

MODEL = "model_executor/models"
QUARK = "model_executor/layers/quantization/quark"
# Files of vLLM, and where they are cited in each of the ways that the tree has.
CITED = {
    "config/speculative.py": "validate/dryload/failures.toml",
    f"{MODEL}/glm4_moe_mtp.py": "recipes/families/glm4_moe.yaml",
    f"{MODEL}/mimo.py": "recipes/families/mimo.yaml",
    f"{QUARK}/utils.py": "validate/check/dialects/quark.py",
    "models/deepseek_v32/amd/mtp.py": "recipes/families/deepseek_v32.yaml",
}
# Others of these names, which nothing cites.
OTHERS = ("audio/mimo.py", "utils.py", "models/nobody/mtp.py", f"{MODEL}/mimo_mtp.py")


@pytest.fixture
def sites(tmp_path) -> tuple[Path, Path]:
    """Two versions with the same files."""
    for site in ("old", "new"):
        for name in (*CITED, *OTHERS):
            path = tmp_path / site / "vllm" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("as it was")
    return tmp_path / "old", tmp_path / "new"


def test_nothing_is_told_of_what_is_the_same(sites):
    assert list(follow.changed_files(*sites)) == []


@pytest.mark.parametrize("is_gone", [False, True])
@pytest.mark.parametrize("file", CITED)
def test_a_cited_file_that_changes_is_told_with_its_place(file, is_gone, sites):
    changed = sites[1] / "vllm" / file
    changed.unlink() if is_gone else changed.write_text("otherwise")
    ((told, places),) = follow.changed_files(*sites)
    assert told == (f"{file} is gone" if is_gone else file)
    assert re.search(rf"(^|, ){CITED[file]}:\d+", places), places


def test_answers_that_differ_are_told(monkeypatch):
    answers = {
        "old": {"model_types": ["a", "b"], "any_model": False, "methods": ["fp8"]},
        "new": {"model_types": ["b", "c"], "any_model": True, "methods": ["fp8"]},
    }
    monkeypatch.setattr(follow, "ask", answers.get)
    assert dict(follow.asked_otherwise("old", "new")) == {
        "model_types": "new: c; gone: a",
        "any_model": "False -> True",
    }


@pytest.mark.parametrize(
    ("by", "static", "dry", "is_fit", "how"),
    [
        ("", "", "", True, "agree"),
        ("", "form", "", True, "static check alone"),
        ("", "", "dry-load", True, "dry load alone"),
        ("", "", "dry-load", False, "unknown over these packages"),
        ("", "", "vllm-defect", True, "a defect of vLLM"),
        ("both", "form", "no-kernel", True, "agree"),
        ("both", "", "dry-load", True, "dry load alone"),
        ("both", "form", "", False, "static check alone"),
        ("static", "form", "", True, "agree"),
        ("static", "form", "vllm-defect", True, "agree"),
        ("dry", "form", "dry-load", True, "agree"),
        ("dry", "", "", True, "nobody"),
    ],
)
def test_how_check_and_dry_load_agree(by, static, dry, is_fit, how):
    rules = [{word} - {""} for word in (static, dry)]
    assert follow.agreement(by, *rules, is_fit=is_fit) == how


def test_the_page_counts_and_gives_every_reason_once():
    names = [f"glm-4.7, {variant}" for variant in follow.VARIANTS]
    cells = {
        "9.1.0": dict.fromkeys(names, "loads") | {names[1]: "no x", names[2]: "no x"},
        "9.2.0": dict.fromkeys(names, "loads"),
    }
    corpora = {
        "9.1.0": {"good: a": "agree", "good: b": "dry load alone: no y", "broken: c": "agree"},
        "9.2.0": {"good: a": "agree", "good: b": "agree", "broken: c": "nobody: "},
    }
    page = follow.versions_page(cells, corpora)
    assert "| family | 9.1.0 | 9.2.0 |" in page and "| glm4_moe | 3 of 5 [1] | 5 of 5 |" in page
    assert page.count("no x") == 1
    for row in (
        "| good, agree | 1 of 2 | 2 of 2 |",
        "| good, dry load alone | 1 of 2 | 0 of 2 |",
        "| broken, agree | 1 of 1 | 0 of 1 |",
        "- 9.1.0: good: b: dry load alone: no y\n",
        "- 9.2.0: broken: c: nobody",
    ):
        assert row in page, row


@pytest.mark.full
@pytest.mark.vllm
def test_from_0_31_over_0_32_to_0_33(monkeypatch, capsys, tmp_path):
    """Two families whose defects ended, one in each step."""
    try:
        found = chosen_vllms(["0.31.0,0.32.0,0.33.0"], find_vllm())
    except VLLMError as error:
        pytest.skip(f"the package index gives no wheel: {error}")
    monkeypatch.setattr(follow, "KEPT", tmp_path)
    monkeypatch.setattr(follow, "PAGE", tmp_path / "versions.md")
    for model in {*MODELS} - {"longcat-flash-chat", "step-3.5-flash"}:
        monkeypatch.delitem(MODELS, model)
    sites, told = [follow.site_of(vllm) for vllm in found], []
    for old, new in ((0, 1), (1, 2)):
        versions = found[old].version, found[new].version
        words = ["follow", versions[1], "--since", versions[0], "--no-corpus"]
        monkeypatch.setattr(sys, "argv", words)
        follow.main()
        told.append(capsys.readouterr().out)
        missing = [name for name in mentioned(sites[old], sites[new]) if name not in told[-1]]
        assert not missing
    defect = "released\n    a defect of vLLM, not of the checkpoint: {}"
    assert f"longcat-flash-chat, {defect.format('its target skips')}" in told[0]
    assert "step-3.5" not in told[0] and "longcat" not in told[1].partition("families that")[2]
    assert f"step-3.5-flash, {defect.format('it cuts layer_types')}" in told[1]
    assert "any_model\n    False -> True" in told[1] and "step5" in told[1]
    assert "| family | 0.31.0 | 0.32.0 | 0.33.0 |" in (tmp_path / "versions.md").read_text()


def mentioned(old: Path, new: Path) -> list[str]:
    """Files that differ and whose name, which no other file has, stands somewhere in this tree."""
    words = ["git", "ls-files", "*.py", "*.yaml", "*.toml"]
    tracked = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True)
    ours = [name for name in tracked.stdout.split() if not name.startswith(("tests", "benchmarks"))]
    text = "\n".join((ROOT / name).read_text() for name in ours)
    said = set(re.findall(r"\w+\.py\b", text)) - {Path(name).name for name in ours}
    count = Counter(path.name for path in old.glob("vllm/**/*.py"))
    return [
        str(path.relative_to(old / "vllm"))
        for path in old.glob("vllm/**/*.py")
        if path.name in said
        and count[path.name] == 1
        and (new / path.relative_to(old)).is_file()
        and path.read_bytes() != (new / path.relative_to(old)).read_bytes()
    ]
