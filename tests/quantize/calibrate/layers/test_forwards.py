"""Model code under `torch.inference_mode` computes under `no_grad` meanwhile: llm-compressor #2745."""

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from decorated_model import write_foreign
from keepmtp.checkpoints.source import open_source
from keepmtp.quantize.calibrate.data.data import CalibrationData
from keepmtp.quantize.calibrate.layers import forwards
from keepmtp.quantize.calibrate.layers.backbone import calibrate_backbone
from keepmtp.quantize.calibrate.layers.forwards import adapted
from keepmtp.quantize.plan.plan import make_plan
from keepmtp.quantize.run.statistics import Statistics
from keepmtp.recipes.find import find_recipe
from keepmtp.recipes.schema import Recipe
from llmcompressor.modeling.moe.context import moe_calibration_context
from llmcompressor.modeling.moe.linear_experts import LinearExperts2D
from passes import ALONE
from torch import nn
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeConfig, Glm4MoeExperts

pytestmark = pytest.mark.usefixtures("in_f32")

IDS = torch.randint(0, 512, (4, 32), generator=torch.Generator().manual_seed(0))
DATA = CalibrationData(ids=IDS, held_out_ids=IDS[:2], provenance={})


def calibrated(source: Path, folder: Path) -> dict[str, str]:
    """Sums of what GPTQ makes of a checkpoint whose own Python builds it."""
    block = find_recipe("tiny-glm4-moe.w4a16-gptq")[0].calibration.model_dump()
    block |= {"batch_size": 2, "model_code": "checkpoint"}
    words = find_recipe("mimo-7b", scheme="W4A16")[0].model_dump()
    recipe = Recipe.model_validate(words | {"mtp": "bf16", "calibration": block})
    plan = make_plan(recipe, open_source(source))
    calibrate_backbone(plan, DATA, folder, device=ALONE.device, ranks=ALONE)
    return dict(Statistics.open(folder / "statistics").sums)


@pytest.mark.parametrize("form", ["decorated", "with"])
def test_decorated_code_of_a_checkpoint_calibrates_as_plain_code(form, tmp_path, monkeypatch):
    # Not "with" alone: the folder's name becomes that of a Python package.
    plain, own = (write_foreign(tmp_path / f"mimo_{each}", each) for each in ("plain", form))
    expected = calibrated(plain, tmp_path / "plain")
    assert calibrated(own, tmp_path / "own") == expected and len(expected) == 42
    monkeypatch.setattr(forwards, "adapted", nullcontext)
    with pytest.raises(RuntimeError, match="nference tensor"):
        calibrated(own, tmp_path / "twin")


class Decorated(nn.Linear):
    forward = torch.inference_mode()(nn.Linear.forward)


class Kept(nn.Linear):
    context = torch.inference_mode()

    def forward(self, x):
        with self.context:
            return super().forward(x)


@pytest.mark.parametrize("cls", [Decorated, Kept])
def test_each_way_to_begin_it(cls):
    model = cls(4, 4)
    x = torch.ones(1, 4)
    wanted = model(x)
    assert wanted.is_inference()
    with torch.no_grad(), adapted():
        result = model(x)
        assert not result.is_inference() and not result.requires_grad
        assert torch.equal(result, wanted)
    assert model(x).is_inference(), "restored"


@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize("all_tokens", [False, True])
def test_experts_get_the_tokens_that_llmcompressors_forward_gives_them(all_tokens, trains):
    """One sort for all experts; one of them gets no token. Outputs and gradients, to the bit."""
    config = Glm4MoeConfig(hidden_size=16, moe_intermediate_size=8, n_routed_experts=6)
    experts = LinearExperts2D.get_linear_experts_cls(Glm4MoeExperts)(config)
    for value in experts.parameters():
        nn.init.normal_(value, generator=torch.Generator().manual_seed(1))
    hidden = torch.randn(11, 16, generator=torch.Generator().manual_seed(2))
    weights, index = torch.rand(11, 5, generator=torch.Generator().manual_seed(3)).topk(2)
    results = []
    for context in (nullcontext(), adapted()):
        own = hidden.clone().requires_grad_(trains)
        everyone = moe_calibration_context() if all_tokens else nullcontext()
        with context, everyone, torch.set_grad_enabled(trains):
            output = experts(own, index, weights)
        if trains:
            output.square().sum().backward()
        results.append((output, own.grad if trains else None))
    (expected, slope), (output, own_slope) = results
    assert torch.equal(output, expected) and output.any()
    assert not trains or torch.equal(slope, own_slope)
