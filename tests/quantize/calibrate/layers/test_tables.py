"""A packed head in the figures: what a server computes with it, and what the release computes."""

import pytest
import torch
from good import packed
from keepmtp.checkpoints.dequantize import dequantize
from keepmtp.checkpoints.source import open_source
from keepmtp.quantize.calibrate.layers.activations import fp8_tokens, nvfp4
from keepmtp.quantize.calibrate.layers.served import InMemory, serve_weights
from keepmtp.quantize.calibrate.layers.tables import served_tables
from keepmtp.quantize.calibrate.layers.work import LayerWork
from keepmtp.quantize.calibrate.model.skeleton import Skeleton
from keepmtp.quantize.calibrate.mtp.acceptance import computed, target
from keepmtp.quantize.pack.pack import pack
from keepmtp.quantize.pack.unit import load
from keepmtp.quantize.plan.plan import make_plan
from keepmtp.recipes.find import find_recipe
from keepmtp.recipes.model_file import shipped_path
from keepmtp.recipes.schemes import SCHEMES
from passes import as_calibrated, finished
from real_releases import TABLE
from writing import tiny, written

MODEL = shipped_path("tiny-glm4-moe")
HELD_OUT = torch.arange(128).reshape(2, 64) + 7
SCHEMES_OF_HEADS = ("FP8_DYNAMIC", "W4A16", "NVFP4")


@pytest.fixture(scope="module", params=SCHEMES_OF_HEADS)
def passed(request, tmp_path_factory):
    """A pass whose backbone is the release's but for its head, and the head's scheme."""
    recipe, _ = find_recipe("tiny-glm4-moe.fp8-dynamic")
    backbone = dict.fromkeys(recipe.backbone, "bf16") | {"head": request.param}
    recipe = recipe.model_copy(update={"backbone": backbone})
    plan = as_calibrated(make_plan(recipe, open_source(MODEL)))
    folder = tmp_path_factory.mktemp("pass")
    return finished(plan, folder, held_out=HELD_OUT, samples=2), request.param


@pytest.mark.parametrize("word", ["NVFP4A16", "FP8"])
def test_a_layer_looks_up_the_served_rows_of_ngrams(word, tmp_path):
    """What the writer writes, part by part."""
    recipe = packed("qwen3.8-flash-next", "table", word).recipe
    plan = make_plan(recipe, open_source(tiny(tmp_path / "release", "qwen3.8-flash-next")))
    made = written(plan, tmp_path / "out")
    scheme = SCHEMES[word]
    expected = []
    for part in (0, 1):
        name = f"{TABLE}.shard_{part}.weight"
        parts = {"weight_packed": made[name], "weight_scale": made.get(f"{name}_scale")}
        if word == "FP8":
            parts = {"weight": made[name], "weight_scale": made[f"{TABLE}.weight_scale"]}
        else:
            parts["weight_global_scale"] = 1 / made[f"{TABLE}.weight_scale_2"]
        shape = (len(made[name]), 16)
        expected.append(dequantize(scheme.form, parts, shape=shape, block=None))
    skeleton = Skeleton(plan, device=torch.device("cpu"))
    work = LayerWork.of(as_calibrated(plan), skeleton.bind_layer(1), f"{skeleton.layer_path}.1.")
    with skeleton.layer(1) as layer:
        serve_weights(skeleton.model, plan, work, InMemory())
        rows = layer.ple.ple_embedding.ngram_embedding.weight
        torch.testing.assert_close(rows, torch.cat(expected))  # 1 / x is rounded once more


def rounded_by(backbone, scheme, states):
    """What a head's kernel multiplies."""
    if scheme == "FP8_DYNAMIC":
        return fp8_tokens(states)
    if scheme == "NVFP4":
        (scale,) = backbone.skeleton.given.values()
        return nvfp4(states, divisor=float(scale))
    return states


def test_served_logits_are_those_of_the_written_bytes(passed):
    """And the release's are of its own head, before and after."""
    backbone, scheme = passed
    skeleton = backbone.skeleton
    source = target(backbone, "source")
    served = target(backbone, "served", reference=source)
    (batch, *_) = backbone.batches("served", size=1).batches()
    with torch.no_grad():
        states = computed(skeleton, batch).logits[0]  # without a head
        (head,) = skeleton.plan.packed_tables
        weight = load(skeleton.plan, head, skeleton.device)
        (packed,) = pack(SCHEMES[scheme], [weight])
        values = dequantize(SCHEMES[scheme].form, packed, shape=tuple(weight.shape), block=None)
        with skeleton.head():
            for _ in range(2):
                assert torch.equal(source.logits(batch.first), states @ weight.T)
                assert torch.equal(
                    served.logits(batch.first), rounded_by(backbone, scheme, states) @ values.T
                )
    assert source.divergence == 0 < served.divergence < 0.1
    assert not skeleton.served, "the head's values stay after it is gone"


def test_only_a_servers_streams_compute_with_packed_tables(passed):
    backbone, _ = passed
    skeleton = backbone.skeleton
    with skeleton.head():
        head = skeleton.model.get_output_embeddings()
        released = head.weight
        for stream in ("source", "calibration"):
            with served_tables(skeleton, stream):
                assert head.weight is released
        for stream in ("served", "mtp"):
            with served_tables(skeleton, stream):
                assert head.weight is not released
        assert head.weight is released and not hasattr(head, "quantization_scheme")


def test_the_input_scale_of_a_head_is_of_what_the_last_layer_hands_on(passed):
    """Of the calibration text alone, and the same when the pass is resumed."""
    backbone, scheme = passed
    skeleton = backbone.skeleton
    if scheme != "NVFP4":
        assert not skeleton.given
        return
    largest = 0.0
    with torch.no_grad():
        for batch in backbone.batches("calibration").batches():
            largest = max(largest, computed(skeleton, batch).logits.abs().max().item())
    (scale,) = skeleton.given.values()
    assert float(scale) == pytest.approx(448 * 6 / largest, rel=2**-8)
    again = finished(skeleton.plan, backbone.folder, held_out=HELD_OUT, samples=2)
    assert again.skeleton.given == skeleton.given
