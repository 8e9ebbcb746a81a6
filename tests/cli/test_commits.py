"""The commits that every run prints and records: over a Hub on loopback."""

import shutil

import pytest
import yaml
from commands import GLM, ROOT, keepmtp, refused
from data_files import json_of
from hub import serving
from killed import small_recipe


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    rows = tmp_path_factory.mktemp("rows")
    shutil.copy(ROOT / "models" / "problems.jsonl", rows)
    with serving(tmp_path_factory.mktemp("hub")) as hub:
        model = hub.mirror("org/model", GLM)
        yield hub.endpoint, model, hub.mirror("datasets/org/data", rows)


@pytest.fixture
def recipe(hub, tmp_path, monkeypatch) -> dict:
    """A calibrated recipe, small, whose model and dataset are on the Hub."""
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    place = {"HF_ENDPOINT": hub[0], "HF_HOME": str(tmp_path / "home"), "HF_HUB_DISABLE_XET": "1"}
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    data = {"dataset": "org/data", "dataset_revision": "main"}
    path = small_recipe(tmp_path, "tiny-glm4-moe.fp8", **data)
    return yaml.safe_load(path.read_text()) | {"source": "org/model", "revision": "main"}


@pytest.mark.full
def test_a_run_prints_and_records_the_commits_that_it_read(recipe, hub, tmp_path):
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(recipe))
    done = keepmtp("quantize mine.yaml --out out", cwd=tmp_path, status=0)
    _, model, dataset = hub
    assert f"dataset org/data at commit {dataset}\n" in done.stderr
    assert f": org/model ({model}): " in done.stderr
    record = json_of(tmp_path / "out" / "keepmtp.json")
    assert record["source"]["revision"] == model
    assert record["calibration"]["data"]["dataset_revision"] == dataset


def test_a_dataset_out_of_reach_is_found_before_anything_is_installed(recipe, tmp_path):
    recipe["calibration"]["dataset"] = "org/none"
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(recipe))
    says = "calibration.dataset org/none: must be a dataset on the Hub, or a file or folder"
    refused("quantize mine.yaml", says=says, cwd=tmp_path)
    assert not (tmp_path / "out").exists()
