"""Routed experts as single linear layers."""

import pytest
import torch
from keepmtp.quantize.calibrate.layers.layer import calibrate
from keepmtp.quantize.calibrate.layers.work import LayerWork
from keepmtp.quantize.calibrate.model.experts import linear_experts
from keepmtp.recipes.errors import CheckpointError
from llmcompressor.modeling.moe.linear_experts import LinearExperts2D
from torch import Tensor, nn
from transformers import Glm4MoeConfig
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeExperts

TOKENS, EXPERTS, CHOICES = 24, 6, 3


class Routed(nn.Module):
    """Experts, with a fixed choice for every token."""

    def __init__(self, index: Tensor):
        super().__init__()
        self.config = Glm4MoeConfig(
            hidden_size=64,
            moe_intermediate_size=48,
            n_routed_experts=EXPERTS,
            num_experts_per_tok=CHOICES,
        )
        with torch.device("meta"):
            self.experts = Glm4MoeExperts(self.config)
        linear_experts(self)
        self.experts.to_empty(device="cpu").bfloat16()
        torch.manual_seed(0)
        for parameter in self.experts.parameters():
            parameter.data.normal_(0, 0.1)
        self.index, self.weights = index, torch.rand(TOKENS, CHOICES)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.experts(hidden, self.index, self.weights)


def choices(kind: str) -> Tensor:
    torch.manual_seed(1)
    num = EXPERTS if kind == "all experts" else EXPERTS - 2
    return torch.stack([torch.randperm(num)[:CHOICES] for _ in range(TOKENS)])


def test_a_broken_expert_without_a_token_is_named():
    """No output holds the NaN: the layer's own output leaves this expert out."""
    model, hidden = Routed(choices("two without a token")), torch.randn(TOKENS, 64).bfloat16()
    schemes = {
        name: "FP8" for name, module in model.named_modules() if isinstance(module, nn.Linear)
    }
    model.experts[EXPERTS - 1].down_proj.weight.data[0, 0] = float("nan")
    with torch.no_grad():
        assert model(hidden).isfinite().all()
    with pytest.raises(
        CheckpointError, match=r"^experts\.5\.down_proj: activations must be finite.* its output"
    ):
        calibrate(model, [{"hidden": hidden}], LayerWork(schemes=schemes, algorithm="minmax"))


def test_experts_with_a_forward_of_their_own_are_refused(monkeypatch):
    with torch.device("meta"):
        model = nn.Module()
        model.experts, model.config = Glm4MoeExperts(Routed(choices("all experts")).config), None
    own = LinearExperts2D.get_linear_experts_cls(Glm4MoeExperts)
    monkeypatch.setattr(own, "forward", lambda *_: None, raising=False)
    with pytest.raises(CheckpointError, match="experts: experts must have the common layout"):
        linear_experts(model)
