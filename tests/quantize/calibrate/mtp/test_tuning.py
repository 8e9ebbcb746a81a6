"""`mtp: tuned` over shipped models: what training leaves for the writer, when it is written, and
how it goes on; its losses against acceptance that is computed by hand.
"""

import math
import shutil
from dataclasses import replace
from functools import partial
from typing import get_args
from unittest.mock import Mock

import pytest
import torch
import yaml
from keepmtp.checkpoints.dequantize import dequantize
from keepmtp.quantize.calibrate.layers.backbone import Backbone
from keepmtp.quantize.calibrate.layers.forwards import released
from keepmtp.quantize.calibrate.mtp import mtp_pass as mtp_pass_module
from keepmtp.quantize.calibrate.mtp import mtp_policy, tuning
from keepmtp.quantize.calibrate.mtp.acceptance import Acceptance
from keepmtp.quantize.calibrate.mtp.facts import MtpFact
from keepmtp.quantize.calibrate.mtp.mtp_pass import mtp_pass, refuse_held_out, refuse_mtp
from keepmtp.quantize.calibrate.mtp.tuning import Training, draft_loss, losses
from keepmtp.quantize.plan.plan import Plan, make_plan
from keepmtp.quantize.run.statistics import Statistics, refuse_statistics
from keepmtp.quantize.write.writer import write_shards
from keepmtp.recipes.errors import CheckpointError, RecipeError
from keepmtp.recipes.schema import MtpTuned
from passes import ROOT, answered, even, fresh, plan_over, results_of
from safetensors.torch import load_file, save_file
from writing import recipe_with, weights_of

pytestmark = pytest.mark.usefixtures("in_f32")

TUNED = """
{mtp: NVFP4, steps: 8, batch_size: 2, learning_rate: 4.0e-3, seed: 0, loss: lk_hybrid, draft_steps: 2, decay: 0.6}
"""
SETTINGS = MtpTuned.model_validate(yaml.safe_load(TUNED))
FILE = "statistics/mtp-00000.safetensors"
LOSSES = get_args(MtpTuned.model_fields["loss"].annotation)
P = torch.tensor([[0.5, 0.3, 0.2], [0.9, 0.05, 0.05]])
Q = torch.tensor([[0.2, 0.3, 0.5], [0.05, 0.9, 0.05]])
ACCEPTED = (0.2 + 0.3 + 0.2, 0.05 + 0.05 + 0.05)


def with_settings(plan: Plan, **changes: object) -> Plan:
    settings = SETTINGS.model_copy(update=changes)
    return make_plan(plan.recipe.model_copy(update={"mtp_tuned": settings}), plan.source)


@pytest.fixture(scope="module")
def weak(tmp_path_factory) -> tuple[Plan, Backbone]:
    """A model whose MTP block drafts badly: noise in the matrix that joins embedding and hidden
    state.
    """
    return _made("tiny-qwen3_5", tmp_path_factory, noisy="mtp.fc.weight")


@pytest.fixture(scope="module")
def glm(tmp_path_factory) -> tuple[Plan, Backbone]:
    """Experts and a router, and a block as released, which has nothing to gain."""
    return _made("tiny-glm4-moe", tmp_path_factory)


def _made(model: str, tmp_path_factory, noisy: str = "") -> tuple[Plan, Backbone]:
    folder = tmp_path_factory.mktemp(model) / "source"
    shutil.copytree(ROOT / "models" / model, folder)
    if noisy:
        (file,) = folder.glob("*.safetensors")
        weights = load_file(file)
        noise = torch.randn(weights[noisy].shape, generator=torch.Generator().manual_seed(0))
        weights[noisy] += (3.0 * weights[noisy].float().std() * noise).bfloat16()
        save_file(weights, file, metadata={"format": "pt"})
    plan = plan_over(folder, recipe_with(f"{model}.nvfp4", mtp="tuned", mtp_tuned=SETTINGS))
    return plan, answered(plan, folder.parent / "pass", count=8, samples=8)


@pytest.fixture(scope="module")
def trained(weak, tmp_path_factory) -> tuple[Backbone, Plan, MtpFact]:
    plan, backbone = weak
    backbone = fresh(backbone, tmp_path_factory.mktemp("trained") / "pass")
    return backbone, *mtp_pass(plan, backbone)


