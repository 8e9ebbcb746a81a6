"""The commits that every run prints and records: over a Hub on loopback."""

import json
import os
import subprocess
from pathlib import Path

import pytest
from commands import KEEPMTP, ROOT
from hub import serving
from keepmtp.recipes.find import find_recipe

TINY = ROOT / "models" / "tiny-glm4-moe"


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    rows = tmp_path_factory.mktemp("rows")
    (rows / "problems.jsonl").write_bytes((ROOT / "models" / "problems.jsonl").read_bytes())
    with serving(tmp_path_factory.mktemp("hub")) as hub:
        yield hub, hub.mirror("org/model", TINY), hub.mirror("datasets/org/data", rows)


def run(*words: str, hub, cwd: Path) -> subprocess.CompletedProcess[str]:
    endpoint = {
        "HF_ENDPOINT": hub[0].endpoint,
        "HF_HOME": str(cwd / "home"),
        "HF_HUB_DISABLE_XET": "1",
    }
    clean = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
    return subprocess.run(
        [KEEPMTP, *words], capture_output=True, text=True, cwd=cwd, env=clean | endpoint
    )


@pytest.fixture
def recipe(tmp_path) -> Path:
    """A calibrated recipe, small, whose model and dataset are on the Hub."""
    text = find_recipe("tiny-glm4-moe.fp8")[1]
    for old, new in {
        "source: models/tiny-glm4-moe": "source: org/model  # ours",
        "revision: local\nbackbone": "revision: main\nbackbone",
        "dataset: models/problems.jsonl\n  dataset_revision: local": "dataset: org/data\n  dataset_revision: main",
        "samples: 32": "samples: 4",
        "held_out: 16": "held_out: 4",
        "batch_size: 8": "batch_size: 4",
    }.items():
        assert old in text
        text = text.replace(old, new)
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    return path


@pytest.mark.full
def test_a_run_prints_and_records_the_commits_that_it_read(recipe, hub, tmp_path):
    done = run("quantize", "mine.yaml", "--out", "out", hub=hub, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    _, model, dataset = hub
    assert (
        f"reads org/model at commit {model}, dataset org/data at commit {dataset}\n" in done.stderr
    )
    record = json.loads((tmp_path / "out" / "keepmtp.json").read_text())
    assert record["source"]["revision"] == model
    assert record["calibration"]["data"]["dataset_revision"] == dataset


def test_a_dataset_out_of_reach_is_found_before_anything_is_installed(recipe, hub, tmp_path):
    recipe.write_text(recipe.read_text().replace("org/data", "org/none"))
    for verb in ("extra", "quantize"):
        done = run(verb, "mine.yaml", hub=hub, cwd=tmp_path)
        assert done.returncode == 2 and not done.stdout, done.stdout
        assert "calibration.dataset org/none: must be a dataset on the Hub" in done.stderr
    assert not (tmp_path / "out").exists()
