"""The llm-compressor back-end, one layer at a time, against llm-compressor's own sequential
pipeline; and its gates.

Equality is to the bit, AWQ's grid search included: both run the same modifiers on the same inputs
in the same order.
"""

from collections.abc import Iterable
from types import SimpleNamespace

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationStatus
from compressed_tensors.quantization.lifecycle.forward import forward_quantize
from keepmtp.quantize.calibrate.layers.forwards import propagating, serving
from keepmtp.quantize.calibrate.layers.layer import calibrate
from keepmtp.quantize.calibrate.layers.work import LayerWork
from keepmtp.recipes.errors import CheckpointError, RecipeError
from keepmtp.recipes.knobs import AWQKnobs, GPTQKnobs
from keepmtp.recipes.schemes import SCHEMES
from layerwise import (
    GLM,
    IGNORE,
    QWEN,
    Skeleton,
    assert_same,
    layerwise,
    outliers,
    sequential,
    token_ids,
)
from llmcompressor.modifiers.quantization.calibration import (
    initialize_observer,
    observe,
    update_qparams,
)
from torch import Tensor, nn

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("folder", [GLM, QWEN], ids=lambda folder: folder.name)
@pytest.mark.parametrize("scheme", ["NVFP4", "FP8"])
def test_input_scales_equal_the_sequential_pipelines(folder, scheme):
    from llmcompressor.modifiers.quantization import QuantizationModifier

    ids = token_ids()
    model = sequential(
        folder, ids, [QuantizationModifier(targets="Linear", scheme=scheme, ignore=IGNORE)]
    )
    skeleton, results = layerwise(folder, ids, scheme, "minmax")
    assert assert_same(results, model, all_tensors=False) == sum(
        len(result.coverage) for result in results
    )
    for index, layer in enumerate(skeleton.layers):
        for name, value in layer.named_parameters():
            on_disk = skeleton.weights.get(f"model.layers.{index}.{name}")
            assert on_disk is None or torch.equal(value, on_disk), (
                f"{name} was changed by calibration"
            )


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("folder", "scheme", "knobs"),
    [
        (GLM, "W4A16", GPTQKnobs(actorder=None, dampening_frac=0.2, block_size=48)),
        (GLM, "W4A16", GPTQKnobs()),
        (QWEN, "W4A16", GPTQKnobs()),
        (GLM, "NVFP4", GPTQKnobs()),
        (QWEN, "W8A8", GPTQKnobs()),
        (GLM, "W4A16_G32", GPTQKnobs()),
        (GLM, "W4A16_ASYM", GPTQKnobs()),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_gptq_equals_the_sequential_pipelines(folder, scheme, knobs):
    from llmcompressor.modifiers.gptq import GPTQModifier

    ids, given = token_ids(samples=2), knobs.model_dump()
    model = sequential(
        folder, ids, [GPTQModifier(config_groups=group_of(scheme), ignore=IGNORE, **given)]
    )
    _, results = layerwise(folder, ids, scheme, "gptq", knobs=given)
    compared = assert_same(results, model, all_tensors=True)
    assert compared == sum(len(result.coverage) for result in results) * len(
        SCHEMES[scheme].tensors(128, 128)
    )


def group_of(scheme: str) -> dict:
    from compressed_tensors.quantization import QuantizationScheme

    return {scheme: QuantizationScheme(targets=["Linear"], **SCHEMES[scheme].config_group())}


def test_static_and_weight_are_one_order():
    ids, found = token_ids(samples=1), []
    for order in ("static", "weight", None):
        skeleton = Skeleton(GLM)
        schemes = dict.fromkeys(skeleton.linears(0)[:2], "W4A16")
        knobs = GPTQKnobs(actorder=order).model_dump()
        batches = skeleton.enter(0, ids, None)
        found.append(skeleton.calibrated(batches, schemes, algorithm="gptq", knobs=knobs).tensors)
    assert all(torch.equal(value, found[1][name]) for name, value in found[0].items())
    assert any(not torch.equal(value, found[2][name]) for name, value in found[0].items())
    assert found[0].keys() == found[2].keys(), "no order needs a tensor of its own"


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("folder", "scheme", "algorithm", "knobs"),
    [
        (GLM, "W4A16", "awq", AWQKnobs(n_grid=5, duo_scaling=False)),
        (GLM, "W4A16", "awq", AWQKnobs(n_grid=6, duo_scaling="both")),
        (QWEN, "W4A16", "awq", AWQKnobs()),
        (GLM, "W4A16", "awq", AWQKnobs()),
        (GLM, "W4A16_ASYM", "awq", AWQKnobs()),
        (QWEN, "W8A8", "smoothquant", None),
        (GLM, "W8A8", "smoothquant", None),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_smoothing_equals_the_sequential_pipelines(folder, scheme, algorithm, knobs, monkeypatch):
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from llmcompressor.modifiers.transform.awq import AWQMapping, AWQModifier
    from llmcompressor.modifiers.transform.smoothquant import SmoothQuantModifier
    from llmcompressor.pipelines.cache import IntermediatesCache

    # Without an accelerator llm-compressor's own AWQ stops at the first mapping.
    monkeypatch.setattr(IntermediatesCache, "pin_memory", lambda *_: None)
    ids, given = token_ids(samples=2), knobs.model_dump() if knobs else {}
    _, results = layerwise(folder, ids, scheme, algorithm, knobs=given)
    pairs = [(s.smooth, list(s.balance)) for result in results for s in result.smoothings]
    if algorithm == "awq":
        # Qwen3.5's own table is right; GLM's forgets the shared experts.
        own = None if folder == QWEN else [AWQMapping(smooth, balance) for smooth, balance in pairs]
        smoother = AWQModifier(mappings=own, **given)
    else:
        smoother = SmoothQuantModifier(mappings=[(balance, smooth) for smooth, balance in pairs])
    rounding = QuantizationModifier(config_groups=group_of(scheme), ignore=IGNORE)
    model = sequential(folder, ids, [smoother, rounding])
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


def test_gptq_beside_rounding_to_nearest():
    """Two modifiers in one run do not disturb each other."""
    skeleton = Skeleton(QWEN)
    hidden = outliers(3, 128)
    ids = token_ids(samples=3)
    results = []
    for choice in ("W4A16", "FP8", "both"):
        batches = skeleton.enter(2, ids, hidden)
        mlp = {
            name: choice if choice != "both" else "W4A16"
            for name in skeleton.linears(2)
            if ".mlp." in name
        }
        attention = {
            name: choice if choice != "both" else "FP8"
            for name in skeleton.linears(2)
            if "self_attn" in name
        }
        results.append(skeleton.calibrated(batches, attention | mlp, algorithm="gptq").tensors)
    gptq, fp8, both = results
    assert {name for name in both if "self_attn" in name} == {
        name for name in fp8 if "self_attn" in name
    }
    for name, value in both.items():
        assert torch.equal(value, fp8[name] if "self_attn" in name else gptq[name]), name


def test_coverage_counts_what_the_router_sent():
    skeleton = Skeleton(GLM)
    batches = skeleton.enter(1, token_ids(), outliers(4, 256))
    schemes = dict.fromkeys(skeleton.linears(1), "FP8_DYNAMIC")
    coverage = {
        c.module: c for c in skeleton.calibrated(batches, schemes, algorithm="minmax").coverage
    }
    assert {entry.tokens for entry in coverage.values()} == {4 * 32}
    routed = [coverage[f"model.layers.1.mlp.experts.{e}.up_proj"].routed for e in range(4)]
    assert sum(routed) == 4 * 32 * 2
    assert coverage["model.layers.1.mlp.shared_experts.up_proj"].routed is None
    assert coverage["model.layers.1.self_attn.q_proj"].routed is None


def test_nothing_stays_behind(capfd):
    from llmcompressor.core import active_session

    skeleton, session, held = Skeleton(QWEN), active_session(), active_session().state.model
    for _ in range(2):
        batches = skeleton.enter(2, token_ids(), outliers(4, 128))
        skeleton.calibrated(batches, "W4A16", algorithm="awq")
    assert active_session() is session and session.state.model is held, "a session of its own"
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in skeleton.model.modules())
    assert not any(name.endswith("_observer") for name, _ in skeleton.model.named_modules())
    output = capfd.readouterr()
    assert "METRIC" not in output.out + output.err
    assert "it/s" not in output.out + output.err


class Toy(nn.Module):
    """A norm, two projections of it that run fused, and a gated feed-forward part."""

    def __init__(self, *, clamped: bool = False, leaks: bool = False):
        super().__init__()
        self.config = SimpleNamespace(name="toy")
        self.norm = nn.RMSNorm(128)
        self.in_proj_qkv, self.in_proj_z = (
            nn.Linear(128, 128, bias=False),
            nn.Linear(128, 128, bias=False),
        )
        self.gate_proj, self.up_proj = (
            nn.Linear(128, 256, bias=False),
            nn.Linear(128, 256, bias=False),
        )
        self.down_proj, self.spare = (
            nn.Linear(256, 128, bias=False),
            nn.Linear(128, 128, bias=False),
        )
        self.clamped, self.leaks = clamped, leaks
        generator = torch.Generator().manual_seed(0)
        for index, parameter in enumerate(self.parameters()):
            parameter.data = (
                torch.randn(parameter.shape, generator=generator).bfloat16() * (index + 1) / 100
            )
        self.norm.weight.data.fill_(1)

    def forward(self, hidden: Tensor) -> Tensor:
        x = self.norm(hidden)
        h = (
            hidden
            + self.in_proj_qkv(x) * torch.sigmoid(self.in_proj_z(x))
            + (x if self.leaks else 0)
        )
        up = self.up_proj(h)
        up = up.clamp(-100, 100) if self.clamped else up
        return h + self.down_proj(nn.functional.silu(self.gate_proj(h)) * up)


PROJECTIONS = ("in_proj_qkv", "in_proj_z", "gate_proj", "up_proj", "down_proj")


def toy_batches(samples: int = 3) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        {"hidden": torch.randn(2, 16, 128, generator=generator).bfloat16()} for _ in range(samples)
    ]


