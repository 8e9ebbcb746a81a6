"""The search of `backbone: auto`: what its sensitivities predict, what it finds, and what becomes
of it on disk.
"""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from keepmtp import pipeline
from keepmtp.checkpoints.source import open_source
from keepmtp.cli.main import app
from keepmtp.quantize.calibrate.data.claim import search_fingerprint
from keepmtp.quantize.calibrate.data.data import CalibrationData, calibration_data
from keepmtp.quantize.calibrate.search import search_pass
from keepmtp.quantize.calibrate.search.search_pass import (
    measure_plans,
    packed,
    search,
    search_run,
)
from keepmtp.quantize.calibrate.search.sensitivity import SearchRun, Sensitivities
from keepmtp.quantize.plan.choices import choices_of
from keepmtp.quantize.plan.found_recipe import found_plan, found_recipe, found_text
from keepmtp.quantize.plan.plan import Plan, make_plan
from keepmtp.recipes.errors import CheckpointError, GateError, RecipeError
from keepmtp.recipes.find import find_recipe, read_recipe
from keepmtp.recipes.schema import Recipe
from passes import ALONE, ROOT, plan_over
from scipy.stats import spearmanr
from typer.testing import CliRunner

GLM = ROOT / "models" / "tiny-glm4-moe"
WORDS = ["NVFP4", "FP8_DYNAMIC", "bf16"]


def searched(
    budget: str, model: str = "tiny-glm4-moe", *, auto: dict | None = None, **changes
) -> Recipe:
    raw = find_recipe(f"{model}.nvfp4")[0].model_dump()
    own = {
        "backbone": "auto",
        "mtp": "auto",
        "budget": budget,
        "backbone_auto": {"candidates": WORDS} | (auto or {}),
    }
    return Recipe.model_validate(raw | own | changes)


def plan_and_data(recipe: Recipe) -> tuple[Plan, CalibrationData]:
    plan = plan_over(ROOT / recipe.source, recipe)
    return plan, calibration_data(recipe.calibration, plan.source)


@pytest.fixture(scope="module")
def swept(tmp_path_factory) -> tuple[SearchRun, Sensitivities]:
    """A search whose sensitivities are known."""
    plan, data = plan_and_data(searched("5.5 bits"))
    choices = choices_of(plan.recipe, plan.source)
    own = search_run(choices, data, tmp_path_factory.mktemp("search"), ALONE)
    return own, own.sensitivities()


@pytest.mark.full
def test_sensitivities_predict_what_one_unit_does_to_held_out_text(swept, tmp_path):
    """Each unit in 4 bits alone: predicted on calibration text, measured as divergence on held-out
    text.

    Predictions are of answers and drafts together, so the measured ones are of units before the
    block; a drawn token for each slot leaves a factor of about two.
    """
    own, found = swept
    choices = own.choices
    backbone = [unit for unit in choices.units if unit.part == "backbone"]
    plans = [choices.plan({**choices.uniform("bf16"), unit.name: "NVFP4"}) for unit in backbone]
    _, *measured = measure_plans(
        replace(own, has_block=False), plans, own.data, tmp_path, found.largest
    )
    predicted = [found.losses[unit.name, "NVFP4"] for unit in backbone]
    diverged = [each.divergence for each, _ in measured]
    assert spearmanr(predicted, diverged).statistic > 0.8
    assert 0.5 < sum(predicted) / sum(diverged) < 3
    assert all(
        found.losses[unit.name, "FP8_DYNAMIC"] < found.losses[unit.name, "NVFP4"]
        for unit in backbone
    )
    assert all((unit.name, "bf16") not in found.losses for unit in choices.units)
    # The block's units are known, too, by what they do to drafts.
    assert all(found.losses[unit.name, "NVFP4"] > 0 for unit in choices.units if unit.part == "mtp")


def test_what_is_found_is_a_recipe_that_gives_the_same_plan(swept):
    own, found = swept
    choices = own.choices
    assignment, _ = packed(choices, found, {})
    assert choices.fits(assignment)
    plan = found_plan(choices, assignment, shard_bytes=10**9)
    text = found_text(plan.recipe)
    assert "auto" not in text and "budget" not in text.replace("found for", "")
    path = own.place / "recipe.yaml"
    path.write_text(text)
    again = make_plan(read_recipe(path), plan.source)
    assert [(t.name, t.fate, t.scheme) for t in again.tensors] == [
        (t.name, t.fate, t.scheme) for t in plan.tensors
    ]
    # One of its overrides is wrong: the unit is named.
    assert plan.recipe.overrides, "nothing deviates from its group: choose another budget"
    broken = {
        **assignment,
        choices.units[0].name: "NVFP4" if assignment[choices.units[0].name] != "NVFP4" else "bf16",
    }
    with pytest.raises(RecipeError, match=r"must give model\.layers\.0\..* the word"):
        _checked_against(choices, broken, plan.recipe)


