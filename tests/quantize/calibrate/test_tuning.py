"""`mtp: tuned` over shipped models: what training leaves for the writer, when it is written, and
how it goes on.
"""

import math
import shutil
from dataclasses import replace

import pytest
import torch
from drafts import weights_of
from keepmtp.checkpoints.dequantize import dequantize
from keepmtp.quantize.calibrate.layers.backbone import Backbone
from keepmtp.quantize.calibrate.mtp import mtp_policy, tuning
from keepmtp.quantize.calibrate.mtp.mtp_pass import MtpPass, mtp_pass, refuse_held_out, refuse_mtp
from keepmtp.quantize.plan.plan import Plan, make_plan
from keepmtp.quantize.run.statistics import Statistics, refuse_statistics
from keepmtp.quantize.write.writer import write_shards
from keepmtp.recipes.errors import CheckpointError, RecipeError
from keepmtp.recipes.find import find_recipe
from keepmtp.recipes.schema import MtpTuned, Recipe
from passes import ROOT, answered, even, fresh, plan_over, results_of
from safetensors.torch import load_file, save_file

QWEN, GLM = ("tiny-qwen3_5", "tiny-glm4-moe")
TUNED = {
    "mtp": "NVFP4",
    "steps": 8,
    "batch_size": 2,
    "learning_rate": 4e-3,
    "seed": 0,
    "loss": "lk_hybrid",
    "draft_steps": 2,
    "decay": 0.6,
}


def recipe(model: str, **changes: object) -> Recipe:
    raw = find_recipe(f"{model}.nvfp4")[0].model_dump()
    return Recipe.model_validate(raw | {"mtp": "tuned", "mtp_tuned": TUNED | changes})


def with_settings(plan: Plan, **changes: object) -> Plan:
    return make_plan(
        plan.recipe.model_copy(update={"mtp_tuned": MtpTuned.model_validate(TUNED | changes)}),
        plan.source,
    )


@pytest.fixture(scope="module")
def weak(tmp_path_factory) -> tuple[Plan, Backbone]:
    """A model whose MTP block drafts badly: noise in the matrix that joins embedding and hidden
    state.
    """
    return _made(QWEN, tmp_path_factory, noisy="mtp.fc.weight")


@pytest.fixture(scope="module")
def glm(tmp_path_factory) -> tuple[Plan, Backbone]:
    """Experts and a router, and a block as released, which has nothing to gain."""
    return _made(GLM, tmp_path_factory)


def _made(model: str, tmp_path_factory, noisy: str = "") -> tuple[Plan, Backbone]:
    folder = tmp_path_factory.mktemp(model) / "source"
    shutil.copytree(ROOT / "models" / model, folder)
    if noisy:
        (file,) = folder.glob("*.safetensors")
        weights = load_file(file)
        noise = torch.randn(weights[noisy].shape, generator=torch.Generator().manual_seed(0))
        weights[noisy] += (3.0 * weights[noisy].float().std() * noise).bfloat16()
        save_file(weights, file, metadata={"format": "pt"})
    plan = plan_over(folder, recipe(model))
    return plan, answered(plan, folder.parent / "pass", count=8, samples=8)


@pytest.fixture(scope="module")
def trained(weak, tmp_path_factory) -> tuple[Backbone, MtpPass]:
    plan, backbone = weak
    backbone = fresh(backbone, tmp_path_factory.mktemp("trained") / "pass")
    return backbone, mtp_pass(plan, backbone)


@pytest.mark.full
def test_a_weak_block_is_trained_and_written(weak, trained, tmp_path):
    plan, _ = weak
    backbone, found = trained
    tuned = found.tuned
    assert (
        tuned is not None
        and tuned.chosen
        and tuned.gain_at_least > 1.2
        and tuned.last_loss < tuned.first_loss
    )
    assert (
        "trained for 8 steps of 2 sequences of the calibration text (loss lk_hybrid, seed 0"
        in tuned.says
    )
    # A quarter of the bytes, and it drafts better than the release's own block with the same
    # backbone.
    assert tuned.of_released_at_least > 1.0 and [row.mtp for row in found.combinations] == [
        "source",
        "source",
        "tuned",
    ]
    assert found.combinations[2].acceptance == tuned.after and found.summary()["mtp"] == "NVFP4"
    statistics = statistics_of(backbone, found)
    wanted = {output.name for tensor in plan.tensors if tensor.tuned for output in tensor.outputs}
    assert {name for name in statistics if name.startswith("mtp.")} == wanted
    write_shards(found.plan, tmp_path, threads=1, statistics=statistics)
    written, released = weights_of(tmp_path), weights_of(plan.source.folder)
    assert all(torch.equal(written[name], statistics.read(name)) for name in wanted)
    assert not torch.equal(written["mtp.fc.weight"], released["mtp.fc.weight"])
    assert torch.equal(written["model.embed_tokens.weight"], released["model.embed_tokens.weight"])