@pytest.mark.parametrize(
    ("toy", "missing"), [({"leaks": True}, "norm"), ({"clamped": True}, "up_proj")]
)
def test_what_is_not_linear_is_not_smoothed(toy, missing):
    """A norm whose output also goes elsewhere, and a projection behind which values are clamped,
    are left alone.
    """
    schemes = dict.fromkeys(PROJECTIONS, "W4A16")
    plain = calibrate(Toy(), toy_batches(), LayerWork(schemes=schemes, algorithm="awq"))
    assert {s.smooth for s in plain.smoothings} == {"norm", "up_proj"}
    result = calibrate(Toy(**toy), toy_batches(), LayerWork(schemes=schemes, algorithm="awq"))
    assert {s.smooth for s in result.smoothings} == {"norm", "up_proj"} - {missing}


def test_modules_of_other_schemes_are_not_rescaled():
    schemes = dict.fromkeys(PROJECTIONS, "W4A16") | {"in_proj_z": "FP8_DYNAMIC"}
    result = calibrate(Toy(), toy_batches(), LayerWork(schemes=schemes, algorithm="awq"))
    assert {s.smooth for s in result.smoothings} == {"up_proj"}
    assert not any(name.startswith(("in_proj_z", "norm")) for name in result.tensors)


def test_fused_modules_share_global_scales():
    """Names that llm-compressor's table of fused modules misses; without them they differ."""
    pair = ("in_proj_qkv", "in_proj_z")
    schemes = dict.fromkeys(pair, "NVFP4")
    apart, together = Toy(), Toy()
    calibrate(apart, toy_batches(), LayerWork(schemes=schemes, algorithm="gptq"))
    own = [float(apart.get_submodule(name).weight_global_scale) for name in pair]
    assert own[0] != own[1]
    work = LayerWork(schemes=schemes, algorithm="gptq", fused=[pair])
    result = calibrate(together, toy_batches(), work)
    for name in pair:
        module = together.get_submodule(name)
        state = {
            key.rpartition(".")[2]: value
            for key, value in result.tensors.items()
            if key.startswith(f"{name}.")
        }
        assert float(module.input_global_scale) == float(state["input_global_scale"])
        assert float(state["weight_global_scale"]) == min(own)
        # Packed by that very scale: what is on disk decompresses to what the model computes with.
        weight = BaseCompressor.get_value_from_registry("nvfp4-pack-quantized").decompress(
            state, module.quantization_scheme
        )["weight"]
        assert torch.allclose(weight.float(), module.weight.float(), rtol=2**-7)


