"""The writer against independent readers: what is kept, dequantized and packed, and what a kill
leaves behind.
"""

from dataclasses import replace

import keepmtp.checkpoints.values as values_module
import keepmtp.quantize.pack.unit as unit_module
import pytest
import torch
from calibrated import made_up, planned, saved
from data_files import json_of
from keepmtp.checkpoints.source import open_source
from keepmtp.quantize.pack.unit import CPU, packed_groups
from keepmtp.quantize.plan.configs import files_of
from keepmtp.quantize.plan.plan import make_plan
from keepmtp.recipes.conventions import ALGORITHMS, NOT_FOR_EXPERTS
from keepmtp.recipes.errors import CheckpointError
from keepmtp.recipes.find import find_recipe
from keepmtp.recipes.schema import Recipe
from keepmtp.recipes.schemes import SCHEMES
from releases import source_layout, write_checkpoint
from writing import tiny, weights_of, written
from written_values import poke


def run(model: str, variant: str, folder, mtp: str | None = None):
    """A plan of many shards, so that there is something between them; the source's tensors and the
    output's.
    """
    recipe, text = find_recipe(model, scheme=variant, mtp=mtp)
    source = tiny(folder / "source", model)
    plan = replace(make_plan(recipe, open_source(source)), shard_bytes=2_000_000)
    return plan, weights_of(source), written(plan, folder / "out", recipe_text=text)


def bits(value: torch.Tensor) -> bytes:
    return value.reshape(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize(
    "model, variant, mtp",
    [
        ("dsv4-flash", "w4a16-fp8", None),
        ("dsv4-flash", "w4a16-fp8", "source"),
        ("deepseek-v3.1", "W4A16", "source"),
        ("glm-4.7", "NVFP4A16", "FP8_DYNAMIC"),
        ("qwen3.5-397b", "W4A16", "bf16"),
        ("mimo-7b", "W8A16", "bf16"),
    ],
)
def test_every_output_is_what_the_plan_says(model, variant, mtp, tmp_path):
    """Names, dtypes and shapes for all; bytes for what is kept; numbers for what was packed in the
    source.
    """
    plan, source, made = run(model, variant, tmp_path, mtp)
    planned = {o.name: torch.Size(o.shape) for tensor in plan.tensors for o in tensor.outputs}
    assert {name: value.shape for name, value in made.items()} == planned
    index = json_of(tmp_path / "out/model.safetensors.index.json")
    assert index["weight_map"].keys() == planned.keys()
    for tensor in plan.tensors:
        if tensor.fate in ("keep", "add") and not tensor.scheme:
            for origin, output in zip(tensor.inputs, tensor.outputs, strict=True):
                assert bits(made[output.name]) == bits(source[origin]), tensor.name
        elif tensor.fate == "keep":
            (weight,) = (n for n in tensor.inputs if n.endswith(("weight", "weight_packed")))
            assert bits(made[tensor.outputs[0].name]) == bits(source[weight]), tensor.name
        elif tensor.fate == "dequantize" and tensor.form == "fp8_block":
            scale = next(source[name] for name in tensor.inputs if "scale" in name).float()
            n, k = tensor.shape
            wide = scale.repeat_interleave(128, 0)[:n].repeat_interleave(128, 1)[:, :k]
            expected = (source[tensor.name].float() * wide).to(torch.bfloat16)
            assert torch.equal(made[tensor.name], expected), tensor.name


@pytest.mark.parametrize(
    "scheme, format",
    [(name, "compressed-tensors") for name in SCHEMES]
    + [(name, "modelopt") for name in ALGORITHMS if name not in NOT_FOR_EXPERTS],
)
def test_slices_of_a_large_matrix_are_the_rows_of_the_whole(scheme, format, tmp_path, monkeypatch):
    plan = planned(tmp_path / "source", data="random")
    recipe = plan.recipe.model_dump() | {"format": format}
    kept = {"experts": "bf16", "shared_experts": "bf16"}  # too narrow for a second slice
    recipe["backbone"] = dict.fromkeys(recipe["backbone"], scheme) | kept
    if not SCHEMES[scheme].needs_calibration:
        recipe["calibration"] = None
    plan = make_plan(Recipe.model_validate(recipe), plan.source)
    given = saved(tmp_path / "statistics", made_up(plan))
    written(plan, tmp_path / "whole", statistics=given)
    monkeypatch.setattr(values_module, "_CHUNK_CPU", 1)
    monkeypatch.setattr(unit_module, "_ROWS", 128)
    (unit,) = [
        unit for unit in plan.units if unit[0].name.endswith("layers.0.mlp.down_proj.weight")
    ]
    assert len([*packed_groups(plan, unit, given, device=CPU)]) == 2
    written(plan, tmp_path / "slices", statistics=given)
    for shard in plan.shards:
        whole, slices = (tmp_path / name / shard.file for name in ("whole", "slices"))
        assert whole.read_bytes() == slices.read_bytes(), shard.file


def test_config_is_the_sources_own(tmp_path):
    """Every key of the source's config.json survives as it was, and only quantization_config is
    new.
    """
    run("dsv4-flash", "w4a16-fp8", tmp_path)
    out = tmp_path / "out"
    before, after = (json_of(tmp_path / f"{name}/config.json") for name in ("source", "out"))
    assert before.pop("quantization_config")["quant_method"] == "fp8"
    assert after.pop("quantization_config")["quant_method"] == "compressed-tensors"
    assert list(after.items()) == list(before.items())
    assert (out / "recipe.yaml").read_text() == find_recipe("dsv4-flash", scheme="w4a16-fp8")[1]
    assert str(tmp_path) not in (out / "keepmtp.json").read_text(), (
        "no path of the machine that made it"
    )


def test_nan_in_a_weight_names_it(tmp_path):
    name = "model.layers.0.mlp.down_proj.weight"
    poke(tiny(tmp_path / "source", "mimo-7b"), name, float("nan"), at=20)
    with pytest.raises(CheckpointError, match=f"{name}.*finite"):
        run("mimo-7b", "W8A16", tmp_path)
    assert not (tmp_path / "out").exists()


def test_text_config_loses_its_own_quantization_config(tmp_path):
    """A nested quantization_config would win over ours in some loaders."""
    config, tensors = source_layout("qwen3.5-397b")
    native = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    config["text_config"]["quantization_config"] = native
    recipe, _ = find_recipe("qwen3.5-397b", scheme="W4A16", mtp="bf16")
    plan = make_plan(recipe, open_source(write_checkpoint(tmp_path, config, tensors)))
    assert "quantization_config" not in files_of(plan)["config.json"]["text_config"]
