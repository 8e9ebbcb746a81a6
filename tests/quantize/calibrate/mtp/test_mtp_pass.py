"""The MTP pass over shipped models: what it leaves for the writer, what it measures, how `mtp: auto`
chooses, and the states that a block is calibrated on: a server's, or none.
"""

import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from commands import GLM
from keepmtp.quantize.calibrate.data.claim import claim_pass, fingerprint
from keepmtp.quantize.calibrate.data.data import CalibrationData
from keepmtp.quantize.calibrate.layers import backbone as calibrate
from keepmtp.quantize.calibrate.layers.backbone import Backbone, calibrate_backbone
from keepmtp.quantize.calibrate.mtp import mtp_pass as mtp
from keepmtp.quantize.calibrate.mtp import mtp_policy as policy
from keepmtp.quantize.calibrate.mtp.acceptance import Acceptance, block_input
from keepmtp.quantize.calibrate.mtp.facts import AcceptanceFact
from keepmtp.quantize.calibrate.mtp.mtp_block import draft_steps
from keepmtp.quantize.calibrate.mtp.mtp_pass import mtp_pass, refuse_held_out, refuse_mtp
from keepmtp.quantize.needs.room import calibration_bytes
from keepmtp.quantize.plan.plan import Plan, make_plan
from keepmtp.quantize.run.statistics import Statistics, refuse_statistics
from keepmtp.recipes.errors import CheckpointError, GateError, RecipeError
from keepmtp.recipes.schema import MtpAuto
from passes import ALONE, ROOT, answered, even, fresh, plan_over, reading, results_of

pytestmark = pytest.mark.usefixtures("in_f32")

# Of a tiny model's block, the group that is quantized.
MODELS = {"tiny-glm4-moe": "experts", "tiny-qwen3_5": "dense_mlp"}


@pytest.fixture(scope="module")
def pass_of(tmp_path_factory) -> Callable[[str], tuple[Plan, Backbone]]:
    """A model's backbone pass, which no test may repeat, with its own answers as held-out text."""

    @cache
    def made_of(model: str) -> tuple[Plan, Backbone]:
        plan = plan_over(ROOT / "models" / model, f"{model}.nvfp4")
        # A pass for a block of NVFP4 serves every other policy, too.
        return plan, answered(with_mtp(plan, "NVFP4"), tmp_path_factory.mktemp(model), count=12)

    return made_of


@pytest.fixture(params=MODELS)
def made(request, pass_of) -> tuple[Plan, Backbone]:
    return pass_of(request.param)


@pytest.fixture
def glm(pass_of) -> tuple[Plan, Backbone]:
    return pass_of("tiny-glm4-moe")


def with_mtp(plan: Plan, policy) -> Plan:
    return make_plan(plan.recipe.resolved(policy), plan.source)


def auto(plan: Plan, *candidates, least: float = 0.97) -> Plan:
    """The plan of a recipe that leaves the choice to these candidates."""
    chooses = MtpAuto(min_acceptance=least, candidates=candidates)
    return replace(plan, recipe=plan.recipe.model_copy(update={"mtp": "auto", "mtp_auto": chooses}))


def kept_of(own: AcceptanceFact, other: AcceptanceFact) -> float:
    """The least share that is kept, over the numbers of tokens a step."""
    return min(sum(own.by_position[k]) / sum(other.by_position[k]) for k in other.by_position)


def published(backbone: Backbone) -> dict[str, bytes]:
    """The block's statistics as the writer finds them."""
    folder = backbone.folder / "statistics"
    return {path.name: path.read_bytes() for path in folder.glob("mtp-*")}


