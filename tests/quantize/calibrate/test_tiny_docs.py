"""The instrument: tiny-docs drafts and loses as large models do, so policies differ on it."""

import json

import pytest
import torch
from keepmtp.quantize.calibrate.layers.backbone import Backbone
from keepmtp.quantize.calibrate.mtp.acceptance import Acceptance, acceptance
from keepmtp.quantize.calibrate.mtp.mtp_block import bind_block, build_block
from keepmtp.quantize.calibrate.mtp.target import target
from passes import ROOT, finished, plan_over
from torch import Tensor
from transformers import AutoTokenizer

FOLDER = ROOT / "models" / "tiny-docs"
TRAINED = json.loads((FOLDER / "training.json").read_text())["measured"]


def held_out_ids() -> Tensor:
    """The first tokens of each passage that models/train measured, and no others."""
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    texts = [
        json.loads(line)["text"]
        for line in (ROOT / "models" / "docs_held_out.jsonl").read_text().splitlines()
    ]
    length = TRAINED["sequence_length"]
    rows = [tokenizer.encode(text)[:length] for text in texts]
    return torch.tensor([row for row in rows if len(row) == length])


@pytest.fixture(scope="module")
def backbone(tmp_path_factory) -> Backbone:
    """NVFP4 throughout, with the released model's states next to its own."""
    held_out = held_out_ids()
    assert len(held_out) == TRAINED["num_sequences"]
    return finished(
        plan_over(FOLDER, "tiny-docs.nvfp4"), tmp_path_factory.mktemp("pass"), held_out=held_out
    )


@pytest.fixture(scope="module")
def accepted(backbone) -> Acceptance:
    """Of the released block behind the released backbone."""
    plan = backbone.skeleton.plan
    block = build_block(plan.view)
    backbone.skeleton.fill(block, bind_block(block, plan))
    return acceptance(target(backbone, "source"), [block.requires_grad_(False)])


@pytest.mark.full
def test_it_is_what_its_training_said(backbone, accepted):
    """Another block and another loop over the layers than models/train has; both in BF16."""
    assert target(backbone, "source").perplexity == pytest.approx(TRAINED["perplexity"], rel=0.01)
    assert accepted.num_slots == pytest.approx(TRAINED["num_slots"], rel=0.01)
    for k, rates in TRAINED["accepted"].items():
        assert accepted.by_position(int(k)) == pytest.approx(rates, abs=0.01)


@pytest.mark.full
def test_its_drafts_leave_room_on_both_sides(accepted):
    """A block that is always right, or never, cannot show which policy is better."""
    assert 0.60 <= accepted.by_position(1)[0] <= 0.85
    low, high = TRAINED["accepted_interval"]
    assert high - low <= 0.04 and low < TRAINED["accepted"]["1"][0] < high
    assert accepted.num_slots >= 3000


def test_nvfp4_costs_it_something(backbone):
    released, quantized = target(backbone, "source"), target(backbone, "served")
    assert quantized.perplexity >= 1.01 * released.perplexity
