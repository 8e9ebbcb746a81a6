"""The MTP pass over shipped models: what it leaves for the writer, what it measures, and how `mtp:
auto` chooses.
"""

import re
from dataclasses import replace

import pytest
import torch
from keepmtp.quantize.calibrate.data.data import CalibrationData
from keepmtp.quantize.calibrate.layers import backbone as calibrate
from keepmtp.quantize.calibrate.layers.backbone import Backbone
from keepmtp.quantize.calibrate.mtp import mtp_pass as mtp
from keepmtp.quantize.calibrate.mtp import mtp_policy as policy
from keepmtp.quantize.calibrate.mtp.facts import AcceptanceFact
from keepmtp.quantize.calibrate.mtp.mtp_block import bind_block, build_block, draft_steps
from keepmtp.quantize.calibrate.mtp.mtp_pass import MtpPass, mtp_pass, refuse_held_out, refuse_mtp
from keepmtp.quantize.calibrate.mtp.target import block_input
from keepmtp.quantize.plan.plan import Plan, make_plan
from keepmtp.quantize.run.statistics import Statistics, refuse_statistics
from keepmtp.recipes.errors import GateError, RecipeError
from keepmtp.recipes.find import find_recipe
from keepmtp.recipes.schema import MtpAuto
from passes import ROOT, answered, even, fresh, plan_over, reading, results_of
from torch import Tensor

GLM, QWEN = (ROOT / "models" / name for name in ("tiny-glm4-moe", "tiny-qwen3_5"))
MODELS = {"glm": (GLM, "tiny-glm4-moe.nvfp4"), "qwen": (QWEN, "tiny-qwen3_5.nvfp4")}


@pytest.fixture(scope="module", params=MODELS)
def made(request, tmp_path_factory) -> tuple[Plan, Backbone]:
    """A backbone pass, which no test may repeat, with the model's own answers as held-out text."""
    return _made(request.param, tmp_path_factory)


@pytest.fixture(scope="module")
def glm(tmp_path_factory) -> tuple[Plan, Backbone]:
    return _made("glm", tmp_path_factory)


def _made(model: str, tmp_path_factory) -> tuple[Plan, Backbone]:
    folder, recipe = MODELS[model]
    plan = plan_over(folder, recipe)
    # A pass for a block of NVFP4 serves every other policy, too.
    return plan, answered(with_mtp(plan, "NVFP4"), tmp_path_factory.mktemp(model), count=12)


def with_mtp(plan: Plan, policy) -> Plan:
    return make_plan(plan.recipe.resolved(policy), plan.source)


def auto(plan: Plan, *candidates, least: float = 0.97) -> Plan:
    """The plan of a recipe that leaves the choice to these candidates."""
    chooses = MtpAuto(min_acceptance=least, candidates=candidates)
    return replace(plan, recipe=plan.recipe.model_copy(update={"mtp": "auto", "mtp_auto": chooses}))


def kept_of(own: AcceptanceFact, other: AcceptanceFact) -> float:
    """The least share that is kept, over the numbers of tokens a step."""
    return min(sum(own.by_position[k]) / sum(other.by_position[k]) for k in other.by_position)


def files(backbone: Backbone) -> list[str]:
    return sorted(path.name for path in (backbone.folder / "statistics").iterdir())


@pytest.mark.few(1)
def test_a_quantized_block_leaves_what_the_writer_needs(made, tmp_path):
    plan, backbone = made
    backbone = fresh(backbone, tmp_path / "pass")
    plan = with_mtp(plan, "NVFP4")
    found = mtp_pass(plan, backbone)
    stamp = (backbone.folder / "fingerprint").read_text()
    statistics = Statistics.open(backbone.folder / "statistics", fingerprint=stamp)
    refuse_statistics(found.plan, statistics)
    wanted = {o.name for t in plan.tensors if t.part == "mtp" for o in t.calibrated_outputs}
    assert (
        wanted
        and {name for name in statistics if statistics.entries[name].file.startswith("mtp-")}
        == wanted
    )
    assert [(row.backbone, row.mtp) for row in found.combinations] == [
        ("source", "source"),
        ("quantized", "source"),
        ("quantized", "quantized"),
    ]
    source, kept, quantized = (row.acceptance for row in found.combinations)
    assert source.by_position["1"][0] > 0.98
    assert kept_of(kept, source) > 0.9 and kept_of(quantized, source) > 0.85
    assert (
        0.8 < found.agreement < 1.0
        and found.combinations[1].perplexity == found.combinations[2].perplexity
    )
    assert found.combinations[0].divergence is None is found.combinations[0].flips
    assert 0 < found.combinations[1].divergence == found.combinations[2].divergence < 1
    assert found.combinations[1].flips == pytest.approx(1 - found.agreement, abs=1e-5)
    assert found.summary()["rows"][2]["acceptance"]["by_position"]["1"] == [
        round(quantized.by_position["1"][0], 5)
    ]


