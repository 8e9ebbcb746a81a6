"""The search of `backbone: auto`: its knapsack against every choice there is, what its
sensitivities predict, what it finds, and what becomes of it on disk.
"""

import itertools
import random
import shutil
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
from commands import GLM
from data_files import json_of, put_json
from keepmtp.checkpoints.source import open_source
from keepmtp.cli.main import app
from keepmtp.quantize.calibrate.data.data import CalibrationData, calibration_data
from keepmtp.quantize.calibrate.layers.backbone import calibrate_backbone
from keepmtp.quantize.calibrate.mtp.acceptance import target
from keepmtp.quantize.calibrate.search import search_pass
from keepmtp.quantize.calibrate.search.search_pass import best_packing, packed, search
from keepmtp.quantize.calibrate.search.sensitivity import SearchRun, Sensitivities
from keepmtp.quantize.plan.choices import choices_of, found_plan, found_recipe, found_text
from keepmtp.quantize.plan.plan import Plan, make_plan
from keepmtp.recipes.errors import CheckpointError
from keepmtp.recipes.find import find_recipe
from keepmtp.recipes.schema import Recipe
from passes import ALONE, ROOT, plan_over
from scipy.stats import spearmanr
from typer.testing import CliRunner
from writing import recipe_with
from written_values import poke


def plan_and_data(
    budget: str = "3.29MB", *, auto: dict | None = None, **changes
) -> tuple[Plan, CalibrationData]:
    plan = plan_over(Path(changes.get("source", GLM)), searched(budget, auto=auto, **changes))
    return plan, calibration_data(plan.recipe.calibration, plan.source)


def searched(budget: str, *, auto: dict | None = None, **changes) -> Recipe:
    words = {"candidates": ["NVFP4", "FP8_DYNAMIC", "bf16"]} | (auto or {})
    own = {"backbone": "auto", "mtp": "auto", "budget": budget, "backbone_auto": words}
    return recipe_with("tiny-glm4-moe.nvfp4", **own, **changes)


def run_in(folder: Path, **auto) -> SearchRun:
    plan, data = plan_and_data(auto=auto)
    return SearchRun(choices_of(plan.recipe, plan.source), data, folder, ALONE)


@pytest.fixture(scope="module")
def swept(tmp_path_factory) -> tuple[SearchRun, Sensitivities]:
    """A search whose sensitivities are known."""
    own = run_in(tmp_path_factory.mktemp("search"))
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
    backbone = [unit.name for unit in choices.units if unit.part == "backbone"]
    predicted = [found[name, "NVFP4"] for name in backbone]
    diverged = []
    data = replace(own.data, ids=own.ids)  # which gives the input scales that were predicted for
    for name in backbone:
        plan = found_plan(choices.base, choices, {**choices.uniform("bf16"), name: "NVFP4"})
        folder = tmp_path / str(len(diverged))
        run = calibrate_backbone(plan, data, folder, device=ALONE.device, ranks=ALONE)
        source = target(run, "source")
        diverged.append(target(run, "served", reference=source).divergence)
    assert spearmanr(predicted, diverged).statistic > 0.8
    assert 0.5 < sum(predicted) / sum(diverged) < 3
    assert all(found[name, "FP8_DYNAMIC"] < found[name, "NVFP4"] for name in backbone)
    # The block's units are known, too, by what they do to drafts.
    for unit in choices.units:
        assert (unit.name, "bf16") not in found and found[unit.name, "NVFP4"] > 0


def test_what_is_found_is_a_recipe_that_gives_the_same_plan(swept, monkeypatch):
    own, found = swept
    choices = own.choices
    assignment = packed(choices, found)
    assert choices.fits(assignment)
    plan = found_plan(choices.base, choices, assignment)
    text = found_text(plan.recipe)
    assert "auto" not in text and "budget" not in text.replace("found for", "")
    path = own.folder / "recipe.yaml"
    path.write_text(text)
    again = make_plan(find_recipe(str(path))[0], plan.source)
    for one, other in zip(again.tensors, plan.tensors, strict=True):
        assert (one.name, one.fate, one.scheme) == (other.name, other.fate, other.scheme)
    # One of its overrides is wrong: the unit is named.
    assert plan.recipe.overrides, "nothing deviates from its group: choose another budget"
    first = next(unit.name for unit in choices.units if unit.layer == 0)
    broken = {**assignment, first: "bf16" if assignment[first] == "NVFP4" else "NVFP4"}
    wrong = Mock(return_value=plan.recipe)
    monkeypatch.setattr("keepmtp.quantize.plan.choices.found_recipe", wrong)
    with pytest.raises(AssertionError, match=r"model\.layers\.0\."):
        found_plan(choices.base, choices, broken)


