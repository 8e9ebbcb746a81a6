"""The states that an MTP block is calibrated on are those that a server computes, or there are
none.
"""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from keepmtp.quantize.calibrate.data.claim import claim_pass
from keepmtp.quantize.calibrate.data.data import CalibrationData
from keepmtp.quantize.calibrate.layers.backbone import Backbone, calibrate_backbone
from keepmtp.quantize.calibrate.mtp.mtp_pass import mtp_pass
from keepmtp.quantize.needs.room import calibration_bytes
from keepmtp.quantize.plan.plan import Plan, make_plan
from keepmtp.recipes.errors import CheckpointError, RecipeError
from keepmtp.recipes.schema import MtpAuto
from passes import ALONE, ROOT, plan_over

IDS = torch.randint(3, 300, (4, 32), generator=torch.Generator().manual_seed(0))
# The same text twice, so that its states can be compared.
DATA = CalibrationData(ids=IDS, held_out_ids=IDS, provenance={"drawn": "by the test"})


def planned(mtp: str) -> Plan:
    plan = plan_over(ROOT / "models" / "tiny-glm4-moe", "tiny-glm4-moe.nvfp4")
    return make_plan(plan.recipe.resolved(mtp), plan.source)


def run(mtp: str, folder: Path) -> Backbone:
    return calibrate_backbone(planned(mtp), DATA, folder, device=ALONE.device, ranks=ALONE)


def test_a_block_is_calibrated_on_what_a_server_computes(tmp_path):
    """Such a pass serves every policy."""
    backbone, states = run("NVFP4", tmp_path), {}
    for stream in ("mtp", "served", "calibration", "source"):
        batches = backbone.batches(stream).batches()
        states[stream] = torch.cat([batch.state[0] for batch in batches]).float()
    served = states["served"]
    assert torch.equal(states["mtp"], served)
    # Under minmax llm-compressor hands on the released model's states.
    assert torch.equal(states["calibration"], states["source"])
    assert (states["source"] - served).norm() > 0.05 * served.norm()
    for word in ("bf16", "FP8_DYNAMIC", "FP8", "NVFP4"):
        claim_pass(planned(word), DATA, tmp_path, ALONE)


def test_a_pass_without_these_states_does_not_calibrate_a_block(tmp_path):
    """The twin: states of another stream would fit in shape."""
    without = run("bf16", tmp_path)
    files = (tmp_path / "states").rglob("*.safetensors")
    assert {path.name.partition("-")[0] for path in files} == {"calibration", "source", "served"}
    with pytest.raises(RecipeError, match="got another MTP block"):
        claim_pass(planned("NVFP4"), DATA, tmp_path, ALONE)
    with pytest.raises(CheckpointError, match="rows 0 to 3 of mtp must be there"):
        mtp_pass(planned("NVFP4"), without)
    claim_pass(planned("FP8_DYNAMIC"), DATA, tmp_path, ALONE)
    assert mtp_pass(planned("FP8_DYNAMIC"), without)[1].rows


@pytest.mark.parametrize(
    ("candidates", "may"),
    [(("NVFP4", "bf16"), True), (("FP8_DYNAMIC", "bf16"), False), ((({"experts": "FP8"}),), True)],
)
def test_candidates_say_whether_a_block_may_be_calibrated(candidates, may):
    plan = planned("bf16")
    changes = {"mtp": "auto", "mtp_auto": MtpAuto(min_acceptance=0.9, candidates=candidates)}
    chooses = replace(plan, recipe=plan.recipe.model_copy(update=changes))
    assert chooses.may_calibrate_mtp == may
    more, calibration = calibration_bytes(chooses) - calibration_bytes(plan), plan.calibration
    assert more == may * 2 * calibration.samples * calibration.sequence_length * 256 * 2
