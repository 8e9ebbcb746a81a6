"""`attention: sdpa`: no scores are held, the numbers are nearly the same, and a class without it is
refused.
"""

from dataclasses import replace

import pytest
import torch
from calibrated import planned
from keepmtp.pipeline import plan_for
from keepmtp.quantize.calibrate.model.skeleton import Skeleton
from keepmtp.quantize.calibrate.run import calibrate
from keepmtp.quantize.needs.memory import stations
from keepmtp.quantize.run.ranks import Ranks
from keepmtp.recipes.errors import RecipeError
from keepmtp.recipes.schema import Recipe
from killed import small_recipe
from transformers.models.glm4_moe import modeling_glm4_moe
from transformers.models.qwen3_5 import modeling_qwen3_5

CPU = torch.device("cpu")
ALONE = Ranks(rank=0, size=1, device=CPU)
MODELS = {"tiny-glm4-moe.nvfp4": modeling_glm4_moe, "tiny-qwen3_5.nvfp4": modeling_qwen3_5}


@pytest.mark.parametrize("name", MODELS)
def test_no_scores_are_computed_and_scales_are_nearly_the_same(name, tmp_path, monkeypatch):
    found = {}
    for attention in ("eager", "sdpa"):
        plan, _ = plan_for(
            str(small_recipe(tmp_path, name, attention=attention, samples=4, held_out=8))
        )
        if attention == "sdpa":
            monkeypatch.setattr(
                MODELS[name], "eager_attention_forward", None
            )  # a call is a TypeError
        run = calibrate(plan, tmp_path / attention, ranks=ALONE)
        statistics = run.statistics
        found[attention] = {key: statistics.read(key) for key in statistics if "input" in key}
    assert found["eager"].keys() == found["sdpa"].keys() and len(found["sdpa"]) > 10
    for key, value in found["eager"].items():
        torch.testing.assert_close(found["sdpa"][key], value, rtol=0.05, atol=0)


def test_eager_computes_scores(tmp_path, monkeypatch):
    """The twin: with the default, the function that must not be called above is called."""
    plan, _ = plan_for(str(small_recipe(tmp_path, "tiny-glm4-moe.nvfp4", samples=4)))
    monkeypatch.setattr(modeling_glm4_moe, "eager_attention_forward", None)
    with pytest.raises(TypeError, match="'NoneType' object is not callable"):
        calibrate(plan, tmp_path / "pass", ranks=ALONE)


def with_sdpa(recipe: Recipe) -> Recipe:
    assert recipe.calibration is not None
    calibration = recipe.calibration.model_copy(update={"attention": "sdpa"})
    return recipe.model_copy(update={"calibration": calibration})


def test_a_class_with_sinks_is_refused(tmp_path):
    plan = planned(tmp_path / "source", model="dsv4-flash", attention="bf16")
    rule = (
        r"attention: sdpa needs a class that computes by it, unlike DeepseekV4\w+; got sdpa\. "
        r"Set attention: eager"
    )
    with pytest.raises(RecipeError, match=rule):
        Skeleton(replace(plan, recipe=with_sdpa(plan.recipe)), device=CPU)


def test_memory_is_counted_without_scores(tmp_path):
    plan = planned(tmp_path / "source")
    plans = (plan, replace(plan, recipe=with_sdpa(plan.recipe)))
    eager, sdpa = (max(each.device_bytes for each in stations(made)) for made in plans)
    assert sdpa < eager