@pytest.mark.full
def test_another_policy_takes_the_place_of_the_first_ones_statistics(glm, tmp_path):
    plan, backbone = glm
    backbone = fresh(backbone, tmp_path / "pass")
    for word, is_there in (("NVFP4", True), ("bf16", False)):
        found = mtp_pass(with_mtp(plan, word), backbone)
        assert ("mtp-00000.safetensors" in files(backbone)) is is_there
        assert len(found.combinations) == 2 + is_there
        refuse_statistics(found.plan, Statistics.open(backbone.folder / "statistics"))


def test_auto_takes_the_cheapest_that_keeps_enough(made, tmp_path):
    plan, backbone = made
    backbone = fresh(backbone, tmp_path / "pass")
    group = "experts" if "glm" in plan.recipe.model else "dense_mlp"
    candidates = (
        "bf16",
        "FP8_DYNAMIC",
        {group: "NVFP4"},
        {"attention": "FP8_DYNAMIC", group: "NVFP4"},
        "NVFP4",
    )
    found = mtp_pass(auto(plan, *candidates, least=0.9), backbone)
    tried = found.candidates
    assert [each.policy for each in tried] == list(candidates)
    refused = [each for each in tried if each.refused]
    assert (
        refused[0].policy == {group: "NVFP4"} and "must say what happens to" in refused[0].refused
    )
    (chosen,) = (each for each in tried if each.chosen)
    enough = [each for each in tried if not each.refused and each.kept_at_least >= 0.9]
    assert all(each.kept_at_least < each.kept for each in tried if not each.refused)
    assert chosen.bytes == min(each.bytes for each in enough) and not chosen.refused
    assert tried[0].bytes == sum(
        o.num_bytes for t in plan.tensors if t.part == "mtp" for o in t.outputs
    )
    assert chosen.bytes < tried[1].bytes < tried[0].bytes
    assert found.plan.recipe.mtp == chosen.policy and found.plan.recipe.mtp_auto is None
    assert (
        found.combinations[2].acceptance == chosen.acceptance
        and found.combinations[1].acceptance == tried[0].acceptance
    )
    # What was chosen is what a recipe that names it gets.
    alone = fresh(backbone, tmp_path / "alone")
    named = mtp_pass(with_mtp(plan, chosen.policy), alone)
    assert named.combinations == found.combinations and named.candidates == ()
    for name in files(alone):
        assert (alone.folder / "statistics" / name).read_bytes() == (
            backbone.folder / "statistics" / name
        ).read_bytes()


@pytest.fixture
def invented(glm, tmp_path, monkeypatch):
    """Results over a pass whose figures are put in by hand, in the order in which they are measured."""
    _, backbone = glm

    def results(asked: Plan, slots: int, *rates: float):
        each = iter(rates)
        monkeypatch.setattr(policy, "acceptance", lambda *_: even(next(each), slots=slots))
        monkeypatch.setattr(policy.PolicyResults, "_made", lambda *_: [])
        monkeypatch.setattr(policy.PolicyResults, "statistics", lambda *_: ())
        run = results_of(asked, fresh(backbone, tmp_path / "pass"))
        run.released()
        return run

    return results


@pytest.mark.parametrize(
    ("least", "chosen"), [(0.89, "W4A16"), (0.96, "FP8_DYNAMIC"), (0.99, "bf16"), (0.999, None)]
)
def test_the_budget_decides(glm, invented, least, chosen):
    asked = auto(glm[0], "W4A16", "FP8_DYNAMIC", "bf16", least=least)
    run = invented(asked, 100_000, 0.8, 0.72, 0.77, 0.798)
    if chosen is None:
        with pytest.raises(GateError, match=r"must keep 99\.9% of acceptance.*got 99\.8% at best"):
            mtp.choose(run, asked.recipe.mtp_auto, None)
        return
    tried, best = mtp.choose(run, asked.recipe.mtp_auto, None)
    assert [each.kept for each in tried] == pytest.approx([0.9, 0.9625, 0.9975])
    assert [each.policy for each in tried if each.chosen] == [chosen]
    assert best.recipe.mtp == chosen