@pytest.mark.full
def test_a_weak_block_is_trained_and_written(weak, trained, tmp_path):
    """And its statistics without one norm, the twin, are refused."""
    plan, _ = weak
    backbone, final, found = trained
    tuned = found.tuned
    assert tuned.chosen and tuned.gain_at_least > 1.2
    said = "trained for 8 steps of 2 sequences of the calibration text (loss lk_hybrid, seed 0"
    assert said in tuned.says
    assert tuned.says.endswith("It was judged on one kind of text; on others it was not tried.")
    # A quarter of the bytes, and it drafts better than the release's own block with the same
    # backbone.
    assert [row.mtp for row in found.rows] == ["source", "source", "tuned"]
    assert found.rows[2].acceptance == tuned.after and found.mtp == "NVFP4"
    assert found.rows[2].acceptance.length > found.rows[1].acceptance.length
    statistics = statistics_of(backbone, final)
    wanted = {output.name for tensor in plan.tensors if tensor.tuned for output in tensor.outputs}
    assert {name for name in statistics if name.startswith("mtp.")} == wanted
    write_shards(final, tmp_path, threads=1, statistics=statistics)
    written = weights_of(tmp_path)
    released = weights_of(plan.source.folder)
    assert all(torch.equal(written[name], statistics.read(name)) for name in wanted)
    same = {
        name for name in written if name in released and torch.equal(written[name], released[name])
    }
    assert "mtp.fc.weight" not in same and "model.embed_tokens.weight" in same
    shutil.copytree(backbone.folder / "statistics", tmp_path / "statistics")
    tensors = load_file(tmp_path / FILE)
    del tensors["mtp.norm.weight"]
    save_file(tensors, tmp_path / FILE)
    with pytest.raises(CheckpointError, match=r"calibration must give mtp\.norm\.weight"):
        refuse_statistics(final, Statistics.open(tmp_path / "statistics"))
    with pytest.raises(RecipeError, match="mtp: tuned must be calibrated before it is written"):
        refuse_statistics(final, None)


def statistics_of(backbone: Backbone, final: Plan) -> Statistics:
    """What the writer is given, which the plan agrees with."""
    statistics = Statistics.open(backbone.folder / "statistics")
    refuse_statistics(final, statistics)
    return statistics


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
    short = with_settings(plan, steps=1)
    results.measured(short)
    kept = load_file(results.statistics(short)[0])
    for module in ("self_attn.q_proj", "mlp.down_proj"):
        leaves = ("weight_packed", "weight_scale", "weight_global_scale")
        parts = {leaf: kept[f"mtp.layers.0.{module}.{leaf}"] for leaf in leaves}
        weight = seen[f"layers.0.{module}.weight"]
        served = dequantize("nvfp4", parts, shape=tuple(weight.shape), block=None)
        assert torch.equal(served, weight)
    assert torch.equal(kept["mtp.fc.weight"], seen["projection.weight"])


@pytest.mark.parametrize("again", [True, False])
def test_static_scales_are_those_of_the_trained_weights(weak, tmp_path, monkeypatch, again):
    """No token is clipped that the pass has seen; the twin keeps the scales from before, and clips."""
    plan, backbone = weak
    if not again:
        monkeypatch.setattr(mtp_policy, "serve_scales", Mock())
        original = mtp_policy.calibrate
        found = []

        def first_found(*args):
            found.append(original(*args))
            return found[0]

        monkeypatch.setattr(mtp_policy, "calibrate", first_found)
    backbone = fresh(backbone, tmp_path / "pass")
    largest = {}
    measured = Mock(return_value=even(0.9, slots=100))
    monkeypatch.setattr(mtp_policy, "acceptance", measured)
    results = results_of(plan, backbone)
    long = with_settings(plan, learning_rate=2.0e-2)
    results.measured(long)
    _, blocks = measured.call_args.args

    def see(name, _module, args):
        largest[name] = max(largest.get(name, 0.0), float(args[0].abs().max()))

    for name, module in blocks[0].named_modules():
        if hasattr(module, "input_global_scale"):
            module.register_forward_pre_hook(partial(see, name))
    with torch.no_grad(), released(blocks[0]):
        for arguments in mtp_policy.BlockInputs(backbone=backbone, blocks=blocks):
            blocks[0](**arguments)
    kept = load_file(results.statistics(long)[0])
    ranges = {}
    for name, value in largest.items():
        scale = kept[f"mtp.{name}.input_global_scale"]
        ranges[name] = 6 * 448 / float(scale) / value
        if again:
            served = blocks[0].get_submodule(name).input_global_scale
            assert torch.equal(scale, served.detach().float())
    assert (min(ranges.values()) > 0.97) == again, ranges


