"""The writer against independent readers: what is kept, dequantized and packed, and what a kill
leaves behind.
"""

import json
import re
from pathlib import Path

import pytest
import torch
from keepmtp.checkpoints.source import open_source
from keepmtp.quantize.config.written import files_of
from keepmtp.quantize.pack.pack import pack
from keepmtp.quantize.plan.plan import make_plan
from keepmtp.quantize.write.output import claim, publish, refuse_output
from keepmtp.quantize.write.writer import write
from keepmtp.recipes.errors import CheckpointError
from keepmtp.recipes.find import find_recipe
from keepmtp.recipes.schemes import SCHEMES
from releases import source_layout, write_checkpoint
from safetensors.torch import load_file

SHARD = 2_000_000  # many shards, so that there is something between them


def run(
    model: str,
    variant: str,
    folder: Path,
    *,
    mtp: str | None = None,
    threads: int = 2,
    name: str = "out",
):
    """Plan and write one tiny checkpoint; the source is made once per folder."""
    recipe, text = find_recipe(model, scheme=variant, mtp=mtp)
    if not (folder / "source").is_dir():
        config, tensors = source_layout(model, size="tiny")
        write_checkpoint(folder / "source", config, tensors, data="random")
    plan = make_plan(recipe, open_source(folder / "source"), shard_bytes=SHARD)
    out = folder / name
    refuse_output(plan, out)
    with claim(plan, out) as partial:
        write(plan, partial, recipe_text=text, threads=threads)
        publish(partial, out)
    return plan, out


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {
        name: value
        for file in sorted(folder.glob("*.safetensors"))
        for name, value in load_file(file).items()
    }


def bits(value: torch.Tensor) -> bytes:
    return value.reshape(-1).view(torch.uint8).numpy().tobytes()


def test_experts_stacked_in_three_tensors_become_single_ones(tmp_path):
    """Step-3.5 stacks gate and up apart: each expert's pair is packed together, since vLLM fuses it
    under one scale.
    """
    _, out = run("step-3.5-flash", "NVFP4A16", tmp_path)
    source, made = tensors_of(tmp_path / "source"), tensors_of(out)
    for expert in range(4):
        stacks = {
            name: source[f"model.layers.2.moe.{name}_proj.weight"][expert]
            for name in ("gate", "up", "down")
        }
        pair = pack(SCHEMES["NVFP4A16"], [stacks["gate"], stacks["up"]])
        alone = pack(SCHEMES["NVFP4A16"], [stacks["down"]])
        stem = f"model.layers.2.moe.experts.{expert}."
        for name, parts in zip(("gate", "up", "down"), [*pair, *alone], strict=True):
            for leaf, value in parts.items():
                assert bits(made[f"{stem}{name}_proj.{leaf}"]) == bits(value), (expert, name, leaf)
        scales = [made[f"{stem}{name}_proj.weight_global_scale"] for name in ("gate", "up")]
        assert torch.equal(*scales)
    assert not any(re.search(r"\.moe\.(gate|up|down)_proj\.", name) for name in made)


@pytest.mark.parametrize(
    ("model", "variant", "mtp"),
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
    plan, out = run(model, variant, tmp_path, mtp=mtp)
    written, source = tensors_of(out), tensors_of(tmp_path / "source")
    planned = {output.name: output for tensor in plan.tensors for output in tensor.outputs}
    assert set(written) == set(planned)
    assert json.loads((out / "model.safetensors.index.json").read_text())[
        "weight_map"
    ].keys() == set(planned)
    assert all(tuple(written[name].shape) == output.shape for name, output in planned.items())
    for tensor in plan.tensors:
        if tensor.fate in ("keep", "add") and not tensor.scheme:
            for origin, output in zip(tensor.inputs, tensor.outputs, strict=True):
                assert bits(written[output.name]) == bits(source[origin]), tensor.name
        elif tensor.fate == "keep":
            weight = next(
                name for name in tensor.inputs if name.endswith(("weight", "weight_packed"))
            )
            assert bits(written[tensor.outputs[0].name]) == bits(source[weight]), tensor.name
        elif tensor.fate == "dequantize" and tensor.form == "fp8_block":
            scale = next(source[name] for name in tensor.inputs if "scale" in name).float()
            n, k = tensor.shape
            wide = scale.repeat_interleave(128, 0)[:n].repeat_interleave(128, 1)[:, :k]
            expected = (source[tensor.name].float() * wide).to(torch.bfloat16)
            assert torch.equal(written[tensor.name], expected), tensor.name


def test_config_is_the_sources_own(tmp_path):
    """Every key of the source's config.json survives as it was, and only quantization_config is
    new.
    """
    _, out = run("dsv4-flash", "w4a16-fp8", tmp_path)
    before = json.loads((tmp_path / "source/config.json").read_text())
    after = json.loads((out / "config.json").read_text())
    assert before.pop("quantization_config")["quant_method"] == "fp8"
    assert after.pop("quantization_config")["quant_method"] == "compressed-tensors"
    assert list(after.items()) == list(before.items())
    assert (out / "recipe.yaml").read_text() == find_recipe("dsv4-flash", scheme="w4a16-fp8")[1]
    assert str(tmp_path) not in (out / "keepmtp.json").read_text(), (
        "no path of the machine that made it"
    )


def test_nan_in_a_weight_names_it(tmp_path):
    config, tensors = source_layout("mimo-7b", size="tiny")
    folder = write_checkpoint(tmp_path / "source", config, tensors, data="random")
    source = open_source(folder)
    entry = source.entries["model.layers.0.mlp.down_proj.weight"]  # type: ignore[index]
    with open(folder / entry.file, "r+b") as file:
        file.seek(entry.start + 40)
        file.write(b"\xc0\x7f")  # a BF16 NaN
    recipe, text = find_recipe("mimo-7b", scheme="W8A16")
    with pytest.raises(CheckpointError, match=r"model\.layers\.0\.mlp\.down_proj\.weight.*finite"):
        write(make_plan(recipe, source), tmp_path, recipe_text=text, threads=2)
    assert not (tmp_path / "out").exists()


def test_text_config_loses_its_own_quantization_config(tmp_path):
    """A nested quantization_config would win over ours in some loaders."""
    config, tensors = source_layout("qwen3.5-397b", size="tiny")
    config["text_config"]["quantization_config"] = {"quant_method": "fp8"}
    recipe, _ = find_recipe("qwen3.5-397b", scheme="W4A16", mtp="bf16")
    plan = make_plan(recipe, open_source(write_checkpoint(tmp_path, config, tensors)))
    assert "quantization_config" not in files_of(plan)["config.json"]["text_config"]
