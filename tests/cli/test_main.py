"""The command as people type it: exit status, one-sentence errors, JSON for machines."""

import json
import re
import sys
from pathlib import Path

import pytest
from commands import ROOT, assert_shows, captured, keepmtp, keepmtp_without, ran, refused
from data_files import printed
from keepmtp.recipes.find import find_recipe
from killed import small_recipe
from releases import source_layout, write_checkpoint

AUTO = "tiny-glm4-moe.nvfp4-mtp-auto"


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    layout = source_layout("glm-4.7", size="tiny")
    return write_checkpoint(tmp_path_factory.mktemp("cli") / "source", *layout, data="random")


def test_quantize_then_check(source, tmp_path):
    line = f"quantize glm-4.7 --source {source} --out out"
    done = keepmtp(line, cwd=tmp_path, status=0)
    assert " tensors in, " in done.stderr, done.stderr
    assert_shows(
        done.stdout, "check passed out: no findings", "out: 5.1 MiB, MTP block BF16. Serve it:"
    )
    assert done.stdout.endswith("\n  keepmtp serve out\n")
    reports = ran(f"check out {source} --json", cwd=tmp_path).splitlines()
    made, released = map(json.loads, reports)
    assert made["ok"] and released["ok"] and made["findings"] == []
    assert "out: finished before" in ran(line, cwd=tmp_path)
    refused(f"{line} --scheme FP8_BLOCK", says="never overwritten", cwd=tmp_path)


def test_a_plan_for_people(source):
    """Of groups of tensors, of a calibration, and of what a machine must have; in a pipe."""
    printed("plan.txt", ran(f"plan {AUTO} --gpu-memory h200", COLUMNS="80"))
    assert_shows(
        ran(f"plan glm-4.7 --source {source}"),
        "no other file",
        "FP8_DYNAMIC runs on sm89 and newer; CPU; from",
        f"{source} (local): 107 tensors in, 176 out;",
    )


def test_a_plan_says_what_an_algorithm_rescales():
    assert_shows(
        ran("plan tiny-glm4-moe.w4a16-awq --gpu-memory h200"),
        "attention a bias, not a matrix; awq may rescale it",
        "norm a vector; awq may rescale it",
        "vLLM builds the gate without a quantization config; awq may rescale it",
        "loads at TP 1; at 2, 4 with W4A16_G32",
    )


def test_a_plan_for_machines(tmp_path):
    told = json.loads(ran(f"plan {AUTO} --gpu-memory 141 --json"))
    printed("plan.json", json.dumps(told, indent=1) + "\n")
    dry = json.loads(ran(f"quantize {AUTO} --dry-run --json", cwd=tmp_path))
    assert not list(tmp_path.iterdir())
    here = dry.pop("needs")
    assert here["machine"].startswith("this machine's") and here["host_there"] > 0
    assert dry == {key: value for key, value in told.items() if key != "needs"}


def test_a_block_that_cannot_be_run_cannot_be_chosen(tmp_path):
    """Known from the family alone, so before a download."""
    write_checkpoint(tmp_path / "source", *source_layout("ring-2.5-1t", size="tiny"))
    words = "ring-2.5-1t --source source --mtp auto"
    assert_shows(
        ran(f"plan {words} --gpu-memory h100", cwd=tmp_path, status=2),
        "MTP block cannot be calibrated: no class for model_type 'bailing_hybrid' in transformers",
        "Would be refused: ring-2.5-1t.nvfp4a16-fp8-mtp-auto: an MTP block that is calibrated or chosen must "
        "be one that can be run; got bailing_hybrid: transformers has no class for Ling 2.5's "
        "layers. Give `mtp` a word that needs no data: bf16, source, FP8_DYNAMIC or W4A16.",
    )
    says = "must be one that can be run"
    refused(f"quantize {words}", says=says, cwd=tmp_path)
    assert not (tmp_path / "out").exists()


def test_a_plan_says_what_is_not_installed(tmp_path):
    """tests/test_wheel.py has what a run refuses."""
    done = keepmtp_without(("torch",), f"plan {AUTO}", cwd=tmp_path, status=0)
    assert "Not installed: calibration for" in done.stdout + done.stderr


@pytest.mark.full
def test_a_sweep_that_several_processes_cannot_share(tmp_path):
    """One sentence, before any work."""
    recipe = small_recipe(tmp_path, "tiny-glm4-moe.nvfp4", algorithm="local-hessian")
    words = f"quantize {recipe} --out {tmp_path}/out"
    done = keepmtp(words, status=2, RANK="0", WORLD_SIZE="2")
    says = (
        "rank 0 of 2: error: tiny-glm4-moe.nvfp4: algorithm: local-hessian must run in one process"
    )
    assert done.stderr.startswith(says) and done.stderr.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == [recipe.name]


@pytest.mark.full
def test_a_calibrated_run_for_machines(tmp_path):
    """A real one, short: progress for people on standard error, one JSON at the end, the same
    figures in report.json.
    """
    text = find_recipe(AUTO)[1]
    text = re.sub(r"candidates:\n( +- .*\n)+", "candidates: [bf16, NVFP4]\n", text)
    for change in ("min_acceptance: 0.2", "samples: 8", "held_out: 16", "batch_size: 4"):
        text = re.sub(rf"{change.partition(' ')[0]} .*", change, text)
    (tmp_path / "mine.yaml").write_text(text)
    words = f"quantize mine.yaml --source {ROOT}/models/tiny-glm4-moe --out out --json"
    done = keepmtp(words, cwd=tmp_path, status=0)
    for step in ("backbone  layer 3 of 3  ", "mtp  policy 2 of 2  "):
        said = done.stderr.partition(step)[2].partition("\n")[0]
        assert re.fullmatch(r"[\d,]+ tok/s  ETA 0:00:00  peak [\d.]+ GiB", said), done.stderr
    told = json.loads(done.stdout)
    found = told["calibration"]
    assert told["check"]["ok"] and told["plan"]["recipe"]["mtp"] == found["mtp"] == "NVFP4"
    assert {path.name for path in tmp_path.iterdir()} == {"mine.yaml", "out", "out.log"}
    results = told["results"]
    assert results["output_bytes"] == told["plan"]["bytes"]["after"]
    assert 0 < results["seconds_a_layer"] < results["seconds"]
    lines = (tmp_path / "out.log").read_text().splitlines()
    assert (
        "layer 3 of 3" in lines[3] and "packing" in lines[-2] and lines[-1].endswith("of the host")
    )
    ran("check out --record", cwd=tmp_path)
    assert json.loads((tmp_path / "out.report/report.json").read_text())["calibration"] == found


def test_a_shipped_model_is_found_from_anywhere(tmp_path):
    ran("plan tiny-glm4-moe", cwd=tmp_path)
    text = find_recipe("tiny-glm4-moe.w4a16-fp8")[1]
    (tmp_path / "mine.yaml").write_text(text.replace("models/tiny-glm4-moe", "models/tiny-glm5"))
    refused("plan mine.yaml", says="models/tiny-glm5: a checkpoint is a folder", cwd=tmp_path)


def test_what_the_hub_warns_of_is_said_once():
    code = (
        "import logging; from keepmtp.cli import main as cli; cli._common(); "
        "logging.getLogger('huggingface_hub.x').warning('slow')"
    )
    done = captured([sys.executable, "-c", code], status=0)
    assert done.stderr.count("slow") == 1, done.stderr
