"""The modelopt back-end, one layer at a time, against modelopt's own run over the whole model, and
llm-compressor's.

Equality is to the bit. modelopt's sweeps round in Triton kernels, which a CPU has not: there the
rounding is that of its exporter, which rounds the weights that its users publish.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationScheme
from compressed_tensors.quantization.utils import generate_gparam
from keepmtp import api
from keepmtp.checkpoints.record import read_record
from keepmtp.checkpoints.source import open_source
from keepmtp.quantize.calibrate.layers.forwards import calibrating
from keepmtp.quantize.calibrate.layers.layer import Calibrated, calibrate
from keepmtp.quantize.calibrate.layers.work import LayerWork
from keepmtp.recipes.conventions import CACHE_LEAVES
from keepmtp.recipes.errors import CheckpointError
from keepmtp.recipes.schemes import REWRITES, SCHEMES, SWEEPS
from keepmtp.validate.check.check import check
from killed import events, finished, small_recipe, start, statistics
from layerwise import GLM, QWEN, Skeleton, layerwise, token_ids
from safetensors.torch import load_file
from torch import Tensor


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def tensors(results: list[Calibrated]) -> dict[str, Tensor]:
    return {name: value for result in results for name, value in result.tensors.items()}


@pytest.mark.parametrize("folder", [GLM, QWEN], ids=lambda folder: folder.name)
def test_input_scales_are_those_of_modelopts_own_run(folder):
    """Its run over the whole model, keys and values too. Its experts have one input scale a stack,
    as ours in a run.

    Zero-centred norms are those of the calibration here: with transformers' own, 7 of 19 scales of
    Qwen3.5 differ, by 1.8 % at most.
    """
    from llmcompressor.modeling.offset_norm import norm_calibration_context
    from modelopt_peer import calibrated, loaded

    ids, model = token_ids(), loaded(folder)
    with norm_calibration_context(model):
        calibrated(
            folder, ids, cache="FP8_KV_CFG", forwards=calibrating(model, routed=True), model=model
        )
    amax = {
        name: q.amax
        for name, q in model.named_modules()
        if name.endswith("input_quantizer") and q.is_enabled
    }
    ours = tensors(layerwise(folder, ids, "NVFP4", "minmax", routed=True)[1])
    assert len(ours) == (45 if folder == GLM else 19)
    for name, value in ours.items():
        module = name.removesuffix(".input_global_scale")
        stack, is_expert, leaf = (
            module.rpartition(".")[0].rpartition(".experts.")[0],
            ".experts." in module,
            module,
        )
        if is_expert:
            is_down = module.endswith("down_proj")
            leaf = f"{stack}.experts.{'down_proj' if is_down else 'gate_up_proj'}_input_quantizer"
            same = [
                v
                for n, v in ours.items()
                if n.startswith(f"{stack}.experts.") and ("down_proj" in n) == is_down
            ]
            value = torch.stack(same).amin(0)
        theirs = amax[leaf if is_expert else f"{module}.input_quantizer"].reshape(1)
        assert torch.equal(value, generate_gparam(-theirs, theirs)), module
    assert caches(folder, ids) == {
        name.replace("_bmm_quantizer", "_scale"): float((q.amax.float() / 448).bfloat16())
        for name, q in model.named_modules()
        if name.endswith("_bmm_quantizer") and q.is_enabled
    }


def caches(folder: Path, ids: list[Tensor]) -> dict[str, float]:
    """The scales of all FP8 caches, which are of the same pass whatever the back-end."""
    skeleton, hidden, found = Skeleton(folder), None, {}
    for index, layer in enumerate(skeleton.layers):
        batches = skeleton.enter(index, ids, hidden)
        own = [f"model.layers.{index}.self_attn"] if hasattr(layer, "self_attn") else []
        schemes = dict.fromkeys(skeleton.linears(index), "NVFP4")
        made = calibrate(
            skeleton.model,
            batches,
            LayerWork(
                schemes=schemes,
                algorithm="minmax",
                routed=True,
                caches=dict.fromkeys(own, CACHE_LEAVES),
            ),
        )
        found |= {
            name: float(value)
            for name, value in made.tensors.items()
            if name.endswith(("k_scale", "v_scale"))
        }
        hidden = skeleton.leave(index, batches)
    assert len(found) > 1
    return found


# --- sweeps ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def swept() -> dict[str, tuple[Skeleton, dict[str, Tensor]]]:
    """Algorithm -> tiny-glm4-moe with NVFP4A16 by it."""
    found = {}
    for algorithm in sorted(SWEEPS):
        skeleton, results = layerwise(GLM, token_ids(), "NVFP4A16", algorithm)
        found[algorithm] = skeleton, tensors(results)
    return found


def exporters_rounding(
    groups: Tensor, amax: Tensor, global_amax: Tensor, largest_scale: float
) -> Tensor:
    """Groups [G, 16] as modelopt's exporter writes them and its loader reads them."""
    from modelopt.torch.quantization.qtensor.nvfp4_tensor import (
        NVFP4QTensor,
        _cast_per_block_scale_to_fp8,
    )

    common = global_amax / (6 * largest_scale)
    scale = _cast_per_block_scale_to_fp8(amax / 6, global_amax / 6, largest_scale)
    packed, _, _ = NVFP4QTensor.quantize(groups.clone(), 16, scale.reshape(-1, 1), common)
    return packed.dequantize(
        torch.float32, scale=scale.reshape(-1, 1), double_scale=common, block_sizes={-1: 16}
    )


