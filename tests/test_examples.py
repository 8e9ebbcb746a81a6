"""examples/, each run as a reader runs it: from another folder, with `keepmtp` on the path."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from commands import GLM, KEEPMTP, ROOT, captured, keepmtp
from data_files import json_of
from hub import serving
from written_values import fine_tune

EXAMPLES = ROOT / "examples"


def test_each_example_is_run_here():
    """Adding a file to examples/ means adding a test of it."""
    names = {path.name for path in EXAMPLES.iterdir()}
    scripts = {"fine_tune.sh", "check_hub_id.py", "quantize.sbatch"}
    assert names == {*scripts, "first_look.ipynb", "two_kinds_of_text.yaml"}


def run(folder: Path, name: str | Path, *words: str | Path) -> subprocess.CompletedProcess[str]:
    """With what is in the folder on the path, too."""
    path = f"{folder}:{os.path.dirname(KEEPMTP)}:{os.environ['PATH']}"
    env = os.environ | {"PATH": path, "SLURM_JOB_NODELIST": "here", "SLURM_JOB_ID": "7"}
    return captured((EXAMPLES / name, *words), cwd=folder, env=env, status=0)


def test_the_cells_of_the_notebook_run_from_top_to_bottom(tmp_path):
    cells = json_of(EXAMPLES / "first_look.ipynb")["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    (tmp_path / "all.py").write_text("\n".join([f"#!{sys.executable}", *code]))
    (tmp_path / "all.py").chmod(0o755)
    assert "check passed fixed" in run(tmp_path, tmp_path / "all.py").stdout
    assert (tmp_path / "sizes.png").is_file()


def test_the_slurm_file_starts_keepmtp_by_torchrun(tmp_path):
    torchrun = 'while [ "$1" != -m ]; do shift; done; shift; exec "$@"'
    srun = 'shift; exec "$@" --dry-run'
    for name, line in (("srun", srun), ("torchrun", torchrun), ("scontrol", "echo here")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{line}\n")
        (tmp_path / name).chmod(0o755)
    said = run(tmp_path, "quantize.sbatch", "tiny-glm4-moe.w4a16-fp8", GLM, "out").stdout
    assert "W4A16" in said


@pytest.mark.full
def test_a_fine_tune_is_quantized_and_checked(tmp_path):
    fine_tune(tmp_path, has_block=False)
    done = run(tmp_path, "fine_tune.sh", "my-fine-tune", GLM, "out/mine")
    assert "check passed out/mine: no findings" in done.stdout
    assert (tmp_path / "out" / "mine" / "keepmtp.json").is_file()


def test_a_hub_id_is_judged_before_a_download(tmp_path):
    """A good repository, and one whose config.json promises a block that no file has."""
    lost = fine_tune(tmp_path, has_block=False)
    with serving(tmp_path / "hub") as hub:
        hub.mirror("org/good", GLM)
        hub.mirror("org/lost", lost)
        place = {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "0"}
        said = {}
        for name, status in (("org/good", 0), ("org/lost", 1), ("org/none", 2)):
            words = (sys.executable, EXAMPLES / "check_hub_id.py", name)
            said[name] = captured(words, env=os.environ | place, cwd=tmp_path, status=status).stdout
    assert "org/good: good, by the rules of vLLM" in said["org/good"]
    assert "error: model.layers.3.* (1)" in said["org/lost"]
    assert "num_nextn_predict_layers=1 promises MTP layer 0" in said["org/lost"]
    shards = [request for request in hub.requests if "safetensors bytes" in request]
    assert len(shards) == 4 and all(request.endswith(" bytes=0-99999") for request in shards)


def test_two_kinds_of_text_are_planned(tmp_path):
    done = keepmtp(f"plan {EXAMPLES}/two_kinds_of_text.yaml --json", cwd=tmp_path, status=0)
    assert "NVFP4" in done.stdout


@pytest.mark.full
def test_two_kinds_of_text_are_calibrated_on(tmp_path):
    keepmtp(f"quantize {EXAMPLES}/two_kinds_of_text.yaml --out out", cwd=tmp_path, status=0)
    record = json_of(tmp_path / "out" / "keepmtp.json")
    assert "problems.jsonl" in str(record["calibration"])
