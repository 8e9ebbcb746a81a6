"""The calibrated line over families whose layers differ most, tiny and random: calibrate both
parts, write, check.

What a release stores quantized (DeepSeek: FP8, MXFP4), experts stacked on disk, latent attention,
hyper-connections. Of random weights there is nothing to accept: that the measurement is left out,
in words, is part of it.
"""

import re
from collections import defaultdict

import pytest
from checked import check
from gpu_runs import BLOCK, CPU, DATA, line
from keepmtp.checkpoints.source import open_source
from keepmtp.quantize.run.statistics import Statistics
from releases import shipped_recipes, source_layout, write_checkpoint

pytestmark = pytest.mark.usefixtures("in_f32")

RECIPES = {recipe.model: recipe for recipe in shipped_recipes() if recipe.variant == "w4a16-fp8"}


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "model, scheme, algorithm",
    [
        ("dsv4-flash", "NVFP4", "minmax"),
        ("dsv4-flash", "W4A16", "awq"),
        ("deepseek-v3.1", "W4A16", "awq"),
        ("qwen3.5-397b", "W4A16", "gptq"),
        ("qwen3-next-80b", "NVFP4", "minmax"),
    ],
)
def test_the_whole_line(model, scheme, algorithm, tmp_path):
    folder = tmp_path / "source"
    recipe = RECIPES[model]
    write_checkpoint(folder, *source_layout(model), data="random")
    words = recipe.backbone | {"experts": scheme}
    mtp = {}
    for group in words.keys() - {"dense_mlp", "linear_attention"}:
        mtp[group] = scheme if group == "experts" else "bf16"
    block = BLOCK.model_copy(update={"algorithm": algorithm})
    recipe = recipe.model_copy(update={"calibration": block, "backbone": words, "mtp": mtp})
    parts, figures = line(recipe, folder, DATA, tmp_path / "made", CPU)
    assert parts == {"backbone", "mtp"}
    assert "must resemble what the model writes" in figures["unmeasured"] or figures["rows"]
    report = check(tmp_path / "made" / "out.partial", source=open_source(folder))
    assert report.ok, report.findings
    statistics = Statistics.open(tmp_path / "made" / "calibration" / "statistics")
    scales = defaultdict(set)
    for name in statistics:
        if match := re.fullmatch(r"(.*\.experts)\.\d+\.(\w+)\.input_(global_)?scale", name):
            scales[match[1], match[2] in ("down_proj", "w2")].add(float(statistics.read(name)))
    assert all(len(found) == 1 for found in scales.values()), "vLLM takes one of all experts"