def test_an_impossible_budget_is_refused_by_name(glm, tmp_path):
    """The twin: nothing is chosen in silence."""
    plan, backbone = glm
    backbone = fresh(backbone, tmp_path / "pass")
    impossible = auto(plan, "bf16", "NVFP4", least=0.99999)
    with pytest.raises(GateError) as caught:
        mtp_pass(impossible, backbone)
    said = str(caught.value)
    assert said.startswith(
        f"{plan.recipe.name}: a candidate of mtp: auto must keep 100.0% of acceptance, at 95% "
        "confidence; got "
    )
    assert re.search(r"at best, at least \d+\.\d%, by ", said)
    assert "mtp_auto.min_acceptance" in said
    assert not [name for name in files(backbone) if name.startswith("mtp-")]
    misfit = auto(plan, {"experts": "NVFP4"})
    with pytest.raises(
        GateError, match=r"no candidate that fits the model: .*must say what happens to \w+;"
    ):
        mtp_pass(misfit, backbone)


def test_too_few_slots_keep_the_block_as_released(glm, invented):
    """99 % on 200 slots may be 96 %: rounding is taken where it is shown to be good, and else left."""
    plan, _ = glm
    asked = auto(plan, "W4A16", "bf16")
    run = invented(asked, 80, 0.8, 0.8, 0.8)
    tried, best = mtp.choose(run, asked.recipe.mtp_auto, None)
    assert best.recipe.mtp == "bf16"
    for each in tried:
        assert each.kept == 1.0 and each.kept_at_least < 0.97 and each.needed_slots == 99
    match = r"on 80 slots\. .*add bf16 to mtp_auto.candidates, raise calibration.held_out"
    with pytest.raises(GateError, match=match):
        mtp_pass(auto(plan, "W4A16"), run.backbone)


def test_text_that_can_show_nothing_is_refused_at_once(glm):
    plan, backbone = glm
    for num_sequences, num_slots in ((16, 98), (3, 10_000)):
        with pytest.raises(
            RecipeError,
            match=r"needs 4 held-out sequences, and 99 tokens of them.*Raise calibration.held_out",
        ):
            refuse_held_out(auto(plan, "bf16"), text(backbone, num_sequences, num_slots))
    refuse_held_out(auto(plan, "bf16"), text(backbone, 4, 99))


def text(backbone: Backbone, num_sequences: int, num_slots: int) -> CalibrationData:
    written = torch.zeros(num_sequences, 4000, dtype=torch.bool)
    written.view(-1)[:num_slots] = True
    return replace(backbone.data, held_out_ids=written.long(), held_out_written=written)


def test_a_killed_run_repeats_no_candidate_and_no_layer(glm, tmp_path, monkeypatch):
    plan, backbone = glm
    asked = auto(plan, "FP8_DYNAMIC", "W4A16", "NVFP4", least=0.5)
    whole = mtp_pass(asked, fresh(backbone, tmp_path / "whole"))
    cut = fresh(backbone, tmp_path / "cut")
    calls = []

    def killed_at(number: int):
        def run(*args, **kwargs):
            calls.append(args)
            if len(calls) == number:
                raise KeyboardInterrupt
            return original(*args, **kwargs)

        original = policy.calibrate
        return run

    with monkeypatch.context() as patch:
        patch.setattr(policy, "calibrate", killed_at(2))
        with pytest.raises(KeyboardInterrupt):
            mtp_pass(asked, cut)
    assert not [name for name in files(cut) if name.startswith("mtp-")], (
        "nothing is published before the end"
    )
    calls.clear()
    with monkeypatch.context() as patch:
        patch.setattr(policy, "calibrate", killed_at(0))
        patch.setattr(
            calibrate, "_calibrate_layer", lambda *_: pytest.fail("a second backbone pass")
        )
        resumed = mtp_pass(asked, cut)
        assert len(calls) == 2, "the first candidate was done"
        again = mtp_pass(asked, cut)
        assert len(calls) == 2, "all were done"
    assert resumed.candidates == whole.candidates == again.candidates
    for name in files(cut):
        whole_file = tmp_path / "whole" / "statistics" / name
        assert whole_file.read_bytes() == (cut.folder / "statistics" / name).read_bytes()


# --- what cannot be run ---------------------------------------------------------------------------


def without_draft(plan: Plan) -> Plan:
    family = replace(plan.view.family, draft=None, no_draft="transformers has no class for it")
    return replace(plan, view=replace(plan.view, family=family))