def statistics_of(backbone: Backbone, found: MtpPass) -> Statistics:
    """What the writer is given, which the plan agrees with."""
    statistics = Statistics.open(backbone.folder / "statistics")
    refuse_statistics(found.plan, statistics)
    return statistics


def test_a_tuned_tensor_that_is_missing_is_refused(weak, trained, tmp_path):
    """The twin: the same statistics without one norm."""
    backbone, found = trained
    shutil.copytree(backbone.folder / "statistics", tmp_path / "statistics")
    file = tmp_path / "statistics" / "mtp-00000.safetensors"
    tensors = load_file(file)
    del tensors["mtp.norm.weight"]
    save_file(tensors, file)
    with pytest.raises(CheckpointError, match=r"calibration must give mtp\.norm\.weight"):
        refuse_statistics(found.plan, Statistics.open(tmp_path / "statistics"))
    with pytest.raises(RecipeError, match="mtp: tuned must be calibrated before it is written"):
        refuse_statistics(found.plan, None)


def test_what_is_measured_is_what_is_written(weak, tmp_path, monkeypatch):
    """The block's weights while its acceptance is measured, and those that the statistics
    decompress to.
    """
    plan, backbone = weak
    backbone, seen = fresh(backbone, tmp_path / "pass"), {}

    def spy(_target, blocks):
        seen.update({name: value.detach().clone() for name, value in blocks[0].named_parameters()})
        return even(0.9, slots=100)

    monkeypatch.setattr(mtp_policy, "acceptance", spy)
    results = results_of(plan, backbone)
    results.measured(with_settings(plan, steps=1))
    (file,) = results.statistics(with_settings(plan, steps=1))
    kept = load_file(file)
    for module in ("self_attn.q_proj", "mlp.down_proj"):
        leaves = ("weight_packed", "weight_scale", "weight_global_scale")
        parts = {leaf: kept[f"mtp.layers.0.{module}.{leaf}"] for leaf in leaves}
        weight = seen[f"layers.0.{module}.weight"]
        served = dequantize("nvfp4", parts, shape=tuple(weight.shape), block=None)
        assert torch.equal(served, weight)
    assert torch.equal(kept["mtp.fc.weight"], seen["projection.weight"])


def test_a_block_that_got_worse_stays_untrained(glm, tmp_path):
    plan, backbone = glm
    backbone = fresh(backbone, tmp_path / "pass")
    wild = with_settings(plan, learning_rate=0.9, steps=2, draft_steps=1, frozen=["experts"])
    found = mtp_pass(wild, backbone)
    assert found.tuned is not None and not found.tuned.chosen and found.tuned.gain < 0.9
    assert found.plan.recipe == wild.recipe and not any(
        tensor.tuned for tensor in found.plan.tensors
    )
    assert [row.mtp for row in found.combinations] == ["source", "source", "quantized"]
    assert found.combinations[2].acceptance == found.tuned.before
    assert found.tuned.says.endswith("the untrained block is what is written.")
    assert not any(name.endswith("enorm.weight") for name in statistics_of(backbone, found))


def test_experts_and_router_are_trained_too(glm, tmp_path, monkeypatch):
    plan, backbone = glm
    monkeypatch.setattr(mtp_policy, "acceptance", lambda *_, **__: even(0.9, slots=100))
    backbone = fresh(backbone, tmp_path / "pass")
    small = with_settings(plan, mtp="bf16", steps=1, batch_size=1, draft_steps=1)
    results = results_of(small, backbone)
    results.measured(small)
    kept, released = load_file(results.statistics(small)[0]), weights_of(plan.source.folder)
    tuned = {tensor.name: tensor.role for tensor in small.tensors if tensor.tuned}
    assert kept.keys() == tuned.keys()
    assert {"experts", "router", "attention", "norm", "glue"} <= {*tuned.values()}
    for name, role in tuned.items():
        assert kept[name].dtype == released[name].dtype
        # One step is less than half of the last bit of a norm near 1.
        assert role == "norm" or not torch.equal(kept[name], released[name]), name
    kept_apart = {each.role for each in small.tensors if each.part == "mtp" and not each.tuned}
    assert kept_apart <= {"embedding", "head", "state", "router"}


