"""The memory that a plan is said to take, against what torch allocates while a small model is
calibrated.

Tolerance: a station counts tensors by their shapes, and of temporary ones only the largest
together. It is right where it is between 0.8 and 1.4 of what is measured. Below, a CPU also holds
the states that wait in memory, which a GPU does not; above, the batch sizes that are chosen from it
would waste a GPU.
"""

import weakref
from contextlib import suppress
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from auto_round.utils.device import CpuInfo
from keepmtp.quantize.calibrate.data.data import CalibrationData
from keepmtp.quantize.calibrate.layers.backbone import Backbone, calibrate_backbone
from keepmtp.quantize.calibrate.mtp.acceptance import NothingCounts
from keepmtp.quantize.calibrate.mtp.mtp_pass import mtp_pass
from keepmtp.quantize.needs.memory import stations
from keepmtp.quantize.plan.plan import Plan
from keepmtp.recipes.find import find_recipe
from keepmtp.recipes.knobs import AutoRoundKnobs
from keepmtp.recipes.schema import MtpTuned, Recipe
from passes import ALONE, ROOT, plan_over, results_of
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

LEAST, MOST = 0.8, 1.4


class LiveBytes(TorchDispatchMode):
    """How many bytes of tensors are alive, and how many were at most, while a context is entered.

    It sees each tensor that an operator returns, and when its storage is freed. What a kernel takes
    for itself and gives back before it returns is not seen.

    State: the storages that are alive; `peak` is the most that they had together.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._sizes: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator, and count what it returns."""
        output = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(output):
            if isinstance(leaf, torch.Tensor) and leaf.device.type != "meta":
                self._count(leaf.untyped_storage())
        return output

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if size and key not in self._sizes:
            self._sizes[key] = size
            self.now += size
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._free, key)

    def _free(self, key: int) -> None:
        self.now -= self._sizes.pop(key)


def small_recipe(name: str, batch_size: int, length: int) -> Recipe:
    recipe, _ = find_recipe(name)
    few = {"samples": 2 * batch_size, "held_out": batch_size}
    few |= {"batch_size": batch_size, "sequence_length": length}
    if recipe.calibration.autoround:
        few["autoround"] = AutoRoundKnobs(iters=2)
    calibration = recipe.calibration.model_copy(update=few)
    return recipe.model_copy(update={"calibration": calibration})


def backbone_of(plan: Plan, folder: Path) -> Backbone:
    """The pass over random text."""
    calibration = plan.recipe.calibration
    shape = calibration.samples + calibration.held_out, calibration.sequence_length
    ids = torch.randint(3, 300, shape, generator=torch.Generator().manual_seed(0))
    calibrated, held_out = ids.split([calibration.samples, calibration.held_out])
    data = CalibrationData(ids=calibrated, held_out_ids=held_out, provenance={})
    return calibrate_backbone(plan, data, folder, device=ALONE.device, ranks=ALONE)


def embedding_bytes(plan: Plan) -> int:
    return 2 * next(prod(tensor.shape) for tensor in plan.tensors if tensor.role == "embedding")


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("name", "batch_size", "length"),
    [
        ("tiny-glm4-moe.nvfp4", 1, 32),
        ("tiny-glm4-moe.nvfp4-mtp-nvfp4", 2, 384),
        ("tiny-glm4-moe.w4a16-gptq", 1, 32),
        ("tiny-glm4-moe.w4a16-autoround", 1, 32),
        ("tiny-qwen3_5.nvfp4", 2, 256),
    ],
)
def test_stations_are_as_large_as_what_torch_allocates(name, batch_size, length, tmp_path):
    recipe = small_recipe(name, batch_size, length)
    if "autoround" in name and not CpuInfo().bf16:
        pytest.skip("AutoRound wants a processor with BF16: it mixes types without")
    plan = plan_over(ROOT / "models" / recipe.model, recipe)
    found = {station.name.partition(" ")[0]: station for station in stations(plan)}
    with LiveBytes() as backbone_bytes:
        backbone = backbone_of(plan, tmp_path)
    assert LEAST < found["decoder"].device_bytes / backbone_bytes.peak < MOST, found["decoder"]
    with LiveBytes() as mtp_bytes:
        mtp_pass(plan, backbone)
    after = found["MTP"].device_bytes - embedding_bytes(plan)  # which was there before
    assert LEAST < after / mtp_bytes.peak < MOST, found["MTP"]


TUNED = """
{steps: 2, batch_size: 1, learning_rate: 1.0e-3, seed: 0, loss: ce, draft_steps: 3, decay: 0.6}
"""


@pytest.mark.full
@pytest.mark.parametrize(("policy", "length"), [("NVFP4", 256), ("bf16", 64)])
def test_training_takes_what_is_said(policy, length, tmp_path):
    settings = MtpTuned.model_validate(yaml.safe_load(TUNED) | {"mtp": policy})
    recipe = small_recipe("tiny-glm4-moe.nvfp4", 1, length)
    tuned = recipe.model_copy(update={"mtp": "tuned", "mtp_tuned": settings})
    plan = plan_over(ROOT / "models" / recipe.model, tuned)
    (said,) = (station for station in stations(plan) if station.name.startswith("training"))
    results = results_of(plan, backbone_of(plan, tmp_path))
    # Of random text no slot need count.
    with LiveBytes() as training_bytes, suppress(NothingCounts):
        results.measured(plan)
    assert LEAST < (said.device_bytes - embedding_bytes(plan)) / training_bytes.peak < MOST, said
