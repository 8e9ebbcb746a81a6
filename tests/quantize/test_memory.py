"""The memory that a plan is said to take, against what torch allocates while a small model is
calibrated.

Tolerance: a station counts tensors by their shapes, and of temporary ones only the largest
together. It is right where it is between 0.8 and 1.4 of what is measured. Below, a CPU also holds
the states that wait in memory, which a GPU does not; above, the batch sizes that are chosen from it
would waste a GPU.
"""

from contextlib import suppress
from math import prod

import pytest
import torch
from keepmtp.quantize.calibrate.data.data import CalibrationData
from keepmtp.quantize.calibrate.layers.backbone import calibrate_backbone
from keepmtp.quantize.calibrate.mtp.acceptance import NothingCounts, target
from keepmtp.quantize.calibrate.mtp.mtp_pass import mtp_pass
from keepmtp.quantize.calibrate.mtp.mtp_policy import PolicyResults
from keepmtp.quantize.needs.memory import stations
from keepmtp.quantize.plan.plan import Plan
from keepmtp.recipes.find import find_recipe
from keepmtp.recipes.knobs import AutoRoundKnobs
from keepmtp.recipes.schema import MtpTuned
from live_bytes import LiveBytes
from passes import ALONE, ROOT, plan_over

LEAST, MOST = 0.8, 1.4


def small_plan(name: str, batch_size: int, length: int) -> Plan:
    recipe, _ = find_recipe(name)
    assert recipe.calibration is not None
    sizes = {
        "batch_size": batch_size,
        "sequence_length": length,
        "samples": 2 * batch_size,
        "held_out": batch_size,
    }
    few = {"autoround": AutoRoundKnobs(iters=2)} if recipe.calibration.autoround else {}
    calibration = recipe.calibration.model_copy(update=sizes | few)
    return plan_over(
        ROOT / "models" / recipe.model, recipe.model_copy(update={"calibration": calibration})
    )


def random_data(plan: Plan) -> CalibrationData:
    calibration = plan.recipe.calibration
    assert calibration is not None
    count, length = calibration.samples + calibration.held_out, calibration.sequence_length
    ids = torch.randint(3, 300, (count, length), generator=torch.Generator().manual_seed(0))
    held_out = ids[calibration.samples :]
    return CalibrationData(
        ids=ids[: calibration.samples], held_out_ids=held_out, provenance={"drawn": "by the test"}
    )


def embedding_bytes(plan: Plan) -> int:
    return 2 * next(prod(tensor.shape) for tensor in plan.tensors if tensor.role == "embedding")


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("name", "batch_size", "length"),
    [
        ("tiny-glm4-moe.nvfp4", 1, 32),  # weights rule
        ("tiny-glm4-moe.nvfp4-mtp-nvfp4", 2, 384),  # scores rule
        ("tiny-glm4-moe.w4a16-gptq", 1, 32),  # Hessians rule
        ("tiny-glm4-moe.w4a16-autoround", 1, 32),  # what is learned rules
        ("tiny-qwen3_5.nvfp4", 2, 256),  # linear attention
    ],
)
def test_stations_are_as_large_as_what_torch_allocates(name, batch_size, length, tmp_path):
    plan = small_plan(name, batch_size, length)
    found = {station.name.partition(" ")[0]: station for station in stations(plan)}
    with LiveBytes() as backbone_bytes:
        backbone = calibrate_backbone(
            plan, random_data(plan), tmp_path, device=ALONE.device, ranks=ALONE
        )
    assert LEAST < found["decoder"].device_bytes / backbone_bytes.peak < MOST, found["decoder"]
    with LiveBytes() as mtp_bytes:
        mtp_pass(plan, backbone)
    after = found["MTP"].device_bytes - embedding_bytes(plan)  # which was there before
    assert LEAST < after / mtp_bytes.peak < MOST, found["MTP"]


@pytest.mark.parametrize(("policy", "length"), [("NVFP4", 256), ("bf16", 64)])
def test_training_takes_what_is_said(policy, length, tmp_path):
    settings = {
        "mtp": policy,
        "steps": 2,
        "batch_size": 1,
        "learning_rate": 1e-3,
        "seed": 0,
        "loss": "ce",
    }
    settings = MtpTuned.model_validate(settings | {"draft_steps": 3, "decay": 0.6})
    recipe = small_plan("tiny-glm4-moe.nvfp4", 1, length).recipe
    plan = plan_over(
        ROOT / "models" / recipe.model,
        recipe.model_copy(update={"mtp": "tuned", "mtp_tuned": settings}),
    )
    said = next(station for station in stations(plan) if station.name.startswith("training"))
    backbone = calibrate_backbone(
        plan, random_data(plan), tmp_path, device=ALONE.device, ranks=ALONE
    )
    results = PolicyResults(
        plan=plan, source=target(backbone, "source"), served=target(backbone, "served")
    )
    with (
        LiveBytes() as training_bytes,
        suppress(NothingCounts),
    ):  # of random text no slot need count
        results.measured(plan)
    assert LEAST < (said.device_bytes - embedding_bytes(plan)) / training_bytes.peak < MOST, said
