"""Scales of an FP8 KV cache: llm-compressor's own to the bit, and keys and values rounded as vLLM
rounds them.
"""

from dataclasses import replace

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from keepmtp.quantize.calibrate.layers.caches import (
    CacheRanges,
    e4m3_by,
    rounded_caches,
    serve_cache,
)
from keepmtp.quantize.calibrate.mtp.mtp_pass import mtp_pass
from keepmtp.quantize.run.statistics import Statistics, refuse_statistics
from keepmtp.recipes.conventions import CACHE_LEAVES, FP8_CACHE
from keepmtp.recipes.errors import CheckpointError
from keepmtp.recipes.find import find_recipe
from keepmtp.recipes.schema import Recipe
from layerwise import (
    GLM,
    IGNORE,
    Skeleton,
    both_models,
    found_in,
    layerwise,
    sequential,
    token_ids,
)
from passes import finished, plan_over
from torch import Tensor, nn

pytestmark = pytest.mark.usefixtures("one_thread")


@both_models
def test_scales_equal_llmcompressors(folder):
    """Found in the same pass as those of the linears, with the largest value of all batches
    (`static_minmax`); its default is a moving average, which cuts off more.
    """
    from llmcompressor.modifiers.quantization import QuantizationModifier

    ids = token_ids()
    cache = QuantizationArgs(**FP8_CACHE, observer="static_minmax")
    recipe = QuantizationModifier(
        targets="Linear", scheme="FP8", ignore=IGNORE, kv_cache_scheme=cache
    )
    wanted = scales(sequential(folder, ids, [recipe]).state_dict())
    found = scales(found_in(layerwise(folder, ids, "FP8", "minmax", caches=True)[1]))
    assert found.keys() == wanted.keys() and len(found) >= 2
    for name, value in wanted.items():
        assert (found[name].dtype, found[name].shape) == (torch.bfloat16, (1,))
        assert torch.equal(found[name], value.cpu().bfloat16()), name
    assert len({float(value) for value in found.values()}) > 1


def scales(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value for name, value in tensors.items() if name.endswith(CACHE_LEAVES)}


def test_a_cache_alone_has_the_same_scales():
    """No weight is quantized: then llm-compressor's session has nothing to do, and the batches run
    by themselves.
    """
    alone, others = (
        scales(found_in(layerwise(GLM, token_ids(samples=2), scheme, "minmax", caches=True)[1]))
        for scheme in ("", "FP8")
    )
    assert len(alone) > 1 and alone == others


def test_values_that_a_smoothing_rescaled_are_looked_at_again():
    """AWQ moves scale from the projection of values to that of the output, and the cache holds what
    is in between.
    """
    skeleton = Skeleton(GLM)
    ids = token_ids(samples=2)
    batches = skeleton.enter(0, ids, None)
    name = "model.layers.0.self_attn"
    result = skeleton.calibrated(batches, "W4A16", algorithm="awq", caches={name: CACHE_LEAVES})
    ranges = CacheRanges(skeleton.model, [name])
    with torch.no_grad(), ranges.observing():
        skeleton.leave(0, batches)
    for leaf in CACHE_LEAVES:
        assert torch.equal(result.tensors[f"{name}.{leaf}"], ranges.scales()[f"{name}.{leaf}"]), (
            leaf
        )


@pytest.mark.full
def test_a_run_with_nothing_but_an_fp8_cache(tmp_path):
    """Every layer's scales are found, the block's too, and the figures are those of rounded keys
    and values.
    """
    recipe = find_recipe("tiny-glm4-moe.fp8-kv")[0]
    plain = recipe.model_dump() | {"backbone": dict.fromkeys(recipe.backbone, "bf16")}
    plan = plan_over(GLM, Recipe.model_validate(plain))
    _, found = mtp_pass(plan, finished(plan, tmp_path, samples=8))
    released, served, cached = found.rows
    assert released.perplexity != served.perplexity and cached.acceptance is not None
    statistics = Statistics.open(tmp_path / "statistics")
    refuse_statistics(plan, statistics)
    attention = [
        *(f"model.layers.{index}.self_attn" for index in range(3)),
        "model.layers.3.self_attn.attn",
    ]
    assert {*statistics} == {f"{name}.{leaf}" for name in attention for leaf in CACHE_LEAVES}
    dropped = "model.layers.3.self_attn.attn.v_scale"
    fewer = {name: entry for name, entry in statistics.entries.items() if name != dropped}
    with pytest.raises(CheckpointError, match=f"calibration must give {dropped}"):
        refuse_statistics(plan, replace(statistics, entries=fewer))


class Attention(nn.Module):
    """Hands its input to a cache, as attention does."""

    def __init__(self, *, has_cache: bool = True):
        super().__init__()
        self.has_cache = has_cache

    def forward(self, states: Tensor, past_key_values=None):
        return (
            past_key_values.update(states, 2 * states, 0)
            if self.has_cache and past_key_values
            else (states, states)
        )


def test_values_are_those_of_a_cache_in_e4m3():
    """448 times the scale is the largest; halves go to the even neighbour; what is larger is cut
    off.
    """
    model = nn.ModuleDict({"attention": Attention()})
    serve_cache(model["attention"], (0.5, 1.0))
    states = torch.tensor([[0.3, 8.5, 9.5, 223.9, 300.0, -1000.0]]).bfloat16()
    plain, _ = model["attention"](states)
    with rounded_caches(model):
        keys, values = model["attention"](states)
    assert torch.equal(plain, states)
    by_hand = (states.float() / 0.5).clamp(-448, 448).to(torch.float8_e4m3fn).float() * 0.5
    assert torch.equal(keys, by_hand.bfloat16())
    assert keys[0, -2:].tolist() == [224.0, -224.0] and values[0, -1] == -448
    assert torch.equal(e4m3_by(1.0, 2 * states), values)


def test_attention_that_keeps_its_keys_is_named():
    model = nn.ModuleDict({"attention": Attention(has_cache=False)})
    ranges = CacheRanges(model, ["attention"])
    with ranges.observing():
        model["attention"](torch.ones(1, 2))
    with pytest.raises(CheckpointError, match="attention: attention must hand its keys to a cache"):
        ranges.scales()
