"""`batch_size: auto`: what is chosen, that it stays, and that minmax finds the same with any."""

from dataclasses import replace

import pytest
import torch
from calibrated import planned
from keepmtp.pipeline import plan_for
from keepmtp.quantize.calibrate.data import batch_size as module
from keepmtp.quantize.calibrate.data.batch_size import with_batch_size
from keepmtp.quantize.calibrate.data.data import calibration_data
from keepmtp.quantize.calibrate.layers.backbone import calibrate_backbone
from keepmtp.quantize.calibrate.run import calibrate
from keepmtp.quantize.needs.memory import stations
from keepmtp.quantize.plan.plan import Plan
from keepmtp.quantize.run.ranks import Ranks
from keepmtp.quantize.run.statistics import Statistics
from keepmtp.recipes.errors import RecipeError
from keepmtp.recipes.schema import Recipe, validated
from killed import small_recipe

ALONE = Ranks(rank=0, size=1, device=torch.device("cpu"))


def auto(plan: Plan, **changes: object) -> Plan:
    """The same plan with `batch_size: auto`."""
    assert plan.recipe.calibration is not None
    calibration = plan.recipe.calibration.model_dump() | {"batch_size": "auto"} | changes
    recipe = Recipe.model_validate(plan.recipe.model_dump() | {"calibration": calibration})
    return replace(plan, recipe=recipe)


def test_the_largest_batch_that_fits_is_taken_and_kept(tmp_path, monkeypatch):
    plan = auto(planned(tmp_path / "source"), samples=64, sequence_length=32)
    needed = {
        size: max(each.device_bytes for each in stations(plan, batch_size=size)) for size in (4, 8)
    }
    assert needed[4] < needed[8], "the count depends on it"
    for size, free in (
        (4, int(1.06 * needed[4])),
        (1, 0),
    ):  # the count is careful: one is tried always
        monkeypatch.setattr(module, "free_host_bytes", lambda free=free: 4 * free)
        folder = tmp_path / f"of-{size}"
        folder.mkdir()
        assert with_batch_size(plan, folder, ALONE).calibration.num_in_batch == size
    # The run goes on where more memory is free, and where less is.
    for free in (2**40, 0):
        monkeypatch.setattr(module, "free_host_bytes", lambda free=free: 4 * free)
        assert with_batch_size(plan, tmp_path / "of-4", ALONE).calibration.num_in_batch == 4


def test_no_batch_is_larger_than_what_is_of_use(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "free_host_bytes", lambda: 2**50)
    plan = planned(tmp_path / "source")
    for samples, length, expected in ((12, 32, 8), (1, 32, 1), (512, 2048, 4), (512, 16384, 1)):
        found = auto(plan, samples=samples, sequence_length=length)
        folder = tmp_path / f"{samples}-{length}"
        folder.mkdir()
        assert with_batch_size(found, folder, ALONE).calibration.num_in_batch == expected


def test_processes_of_a_machine_divide_its_memory_and_take_the_least_of_all(tmp_path, monkeypatch):
    given, largest = [], module.largest_batch_size
    monkeypatch.setattr(module, "free_host_bytes", lambda: 2**50)
    monkeypatch.setattr(
        module, "largest_batch_size", lambda *a, **k: given.append(a[1]) or largest(*a, **k)
    )
    monkeypatch.setattr(Ranks, "least", lambda _self, value: min(value, 2))  # another rank has less
    plan = auto(planned(tmp_path / "source"), samples=64, sequence_length=32)
    two = replace(ALONE, size=2, local_size=2)
    assert with_batch_size(plan, tmp_path, two).calibration.num_in_batch == 2
    assert given == [2**50 // 4 // 2]
    assert (tmp_path / "batch_size").read_text() == "2"


def test_a_recipes_own_number_stays(tmp_path):
    plan = planned(tmp_path / "source")
    assert with_batch_size(plan, tmp_path, ALONE) is plan
    assert not (tmp_path / "batch_size").exists()


@pytest.mark.parametrize("wrong", [0, -1, 2.5, "many", "8", True, None])
def test_a_recipe_says_a_number_or_auto(wrong, tmp_path):
    plan = auto(planned(tmp_path / "source"))
    raw = plan.recipe.model_dump()
    raw["calibration"]["batch_size"] = wrong
    with pytest.raises(RecipeError, match=rf"here: calibration\.batch_size: .* got {wrong!r}\."):
        validated(raw, "here")


@pytest.mark.parametrize("name", ["tiny-glm4-moe.nvfp4", "tiny-qwen3_5.nvfp4"])
def test_minmax_finds_the_same_with_any_batch_size(name, tmp_path):
    """The largest magnitudes do not depend on how the sequences are dealt out, so auto changes no
    number.
    """
    found: dict[object, dict[str, torch.Tensor]] = {}
    for size in (1, 8):
        plan, _ = plan_for(str(small_recipe(tmp_path, name, batch_size=size)))
        assert plan.recipe.calibration is not None
        data = calibration_data(plan.recipe.calibration, plan.source)
        folder = tmp_path / str(size)
        calibrate_backbone(plan, data, folder, device=ALONE.device, ranks=ALONE)
        statistics = Statistics.open(folder / "statistics")
        found[size] = {name: statistics.read(name) for name in statistics}
    assert found[1].keys() == found[8].keys() and len(found[1]) > 10
    assert [name for name in found[1] if not torch.equal(found[1][name], found[8][name])] == []


def test_a_whole_run_says_what_was_chosen_and_records_the_recipe_as_it_was_written(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(module, "_MAX_TOKENS_ON_CPU", 64)
    plan, _ = plan_for(
        str(small_recipe(tmp_path, "tiny-glm4-moe.nvfp4", batch_size="auto", samples=4))
    )
    run = calibrate(plan, tmp_path / "pass", ranks=ALONE)
    assert run.summary["batch_size"] == 2
    assert run.plan.recipe.calibration == plan.recipe.calibration
    names = {path.name for path in (tmp_path / "pass" / "states" / "00003").glob("calibration-*")}
    assert names == {
        "calibration-000000-000002.safetensors",
        "calibration-000002-000004.safetensors",
    }
