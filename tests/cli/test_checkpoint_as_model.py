"""MODEL as a folder, a Hub id or the address of a page: a checkpoint without a recipe, as
fine-tunes are.
"""

import shutil
from pathlib import Path

import pytest
from commands import GLM, assert_shows, ran
from data_files import cases
from keepmtp.pipeline import plan_for
from keepmtp.quantize.plan.checkpoint_as_model import ModelWord, model_name, model_word
from keepmtp.recipes.errors import CheckpointError, RecipeError
from safetensors.torch import load_file, save_file


@pytest.fixture(scope="module")
def fine_tune(tmp_path_factory) -> Path:
    """The shipped tiny model with other weights, under another name."""
    folder = tmp_path_factory.mktemp("tuned") / "My Tune-v1.2"
    shutil.copytree(GLM, folder)
    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        for value in tensors.values():
            if value.is_floating_point():
                value *= 1.01
        save_file(tensors, file, metadata={"format": "pt"})
    return folder


@cases
def test_words_that_mean_a_recipe(model):
    assert model_word(model) == ModelWord(name=model, is_recipe=True)


@cases
def test_words_that_mean_a_checkpoint(model):
    assert model_word(model) == ModelWord(name=model.removeprefix("./"), is_recipe=False)


@cases
def test_a_page_means_a_checkpoint_or_its_recipe(page, revision):
    word = ModelWord(name="org/name", is_recipe=False, revision=revision)
    assert model_word(page) == word
    word = ModelWord(name="zai-org/GLM-4.7", is_recipe=True, revision=revision)
    assert model_word(page.replace("org/name", "zai-org/GLM-4.7")) == word


@cases
def test_a_word_that_means_nothing(model):
    with pytest.raises(RecipeError, match=r"a folder with config\.json, or a Hub id ORG/NAME"):
        model_word(model)


def test_a_recipes_name_comes_before_a_folder_of_that_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("glm-4.7").mkdir()
    assert model_word("glm-4.7").is_recipe and not model_word("./glm-4.7").is_recipe


@pytest.mark.full
def test_any_scheme_and_policy_can_be_named(fine_tune):
    plan, _ = plan_for(str(fine_tune), scheme="nvfp4", mtp="NVFP4")
    assert plan.recipe.name == "My-Tune-v1.2.nvfp4-mtp-nvfp4"
    assert plan.needs_calibration == ["NVFP4"]
    assert_shows(
        ran("plan './My Tune-v1.2'", cwd=fine_tune.parent),
        "My Tune-v1.2 (glm4_moe) variant data bytes GPUs that hold it",
        "nvfp4a16-fp8 none 4.0 MiB 1 x 4090",
        "nvfp4-fp8 mix-256x2048 4.0 MiB 1 x 4090",
        "Choose one with --scheme.",
    )
    shown = ran(f"plan '{fine_tune}' --scheme NVFP4 --mtp NVFP4")
    assert "samples 256" in shown
    shown = ran(f"plan '{fine_tune}' --scheme NVFP4 --calibration problems-32x128")
    assert "samples 32" in shown


def test_a_recipe_still_takes_any_folder_of_its_family(fine_tune):
    plan, _ = plan_for("glm-4.5-air", source=str(fine_tune))
    assert plan.recipe.name == "glm-4.5-air.nvfp4a16-fp8" and plan.source.where == str(fine_tune)


def test_a_hub_id_and_its_page(fine_tune, serve_hub):
    serve_hub(fine_tune)
    for model in ("org/model", "https://huggingface.co/org/model/tree/main"):
        plan, _ = plan_for(model, scheme="w4a16-fp8")
        assert plan.recipe.name == "model.w4a16-fp8"
        assert len(plan.recipe.revision) == 40 and plan.recipe.revision == plan.source.revision


def test_the_page_of_a_release_with_a_recipe_means_that_recipe(serve_hub, fine_tune):
    serve_hub(fine_tune)
    with pytest.raises(CheckpointError, match=r"zai-org/GLM-4\.7"):  # not on this Hub
        plan_for("https://huggingface.co/zai-org/GLM-4.7")


def test_names_of_outputs(tmp_path, monkeypatch):
    assert model_name("org/Name-1.0") == "Name-1.0"
    assert model_name("/data/../Ünï cödé/") == "n-c-d"
    snapshot = tmp_path / "models--org--Tune" / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    assert model_name(str(snapshot)) == "Tune"
    monkeypatch.chdir(snapshot.parent)
    assert model_name(".") == "snapshots"
