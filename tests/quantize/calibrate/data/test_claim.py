"""Which run may go on in a calibration folder, and which sentence stops another one."""

import os
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import pytest
import yaml
from keepmtp.quantize.calibrate.data import claim
from keepmtp.quantize.calibrate.data.claim import claim_pass, fingerprint
from keepmtp.quantize.run.processes import refuse_processes
from keepmtp.quantize.write.refusals import refuse
from keepmtp.recipes.errors import RecipeError
from keepmtp.recipes.find import find_recipe
from killed import small_recipe
from passes import ALONE, prepared
from releases import shipped_recipes


@pytest.fixture
def begun(tmp_path) -> tuple[Path, Path, Path]:
    """(recipe, source, folder) of a pass that was begun over a copy of the shipped model and of its
    dataset.
    """
    source = shutil.copytree("models/tiny-glm4-moe", tmp_path / "source")
    dataset = shutil.copy("models/problems.jsonl", tmp_path)
    recipe = small_recipe(tmp_path, "tiny-glm4-moe.nvfp4", dataset=str(dataset), samples=4)
    claim_pass(*prepared(recipe, source), tmp_path / "pass", ALONE)
    return recipe, source, tmp_path / "pass"


def edit(name: str, before: str, after: str) -> Callable[[Path], None]:
    """Of a file under a folder."""

    def change(folder: Path) -> None:
        (file,) = folder.glob(name)
        assert before in file.read_text()
        file.write_text(file.read_text().replace(before, after))

    return change


def newer(folder: Path) -> None:
    os.utime(next(folder.glob("source/*.safetensors")))


def dated_back(folder: Path) -> None:
    shard = next(folder.glob("source/*.safetensors"))
    before = shard.stat()
    shard.write_bytes(shard.read_bytes())
    os.utime(shard, ns=(before.st_atime_ns, before.st_mtime_ns))


def on_a_gpu(folder: Path) -> None:
    edit("pass/fingerprint.json", '"type": "cpu"', '"type": "cuda"')(folder)


def unnamed(folder: Path) -> None:
    shutil.rmtree(folder / "pass")
    (folder / "pass" / "states" / "00001").mkdir(parents=True)


CHANGES = {
    r"recipe \(backbone was .* and is .*\)": edit("*.yaml", "mlp: NVFP4", "mlp: FP8_DYNAMIC"),
    r"calibration \(seed was 42 and is 43\)": edit("*.yaml", "seed: 42", "seed: 43"),
    r"source \(model\S*\.safetensors was .* and is .*\)": newer,
    r"source \(model\S*\.safetensors was": dated_back,
    r"(source|config\.json) \(": edit("source/config.json", "1e-05", "1e-06"),
    r"dataset \(\w+_sha256 was": edit("problems.jsonl", "has", "had"),
    r"device \(type was .cuda. and is .cpu.\)": on_a_gpu,
    r"recipe \(model was null and is": unnamed,
    r"MTP block \(has_states was null and is true\)": edit("*.yaml", "mtp: bf16", "mtp: NVFP4"),
}


@pytest.mark.parametrize("named", CHANGES)
def test_another_runs_folder_is_refused_and_what_differs_is_named(named, begun):
    recipe, source, folder = begun
    claim_pass(*prepared(recipe, source), folder, ALONE)
    CHANGES[named](folder.parent)
    rule = "with the same recipe, source, dataset, versions and device; got another "
    cure = r".*\. Undo this change to go on, or remove \S+ to start anew\."
    with pytest.raises(RecipeError, match=rule + named + cure) as refused:
        claim_pass(*prepared(recipe, source), folder, ALONE)
    assert len(str(refused.value)) < 700


def test_what_changes_no_number_keeps_a_pass(begun):
    recipe, source, folder = begun
    words = yaml.safe_load(recipe.read_text())
    words["evaluation"] = {**words.get("evaluation", {}), "shots": 3}
    words |= {"mtp": "FP8_DYNAMIC", "gates": {"min_acceptance": 0.9}}
    recipe.write_text(yaml.safe_dump(words))
    stamp = fingerprint(*prepared(recipe, source), 1)
    for shard in source.glob("*.safetensors"):
        os.link(shard, folder.parent / shard.name)  # a checkpoint that shares it
    claim_pass(*prepared(recipe, source), folder, ALONE)
    assert fingerprint(*prepared(recipe, source), 1) == stamp


@pytest.mark.parametrize("variant", ["nvfp4", "w4a16-gptq", "w4a16-awq", "w8a8-smoothquant"])
def test_another_split_counts_where_numbers_are_added_up(variant, tmp_path):
    recipe = small_recipe(tmp_path, f"tiny-glm4-moe.{variant}")
    folder = tmp_path / "pass"
    claim_pass(*prepared(recipe), folder, ALONE)
    stamp = fingerprint(*prepared(recipe), 1)
    larger = edit("*.yaml", "batch_size: 2", "batch_size: 4")
    if variant in ("nvfp4", "w8a8-smoothquant"):
        larger(tmp_path)
        assert fingerprint(*prepared(recipe), 3) == stamp
        return
    rule = r"got another split \("
    with pytest.raises(RecipeError, match=rule + "processes was 1 and is 2"):
        claim_pass(*prepared(recipe), folder, replace(ALONE, size=2))
    larger(tmp_path)
    with pytest.raises(RecipeError, match=rule + "batch_size was 2 and is 4"):
        claim_pass(*prepared(recipe), folder, ALONE)


def test_knobs_and_kernels_make_another_run(tmp_path, monkeypatch):
    """transformers takes kernels for its own functions as soon as they are installed."""
    name = "tiny-glm4-moe.w4a16-autoround"
    real = metadata.version
    other = prepared(small_recipe(tmp_path, name, autoround={"iters": 64}))
    plain = prepared(small_recipe(tmp_path, name))
    found = [fingerprint(*plain, 1), fingerprint(*other, 1)]
    monkeypatch.setattr(
        claim, "version", lambda name: "1.5.0" if name == "causal-conv1d" else real(name)
    )
    assert len({*found, fingerprint(*plain, 1)}) == 3


def test_more_processes_than_sequences_are_refused(begun, monkeypatch):
    """Before the download, from the recipe alone."""
    plan, _ = prepared(*begun[:2])
    refuse(plan, begun[2].with_name("out"))
    monkeypatch.setenv("WORLD_SIZE", "5")
    rule = r"must have a sequence of calibration text; got 4 samples for 5 processes"
    with pytest.raises(RecipeError, match=rule):
        refuse(plan, begun[2].with_name("out"))


def test_eight_processes_may_share_what_the_shipped_recipes_ask_for_but_autoround():
    alone = find_recipe("tiny-glm4-moe.w4a16-autoround")[0]
    refuse_processes(alone.calibration, 1, alone.name)
    found = [recipe for recipe in shipped_recipes() if recipe.calibration is not None]
    assert len(found) > 10 and alone in found
    for recipe in found:
        refused = nullcontext()
        if recipe.calibration.algorithm == "autoround":
            rule = f"^{recipe.name}: .*autoround must run in one process; got 8 processes. Start"
            refused = pytest.raises(RecipeError, match=rule)
        with refused:
            refuse_processes(recipe.calibration, 8, recipe.name)
