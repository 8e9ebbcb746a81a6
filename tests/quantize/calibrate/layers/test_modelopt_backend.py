"""The modelopt back-end, one layer at a time, against modelopt's own run over the whole model, and
llm-compressor's.

Equality is to the bit. modelopt's sweeps round in Triton kernels, which a CPU has not: there the
rounding is that of its exporter, which rounds the weights that its users publish.
"""

import copy

import pytest
import torch
from checked import check
from compressed_tensors.quantization.utils import generate_gparam
from keepmtp import api
from keepmtp.checkpoints.record import read_record
from keepmtp.checkpoints.source import open_source
from keepmtp.quantize.calibrate.layers.forwards import calibrating
from keepmtp.recipes.conventions import CACHE_LEAVES
from keepmtp.recipes.schemes import SWEEPS
from killed import small_recipe
from layerwise import GLM, QWEN, Skeleton, found_in, layerwise, tensors_of, token_ids, unpacked
from torch import Tensor
from transformers import AutoModelForCausalLM
from writing import weights_of

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("folder, count", [(GLM, 21), (QWEN, 19)])
def test_input_scales_are_those_of_modelopts_own_run(folder, count):
    """Its run over the whole model, keys and values too; its experts see their own tokens alone."""
    import modelopt.torch.quantization as mtq

    ids = token_ids()
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, attn_implementation="eager"
    ).eval()
    config = copy.deepcopy(mtq.NVFP4_DEFAULT_CFG)
    config["quant_cfg"] = [*config["quant_cfg"], *mtq.FP8_KV_CFG["quant_cfg"]]

    def run(model):
        for batch in ids:
            model(input_ids=batch, use_cache=False)

    with calibrating(model), torch.no_grad():
        mtq.quantize(model, config, run)
    quantizers = dict(model.named_modules())
    num_caches = 0
    ours = found_in(layerwise(folder, ids, "NVFP4", "minmax", caches=True)[1])
    for name, value in ours.items():
        module, _, leaf = name.rpartition(".")
        if leaf in CACHE_LEAVES:
            amax = quantizers[f"{module}.{leaf.replace('_scale', '_bmm_quantizer')}"].amax
            num_caches += 1
            assert float(value) == float((amax.float() / 448).bfloat16()), name
        elif ".experts." not in name:
            amax = quantizers[f"{module}.input_quantizer"].amax.reshape(1)
            count -= 1
            assert torch.equal(value, generate_gparam(-amax, amax)), name
    assert num_caches > 1 and count == 0


# --- sweeps ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def swept() -> dict[str, tuple[Skeleton, dict[str, Tensor]]]:
    """Algorithm -> tiny-glm4-moe with NVFP4A16 by it."""
    found = {}
    for algorithm in sorted(SWEEPS):
        skeleton, results = layerwise(GLM, token_ids(), "NVFP4A16", algorithm)
        found[algorithm] = skeleton, found_in(results)
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
    amax = groups.abs().amax(-1, keepdim=True)
    total = weight.abs().amax()

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
    own = tensors_of(name, found)
    assert torch.equal(own["weight_scale"].float(), theirs.float())
    assert own["weight_global_scale"] == largest * 6 / total
    # Decompressed in BF16: three roundings of 2**-9, where another code is 8 % away at least. In
    # the middle between two codes both are as near, and the last bit of a quotient decides.
    ours = unpacked(own, "NVFP4A16").float()
    expected = rounding(groups, ends).reshape(weight.shape)
    room = 2**-7 * weight.abs()
    differ = (ours - expected).abs() > room
    assert differ.float().mean() < 1e-3
    assert (((ours - weight).abs() - (expected - weight).abs()).abs() <= room)[differ].all()


def hessian_error(name: str, shape: torch.Size):
    """What modelopt's own accumulator makes of the inputs of a module."""
    from modelopt.torch.quantization.model_calib import _LocalHessianAccumulator

    accumulator = _LocalHessianAccumulator(*shape, block_size=16)
    seen = []
    skeleton = Skeleton(GLM)
    ids = token_ids()
    hidden = skeleton.leave(0, skeleton.enter(0, ids, None))
    batches = skeleton.enter(1, ids, hidden)
    module = skeleton.model.get_submodule(name)
    handle = module.register_forward_pre_hook(lambda _module, args: seen.append(args[0]))
    skeleton.leave(1, batches)
    handle.remove()
    for value in seen:
        accumulator.accumulate(value)
    return accumulator.build_error_func()


def test_a_fused_group_shares_the_global_scale_that_it_is_swept_in():
    skeleton = Skeleton(GLM)
    names = tuple(f"model.layers.1.self_attn.{each}_proj" for each in "qkv")
    batches = skeleton.enter(1, token_ids(samples=1), [torch.randn(1, 32, 256).bfloat16()])
    schemes = dict.fromkeys(names, "NVFP4")
    found = skeleton.calibrated(batches, schemes, algorithm="mse", fused=[names]).tensors
    largest = max(float(skeleton.weights[f"{name}.weight"].abs().amax()) for name in names)
    for name in names:
        assert float(found[f"{name}.weight_global_scale"]) == pytest.approx(2688 / largest)


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
    assert not unpacked(tensors_of(name, found), "NVFP4A16").any()


# --- a whole run ----------------------------------------------------------------------------------


@pytest.mark.full
def test_a_checkpoint_of_it_is_checked_clean(tmp_path):
    """Its MTP block in NVFP4 too; nor has the record forgotten who calibrated."""
    name = "tiny-glm4-moe.nvfp4-mtp-nvfp4"
    recipe = small_recipe(tmp_path, name, algorithm="mse")
    out = api.quantize(api.plan(str(recipe)), tmp_path / "out", threads=1).out
    packed = [name for name in weights_of(out) if name.endswith(".weight_packed")]
    assert len(packed) > 60 and any(name.startswith("model.layers.3.") for name in packed)
    assert check(out, source=open_source(GLM)).findings == ()
    record = read_record(out / "keepmtp.json")
    assert record.versions["nvidia-modelopt"].startswith("0.47")
    assert record.recipe.whole["calibration"]["algorithm"] == "mse"