def test_a_killed_training_goes_on_to_the_same_bytes(weak, trained, tmp_path, monkeypatch):
    plan, backbone = weak
    cut, steps = fresh(backbone, tmp_path / "cut"), []
    original = tuning._step

    def killed(*args):
        steps.append(args[-1])
        if len(steps) == 5:
            raise KeyboardInterrupt
        return original(*args)

    monkeypatch.setattr(tuning, "_SAVE_SECONDS", 0.0)
    monkeypatch.setattr(tuning, "_step", killed)
    with pytest.raises(KeyboardInterrupt):
        mtp_pass(plan, cut)
    found = mtp_pass(plan, cut)
    assert steps == [0, 1, 2, 3, 4, 4, 5, 6, 7], "no step is done twice"
    whole, tuned = trained
    name = "mtp-00000.safetensors"
    assert (cut.folder / "statistics" / name).read_bytes() == (
        whole.folder / "statistics" / name
    ).read_bytes()
    assert found.tuned == tuned.tuned and not [*(cut.folder / "mtp").glob("*.training")]
    assert mtp_pass(plan, cut).tuned == found.tuned and len(steps) == 9, "all was done"


def test_a_loss_that_is_not_finite_is_one_sentence(weak, tmp_path, monkeypatch):
    plan, backbone = weak
    backbone, original = fresh(backbone, tmp_path / "pass"), tuning._backward
    monkeypatch.setattr(tuning, "_backward", lambda *args: original(*args) * math.nan)
    with pytest.raises(
        RecipeError,
        match=r"loss of mtp: tuned.*must be finite; got nan and .* at step 1 of 8\. Lower",
    ):
        mtp_pass(plan, backbone)
    assert not [*(backbone.folder / "statistics").glob("mtp-*")]


def test_each_sequence_is_drawn_once_before_one_is_drawn_again():
    settings = MtpTuned.model_validate(TUNED | {"batch_size": 3})
    drawn = [
        row for step in range(10) for row in tuning.rows_of(step, num_rows=10, settings=settings)
    ]
    assert [sorted(drawn[start : start + 10]) for start in (0, 10, 20)] == [[*range(10)]] * 3
    assert drawn[:10] != drawn[10:20] and drawn[3:6] == tuning.rows_of(
        1, num_rows=10, settings=settings
    )
    rates = [tuning.rate_at(step, 20) for step in range(20)]
    assert max(rates) == 1.0 and rates[0] == 0.5 and 0 < rates[-1] < 0.1 and rates.index(1.0) == 1


def test_what_cannot_be_trained_is_refused_from_the_headers(glm):
    plan, backbone = glm
    groups = [tensor.role for tensor in plan.tensors if tensor.tuned]
    everything = plan.recipe.mtp_tuned.model_copy(update={"frozen": tuple(set(groups))})
    empty = make_plan(plan.recipe.model_copy(update={"mtp_tuned": everything}), plan.source)
    with pytest.raises(
        RecipeError, match=r"must leave something of the block to train; got no tensor\. Shorten"
    ):
        refuse_mtp(empty)
    with pytest.raises(
        RecipeError,
        match=r"needs 4 held-out sequences, and 1 tokens of them.*; got 3 sequences, 24 tokens\. Raise",
    ):
        refuse_held_out(
            plan, replace(backbone.data, held_out_ids=torch.zeros(3, 8), held_out_written=None)
        )


def test_a_tuned_block_with_an_fp8_cache(weak, tmp_path):
    """Keys and values are rounded while it is trained, too; its scales are those of the released
    block.
    """
    plan, backbone = weak
    with_cache = make_plan(plan.recipe.model_copy(update={"kv_cache": "FP8"}), plan.source)
    backbone = fresh(backbone, tmp_path / "pass")
    found = mtp_pass(with_cache, backbone)
    assert found.tuned is not None and found.tuned.chosen and found.tuned.gain > 1.2
    file = load_file(backbone.folder / "statistics" / "mtp-00000.safetensors")
    assert [name for name in file if name.endswith(("k_scale", "v_scale"))]