def test_input_scales_of_fused_modules_are_unified():
    """Modules fused at run time that saw different inputs get the scale of the larger."""
    toy = Toy()
    result = calibrate(
        toy,
        toy_batches(),
        LayerWork(
            schemes=dict.fromkeys(PROJECTIONS, "FP8"),
            algorithm="minmax",
            fused=[("up_proj", "down_proj")],
        ),
    )
    apart = calibrate(
        Toy(),
        toy_batches(),
        LayerWork(schemes=dict.fromkeys(PROJECTIONS, "FP8"), algorithm="minmax"),
    ).tensors
    larger = max(float(apart[f"{name}.input_scale"]) for name in ("up_proj", "down_proj"))
    assert {float(result.tensors[f"{name}.input_scale"]) for name in ("up_proj", "down_proj")} == {
        larger
    }
    assert float(apart["up_proj.input_scale"]) != float(apart["down_proj.input_scale"])


def test_a_module_that_is_never_called_is_an_error():
    with pytest.raises(CheckpointError, match="spare: every quantized module must be called"):
        calibrate(
            Toy(),
            toy_batches(),
            LayerWork(schemes={"spare": "FP8", "up_proj": "FP8"}, algorithm="minmax"),
        )


@pytest.mark.parametrize(("value", "named"), [(float("nan"), "in_proj_z"), (3e38, "up_proj")])
def test_activations_that_are_not_finite_name_the_first_module(value, named):
    toy = Toy()
    (toy.in_proj_z if value != value else toy.up_proj).weight.data[3, 5] = value
    with pytest.raises(CheckpointError, match=named + ": .* its output, batch 1"):
        calibrate(
            toy,
            toy_batches(),
            LayerWork(schemes=dict.fromkeys(PROJECTIONS, "NVFP4"), algorithm="minmax"),
        )


