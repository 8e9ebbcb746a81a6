"""The llm-compressor back-end, one layer at a time, against llm-compressor's own sequential
pipeline; and its gates.

Equality is to the bit, AWQ's grid search included: both run the same modifiers on the same inputs
in the same order.
"""

import math
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from compressed_tensors.quantization import QuantizationScheme, QuantizationStatus
from compressed_tensors.quantization.utils import generate_gparam
from keepmtp.quantize.calibrate.layers.forwards import calibrating, serving
from keepmtp.quantize.calibrate.layers.layer import Calibrated, calibrate
from keepmtp.quantize.calibrate.layers.work import LayerWork
from keepmtp.quantize.calibrate.model.hooks import hooked
from keepmtp.recipes.errors import CheckpointError
from keepmtp.recipes.schemes import SCHEMES
from layerwise import (
    GLM,
    IGNORE,
    LINEAR,
    MODELS,
    QWEN,
    Skeleton,
    assert_same,
    both_models,
    found_in,
    keeping,
    layerwise,
    outliers,
    sequential,
    tensors_of,
    token_ids,
    unpacked,
)
from torch import Tensor, nn

pytestmark = pytest.mark.usefixtures("one_thread")


@both_models
@pytest.mark.parametrize("scheme", ["NVFP4", "FP8"])
def test_input_scales_equal_the_sequential_pipelines(folder, scheme):
    from llmcompressor.modifiers.quantization import QuantizationModifier

    ids = token_ids()
    model = sequential(folder, ids, [QuantizationModifier(scheme=scheme, **LINEAR)])
    _, results = layerwise(folder, ids, scheme, "minmax")
    assert assert_same(results, model, all_tensors=False) == num_modules(results)


def num_modules(results: list) -> int:
    return sum(len(result.coverage) for result in results)


@pytest.mark.few(1, 5)
@pytest.mark.parametrize(
    "model, scheme",
    [
        ("tiny-glm4-moe", "W4A16"),
        ("tiny-qwen3_5", "W4A16"),
        ("tiny-glm4-moe", "NVFP4"),
        ("tiny-qwen3_5", "W8A8"),
        ("tiny-glm4-moe", "W4A16_G32"),
        ("tiny-glm4-moe", "W4A16_ASYM"),
    ],
)
def test_gptq_equals_the_sequential_pipelines(model, scheme):
    from llmcompressor.modifiers.gptq import GPTQModifier

    folder = MODELS / model
    ids = token_ids(samples=2)
    modifier = GPTQModifier(config_groups=group_of(scheme), ignore=IGNORE)
    model = sequential(folder, ids, [modifier])
    _, results = layerwise(folder, ids, scheme, "gptq")
    compared = assert_same(results, model, all_tensors=True)
    assert compared == num_modules(results) * len(SCHEMES[scheme].tensors(128, 128))


def group_of(scheme: str) -> dict:
    return {scheme: QuantizationScheme(targets=["Linear"], **SCHEMES[scheme].config_group())}


