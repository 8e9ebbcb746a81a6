"""Which run may go on in a calibration folder, and which sentence stops another one."""

import json
import os
import re
import shutil
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import pytest
import torch
import yaml
from calibrated import planned
from keepmtp.pipeline import plan_for
from keepmtp.quantize.calibrate.data import claim
from keepmtp.quantize.calibrate.data.claim import claim_pass, fingerprint
from keepmtp.quantize.calibrate.data.data import CalibrationData, calibration_data
from keepmtp.quantize.plan.plan import Plan
from keepmtp.quantize.run.processes import refuse_processes
from keepmtp.quantize.run.ranks import Ranks
from keepmtp.quantize.write.refusals import refuse
from keepmtp.recipes.errors import RecipeError
from keepmtp.recipes.find import find_recipe, shipped_recipes
from killed import small_recipe

SHIPPED = Path("models/tiny-glm4-moe")
ALONE = Ranks(rank=0, size=1, device=torch.device("cpu"))


def prepared(recipe: Path, source: Path) -> tuple[Plan, CalibrationData]:
    plan, _ = plan_for(str(recipe), source=str(source))
    assert plan.recipe.calibration is not None
    return plan, calibration_data(plan.recipe.calibration, plan.source)


@pytest.fixture
def begun(tmp_path) -> tuple[Path, Path, Path]:
    """(recipe, source, folder) of a pass that was begun over a copy of the shipped model and of its
    dataset.
    """
    source = shutil.copytree(SHIPPED, tmp_path / "source")
    dataset = shutil.copy("models/problems.jsonl", tmp_path)
    recipe = small_recipe(tmp_path, "tiny-glm4-moe.nvfp4", dataset=str(dataset), samples=4)
    claim_pass(*prepared(recipe, source), tmp_path / "pass", ALONE)
    return recipe, source, tmp_path / "pass"


def edit(file: Path, before: str, after: str) -> None:
    assert before in file.read_text()
    file.write_text(file.read_text().replace(before, after))


def add_to_config(source: Path, **values: object) -> None:
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | values))


CHANGES = {
    r"another recipe \(backbone was .* and is .*\)": lambda recipe, source: edit(
        recipe, "mlp: NVFP4", "mlp: FP8_DYNAMIC"
    ),
    r"another calibration \(seed was 42 and is 43\)": lambda recipe, source: edit(
        recipe, "seed: 42", "seed: 43"
    ),
    r"another source \(model\S*\.safetensors was .* and is .*\)": lambda recipe, source: os.utime(
        next(source.glob("*.safetensors"))
    ),
    r"another (source|config\.json) \(": lambda recipe, source: add_to_config(
        source, rms_norm_eps=1e-6
    ),
    r"another dataset \(\w+_sha256 was": lambda recipe, source: edit(
        recipe.parent / "problems.jsonl", "has", "had"
    ),
}


@pytest.mark.parametrize("named", CHANGES)
def test_another_runs_folder_is_refused_and_what_differs_is_named(named, begun):
    recipe, source, folder = begun
    claim_pass(*prepared(recipe, source), folder, ALONE)
    CHANGES[named](recipe, source)
    rule = "can only be resumed with the same recipe, source, dataset and versions; got "
    with pytest.raises(
        RecipeError, match=rule + named + r".*\. Undo this change to go on, or remove "
    ) as refused:
        claim_pass(*prepared(recipe, source), folder, ALONE)
    assert len(str(refused.value)) < 500


def test_what_changes_no_number_keeps_a_pass(begun):
    recipe, source, folder = begun
    words = yaml.safe_load(recipe.read_text())
    words["evaluation"] = {**words.get("evaluation", {}), "shots": 3}
    recipe.write_text(
        yaml.safe_dump({**words, "mtp": "FP8_DYNAMIC", "gates": {"min_acceptance": 0.9}})
    )
    claim_pass(*prepared(recipe, source), folder, ALONE)