def _checked_against(choices, assignment, recipe) -> None:
    """`found_plan` where the recipe is of another assignment."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("keepmtp.quantize.plan.found_recipe.found_recipe", lambda *_: recipe)
        found_plan(choices, assignment, shard_bytes=10**9)


def test_overrides_are_few_where_layers_agree():
    """A full-size model: one line for all layers of a kind."""
    choices = choices_of(searched("16 bits"), open_source(GLM))
    assignment = choices.uniform("bf16") | {
        unit.name: "NVFP4" for unit in choices.units if unit.role == "attention" and unit.layer == 1
    }
    overrides = found_recipe(choices, assignment).overrides
    projections = "|".join(rf"model\.layers\.(?:1)\.self_attn\.{each}_proj" for each in "kqv")
    assert [each.modules for each in overrides] == [
        rf"re:(?:{projections})",
        r"re:(?:model\.layers\.(?:1)\.self_attn\.o_proj)",
    ]


@pytest.mark.parametrize("stop", ["_forward", "_top", "_backward"])
def test_a_killed_search_goes_on_to_the_same_sums(stop, swept, tmp_path, monkeypatch):
    own, found = swept
    sweeps = replace(own, place=tmp_path)
    calls = []
    once = getattr(type(sweeps), stop)

    def killed(self, *args):
        calls.append(args)
        if len(calls) == (1 if stop == "_top" else 2):
            raise KeyboardInterrupt
        return once(self, *args)

    monkeypatch.setattr(type(sweeps), stop, killed)
    with pytest.raises(KeyboardInterrupt):
        sweeps.sensitivities()
    monkeypatch.setattr(type(sweeps), stop, once)
    assert replace(own, place=tmp_path).sensitivities() == found


@pytest.mark.full
def test_the_whole_line(tmp_path, monkeypatch):
    """From a recipe with a budget to a checkpoint that passes its check, and the same again without
    a search.
    """
    monkeypatch.chdir(ROOT)
    asked = tmp_path / "asked.yaml"
    asked.write_text(json.dumps(searched("3.3MB", variant="small").model_dump(mode="json")))
    out = tmp_path / "out"
    said = CliRunner().invoke(
        app, ["quantize", str(asked), "--out", str(out), "--keep-calibration"]
    )
    assert said.exit_code == 0, said.output
    assert "recipe.yaml in the output" in said.output and "check passed" in said.output
    assert sum(path.stat().st_size for path in out.iterdir()) <= 3_300_000
    record = json.loads((out / "keepmtp.json").read_text())
    fact = record["calibration"]["search"]
    chosen = [plan for plan in fact["plans"] if plan["chosen"]]
    uniform = [plan for plan in fact["plans"] if plan["title"] == "NVFP4 for all"]
    assert len(chosen) == 1 and fact["budget"] == "3.3MB"
    assert chosen[0]["divergence"] < uniform[0]["divergence"]
    # The same command finds it finished; its own recipe makes the same shards, and searches
    # nothing.
    again = CliRunner().invoke(app, ["quantize", str(asked), "--out", str(out)])
    assert "finished before" in again.output, again.output
    monkeypatch.setattr(search_pass, "search", None)
    other = tmp_path / "other"
    said = CliRunner().invoke(app, ["quantize", str(out / "recipe.yaml"), "--out", str(other)])
    assert said.exit_code == 0, said.output
    for path in out.glob("*.safetensors"):
        assert path.read_bytes() == (other / path.name).read_bytes()
    # Another budget uses the sensitivities again; another text does not.
    folder = Path(f"{out}.calibration")
    _another_budget(folder / "search", monkeypatch)


def _another_budget(folder: Path, monkeypatch) -> None:
    monkeypatch.setattr("keepmtp.quantize.calibrate.search.sensitivity.SearchRun._forward", None)
    plan, data = plan_and_data(searched("16 bits", variant="small"))
    found, fact = search(plan, data, folder, ranks=ALONE)
    # Everything fits: nothing is rounded, and nothing is left for batches.
    assert fact.plans[0].predicted == 0.0 and "calibration: null" in found_text(found.recipe)
    calibration = plan.recipe.calibration.model_copy(update={"seed": 7})
    other = replace(plan, recipe=plan.recipe.model_copy(update={"calibration": calibration}))
    with pytest.raises(TypeError, match="'NoneType' object is not callable"):
        search(other, data, folder, ranks=ALONE)


def test_acceptance_that_no_plan_keeps_is_refused(swept, tmp_path):
    own, _ = swept
    plan, data = plan_and_data(searched("5.5 bits", auto={"min_acceptance": 0.9999}))
    shutil.copytree(own.place, tmp_path / search_fingerprint(plan, data, 1)[:16])
    with pytest.raises(
        GateError, match=r"must keep 100\.0% of acceptance.*, by (found|NVFP4 for all)"
    ):
        search(plan, data, tmp_path, ranks=ALONE)


def test_a_layer_that_is_not_finite_is_named(tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(GLM, folder)
    name = "model.layers.2.self_attn.o_proj.weight"
    source = open_source(folder)
    entry = source.entries[name]
    with open(folder / entry.file, "r+b") as file:
        file.seek(entry.start)
        file.write(
            torch.full((4,), float("nan"), dtype=torch.bfloat16).view(torch.uint8).numpy().tobytes()
        )
    recipe = searched("5.5 bits", source=str(folder))
    plan = pipeline.plan_before_measuring(recipe, open_source(folder))
    data = calibration_data(recipe.calibration, plan.source)
    with pytest.raises(CheckpointError, match=r"model\.layers\.2: a released model must"):
        search(plan, data, tmp_path / "search", ranks=ALONE)
