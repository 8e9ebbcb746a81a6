"""The instrument: tiny-docs drafts and loses as large models do, so policies differ on it."""

import json

import pytest
import torch
from data_files import json_of
from keepmtp.quantize.calibrate.mtp.acceptance import acceptance, target
from keepmtp.quantize.calibrate.mtp.mtp_policy import filled_blocks
from passes import ROOT, finished, plan_over
from transformers import AutoTokenizer

pytestmark = pytest.mark.usefixtures("in_f32")

FOLDER = ROOT / "models" / "tiny-docs"
TRAINED = json_of(FOLDER / "training.json")["measured"]


@pytest.mark.full
def test_it_is_what_its_training_said_and_nvfp4_costs_it_something(tmp_path):
    """Another block and another loop over the layers than models/train has; both in BF16. On the
    first tokens of each passage that models/train measured, and no others.

    Its drafts leave room on both sides: a block that is always right, or never, cannot show which
    policy is better.
    """
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    rows = []
    for line in (ROOT / "models" / "docs_held_out.jsonl").read_text().splitlines():
        row = tokenizer.encode(json.loads(line)["text"])[: TRAINED["sequence_length"]]
        rows += [row] if len(row) == TRAINED["sequence_length"] else []
    assert len(rows) == TRAINED["num_sequences"]
    # NVFP4 throughout, with the released model's states next to its own.
    plan = plan_over(FOLDER, "tiny-docs.nvfp4")
    backbone = finished(plan, tmp_path, held_out=torch.tensor(rows))
    released = target(backbone, "source")
    quantized = target(backbone, "served")
    assert released.perplexity == pytest.approx(TRAINED["perplexity"], rel=0.01)
    assert quantized.perplexity >= 1.01 * released.perplexity
    accepted = acceptance(released, filled_blocks(plan, backbone.skeleton))
    assert accepted.num_slots == pytest.approx(TRAINED["num_slots"], rel=0.01)
    assert accepted.num_slots >= 3000 and 0.60 <= accepted.by_position(1)[0] <= 0.85
    for k, rates in TRAINED["accepted"].items():
        assert accepted.by_position(int(k)) == pytest.approx(rates, abs=0.01)
    low, high = TRAINED["accepted_interval"]
    assert high - low <= 0.04 and low < TRAINED["accepted"]["1"][0] < high