def test_a_block_that_got_worse_stays_untrained(glm, tmp_path):
    plan, backbone = glm
    backbone = fresh(backbone, tmp_path / "pass")
    kinds = ("a", "b") * 4
    backbone = replace(backbone, data=replace(backbone.data, held_out_kinds=kinds))
    wild = {"learning_rate": 0.9, "steps": 2, "draft_steps": 1, "frozen": ("experts",)}
    wild = with_settings(plan, **wild)
    final, found = mtp_pass(wild, backbone)
    assert not found.tuned.chosen and found.tuned.gain < 0.9
    assert final.recipe == wild.recipe and not any(tensor.tuned for tensor in final.tensors)
    assert [row.mtp for row in found.rows] == ["source", "source", "quantized"]
    assert found.rows[2].acceptance == found.tuned.before
    assert "the untrained block is what is written." in found.tuned.says
    assert not any(name.endswith("enorm.weight") for name in statistics_of(backbone, final))


def by_kind(**gains: float) -> Acceptance:
    """Kinds `a` and `b` in turns, 40 sequences of 100 slots, of which half are accepted times so
    much, a few more or less in some.
    """
    counts = torch.full((40, 3, 1, 1), 100.0, dtype=torch.float64)
    for place, gain in enumerate(gains.values()):
        counts[place::2, 2, 0, 0] = 50 * gain + torch.arange(20) % 3 - 1
    return Acceptance(counts)


KINDS = ("a", "b") * 20


@pytest.mark.parametrize(
    "a, b, is_better",
    [
        (1.3, 1.0, True),
        (1.3, 0.9, False),
        (1.01, 0.99, False),
        (1.02, 1.02, True),
    ],
)
def test_no_kind_may_be_lost_and_the_mean_must_gain(a, b, is_better):
    """1.3 and 0.9 are the twin: its mean gains, as a gate of one kind of text would see."""
    rows = {kind: [*range(place, 40, 2)] for place, kind in enumerate("ab")}
    before = by_kind(a=1.0, b=1.0)
    after = by_kind(a=a, b=b)
    figures = mtp_pass_module.gains(before, after, rows, 0.95)
    assert figures["chosen"] == is_better
    assert figures["gain"] == pytest.approx((a + b) / 2, abs=0.01)
    assert [each.gain for each in figures["kinds"]] == pytest.approx([a, b], abs=0.01)
    assert all(each.gain_at_least < each.gain < each.gain_at_most for each in figures["kinds"])
    alone = mtp_pass_module.gains(before, after, {"": [*range(40)]}, 0.95)
    assert [each.gain for each in alone["kinds"]] == [round(alone["gain"], 5)]
    value, low = after.kept_of(before, 0.95)
    assert (alone["gain"], alone["gain_at_least"]) == pytest.approx((value, low))


def of_two_kinds(backbone: Backbone, folder) -> Backbone:
    backbone = fresh(backbone, folder)
    return replace(backbone, data=replace(backbone.data, held_out_kinds=KINDS))


def test_a_block_that_gains_on_every_kind_is_written(weak, tmp_path, monkeypatch):
    """And its training leaves nothing but what is written."""
    plan, backbone = weak
    backbone = of_two_kinds(backbone, tmp_path / "pass")
    measured = [by_kind(a=1, b=1), by_kind(a=1.2, b=1.01)]
    monkeypatch.setattr(mtp_policy, "acceptance", Mock(side_effect=measured))
    small = with_settings(plan, steps=2)
    results = results_of(small, backbone)
    fact, final = mtp_pass_module.tune(results, None)
    assert fact.chosen and final is small
    assert not [*(backbone.folder / "mtp").glob("*.training")]
    assert "worse on" not in fact.says and "By kind: a 1.2" in fact.says
    assert mtp_pass_module.tune(results, None)[0] == fact, "from files"


def test_a_kind_that_is_lost_keeps_the_block_untrained(weak, tmp_path, monkeypatch):
    plan, backbone = weak
    measured = [by_kind(a=1, b=1), by_kind(a=1.3, b=0.9)]
    monkeypatch.setattr(mtp_policy, "acceptance", Mock(side_effect=measured))
    monkeypatch.setattr(mtp_policy.PolicyResults, "_make", Mock())
    results = results_of(plan, of_two_kinds(backbone, tmp_path / "pass"))
    fact, final = mtp_pass_module.tune(results, None)
    assert not fact.chosen and fact.gain_at_least > 1
    assert "it is worse on a kind, and the untrained block is what is written." in fact.says
    assert not any(tensor.tuned for tensor in final.tensors)


