"""Calibration on a pretended GPU: no operation mixes devices, and the results are those of the CPU,
bit for bit.

Every family that can be calibrated once, with NVFP4 in backbone and MTP block, and every algorithm
once.
"""

from contextlib import contextmanager
from pathlib import Path

import pytest
from data_files import table
from gpu_runs import both, family_run, in_a_child
from keepmtp.quantize.calibrate.model import skeleton
from killed import small_recipe
from passes import prepared
from releases import shipped_recipes

# One model of each family that transformers can build. The block of those without a draft stays
# BF16.
FAMILIES = table("quantize/calibrate/model/test_pretended_gpu")["FAMILIES"]
WITHOUT_DRAFT = ("glm-5.3-flash",)
RECIPES = {recipe.model: recipe for recipe in shipped_recipes() if not recipe.calibrated_schemes()}


@pytest.mark.few(1, 5)
@pytest.mark.parametrize("model", FAMILIES)
def test_every_family(model, tmp_path):
    found = in_a_child(family_run, RECIPES[model], tmp_path)
    assert (found.mixes, found.files, found.figures) == ((), (), {})
    assert found.parts == ({"backbone"} if model in WITHOUT_DRAFT else {"backbone", "mtp"})
    assert found.peak_bytes and found.num_waits


SMALL = {"samples": 2, "held_out": 4, "sequence_length": 32, "batch_size": 1}


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "name",
    [
        "tiny-glm4-moe.fp8",
        "tiny-glm4-moe.nvfp4-mtp-auto",
        "tiny-glm4-moe.w4a16-gptq",
        "tiny-glm4-moe.w4a16-awq",
        "tiny-glm4-moe.w8a8-smoothquant",
        "tiny-qwen3_5.w4a16-awq",
    ],
)
def test_every_algorithm(name, tmp_path):
    found = in_a_child(algorithm_run, name, tmp_path)
    assert found.mixes == ()
    assert (found.files, found.figures) == ((), {})
    assert found.parts


def algorithm_run(name: str, folder: Path):
    plan, data = prepared(small_recipe(folder, name, **SMALL))
    recipe = plan.recipe
    if recipe.mtp_auto:
        least = {"min_acceptance": 0.01, "candidates": ("NVFP4",)}
        recipe = recipe.model_copy(update={"mtp_auto": recipe.mtp_auto.model_copy(update=least)})
    return both(recipe, plan.source.folder, data, folder)


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
    real = skeleton.Skeleton.fed

    @contextmanager
    def fed(*args):
        with real(*args) as arguments:
            yield {name: value.cpu() for name, value in arguments.items()}

    skeleton.Skeleton.fed = fed
    family_run(RECIPES["glm-4.7"], folder)