def test_overrides_are_few_where_layers_agree():
    """A full-size model: one line for all layers of a kind."""
    choices = choices_of(searched("1GB"), open_source(GLM))
    changed = [u.name for u in choices.units if u.role == "attention" and u.layer == 1]
    found = found_recipe(choices, choices.uniform("bf16") | dict.fromkeys(changed, "NVFP4"))
    projections = "|".join(rf"model\.layers\.(?:1)\.self_attn\.{each}_proj" for each in "kqv")
    assert [each.modules for each in found.overrides] == [
        rf"re:(?:{projections})",
        r"re:(?:model\.layers\.(?:1)\.self_attn\.o_proj)",
    ]


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "stop, at",
    [
        ("_forward", 2),
        ("_top", 1),
        ("_backward", 2),
    ],
)
def test_a_killed_search_goes_on_to_the_same_sums(stop, at, swept, tmp_path, monkeypatch):
    own = run_in(tmp_path)
    calls = []
    once = getattr(SearchRun, stop)

    def killed(self, *args):
        calls.append(args)
        if len(calls) == at:
            raise KeyboardInterrupt
        return once(self, *args)

    monkeypatch.setattr(SearchRun, stop, killed)
    with pytest.raises(KeyboardInterrupt):
        own.sensitivities()
    assert run_in(tmp_path).sensitivities() == swept[1]


@pytest.mark.full
def test_the_whole_line(tmp_path, monkeypatch):
    """From a recipe with a budget to a checkpoint that passes its check, and the same again without
    a search.
    """

    def quantize(*words: object) -> str:
        said = CliRunner().invoke(app, ["quantize", *map(str, words)])
        assert said.exit_code == 0, said.output
        return said.output

    monkeypatch.chdir(ROOT)
    asked, out, other = (tmp_path / name for name in ("asked.yaml", "out", "other"))
    put_json(asked, searched("3.3MB", variant="small").model_dump(mode="json"))
    said = quantize(asked, "--out", out, "--keep-calibration")
    assert "recipe.yaml in the output" in said and "check passed" in said
    assert sum(path.stat().st_size for path in out.iterdir()) <= 3_300_000
    fact = json_of(out / "keepmtp.json")["calibration"]["search"]
    assert fact["budget"] == "3.3MB" and fact["bytes"] <= 3_300_000
    # The same command finds it finished; its own recipe makes the same shards, and searches
    # nothing.
    assert "finished before" in quantize(asked, "--out", out)
    monkeypatch.setattr(search_pass, "search", None)
    quantize(out / "recipe.yaml", "--out", other)
    for path in out.glob("*.safetensors"):
        assert path.read_bytes() == (other / path.name).read_bytes()
    # Another budget uses the sensitivities again; another text does not.
    monkeypatch.setattr(SearchRun, "_forward", None)
    plan, data = plan_and_data("1GB", variant="small")
    folder = Path(f"{out}.calibration") / "search"
    found, fact = search(plan, data, folder, ranks=ALONE)
    # Everything fits: nothing is rounded, and nothing is left for batches.
    assert fact.predicted == 0.0 and "calibration: null" in found_text(found.recipe)
    calibration = plan.recipe.calibration.model_copy(update={"seed": 7})
    plan = replace(plan, recipe=plan.recipe.model_copy(update={"calibration": calibration}))
    with pytest.raises(TypeError, match="'NoneType' object is not callable"):
        search(plan, data, folder, ranks=ALONE)


def test_a_layer_that_is_not_finite_is_named(tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(GLM, folder)
    poke(folder, "model.layers.2.self_attn.o_proj.weight", float("nan"))
    plan, data = plan_and_data(source=str(folder))
    with pytest.raises(CheckpointError, match=r"model\.layers\.2: a released model must"):
        search(plan, data, tmp_path / "search", ranks=ALONE)


# --- the knapsack ---------------------------------------------------------------------------------


def units_of(seed: int, count: int) -> list[list[tuple[int, float]]]:
    """Options that cost more and lose less, mostly; some are good for nothing."""
    draw = random.Random(seed)
    found = []
    for _ in range(count):
        size = draw.randint(1, 40)
        loss = draw.random()
        options = [(size, loss), (2 * size, loss * draw.random()), (4 * size, 0.0)]
        found.append(draw.sample([*options, (3 * size, loss * 2)], 4))
    return found


def room_of(units, share: float) -> int:
    low, high = (sum(pick(cost for cost, _ in options) for options in units) for pick in (min, max))
    return int(low + share * (high - low))


def taken(units, room: int) -> float:
    """The loss of what fits."""
    chosen = best_packing(units, room)
    picked = [options[number] for options, number in zip(units, chosen, strict=True)]
    assert sum(cost for cost, _ in picked) <= room
    return sum(loss for _, loss in picked)


@pytest.mark.parametrize("seed", range(12))
def test_no_choice_is_better(seed):
    units = units_of(seed, 6)
    room = room_of(units, seed / 11)
    best = float("inf")
    for picked in itertools.product(*units):
        if sum(cost for cost, _ in picked) <= room:
            best = min(best, sum(loss for _, loss in picked))
    assert taken(units, room) == pytest.approx(best, abs=1e-12)


def test_a_large_one_fits_to_the_byte_and_more_room_loses_less():
    units = [[(cost * 10**9 + 7, loss) for cost, loss in each] for each in units_of(1, 300)]
    losses = [taken(units, room_of(units, share)) for share in (0.0, 0.01, 0.3, 0.7, 1.0)]
    assert losses == sorted(losses, reverse=True) and losses[0] > 0 == losses[-1]
    assert taken(units, 10**15) == 0.0
