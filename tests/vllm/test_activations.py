"""The scales of activations that are measured and written, against those that vLLM's own code makes
of them.
"""

from functools import partial

import pytest
import torch
from commands import GLM
from keepmtp.quantize.calibrate.layers.activations import (
    fp8_groups,
    fp8_tensor,
    fp8_tokens,
    int8_tokens,
    nvfp4,
)
from keepmtp.quantize.calibrate.layers.layer import calibrate
from keepmtp.quantize.calibrate.layers.work import LayerWork
from layerwise import Skeleton
from real_vllm import computed

pytestmark = pytest.mark.vllm

ROUND = """
import sys
from types import SimpleNamespace
import torch
from safetensors.torch import load_file, save_file
from vllm import _custom_ops as ops
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.fused_moe.oracle.nvfp4 import NvFp4MoeBackend, convert_to_nvfp4_moe_kernel_format
from vllm.model_executor.layers.quantization.input_quant_fp8 import QuantFP8
from vllm.model_executor.layers.quantization.utils import flashinfer_fp4_moe
from vllm.model_executor.layers.quantization.utils.fp8_utils import process_fp8_input_tensor_strategy_moe
from vllm.model_executor.layers.quantization.utils.nvfp4_emulation_utils import ref_nvfp4_quant_dequant
from vllm.model_executor.layers.quantization.utils.quant_utils import GroupShape

flashinfer_fp4_moe.swizzle_blockscale = lambda scale: scale  # a layout that only a GPU has
given, made = load_file(sys.argv[1]), {}
parallel = SimpleNamespace(enable_eplb=False)
layer = SimpleNamespace(
    activation=SimpleNamespace(is_gated=True), moe_config=SimpleNamespace(moe_parallel_config=parallel)
)
for name in ("apart", "common"):
    w13, w2 = 1 / given[f"NVFP4.{name}.w13"], 1 / given[f"NVFP4.{name}.w2"]
    count = len(w2)
    for backend in ("EMULATION", "FLASHINFER_CUTLASS", "FLASHINFER_CUTEDSL_BATCHED", "FLASHINFER_B12X", "VLLM_CUTLASS"):
        bytes_, scales = torch.zeros(count, 256, 128, dtype=torch.uint8), torch.zeros(count, 256, 16)
        found = convert_to_nvfp4_moe_kernel_format(
            NvFp4MoeBackend[backend], layer, bytes_, scales, torch.ones(count), w13.clone(),
            bytes_, scales, torch.ones(count), w2.clone(), True)
        scale = found[7] if backend == "EMULATION" else 1 / found[7]
        made[f"{name}.{backend}"] = scale.reshape(-1)
    made[f"{name}.FP8"] = process_fp8_input_tensor_strategy_moe(
        given[f"FP8.{name}.w13"].float().amax(1), given[f"FP8.{name}.w2"].float(), False)[1].reshape(-1)
tokens = given["tokens"]
values, scale, _ = ops.scaled_int8_quant(tokens)
made["int8_tokens"] = values.float() * scale
with set_current_vllm_config(VllmConfig()):
    values, scale = QuantFP8(static=False, group_shape=GroupShape.PER_TOKEN).forward_native(tokens)
    made["fp8_tokens"] = values.float() * scale
    values, scale = QuantFP8(static=True, group_shape=GroupShape.PER_TENSOR).forward_native(tokens, torch.tensor(0.03))
    made["fp8_tensor"] = values.float() * scale
    values, scale = QuantFP8(static=False, group_shape=GroupShape(1, 128), use_ue8m0=False).forward_native(tokens)
    made["fp8_groups"] = values.float() * scale.repeat_interleave(128, 1)[:, :tokens.shape[1]]
made["nvfp4"] = ref_nvfp4_quant_dequant(tokens, torch.tensor(700.0), 16)
save_file(made, sys.argv[2])
"""