@pytest.mark.few(2, 6)
@pytest.mark.parametrize(
    "model, scheme, algorithm",
    [
        ("tiny-qwen3_5", "W4A16", "awq"),
        ("tiny-glm4-moe", "W4A16", "awq"),
        ("tiny-glm4-moe", "W4A16_ASYM", "awq"),
        ("tiny-qwen3_5", "W8A8", "smoothquant"),
        ("tiny-glm4-moe", "W8A8", "smoothquant"),
        ("tiny-glm4-moe", "NVFP4", "awq"),
        ("tiny-glm4-moe", "NVFP4", "smoothquant"),
    ],
)
def test_smoothing_equals_the_sequential_pipelines(model, scheme, algorithm, monkeypatch):
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from llmcompressor.modifiers.transform.awq import AWQMapping, AWQModifier
    from llmcompressor.modifiers.transform.smoothquant import SmoothQuantModifier
    from llmcompressor.pipelines.cache import IntermediatesCache

    # Without an accelerator llm-compressor's own AWQ stops at the first mapping.
    monkeypatch.setattr(IntermediatesCache, "pin_memory", Mock())
    folder = MODELS / model
    ids = token_ids(samples=2)
    _, results = layerwise(folder, ids, scheme, algorithm)
    pairs = [(s.smooth, list(s.balance)) for result in results for s in result.smoothings]
    if algorithm == "awq":
        # Qwen3.5's own table is right; GLM's forgets the shared experts.
        own = None if folder == QWEN else [AWQMapping(smooth, balance) for smooth, balance in pairs]
        smoother = AWQModifier(mappings=own)
    else:  # one scale would unbalance INT8's experts
        routed = "model.layers.1.post_attention_layernorm"
        assert (routed in dict(pairs)) == (scheme == "NVFP4" or folder == QWEN)
        smoother = SmoothQuantModifier(mappings=[(balance, smooth) for smooth, balance in pairs])
    rounding = QuantizationModifier(config_groups=group_of(scheme), ignore=IGNORE)
    model = sequential(folder, ids, [smoother, rounding], smooths=True)
    for name, value in found_in(results).items():
        if name.endswith("input_global_scale"):  # llm-compressor's are of inputs before smoothing
            model.get_parameter(name).data.copy_(value)
    # Qwen3.5's norms are zero-centred, and what of a rescaled one survives the subtraction of its 1
    # is what the checkpoint holds: later layers see that here, and the norm before the subtraction
    # in the sequential pipeline.
    equal = results[:1] if folder == QWEN else results
    assert assert_same(equal, model, all_tensors=True) > 10
    assert any("layernorm" in name for result in equal for name in result.tensors)
    assert any(name.endswith("zero_point") for name in results[0].tensors) == (
        scheme == "W4A16_ASYM"
    )


def test_smoothings_are_those_of_the_structure():
    skeleton = Skeleton(GLM)
    batches = skeleton.enter(1, token_ids(samples=1), outliers(1, 256))
    result = skeleton.calibrated(
        batches, "W4A16", algorithm="awq", frozen=["model.layers.1.self_attn.k_proj"]
    )
    found = {s.smooth.removeprefix("model.layers.1."): s.balance for s in result.smoothings}
    experts = [
        f"model.layers.1.mlp.{e}.{p}"
        for e in ("shared_experts", "experts.0", "experts.3")
        for p in ("gate_proj", "up_proj")
    ]
    assert {"model.layers.1.mlp.gate", *experts} <= {*found["post_attention_layernorm"]}
    assert found["mlp.experts.2.up_proj"] == ("model.layers.1.mlp.experts.2.down_proj",)
    assert "input_layernorm" not in found
    assert "model.layers.1.mlp.gate.weight" in result.tensors


def test_coverage_counts_what_the_router_sent():
    skeleton = Skeleton(GLM)
    batches = skeleton.enter(1, token_ids(), outliers(4, 256))
    coverage = skeleton.calibrated(batches, "FP8_DYNAMIC", algorithm="minmax").coverage
    tokens = 4 * 32
    routed = [coverage[f"model.layers.1.mlp.experts.{e}.up_proj"] for e in range(4)]
    assert sum(routed) == tokens * 2 and len({*routed}) > 1
    assert {count for name, count in coverage.items() if ".experts." not in name} == {tokens}


def test_nothing_stays_behind(capfd):
    from llmcompressor.core import active_session

    session = active_session()
    held = active_session().state.model
    for _ in range(2):
        skeleton = Skeleton(QWEN)
        batches = skeleton.enter(2, token_ids(), outliers(4, 128))
        skeleton.calibrated(batches, "W4A16", algorithm="awq")
        skeleton.leave(2, batches)
    assert active_session() is session and session.state.model is held, "a session of its own"
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in skeleton.model.modules())
    assert not any(name.endswith("_observer") for name, _ in skeleton.model.named_modules())
    output = "".join(capfd.readouterr())
    assert "METRIC" not in output and "it/s" not in output


