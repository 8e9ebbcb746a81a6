"""Calibration on a pretended GPU: no operation mixes devices, and the results are those of the CPU,
bit for bit.

Every family that can be calibrated once, with NVFP4 in backbone and MTP block, and every algorithm
once.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from gpu_runs import both, family_run, in_a_child
from keepmtp.checkpoints.source import open_source
from keepmtp.quantize.calibrate.data.data import calibration_data
from keepmtp.quantize.calibrate.model import skeleton
from keepmtp.recipes.find import find_recipe, shipped_recipes
from passes import ROOT
from pretended_gpu import MixedDevices, pretended_gpu

# One model of each family that transformers can build. The block of those without a draft stays
# BF16.
FAMILIES = (
    "deepseek-v3.1",
    "deepseek-v3.2",
    "dsv4-flash",
    "ernie-4.5-21b",
    "exaone-4.5-33b",
    "glm-4.7",
    "glm-4.7-flash",
    "glm-5",
    "glm-5.3-flash",
    "glm-ocr",
    "hy3",
    "hy4-preview",
    "k-exaone-236b",
    "mimo-7b",
    "mimo-v2-flash",
    "minimax-m3",
    "nemotron-3-super",
    "qwen3-next-80b",
    "qwen3.5-27b",
    "qwen3.5-397b",
)
WITHOUT_DRAFT = ("glm-5.3-flash",)
RECIPES = {recipe.model: recipe for recipe in shipped_recipes() if not recipe.calibrated_schemes()}


@pytest.mark.few(4)
@pytest.mark.parametrize("model", FAMILIES)
def test_every_family(model, tmp_path):
    found = in_a_child(family_run, RECIPES[model], tmp_path)
    assert (found.mixes, found.files, found.figures) == ((), (), {})
    assert found.parts == ({"backbone"} if model in WITHOUT_DRAFT else {"backbone", "mtp"})
    assert found.peak_bytes and found.num_waits


SMALL = {"samples": 2, "held_out": 4, "sequence_length": 32, "batch_size": 1}
# GPTQ walks over the columns of each matrix, AWQ over a grid: a few matrices show what all of them
# do.
FEW = {"attention": "W4A16", "dense_mlp": "W4A16", "shared_experts": "bf16", "experts": "bf16"}


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("name", "backbone"),
    [
        ("tiny-glm4-moe.fp8", {}),
        ("tiny-glm4-moe.nvfp4-mtp-auto", {}),
        ("tiny-glm4-moe.w4a16-gptq", FEW),
        ("tiny-glm4-moe.w4a16-awq", FEW),
        ("tiny-glm4-moe.w8a8-smoothquant", {}),
        ("tiny-qwen3_5.w4a16-awq", {}),
    ],
)
def test_every_algorithm(name, backbone, tmp_path):
    found = in_a_child(algorithm_run, name, backbone, tmp_path)
    assert found.mixes == ()
    assert (found.files, found.figures) == ((), {})
    assert found.parts


def algorithm_run(name: str, backbone: dict[str, str], folder: Path):
    recipe, _ = find_recipe(name)
    changes = {
        "calibration": recipe.calibration.model_copy(update=SMALL),
        "backbone": recipe.backbone | backbone,
    }
    if recipe.mtp_auto:
        changes["mtp_auto"] = recipe.mtp_auto.model_copy(
            update={"min_acceptance": 0.01, "candidates": ("NVFP4",)}
        )
    source = ROOT / "models" / recipe.model
    data = calibration_data(changes["calibration"], open_source(source))
    return both(recipe.model_copy(update=changes), source, data, folder)


# --- twins: what is wrong on purpose is found -----------------------------------------------------


def test_a_tensor_left_on_the_cpu_is_found_by_operation_and_place(tmp_path):
    message = (
        r"MixedDevices: aten\.embedding\.default must have all tensors on one device; got "
        r"bfloat16 \[512, 256\] on gpu "
        r"and int64 \[2, 16\] on cpu, in quantize/calibrate/layers/backbone\.py:\d+ \(run\)"
    )
    with pytest.raises(RuntimeError, match=message):
        in_a_child(left_run, tmp_path)


def left_run(folder: Path) -> None:
    real = skeleton.Skeleton.feed

    def feed(*args):
        yield from ({name: value.cpu() for name, value in each.items()} for each in real(*args))

    skeleton.Skeleton.feed = feed
    family_run(RECIPES["glm-4.7"], folder)


def pinned(value: torch.Tensor) -> torch.Tensor:
    return value.pin_memory() if torch.accelerator.is_available() else value


# Name -> an operation that CUDA takes, given a tensor [2, 3] on the GPU.
TAKEN: dict[str, Callable] = {
    "a number on the CPU": lambda x: x + torch.tensor(2.0),
    "indices on the CPU": lambda x: x[torch.tensor([0, 1, 1])],
    "a list of indices": lambda x: x[[0, 1, 1]] + x[:, [0, 2]].sum(),
    "a tensor made on the GPU": lambda x: x + torch.tensor([1.0, 2.0, 3.0], device=x.device),
    "a copy": lambda x: torch.zeros(2, 3).copy_(x) + x.cpu(),
    "a slice that is written": lambda x: x[:, 1].copy_(torch.ones(2)),
    "pinned values": lambda x: x + pinned(torch.ones(2, 3)).to(x.device, non_blocking=True),
}


def late(value: torch.Tensor, *, waits: bool) -> torch.Tensor:
    """A copy to pinned memory that goes on while the CPU does something else."""
    host = torch.empty(value.shape, pin_memory=True)
    host.copy_(value, non_blocking=True)
    event = torch.cuda.Event()
    event.record()
    if waits:
        event.synchronize()
    return host.clone()


REFUSED: dict[str, Callable] = {
    "a row on the CPU": lambda x: x + torch.ones(3),
    "a number in a list": lambda x: torch.stack([x.sum(), torch.tensor(2.0)]),
    "a number that is written": lambda x: torch.tensor(2.0).add_(x.sum()),
    "indices of a gather": lambda x: x.gather(1, torch.zeros(2, 1, dtype=torch.int64)),
    "values that are put": lambda x: x.index_put_((torch.tensor([0]),), torch.ones(3)),
    "a tensor on meta": lambda x: x + torch.ones(3, device="meta"),
    "data of the CPU": lambda x: setattr(x, "data", torch.ones(2, 3)),
    "a pinned tensor of the GPU": lambda x: x.pin_memory(),
    "a generator of the CPU": lambda x: torch.rand(3, device=x.device, generator=torch.Generator()),
}


def test_what_cuda_takes_and_what_it_refuses():
    values, messages, num_bytes = in_a_child(rules)
    assert values.keys() == TAKEN.keys()
    assert messages.keys() == REFUSED.keys()
    for name, call in TAKEN.items():
        assert values[name] == call(torch.arange(6.0).reshape(2, 3)).tolist(), name
    assert all("must have all tensors on one device" in message for message in messages.values())
    assert num_bytes == (24, 52)


def rules() -> tuple[dict[str, list], dict[str, str], tuple[int, int]]:
    """Values of what is taken, messages about what is refused, and bytes that are held: now and at
    most.
    """
    with pretended_gpu() as gpu:
        values = {
            name: call(torch.arange(6.0, device=gpu.device).reshape(2, 3)).tolist()
            for name, call in TAKEN.items()
        }
        messages = {}
        for name, call in REFUSED.items():
            with pytest.raises(MixedDevices) as refusal:
                call(torch.ones(2, 3, device=gpu.device))
            messages[name] = str(refusal.value)
        assert gpu.mixes == [*messages.values()]
        del refusal
        assert late(torch.ones(2, device=gpu.device), waits=True).tolist() == [1.0, 1.0]
        assert late(torch.ones(2, device=gpu.device), waits=False).isnan().all()
        gpu.peak_bytes = gpu.bytes_now = 0
        x = torch.ones(2, 3, device=gpu.device)
        assert x.view(3, 2).T.sum() == 6 and (x + 1).sum() == 12  # a view holds nothing of its own
        with pytest.raises(TypeError, match="can't convert gpu device type tensor"):
            x.numpy()
        return values, messages, (gpu.bytes_now, gpu.peak_bytes)
