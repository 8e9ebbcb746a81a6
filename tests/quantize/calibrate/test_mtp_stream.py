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
from keepmtp.quantize.calibrate.model.states import Stream
from keepmtp.quantize.calibrate.mtp.mtp_pass import mtp_pass
from keepmtp.quantize.needs.room import calibration_bytes
from keepmtp.quantize.plan.plan import Plan, make_plan
from keepmtp.recipes.errors import CheckpointError, RecipeError
from keepmtp.recipes.schema import MtpAuto
from passes import ALONE, ROOT, plan_over
from torch import Tensor

TINY = ROOT / "models" / "tiny-glm4-moe"
IDS = torch.randint(3, 300, (4, 32), generator=torch.Generator().manual_seed(0))
# The same text twice, so that its states can be compared.
DATA = CalibrationData(ids=IDS, held_out_ids=IDS, provenance={"drawn": "by the test"})


def planned(mtp: str) -> Plan:
    plan = plan_over(TINY, "tiny-glm4-moe.nvfp4")
    return make_plan(plan.recipe.resolved(mtp), plan.source)


def run(plan: Plan, folder: Path) -> Backbone:
    folder.mkdir()
    return calibrate_backbone(plan, DATA, folder, device=ALONE.device, ranks=ALONE)


def last_states(backbone: Backbone, stream: Stream) -> Tensor:
    return torch.cat([batch.state[0] for batch in backbone.batches(stream).batches()]).float()


@pytest.fixture(scope="module")
def with_stream(tmp_path_factory) -> Backbone:
    return run(planned("NVFP4"), tmp_path_factory.mktemp("with") / "pass")


@pytest.fixture(scope="module")
def without(tmp_path_factory) -> Backbone:
    return run(planned("bf16"), tmp_path_factory.mktemp("without") / "pass")


def test_a_block_is_calibrated_on_what_a_server_computes(with_stream):
    mtp, served = last_states(with_stream, "mtp"), last_states(with_stream, "served")
    assert torch.equal(mtp, served)
    propagated, released = (
        last_states(with_stream, "calibration"),
        last_states(with_stream, "source"),
    )
    assert torch.equal(propagated, released), (
        "under minmax llm-compressor hands on the released model's states"
    )
    assert (propagated - served).norm() > 0.05 * served.norm()


def test_a_pass_without_these_states_does_not_calibrate_a_block(without, tmp_path):
    """The twin: states of another stream would fit in shape."""
    names = {
        path.name.partition("-")[0] for path in (without.folder / "states").rglob("*.safetensors")
    }
    assert names == {"calibration", "source", "served"}
    rule = (
        "the MTP block must be calibrated on what the quantized backbone computes; got .* "
        "without these states"
    )
    with pytest.raises(RecipeError, match=rule):
        claim_pass(planned("NVFP4"), DATA, without.folder, ALONE)
    with pytest.raises(CheckpointError, match="rows 0 to 3 of mtp must be there"):
        mtp_pass(planned("NVFP4"), without)
    claim_pass(planned("FP8_DYNAMIC"), DATA, without.folder, ALONE)
    assert mtp_pass(planned("FP8_DYNAMIC"), without).combinations


def test_a_pass_with_these_states_serves_every_policy(with_stream):
    for word in ("bf16", "FP8_DYNAMIC", "FP8", "NVFP4"):
        claim_pass(planned(word), DATA, with_stream.folder, ALONE)


@pytest.mark.parametrize(
    ("candidates", "may"),
    [(("NVFP4", "bf16"), True), (("FP8_DYNAMIC", "bf16"), False), ((({"experts": "FP8"}),), True)],
)
def test_candidates_say_whether_a_block_may_be_calibrated(candidates, may):
    plan = plan_over(TINY, "tiny-glm4-moe.nvfp4")
    changes = {"mtp": "auto", "mtp_auto": MtpAuto(min_acceptance=0.9, candidates=candidates)}
    chooses = replace(plan, recipe=plan.recipe.model_copy(update=changes))
    assert chooses.may_calibrate_mtp == may
    more = calibration_bytes(chooses) - calibration_bytes(plan)
    calibration = plan.recipe.calibration
    assert more == may * 2 * calibration.samples * calibration.sequence_length * 256 * 2