def test_no_batch_is_an_error():
    with pytest.raises(RecipeError, match="there must be a batch"):
        calibrate(Toy(), [], LayerWork(schemes={"up_proj": "FP8"}, algorithm="minmax"))


@pytest.mark.parametrize("scheme", [name for name, scheme in SCHEMES.items() if scheme.inputs])
def test_propagating_and_serving(scheme):
    """Propagation has no rounding in it, serving has both."""
    toy, (batch, *_) = Toy(), toy_batches()
    with torch.no_grad():
        exact = toy(**batch)
    calibrate(
        toy,
        toy_batches(),
        LayerWork(schemes=dict.fromkeys(PROJECTIONS, scheme), algorithm="minmax"),
    )
    with propagating(toy):
        assert torch.equal(toy(**batch), exact)
    with pytest.raises(AssertionError, match="in_proj_qkv: no served weight"), serving(toy):
        pass
    serve(toy, PROJECTIONS)
    with serving(toy):
        served = toy(**batch)
    with torch.no_grad():
        weights_alone = toy(**batch)
    assert not torch.equal(served, weights_alone)
    assert not served.is_inference() and not served.requires_grad
    error = float((served - exact).norm() / exact.norm())
    assert 1e-3 < error < 0.3


def serve(model: nn.Module, names: Iterable[str]) -> None:
    """Weights rounded by compressed-tensors, for modules that no plan knows."""
    for name in names:
        module = model.get_submodule(name)
        initialize_observer(module, "weight")
        observe(module, "weight")
        update_qparams(module, "weight")
        module.weight.data = forward_quantize(
            module, module.weight.data, "weight", module.quantization_scheme.weights
        )
        module.quantization_status = QuantizationStatus.COMPRESSED