def test_a_block_that_cannot_be_run_is_refused_or_left_unmeasured(glm, tmp_path):
    plan, backbone = glm
    for mtp_word in ("NVFP4", "auto"):
        needing = without_draft(
            auto(plan, "bf16") if mtp_word == "auto" else with_mtp(plan, mtp_word)
        )
        with pytest.raises(RecipeError, match="keepmtp must be able to run an MTP block"):
            refuse_mtp(needing)
    kept = without_draft(with_mtp(plan, "FP8_DYNAMIC"))
    refuse_mtp(kept)
    found: MtpPass = mtp_pass(kept, fresh(backbone, tmp_path / "pass"))
    assert "transformers has no class for it" in found.unmeasured and found.plan is kept
    assert [row.acceptance for row in found.combinations] == [None, None] and found.combinations[
        1
    ].perplexity > 1
    refuse_mtp(with_mtp(plan, "NVFP4"))


def nobody(backbone: Backbone) -> Tensor:
    """No token of the held-out text is the model's."""
    return torch.zeros_like(backbone.data.held_out_ids, dtype=torch.bool)


def test_text_that_says_nothing_costs_a_figure_not_the_run(glm, tmp_path):
    """As with a dataset that no model wrote: hours of backbone pass are behind it by then."""
    plan, backbone = glm
    backbone, known = fresh(backbone, tmp_path / "pass"), fresh(backbone, tmp_path / "known")
    plan = with_mtp(plan, "NVFP4")
    found = mtp_pass(plan, reading(backbone, nobody(backbone)))
    says = (
        f"{plan.recipe.name}: the held-out text must resemble what the model writes; got not one "
        "token"
    )
    assert found.unmeasured.startswith(says)
    assert [row.mtp for row in found.combinations] == ["source", "source", "quantized"]
    assert not any(row.acceptance for row in found.combinations)
    assert found.plan is plan and found.combinations[1].perplexity > 1
    refuse_statistics(found.plan, Statistics.open(backbone.folder / "statistics"))
    known = mtp_pass(plan, known)
    for name in files(backbone):
        statistics = tmp_path / "known" / "statistics" / name
        assert statistics.read_bytes() == (backbone.folder / "statistics" / name).read_bytes()
    assert not known.unmeasured
    with pytest.raises(RecipeError, match="the held-out text must resemble what the model"):
        mtp_pass(auto(plan, "bf16"), reading(backbone, nobody(backbone)))


# --- inputs ---------------------------------------------------------------------------------------


def test_inputs_are_those_of_a_draft(made):
    """Each block sees in calibration what it sees when it drafts, up to the last slots, which have
    no next token.
    """
    _, backbone = made
    skeleton = backbone.skeleton
    blocks = []
    for _ in range(2):
        block = build_block(skeleton.plan.view)
        skeleton.fill(block, bind_block(block, skeleton.plan))
        blocks.append(block)
    batch = next(backbone.batches("mtp").batches())
    with torch.no_grad():
        hidden = block_input(skeleton, blocks[0], batch)
        steps = draft_steps(
            blocks, skeleton.model.get_input_embeddings(), ids=batch.ids, hidden=hidden, num_steps=2
        )
        for count, expected in enumerate(steps, start=1):
            inputs = policy.BlockInputs(backbone=backbone, blocks=blocks[:count])
            arguments = next(iter(inputs))
            assert len(inputs) == len(list(inputs)) == len(list(inputs))
            output = blocks[count - 1](**arguments)[0]
            assert output.shape[1] == batch.ids.shape[1] - count
            # Sums over other lengths are added in another order: two units in the last place of
            # BF16 near 4.
            torch.testing.assert_close(
                output, expected[:, : output.shape[1]], atol=0.0625, rtol=0.02
            )


@pytest.mark.full
def test_the_shipped_recipe_chooses(glm, tmp_path):
    """`tiny-glm4-moe.nvfp4-mtp-auto`: its seven candidates over a pass of its sibling, which has
    the same backbone.
    """
    plan, backbone = glm
    recipe = find_recipe("tiny-glm4-moe.nvfp4-mtp-auto")[0]
    assert recipe.backbone == plan.recipe.backbone and recipe.calibration == plan.recipe.calibration
    shipped = replace(plan, recipe=recipe)
    found = mtp_pass(shipped, fresh(backbone, tmp_path / "pass"))
    assert len(found.candidates) == 7 and not any(each.refused for each in found.candidates)
    (chosen,) = (each for each in found.candidates if each.chosen)
    assert chosen.bytes < found.candidates[0].bytes * 0.75 and chosen.kept >= 0.97