class Toy(nn.Module):
    """A norm, two projections of it that run fused, and a gated feed-forward part."""

    def __init__(self, *, clamped: bool = False, leaks: bool = False):
        super().__init__()
        self.config = SimpleNamespace(name="toy")
        self.norm = nn.RMSNorm(128)
        for name, inputs, outputs in SHAPES:
            setattr(self, name, nn.Linear(inputs, outputs, bias=False))
        self.clamped, self.leaks = clamped, leaks
        generator = torch.Generator().manual_seed(0)
        for index, parameter in enumerate(self.parameters()):
            noise = torch.randn(parameter.shape, generator=generator).bfloat16()
            parameter.data = noise * (index + 1) / 100
        self.norm.weight.data.fill_(1)

    def forward(self, hidden: Tensor) -> Tensor:
        x = self.norm(hidden)
        h = hidden + self.in_proj_qkv(x) * torch.sigmoid(self.in_proj_z(x))
        if self.leaks:
            h = h + x
        up = self.up_proj(h)
        if self.clamped:
            up = up.clamp(-100, 100)
        return h + self.down_proj(nn.functional.silu(self.gate_proj(h)) * up)


SHAPES = (
    ("in_proj_qkv", 128, 128),
    ("in_proj_z", 128, 128),
    ("gate_proj", 128, 256),
    ("up_proj", 128, 256),
    ("down_proj", 256, 128),
    ("spare", 128, 128),
)
PROJECTIONS = ("in_proj_qkv", "in_proj_z", "gate_proj", "up_proj", "down_proj")


def toy_batches() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [{"hidden": torch.randn(2, 16, 128, generator=generator).bfloat16()} for _ in range(3)]


def of_toy(toy: Toy, schemes: str | dict[str, str], algorithm: str, **work) -> Calibrated:
    if isinstance(schemes, str):
        schemes = dict.fromkeys(PROJECTIONS, schemes)
    return calibrate(toy, toy_batches(), LayerWork(schemes=schemes, algorithm=algorithm, **work))


@pytest.mark.parametrize(
    "toy, schemes, smoothed",
    [
        ({}, {}, ["norm", "up_proj"]),
        ({"leaks": True}, {}, ["up_proj"]),
        ({"clamped": True}, {}, ["norm"]),
        ({}, {"in_proj_z": "FP8_DYNAMIC"}, ["up_proj"]),
    ],
)
def test_what_may_be_smoothed(toy, schemes, smoothed):
    result = of_toy(Toy(**toy), dict.fromkeys(PROJECTIONS, "W4A16") | schemes, "awq")
    assert {s.smooth for s in result.smoothings} == {*smoothed}
    assert any(name.startswith("norm") for name in result.tensors) == ("norm" in smoothed)
    assert not any(name.startswith("in_proj_z") for name in result.tensors) or not schemes


@pytest.mark.parametrize("algorithm", ["awq", "smoothquant"])
def test_input_scales_are_of_smoothed_inputs(algorithm):
    toy = Toy()
    seen = []
    scale = of_toy(toy, "NVFP4", algorithm).tensors["in_proj_z.input_global_scale"]
    with hooked([toy.norm.register_forward_hook(keeping(seen))]), calibrating(toy):
        for batch in toy_batches():
            toy(**batch)
    largest = torch.stack(seen).abs().amax()
    assert scale == generate_gparam(-largest, largest)


def test_fused_modules_share_global_scales():
    """Names that llm-compressor's table of fused modules misses; without them they differ."""
    pair = ("in_proj_qkv", "in_proj_z")
    schemes = dict.fromkeys(pair, "NVFP4")
    apart = Toy()
    together = Toy()
    of_toy(apart, schemes, "gptq")
    own = [float(apart.get_submodule(name).weight_global_scale) for name in pair]
    assert own[0] != own[1]
    result = of_toy(together, schemes, "gptq", fused=[pair])
    for name in pair:
        module = together.get_submodule(name)
        state = tensors_of(name, result.tensors)
        assert float(module.input_global_scale) == float(state["input_global_scale"])
        assert float(state["weight_global_scale"]) == min(own)
        # Packed by that very scale: what is on disk decompresses to what the model computes with.
        weight = unpacked(state, "NVFP4")
        assert torch.allclose(weight.float(), module.weight.float(), rtol=2**-7)