def test_a_kind_that_says_nothing_is_refused_before_the_first_step(weak, tmp_path, monkeypatch):
    plan, backbone = weak
    silent = by_kind(a=1, b=1)
    silent.counts[1::2] = 0
    monkeypatch.setattr(mtp_policy, "acceptance", Mock(return_value=silent))
    monkeypatch.setattr(Training, "_step", Mock(side_effect=AssertionError("a step")))
    backbone = of_two_kinds(backbone, tmp_path / "pass")
    match = r": b: 4 held-out sequences must have tokens that are the model's own choice; got 0\."
    with pytest.raises(RecipeError, match=match):
        mtp_pass_module.tune(results_of(plan, backbone), None)
    few = replace(backbone.data, held_out_kinds=("a",) * 5 + ("b",) * 3)
    match = "needs 4 held-out sequences of each dataset, and 1 tokens of them.*; got 0 sequences"
    with pytest.raises(RecipeError, match=match):
        refuse_held_out(plan, few)


def test_a_relative_rate_goes_by_the_spread_of_a_matrix():
    """At a spread of 0.07 it is the fixed rate; the twin, a fixed one, is 0.05 of a spread of 0.02."""
    rng = torch.Generator().manual_seed(0)
    weights = {"norm": torch.ones(64)}
    for name, spread in {"wide": 0.02, "narrow": 0.07}.items():
        weights[name] = spread * torch.randn(64, 64, generator=rng)
    settings = SETTINGS.model_copy(update={"learning_rate": None, "relative_rate": 1 / 70})
    norm, wide, narrow = tuning.rates_of(weights, settings)
    assert narrow == pytest.approx(1e-3, rel=0.05) and wide == pytest.approx(2e-4 / 0.7, rel=0.05)
    assert norm == pytest.approx((wide + narrow) / 2)
    assert tuning.rates_of(weights, SETTINGS) == [SETTINGS.learning_rate] * 3


def test_experts_and_router_are_trained_too(glm, tmp_path, monkeypatch):
    plan, backbone = glm
    monkeypatch.setattr(mtp_policy, "acceptance", Mock(return_value=even(0.9, slots=100)))
    small = with_settings(plan, mtp="bf16", steps=1, batch_size=1, draft_steps=1)
    results = results_of(small, fresh(backbone, tmp_path / "pass"))
    results.measured(small)
    kept = load_file(results.statistics(small)[0])
    released = weights_of(plan.source.folder)
    tuned = {tensor.name: tensor.role for tensor in small.tensors if tensor.tuned}
    assert kept.keys() == tuned.keys()
    assert {"experts", "router", "attention", "norm", "glue"} <= {*tuned.values()}
    for name, role in tuned.items():
        assert kept[name].dtype == released[name].dtype
        # One step is less than half of the last bit of a norm near 1.
        assert role == "norm" or not torch.equal(kept[name], released[name]), name
    left = {each.role for each in small.tensors if each.part == "mtp" and not each.tuned}
    assert left <= {"embedding", "head", "state", "router"}


@pytest.mark.full
def test_a_killed_training_goes_on_to_the_same_bytes(weak, trained, tmp_path, monkeypatch):
    plan, backbone = weak
    cut = fresh(backbone, tmp_path / "cut")
    steps = []
    original = Training._step
    name = "layers.0.mlp.down_proj.weight"
    released = weights_of(plan.source.folder)[f"mtp.{name}"].float()

    def killed(self, step):
        assert steps or torch.equal(self._masters[name], released), "not those of the packed block"
        steps.append(step)
        if len(steps) == 5:
            raise KeyboardInterrupt
        original(self, step)

    monkeypatch.setattr(tuning, "_SAVE_SECONDS", 0.0)
    monkeypatch.setattr(Training, "_step", killed)
    with pytest.raises(KeyboardInterrupt):
        mtp_pass(plan, cut)
    whole, _, expected = trained
    for _ in range(2):
        assert mtp_pass(plan, cut)[1].tuned == expected.tuned
        assert steps == [0, 1, 2, 3, 4, 4, 5, 6, 7], "no step is done twice"
    assert (cut.folder / FILE).read_bytes() == (whole.folder / FILE).read_bytes()
    assert not [*(cut.folder / "mtp").glob("*.training")]