@pytest.mark.few(1)
def test_a_quantized_block_leaves_what_the_writer_needs(made, tmp_path):
    """And another policy takes the place of its statistics."""
    plan, backbone = made
    backbone = fresh(backbone, tmp_path / "pass")
    plan = with_mtp(plan, "NVFP4")
    final, found = mtp_pass(plan, backbone)
    stamp = fingerprint(backbone.skeleton.plan, backbone.data, 1)
    statistics = Statistics.open(backbone.folder / "statistics", fingerprint=stamp)
    refuse_statistics(final, statistics)
    wanted = set()
    for tensor in plan.mtp:
        wanted.update(output.name for output in tensor.calibrated_outputs)
    own = {name for name in statistics if statistics.entries[name].file.startswith("mtp-")}
    assert wanted and own == wanted
    sides = [(row.backbone, row.mtp) for row in found.rows]
    assert sides == [("source", "source"), ("quantized", "source"), ("quantized", "quantized")]
    first, second, third = found.rows
    assert first.acceptance.by_position["1"][0] > 0.98
    assert kept_of(second.acceptance, first.acceptance) > 0.9
    assert kept_of(third.acceptance, first.acceptance) > 0.85
    sums = [sum(row.acceptance.by_position["3"]) for row in found.rows]
    parts = found.of_backbone.kept, found.of_block.kept
    assert parts == pytest.approx((sums[1] / sums[0], sums[2] / sums[1]), abs=1e-4)
    assert 0 < found.of_block.reach < 0.5
    assert 0.8 < found.agreement < 1.0 and second.perplexity == third.perplexity
    assert first.divergence is None
    assert 0 < second.divergence == third.divergence < 1
    final, found = mtp_pass(with_mtp(plan, "bf16"), backbone)
    assert not published(backbone) and len(found.rows) == 2 and found.of_block is None
    refuse_statistics(final, Statistics.open(backbone.folder / "statistics"))


@pytest.mark.few(1)
def test_auto_takes_the_cheapest_that_keeps_enough(made, tmp_path):
    plan, backbone = made
    backbone = fresh(backbone, tmp_path / "pass")
    group = MODELS[plan.recipe.model]
    mixed = {"attention": "FP8_DYNAMIC", group: "NVFP4"}
    candidates = ("bf16", "FP8_DYNAMIC", {group: "NVFP4"}, mixed, "NVFP4")
    final, found = mtp_pass(auto(plan, *candidates, least=0.9), backbone)
    tried = [each for each in found.candidates if not each.refused]
    refused = found.candidates[: -len(tried)]
    assert refused[0].policy == {group: "NVFP4"}
    assert all("must say what happens to" in each.refused for each in refused)
    in_order = [each for each in candidates if each not in [one.policy for one in refused]]
    assert [each.policy for each in tried] == in_order[: len(tried)]
    (chosen,) = (each for each in tried if each.chosen)
    assert all(each.kept_at_least < each.kept for each in tried)
    shown = [each for each in tried if each.kept_at_least >= 0.9]
    assert chosen is shown[-1] and tried in (shown, [*shown, tried[-1]])
    assert chosen.bytes < tried[1].bytes < tried[0].bytes == block_bytes(plan)
    assert final.recipe.mtp == chosen.policy and final.recipe.mtp_auto is None
    accepted = [row.acceptance for row in found.rows[1:]]
    assert accepted == [tried[0].acceptance, chosen.acceptance]
    # What was chosen is what a recipe that names it gets.
    alone = fresh(backbone, tmp_path / "alone")
    _, named = mtp_pass(with_mtp(plan, chosen.policy), alone)
    assert named.rows == found.rows and named.candidates == ()
    assert published(alone) == published(backbone)


@pytest.fixture
def invented(glm, tmp_path, monkeypatch):
    """Results over a pass whose figures are put in by hand, in the order in which they are measured."""
    _, backbone = glm

    def results(asked: Plan, slots: int, *rates: float):
        measured = [even(rate, slots=slots) for rate in rates]
        monkeypatch.setattr(policy, "acceptance", Mock(side_effect=measured))
        monkeypatch.setattr(policy.PolicyResults, "_make", Mock())
        run = results_of(asked, fresh(backbone, tmp_path / "pass"))
        run.released()
        return run

    return results


@pytest.mark.parametrize(
    "least, chosen",
    [
        (0.89, "W4A16"),
        (0.96, "FP8_DYNAMIC"),
        (0.99, "bf16"),
        (0.999, None),
    ],
)
def test_the_budget_decides(glm, invented, least, chosen):
    asked = auto(glm[0], "W4A16", "FP8_DYNAMIC", "bf16", least=least)
    run = invented(asked, 100_000, 0.8, 0.798, 0.77, 0.72)
    if chosen is None:
        with pytest.raises(GateError, match=r"must keep 99\.9% of acceptance.*got 99\.8% at best"):
            mtp.choose(run, asked.recipe.mtp_auto, None)
        return
    tried, best = mtp.choose(run, asked.recipe.mtp_auto, None)
    kept = [0.9975, 0.9625, 0.9]
    assert [each.kept for each in tried] == pytest.approx(kept[: len(tried)])
    assert len(tried) == min(3, sum(each >= least for each in kept) + 1), "none after the first"
    assert [each.policy for each in tried if each.chosen] == [chosen] == [best.recipe.mtp]