@pytest.mark.parametrize("variant", ["nvfp4", "w4a16-gptq", "w4a16-awq", "w8a8-smoothquant"])
def test_another_split_counts_where_numbers_are_added_up(variant, tmp_path):
    recipe, source, folder = (
        small_recipe(tmp_path, f"tiny-glm4-moe.{variant}"),
        SHIPPED,
        tmp_path / "pass",
    )
    claim_pass(*prepared(recipe, source), folder, ALONE)
    algorithm = variant.rpartition("-")[2]
    if algorithm in ("nvfp4", "smoothquant"):
        edit(recipe, "batch_size: 2", "batch_size: 4")
        assert fingerprint(*prepared(recipe, source), 3) == (folder / "fingerprint").read_text()
        claim_pass(*prepared(recipe, source), folder, ALONE)
        return
    rule = r"got another split \("
    with pytest.raises(RecipeError, match=rule + "processes was 1 and is 2"):
        claim_pass(*prepared(recipe, source), folder, replace(ALONE, size=2))
    edit(recipe, "batch_size: 2", "batch_size: 4")
    with pytest.raises(RecipeError, match=rule + "batch_size was 2 and is 4"):
        claim_pass(*prepared(recipe, source), folder, ALONE)


def test_a_knob_makes_another_run(tmp_path):
    recipe, folder = small_recipe(tmp_path, "tiny-glm4-moe.w4a16-gptq"), tmp_path / "pass"
    claim_pass(*prepared(recipe, SHIPPED), folder, ALONE)
    edit(recipe, "algorithm: gptq", "algorithm: gptq\n  gptq: {block_size: 64}")
    with pytest.raises(
        RecipeError, match=r'another calibration \(gptq was null and is \{"actorder"'
    ):
        claim_pass(*prepared(recipe, SHIPPED), folder, ALONE)


@pytest.mark.parametrize("is_stamped", [True, False])
def test_states_of_an_unnamed_run_are_refused(is_stamped, begun):
    recipe, source, folder = begun
    (folder / "fingerprint.json").unlink()
    if is_stamped:
        (folder / "fingerprint").write_text("0" * 64)
    else:
        (folder / "fingerprint").unlink()
        (folder / "states" / "00001").mkdir(parents=True)
    with pytest.raises(RecipeError, match=r"got another run\. .* remove .* to start anew"):
        claim_pass(*prepared(recipe, source), folder, ALONE)


def test_a_gpu_that_cannot_be_seen_any_more_is_no_reason_for_the_cpu(begun):
    recipe, source, folder = begun
    plan, data = prepared(recipe, source)
    shutil.rmtree(folder)
    claim_pass(plan, data, folder, replace(ALONE, device=torch.device("cuda")))
    rule = r"was begun on cuda must go on there; got cpu on rank 0 of 1\. Look at `nvidia-smi`"
    with pytest.raises(RecipeError, match=rule):
        claim_pass(plan, data, folder, ALONE)


def test_kernels_count(tmp_path, monkeypatch):
    """transformers takes them for its own functions as soon as they are installed."""
    data = CalibrationData(ids=torch.zeros(4, 8), held_out_ids=torch.zeros(2, 8), provenance={})
    plan, real = planned(tmp_path / "source", model="qwen3-next-80b"), metadata.version
    before = fingerprint(plan, data, 1)
    monkeypatch.setattr(
        claim, "version", lambda name: "1.5.0" if name == "causal-conv1d" else real(name)
    )
    assert fingerprint(plan, data, 1) != before


def test_more_processes_than_sequences_are_refused(begun, monkeypatch):
    """Before the download, from the recipe alone."""
    plan, data = prepared(*begun[:2])
    rule = "must have a sequence of calibration text; got 4 samples for 5 processes"
    with pytest.raises(RecipeError, match=re.escape(rule)):
        claim_pass(plan, data, begun[2].with_name("other"), replace(ALONE, size=5))
    refuse(plan, begun[2].with_name("out"))
    monkeypatch.setenv("WORLD_SIZE", "5")
    with pytest.raises(RecipeError, match=re.escape(rule)):
        refuse(plan, begun[2].with_name("out"))


def test_eight_processes_may_share_what_the_shipped_recipes_ask_for():
    """Sixteen held-out sequences in batches of four were too few for eight processes."""
    found = [recipe for recipe in shipped_recipes() if recipe.calibration is not None]
    assert len(found) > 10
    for recipe in found:
        assert recipe.calibration is not None
        if recipe.calibration.algorithm != "autoround":
            refuse_processes(recipe.calibration, 8, recipe.name)


def test_autoround_runs_in_one_process():
    recipe = find_recipe("tiny-glm4-moe.w4a16-autoround")[0]
    assert recipe.calibration is not None
    refuse_processes(recipe.calibration, 1, recipe.name)
    with pytest.raises(
        RecipeError,
        match=f"^{recipe.name}: .*autoround must run in one process; got 2 processes. Start",
    ):
        refuse_processes(recipe.calibration, 2, recipe.name)