def test_input_scales_of_fused_modules_are_unified():
    """Modules fused at run time that saw different inputs get the scale of the larger."""
    pair = ("up_proj", "down_proj")
    found = []
    for fused in ([], [pair]):
        tensors = of_toy(Toy(), "FP8", "minmax", fused=fused).tensors
        found.append([float(tensors[f"{name}.input_scale"]) for name in pair])
    apart, together = found
    assert {*together} == {max(apart)} and apart[0] != apart[1]


def test_a_module_that_is_never_called_is_an_error():
    with pytest.raises(CheckpointError, match="spare: every quantized module must be called"):
        of_toy(Toy(), {"spare": "FP8", "up_proj": "FP8"}, "minmax")


@pytest.mark.parametrize(
    "broken, value, named",
    [
        ("in_proj_z", math.nan, "in_proj_z: .* its weight"),
        ("norm", math.nan, "in_proj_qkv: .* its input"),
        ("up_proj", 3e38, "down_proj: .* its input"),
        ("down_proj", 3e38, "its output"),
    ],
)
def test_activations_that_are_not_finite_name_the_first_module(broken, value, named):
    toy = Toy()
    toy.get_submodule(broken).weight.data[3] = value
    with pytest.raises(CheckpointError, match=named):
        of_toy(toy, "NVFP4", "minmax")


@pytest.mark.parametrize("scheme", [name for name, scheme in SCHEMES.items() if scheme.inputs])
def test_propagating_and_serving(scheme):
    """Propagation has no rounding in it; serving rounds inputs, even of weights that are as they
    were.
    """
    toy, (batch, *_) = Toy(), toy_batches()
    with torch.no_grad():
        exact = toy(**batch)
    of_toy(toy, scheme, "minmax")
    with calibrating(toy):
        assert torch.equal(toy(**batch), exact)
    with pytest.raises(AssertionError, match="no served weight"), serving(toy):
        pass
    for name in PROJECTIONS:
        toy.get_submodule(name).quantization_status = QuantizationStatus.COMPRESSED
    with serving(toy):
        served = toy(**batch)
    assert not served.is_inference() and not served.requires_grad
    assert 1e-3 < float((served - exact).norm() / exact.norm()) < 0.3


@both_models
@pytest.mark.parametrize(
    "scheme, algorithm, equal",
    [
        ("NVFP4", "minmax", True),
        ("W4A16", "gptq", False),
    ],
)
def test_one_pass_is_enough_where_no_weight_is_rewritten(folder, scheme, algorithm, equal):
    """What the layer returns while it is observed is what it hands on, to the bit; GPTQ's weights
    are the twin.
    """
    skeleton = Skeleton(folder)
    for index, layer in enumerate(skeleton.layers):
        batches = skeleton.enter(index, token_ids(), outliers(4, skeleton.model.config.hidden_size))
        for name, value in layer.named_parameters():
            # llm-compressor's norms would round this: 1 + weight does not fit BF16.
            if "layernorm" in name:
                value.data.add_(0.0012)
        observed: list[Tensor] = []
        schemes = dict.fromkeys(skeleton.linears(index), scheme)
        work = LayerWork(schemes=schemes, algorithm=algorithm)
        with hooked([layer.register_forward_hook(keeping(observed))]):
            calibrate(skeleton.model, batches, work)
        assert len(observed) == 4
        pairs = zip(observed, skeleton.leave(index, batches), strict=True)
        assert all(torch.equal(*pair) for pair in pairs) is equal is not work.rewrites