@pytest.mark.parametrize("num_good", [0, 3])
def test_played_games_pass_wrongly_as_seldom_as_the_confidence_says(glm, monkeypatch, num_good):
    """Eight candidates, of which all or the smaller ones keep just too little: 96.99 % of 97. What
    chance adds to the confidence's share is two standard deviations at most.

    The twin takes any that is shown, as if each were alone.
    """
    words = ["bf16", "FP8_BLOCK", "FP8", "NVFP4", "W4A16_ASYM", "W4A16_G32", "W4A16", "MXFP4A16"]
    asked = auto(glm[0], *words)
    num_games = 250
    plans = {word: with_mtp(glm[0], word) for word in words}
    by_size = sorted(words, key=lambda word: -block_bytes(plans[word]))
    monkeypatch.setattr(mtp, "with_policy", lambda _, policy: plans[policy])
    rng = torch.Generator().manual_seed(0)
    wrong = 0
    wrong_alone = 0
    for _ in range(num_games):
        released, found = game(rng, [1.0] * num_good + [0.9699] * (8 - num_good))
        own = dict(zip(by_size, found, strict=True))
        run = SimpleNamespace(
            plan=asked,
            backbone=glm[1],
            released=Mock(return_value=released),
            measured=lambda plan, own=own: own[plan.recipe.mtp],
        )
        with suppress(GateError):
            facts, best = mtp.choose(run, asked.recipe.mtp_auto, None)
            is_shown = any(each.chosen and each.kept_at_least >= 0.97 for each in facts)
            wrong += is_shown and best.recipe.mtp in by_size[num_good:]
        bad = found[num_good:]
        wrong_alone += any(each.kept_of(released, 0.95)[1] >= 0.97 for each in bad)
    luck = 2 * (num_games * 0.05 * 0.95) ** 0.5
    assert wrong <= 0.05 * num_games + luck < wrong_alone, (wrong, wrong_alone)


def block_bytes(plan: Plan) -> int:
    size = 0
    for tensor in plan.mtp:
        for output in tensor.outputs:
            size += output.num_bytes
    return size


def game(rng: torch.Generator, kept: list[float]) -> tuple[Acceptance, list[Acceptance]]:
    """Drafts over 24 sequences, some of which are hard: of the release, and of blocks that keep so
    much of its acceptance, each losing drafts of its own.
    """
    num_slots = torch.randint(40, 80, (24, 1), generator=rng)
    rates = 0.4 + 0.5 * torch.rand(24, 1, generator=rng)
    is_slot = torch.arange(80) < num_slots
    is_accepted = is_slot & (torch.rand(24, 80, generator=rng) < rates)
    found = []
    for share in (1.0, *kept):
        stays = torch.rand(24, 80, generator=rng) < share
        counts = torch.stack([is_slot.sum(1), is_slot.sum(1), (is_accepted & stays).sum(1)], dim=1)
        found.append(Acceptance(counts.double()[:, :, None, None]))
    return found[0], found[1:]


def test_an_impossible_budget_is_refused_by_name(glm, tmp_path):
    """The twin: nothing is chosen in silence."""
    plan, backbone = glm
    backbone = fresh(backbone, tmp_path / "pass")
    with pytest.raises(GateError) as caught:
        mtp_pass(auto(plan, "bf16", "NVFP4", least=0.99999), backbone)
    rule = (
        f"{plan.recipe.name}: a candidate of mtp: auto must keep 100.0% of acceptance, at 95% "
        r"confidence; got .* at best, at least \d+\.\d%, by .*mtp_auto.min_acceptance"
    )
    assert re.match(rule, str(caught.value)) and not published(backbone)
    rule = r"no candidate that fits the model: .*must say what happens to \w+;"
    with pytest.raises(GateError, match=rule):
        mtp_pass(auto(plan, {"experts": "NVFP4"}), backbone)