@pytest.mark.few(1)
@pytest.mark.parametrize("algorithm", sorted(SWEEPS))
def test_block_scales_are_those_of_modelopts_calibrators(algorithm, swept):
    """Run on their own, with its exporter's rounding; then the file's tensors, decompressed by
    compressed-tensors.
    """
    from modelopt.torch.quantization.calib import MseCalibrator, NVFP4MSECalibrator

    skeleton, found = swept[algorithm]
    name = "model.layers.1.self_attn.o_proj"
    largest = 256.0 if algorithm == "four-over-six" else 448.0
    weight = skeleton.weights[f"{name}.weight"].float()
    groups = weight.reshape(-1, 16)
    amax, total = groups.abs().amax(-1, keepdim=True), weight.abs().amax()

    def rounding(x: Tensor, ends: Tensor) -> Tensor:
        return exporters_rounding(x, ends, total, largest)

    if algorithm == "four-over-six":
        calibrator = MseCalibrator(amax, 0, 0.5, 1.0, 1.5, quant_func=rounding)
    else:
        error = None if algorithm == "mse" else hessian_error(name, weight.shape)
        calibrator = NVFP4MSECalibrator(amax, total, 0, quant_func=rounding, error_func=error)
    calibrator.collect(groups)
    ends = calibrator.compute_amax()
    assert ends is not None
    theirs = (
        (ends * largest / total).clamp(2**-9, 448).to(torch.float8_e4m3fn).reshape(len(weight), -1)
    )
    own = {
        key.rpartition(".")[2]: value for key, value in found.items() if key.startswith(f"{name}.")
    }
    assert torch.equal(own["weight_scale"].float(), theirs.float())
    assert own["weight_global_scale"] == largest * 6 / total
    values = BaseCompressor.get_value_from_registry("nvfp4-pack-quantized").decompress(
        own, QuantizationScheme(targets=[], **SCHEMES["NVFP4A16"].config_group())
    )
    # Decompressed in BF16: three roundings of 2**-9, where another code is 8 % away at least. In
    # the middle between two codes both are as near, and the last bit of a quotient decides.
    ours, expected = values["weight"].float(), rounding(groups, ends).reshape(weight.shape)
    room = 2**-7 * weight.abs()
    differ = (ours - expected).abs() > room
    assert differ.float().mean() < 1e-3
    assert (((ours - weight).abs() - (expected - weight).abs()).abs() <= room)[differ].all()


def hessian_error(name: str, shape: torch.Size):
    """What modelopt's own accumulator makes of the inputs of a module."""
    from modelopt.torch.quantization.model_calib import _LocalHessianAccumulator

    accumulator, seen = _LocalHessianAccumulator(*shape, block_size=16), []
    skeleton, ids = Skeleton(GLM), token_ids()
    hidden = skeleton.leave(0, skeleton.enter(0, ids, None))
    batches = skeleton.enter(1, ids, hidden)
    module = skeleton.model.get_submodule(name)
    handle = module.register_forward_pre_hook(lambda _module, args: seen.append(args[0]))
    skeleton.leave(1, batches)
    handle.remove()
    for value in seen:
        accumulator.accumulate(value)
    return accumulator.build_error_func()


def test_a_sweep_ends_nearer_to_the_weights(swept):
    """By the error that it minimizes; the largest groups of one layer are not those of another."""
    from keepmtp.quantize.pack.pack import pack

    scheme = SCHEMES["NVFP4A16"]

    def error(skeleton: Skeleton, found: dict[str, Tensor]) -> float:
        total = 0.0
        for name in skeleton.linears(2):
            own = {
                key.rpartition(".")[2]: value
                for key, value in found.items()
                if key.startswith(f"{name}.")
            }
            weight = skeleton.weights[f"{name}.weight"]
            own = own or pack(scheme, [weight])[0]
            values = BaseCompressor.get_value_from_registry(scheme.format).decompress(
                own, QuantizationScheme(targets=[], **scheme.config_group())
            )
            total += float((values["weight"].float() - weight.float()).square().sum())
        return total

    plain = error(swept["mse"][0], {})
    # Of all scales, mse has the best; four-over-six has two to choose from.
    assert error(*swept["mse"]) < error(*swept["four-over-six"]) < plain
    assert error(*swept["mse"]) < error(*swept["local-hessian"])


def test_a_fused_group_shares_the_global_scale_that_it_is_swept_in():
    skeleton = Skeleton(GLM)
    names = tuple(f"model.layers.1.self_attn.{each}_proj" for each in "qkv")
    batches = skeleton.enter(1, token_ids(samples=1), [torch.randn(1, 32, 256).bfloat16()])
    schemes = dict.fromkeys(names, "NVFP4")
    found = skeleton.calibrated(batches, schemes, algorithm="mse", fused=[names]).tensors
    largest = max(float(skeleton.weights[f"{name}.weight"].abs().amax()) for name in names)
    for name in names:
        assert float(found[f"{name}.weight_global_scale"]) == pytest.approx(2688 / largest)
    assert [LayerWork(schemes=schemes, algorithm=each).rewrites for each in ("mse", "gptq")] == [
        False,
        True,
    ]