@pytest.mark.parametrize("scheme", ["FP8_DYNAMIC", "W8A8"])
def test_an_experts_tokens_have_scales_of_their_own(scheme):
    """compressed-tensors takes one scale for all tokens of an expert: here the second token would
    be rounded to 0.
    """
    toy, tokens = (
        nn.Sequential(nn.Linear(128, 128, bias=False)).bfloat16(),
        torch.ones(2, 128).bfloat16(),
    )
    toy.config = SimpleNamespace(name="toy")
    tokens[0] *= 4096
    calibrate(toy, [{"input": tokens}], LayerWork(schemes={"0": scheme}, algorithm="minmax"))
    serve(toy, ["0"])
    with serving(toy):
        together, apart = toy(tokens), torch.cat([toy(token[None]) for token in tokens])
    assert torch.equal(together, apart) and together[1].any()


@pytest.mark.parametrize("folder", [GLM, QWEN], ids=lambda folder: folder.name)
@pytest.mark.parametrize(
    ("scheme", "algorithm", "equal"), [("NVFP4", "minmax", True), ("W4A16", "gptq", False)]
)
def test_one_pass_is_enough_where_no_weight_is_rewritten(folder, scheme, algorithm, equal):
    """What the layer returns while it is observed is what it hands on, to the bit; GPTQ's weights
    are the twin.
    """
    skeleton = Skeleton(folder)
    for index in range(len(skeleton.layers)):
        batches = skeleton.enter(index, token_ids(), outliers(4, skeleton.model.config.hidden_size))
        for name, value in skeleton.layers[index].named_parameters():
            if (
                "layernorm" in name
            ):  # 1 + weight does not fit BF16 where norms are zero-centred, as Qwen3.5's are
                value.data.add_(0.0012)
        while_observed: list[Tensor] = []
        handle = skeleton.layers[index].register_forward_hook(
            lambda _module, _args, output, kept=while_observed: kept.append(
                output[0] if isinstance(output, tuple) else output
            )
        )
        work = LayerWork(
            schemes=dict.fromkeys(skeleton.linears(index), scheme), algorithm=algorithm
        )
        calibrate(skeleton.model, batches, work)
        handle.remove()
        assert len(while_observed) == 4
        pairs = zip(while_observed, skeleton.leave(index, batches), strict=True)
        assert all(torch.equal(*pair) for pair in pairs) is equal is not work.rewrites


def test_zero_centred_norms_come_back_as_they_were():
    """llm-compressor returns them rounded to what 1 + weight can hold in BF16."""
    skeleton = Skeleton(QWEN)
    batches = skeleton.enter(2, token_ids(), outliers(4, 128))
    norm = skeleton.layers[2].input_layernorm
    norm.weight.data.fill_(0.0012)
    before = norm.weight.detach().clone()
    assert not torch.equal((1 + before.float()).bfloat16().float() - 1, before.float())
    result = skeleton.calibrated(batches, "FP8", algorithm="minmax")
    assert torch.equal(norm.weight, before)
    assert not any("norm" in name for name in result.tensors)
    skeleton.leave(2, batches)
    assert torch.equal(norm.weight, before)