def test_too_few_slots_keep_the_block_as_released(glm, invented):
    """All of 80 slots may be 96 %: rounding is taken where it is shown to be good, and else left."""
    plan, _ = glm
    asked = auto(plan, "W4A16", "bf16")
    run = invented(asked, 80, 0.8, 0.8, 0.8)
    (tried,), best = mtp.choose(run, asked.recipe.mtp_auto, None)
    assert best.recipe.mtp == "bf16"
    assert tried.kept == 1.0 and tried.kept_at_least < 0.97
    match = r"on 80 slots\. .*add bf16 to mtp_auto.candidates, raise calibration.held_out"
    with pytest.raises(GateError, match=match):
        mtp_pass(auto(plan, "W4A16"), run.backbone)


def test_text_that_can_show_nothing_is_refused_at_once(glm):
    plan, backbone = glm

    def ask(num_sequences: int, num_slots: int) -> None:
        written = torch.zeros(num_sequences, 4000, dtype=torch.bool)
        written.view(-1)[:num_slots] = True
        text = replace(backbone.data, held_out_ids=written.long(), held_out_written=written)
        refuse_held_out(auto(plan, "bf16"), text)

    ask(4, 99)
    rule = r"needs 4 held-out sequences, and 99 tokens of them.*Raise calibration.held_out"
    for too_few in ((16, 98), (3, 10_000)):
        with pytest.raises(RecipeError, match=rule):
            ask(*too_few)


@pytest.mark.full
def test_a_killed_run_repeats_no_candidate_and_no_layer(glm, tmp_path, monkeypatch):
    plan, backbone = glm
    asked = auto(plan, "FP8_DYNAMIC", "W4A16", "NVFP4", least=0.5)
    whole = fresh(backbone, tmp_path / "whole")
    cut = fresh(backbone, tmp_path / "cut")
    expected = mtp_pass(asked, whole)[1]
    calls = []
    original = policy.calibrate

    def killed(*args):
        calls.append(args)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return original(*args)

    monkeypatch.setattr(policy, "calibrate", killed)
    again = Mock(side_effect=AssertionError("a second pass"))
    monkeypatch.setattr(calibrate, "_calibrate_layer", again)
    with pytest.raises(KeyboardInterrupt):
        mtp_pass(asked, cut)
    assert not published(cut), "nothing before the end"
    for _ in range(2):
        assert mtp_pass(asked, cut)[1].candidates == expected.candidates
        assert len(calls) == 4, "the first candidate was done, and then all were"
    assert published(cut) == published(whole)


# --- what cannot be run ---------------------------------------------------------------------------


def without_draft(plan: Plan) -> Plan:
    family = replace(plan.view.family, draft=None, no_draft="transformers has no class for it")
    return replace(plan, view=replace(plan.view, family=family))


def test_a_block_that_cannot_be_run_is_refused_or_left_unmeasured(glm, tmp_path):
    plan, backbone = glm
    for needing in (auto(plan, "bf16"), with_mtp(plan, "NVFP4")):
        refuse_mtp(needing)
        with pytest.raises(RecipeError, match="keepmtp must be able to run an MTP block"):
            refuse_mtp(without_draft(needing))
    kept = without_draft(with_mtp(plan, "FP8_DYNAMIC"))
    refusal = refuse_mtp(kept)
    final, found = mtp_pass(kept, fresh(backbone, tmp_path / "pass"), refusal=refusal)
    assert "transformers has no class for it" in found.unmeasured and final is kept
    assert [row.acceptance for row in found.rows] == [None, None] and found.rows[1].perplexity > 1


@pytest.mark.full
def test_text_that_says_nothing_costs_a_figure_not_the_run(glm, tmp_path):
    """As with a dataset that no model wrote: hours of backbone pass are behind it by then."""
    plan, backbone = glm
    backbone, known = fresh(backbone, tmp_path / "pass"), fresh(backbone, tmp_path / "known")
    plan = with_mtp(plan, "NVFP4")
    silent = reading(backbone, torch.zeros_like(backbone.data.held_out_ids, dtype=torch.bool))
    final, found = mtp_pass(plan, silent)
    says = "the held-out text must resemble what the model writes; got not one token"
    assert found.unmeasured.startswith(f"{plan.recipe.name}: {says}") and final is plan
    rows = [(row.mtp, row.acceptance) for row in found.rows]
    assert rows == [("source", None), ("source", None), ("quantized", None)]
    refuse_statistics(final, Statistics.open(backbone.folder / "statistics"))
    assert not mtp_pass(plan, known)[1].unmeasured
    assert published(backbone) == published(known)
    with pytest.raises(RecipeError, match=says):
        mtp_pass(auto(plan, "bf16"), silent)