@pytest.mark.parametrize("algorithm", sorted(SWEEPS))
def test_a_weight_of_zeros_has_finite_scales(algorithm):
    """As a dead expert's; the writer refuses a scale that is not a positive number."""
    skeleton = Skeleton(GLM)
    name = "model.layers.1.self_attn.o_proj"
    batches = skeleton.enter(1, token_ids(samples=1), [torch.randn(1, 32, 256).bfloat16()])
    skeleton.model.get_submodule(name).weight.data.zero_()
    found = skeleton.calibrated(batches, {name: "NVFP4A16"}, algorithm=algorithm).tensors
    assert 0 < float(found[f"{name}.weight_global_scale"]) < float("inf")
    assert found[f"{name}.weight_scale"].float().isfinite().all()
    values = BaseCompressor.get_value_from_registry("nvfp4-pack-quantized").decompress(
        {key.rpartition(".")[2]: value for key, value in found.items()},
        QuantizationScheme(targets=[], **SCHEMES["NVFP4A16"].config_group()),
    )
    assert not values["weight"].any()


def test_every_sweep_has_its_schemes():
    assert all(REWRITES[name] == {"NVFP4", "NVFP4A16"} for name in SWEEPS)


def test_activations_that_are_not_finite_are_named():
    """modelopt says so with an assertion that names nothing."""
    skeleton = Skeleton(GLM)
    hidden = torch.randn(1, 32, 256).bfloat16()
    hidden[0, 3, 7] = torch.nan
    batches = skeleton.enter(1, token_ids(samples=1), [hidden])
    with pytest.raises(
        CheckpointError, match=r"self_attn\.q_proj: activations must be finite .* input, batch 1"
    ):
        schemes = dict.fromkeys(skeleton.linears(1), "NVFP4")
        skeleton.calibrated(batches, schemes, algorithm="minmax")
    assert not any(module._forward_pre_hooks for module in skeleton.model.modules())


# --- a whole run ----------------------------------------------------------------------------------


def made(folder: Path, name: str, **changes) -> Path:
    """A checkpoint of tiny-glm4-moe, its MTP block in NVFP4 too, by modelopt."""
    recipe = small_recipe(folder, "tiny-glm4-moe.nvfp4-mtp-nvfp4", backend="modelopt", **changes)
    text = recipe.read_text()
    recipe.write_text(text if name == "compressed-tensors" else f"{text}format: {name}\n")
    return api.quantize(api.plan(str(recipe)), folder / name, threads=1, keep_calibration=True).out


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Iterator[dict[str, Path]]:
    folder = tmp_path_factory.mktemp("written")
    yield {name: made(folder, name, algorithm="mse") for name in ("compressed-tensors", "modelopt")}


@pytest.mark.full
def test_either_dialect_has_the_same_bytes(written):
    """And the check, which reads every value, has nothing to say; nor has the record forgotten who
    calibrated.
    """
    of = {
        name: {
            key: value
            for file in folder.glob("*.safetensors")
            for key, value in load_file(file).items()
        }
        for name, folder in written.items()
    }
    ours, theirs = of["compressed-tensors"], of["modelopt"]
    packed = [name for name in ours if name.endswith(".weight_packed")]
    assert len(packed) > 60 and any(name.startswith("model.layers.3.") for name in packed), (
        "no MTP block"
    )
    for name in packed:
        module = name.removesuffix(".weight_packed")
        assert torch.equal(ours[name], theirs[f"{module}.weight"]), name
        assert torch.equal(
            ours[f"{module}.weight_scale"].float(), theirs[f"{module}.weight_scale"].float()
        ), name
        assert theirs[f"{module}.input_scale"] == 1 / ours[f"{module}.input_global_scale"]
    for folder in written.values():
        assert check(folder, source=open_source(GLM)).findings == ()
        record = read_record(folder / "keepmtp.json")
        assert record.versions["nvidia-modelopt"].startswith("0.47")
        assert record.recipe.whole["calibration"]["backend"] == "modelopt"


@pytest.mark.full
def test_ranks_give_the_bits_of_one(written, tmp_path):
    """Each sees its own sequences; what a sweep sees of a weight is the same everywhere."""
    one = written["compressed-tensors"]
    recipe = small_recipe(
        tmp_path, "tiny-glm4-moe.nvfp4-mtp-nvfp4", backend="modelopt", algorithm="mse"
    )
    assert finished(start(recipe, tmp_path / "two", size=2)) == [0, 0]
    assert events(tmp_path / "two") == [1, 2, 3]
    expected = statistics(one.with_name(f"{one.name}.calibration"))
    assert statistics(tmp_path / "two") == {
        name: raw for name, raw in expected.items() if "layer" in name
    }