def test_a_loss_that_is_not_finite_is_one_sentence(weak, tmp_path, monkeypatch):
    plan, backbone = weak
    backbone, original = fresh(backbone, tmp_path / "pass"), Training._backward
    monkeypatch.setattr(Training, "_backward", lambda *args: original(*args) * math.nan)
    match = r"loss of mtp: tuned.*must be finite; got nan and .* at step 1 of 8\. Lower"
    with pytest.raises(RecipeError, match=match):
        mtp_pass(plan, backbone)
    assert not (backbone.folder / FILE).exists()


def test_each_sequence_is_drawn_once_before_one_is_drawn_again():
    settings = SETTINGS.model_copy(update={"batch_size": 3})
    drawn = []
    for step in range(10):
        drawn += tuning.rows_of(step, num_rows=10, settings=settings)
    assert [sorted(drawn[start : start + 10]) for start in (0, 10, 20)] == [[*range(10)]] * 3
    assert drawn[:10] != drawn[10:20]
    rates = [tuning.rate_at(step, 20) for step in range(20)]
    assert max(rates) == 1.0 and rates[0] == 0.5 and 0 < rates[-1] < 0.1 and rates.index(1.0) == 1


def test_what_cannot_be_trained_is_refused_from_the_headers(glm):
    plan, backbone = glm
    groups = {tensor.role for tensor in plan.tensors if tensor.tuned}
    match = r"must leave something of the block to train; got no tensor\. Shorten"
    with pytest.raises(RecipeError, match=match):
        refuse_mtp(with_settings(plan, frozen=(*groups,)))
    few = replace(backbone.data, held_out_ids=torch.zeros(3, 8), held_out_written=None)
    match = r"needs 4 held-out sequences of each dataset, and 1 tokens of them.*; got 3 sequences, 24 tokens\."
    with pytest.raises(RecipeError, match=match):
        refuse_held_out(plan, few)


@pytest.mark.full
def test_a_tuned_block_with_an_fp8_cache(weak, tmp_path):
    """Keys and values are rounded while it is trained, too."""
    plan, backbone = weak
    with_cache = make_plan(plan.recipe.model_copy(update={"kv_cache": "FP8"}), plan.source)
    backbone = fresh(backbone, tmp_path / "pass")
    _, found = mtp_pass(with_cache, backbone)
    assert found.tuned.chosen and found.tuned.gain > 1.2
    file = load_file(backbone.folder / FILE)
    assert [name for name in file if name.endswith(("k_scale", "v_scale"))]


# --- losses ---------------------------------------------------------------------------------------


def test_losses_by_hand():
    """`tv` is what rejection sampling rejects: a token drawn from q is kept with min(1, p / q). None
    hides NaN.
    """
    accepted = torch.tensor(ACCEPTED)
    divergence = (P * (P / Q).log()).sum(dim=1)
    share = (-3 * accepted).exp()
    by_hand = {
        "tv": 1 - accepted,
        "nla": -accepted.log(),
        "ce": -torch.tensor([0.2, 0.05]).log(),
        "kl_div": divergence,
        "lk_hybrid": share * divergence + (1 - share) * (1 - accepted),
    }
    for name, values in by_hand.items():
        torch.testing.assert_close(losses(name, P.log(), Q.log()), values, msg=name)
    torch.testing.assert_close(losses("tv", P.log(), P.log()), torch.zeros(2))
    bad = torch.tensor([[math.nan, 0.0, 1.0]])
    assert all(losses(loss, P[:1].log(), bad).isnan().all() for loss in LOSSES)


@pytest.mark.parametrize("loss", LOSSES)
def test_slots_in_parts_are_all_slots_at_once(loss, monkeypatch):
    rng = torch.Generator().manual_seed(1)
    draft, target = (torch.randn(11, 8, generator=rng) for _ in range(2))
    heads = tuple(torch.nn.Linear(8, 50, bias=False).requires_grad_(False) for _ in range(2))
    whole = draft.clone().requires_grad_()
    value = losses(loss, heads[1](target), heads[0](whole)).sum()
    value.backward()
    for slots in (3, 256):
        monkeypatch.setattr(tuning, "SLOTS", slots)
        total, gradient = draft_loss(draft, target, heads, loss)
        torch.testing.assert_close(total, value.detach())
        torch.testing.assert_close(gradient, whole.grad)