# --- inputs ---------------------------------------------------------------------------------------


def test_inputs_are_those_of_a_draft(made):
    """Each block sees in calibration what it sees when it drafts, up to the last slots, which have
    no next token.
    """
    _, backbone = made
    skeleton = backbone.skeleton
    blocks = [policy.filled_blocks(skeleton.plan, skeleton)[0] for _ in range(2)]
    batch = next(backbone.batches("mtp").batches())
    with torch.no_grad():
        hidden = block_input(skeleton, blocks[0], batch)
        tokens = skeleton.model.get_input_embeddings()
        steps = draft_steps(blocks, tokens, ids=batch.ids, hidden=hidden, num_steps=2)
        for count, expected in enumerate(steps, start=1):
            inputs = policy.BlockInputs(backbone=backbone, blocks=blocks[:count])
            output = blocks[count - 1](**next(iter(inputs)))[0]
            assert len(list(inputs)) == len(list(inputs))
            assert output.shape[1] == batch.ids.shape[1] - count
            # Sums over other lengths are added in another order: two units in the last place of
            # BF16 near 4.
            expected = expected[:, : output.shape[1]]
            torch.testing.assert_close(output, expected, atol=0.0625, rtol=0.02)


# --- the text that a block is calibrated on -------------------------------------------------------

IDS = torch.randint(3, 300, (4, 32), generator=torch.Generator().manual_seed(0))
# The same text twice, so that its states can be compared.
DATA = CalibrationData(ids=IDS, held_out_ids=IDS, provenance={"drawn": "by the test"})


@pytest.fixture(scope="module")
def plans() -> dict[str, Plan]:
    """By the scheme of the block."""
    plan = plan_over(GLM, "tiny-glm4-moe.nvfp4")
    return {word: with_mtp(plan, word) for word in ("bf16", "FP8_DYNAMIC", "FP8", "NVFP4")}


def run(plan: Plan, folder: Path) -> Backbone:
    return calibrate_backbone(plan, DATA, folder, device=ALONE.device, ranks=ALONE)


def test_a_block_is_calibrated_on_what_a_server_computes(plans, tmp_path):
    """Such a pass serves every policy."""
    backbone = run(plans["NVFP4"], tmp_path)
    states = {}
    for stream in ("mtp", "served", "calibration", "source"):
        batches = backbone.batches(stream).batches()
        states[stream] = torch.cat([batch.state[0] for batch in batches]).float()
    served = states["served"]
    assert torch.equal(states["mtp"], served)
    # Under minmax llm-compressor hands on the released model's states.
    assert torch.equal(states["calibration"], states["source"])
    assert (states["source"] - served).norm() > 0.05 * served.norm()
    for plan in plans.values():
        claim_pass(plan, DATA, tmp_path, ALONE)


def test_a_pass_without_these_states_does_not_calibrate_a_block(plans, tmp_path):
    """The twin: states of another stream would fit in shape."""
    without = run(plans["bf16"], tmp_path)
    files = (tmp_path / "states").rglob("*.safetensors")
    assert {path.name.partition("-")[0] for path in files} == {"calibration", "source", "served"}
    with pytest.raises(RecipeError, match="got another MTP block"):
        claim_pass(plans["NVFP4"], DATA, tmp_path, ALONE)
    with pytest.raises(CheckpointError, match="rows 0 to 3 of mtp must be there"):
        mtp_pass(plans["NVFP4"], without)
    claim_pass(plans["FP8_DYNAMIC"], DATA, tmp_path, ALONE)
    assert mtp_pass(plans["FP8_DYNAMIC"], without)[1].rows


@pytest.mark.parametrize(
    "candidates, may",
    [
        (["NVFP4", "bf16"], True),
        (["FP8_DYNAMIC", "bf16"], False),
        ([{"experts": "FP8"}], True),
    ],
)
def test_candidates_say_whether_a_block_may_be_calibrated(candidates, may, plans):
    plan = plans["bf16"]
    chooses = auto(plan, *candidates)
    calibration = plan.calibration
    assert chooses.may_calibrate_mtp == may
    more = calibration_bytes(chooses) - calibration_bytes(plan)
    assert more == may * 3 * calibration.samples * calibration.sequence_length * 256 * 2