def calibrated(scheme: str, *, is_common: bool) -> dict[str, torch.Tensor]:
    """Input scales of one layer's experts, one an expert or one for all: [E, 2] and [E]."""
    skeleton = Skeleton(GLM)
    generator = torch.Generator().manual_seed(0)
    hidden = [torch.randn(1, 32, 256, generator=generator).bfloat16() for _ in range(2)]
    batches = skeleton.enter(1, [torch.ones(1, 32, dtype=torch.int64)] * 2, hidden)
    stem = "model.layers.1.mlp.experts"
    gate = [f"{stem}.{expert}.gate_proj" for expert in range(4)]
    up = [name.replace("gate", "up") for name in gate]
    down = [name.replace("gate", "down") for name in gate]
    experts = []
    if is_common:
        experts = [(*gate, *up), tuple(down)]
    schemes = dict.fromkeys((*gate, *up, *down), scheme)
    found = calibrate(
        skeleton.model, batches, LayerWork(schemes=schemes, algorithm="minmax", experts=experts)
    )
    suffix = "input_global_scale" if scheme == "NVFP4" else "input_scale"

    def scales(modules: list[str]) -> torch.Tensor:
        return torch.cat([found.tensors[f"{name}.{suffix}"] for name in modules])

    return {"w13": torch.stack([scales(gate), scales(up)], dim=1), "w2": scales(down)}


@pytest.fixture(scope="module")
def both(tmp_path_factory) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """What is given to vLLM, and what it makes of it."""
    folder = tmp_path_factory.mktemp("activations")
    tokens = torch.randn(64, 192, generator=torch.Generator().manual_seed(1)).bfloat16()
    tokens[1] *= 4096
    tokens[2] = 0
    given = {"tokens": tokens}
    for scheme in ("NVFP4", "FP8"):
        for name in ("apart", "common"):
            found = calibrated(scheme, is_common=name == "common")
            for leaf, value in found.items():
                given[f"{scheme}.{name}.{leaf}"] = value.contiguous()
    return given, computed(ROUND, given, folder)


ROUNDINGS = {
    "int8_tokens": int8_tokens,
    "fp8_tokens": fp8_tokens,
    "fp8_tensor": partial(fp8_tensor, scale=torch.tensor(0.03).item()),
    "fp8_groups": partial(fp8_groups, group_size=128),
    "nvfp4": partial(nvfp4, divisor=700.0),
}


@pytest.mark.parametrize("name", ROUNDINGS)
def test_activations_are_rounded_as_vllm_rounds_them(name, both):
    """Bit for bit; one token is loud, one is nothing.

    Its INT8 operator for CPUs multiplies by 1 / scale, where GPUs multiply by 127 / amax: ties may
    go the other way.
    """
    given, made = both
    ours = ROUNDINGS[name](given["tokens"])
    differ = ours != made[name].bfloat16()
    assert not differ.any() or (name == "int8_tokens" and differ.float().mean() < 0.01)
    a_step = given["tokens"].float().abs().amax(dim=-1, keepdim=True) / 127
    assert ((ours - made[name]).abs() <= 1.5 * a_step)[differ].all()
    assert ours[1].any() and not ours[2].any() and ours[3].any()
    assert not torch.equal(ours, given["tokens"])


@pytest.mark.parametrize(
    "backend",
    [
        "EMULATION",
        "FLASHINFER_CUTLASS",
        "FLASHINFER_CUTEDSL_BATCHED",
        "FLASHINFER_B12X",
        "VLLM_CUTLASS",
    ],
)
def test_experts_have_the_input_scale_that_vllm_takes(backend, both):
    """The twin is llm-compressor's own: one scale an expert, of which all but CUTLASS take the
    largest amax's.
    """
    given, made = both
    ours = given["NVFP4.common.w2"]
    assert len(set(ours.tolist())) == 1 < len(set(given["NVFP4.apart.w2"].tolist()))
    assert torch.allclose(made[f"common.{backend}"], ours[0], rtol=1e-6)
    assert torch.allclose(made[f"apart.{backend}"], ours[0], rtol=1e-6) == (
        backend != "VLLM_CUTLASS"
    )


def test_experts_in_fp8_have_the_input_scale_that_vllm_takes(both):
    given, made = both
    ours = given["FP8.common.w2"].float()
    assert len(set(ours.tolist())) == 1 < len(set(given["FP8.apart.w2"].tolist()))
    assert made["common.FP8"] == made["apart.FP8"] == ours[0]
