"""What is measured is what is written: every served weight equals a decompression of the finished
file, bit for bit.

The reference is compressed-tensors' own decompress, on what the writer wrote.
"""

from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

import pytest
import torch
from calibrated import made_up, saved
from keepmtp.checkpoints.source import open_source
from keepmtp.quantize.calibrate.layers import served
from keepmtp.quantize.calibrate.layers.served import serve_weights
from keepmtp.quantize.calibrate.layers.work import LayerWork
from keepmtp.quantize.calibrate.model.binding import Binding
from keepmtp.quantize.calibrate.model.skeleton import Skeleton
from keepmtp.quantize.calibrate.mtp.mtp_block import bind_block, build_block
from keepmtp.quantize.pack.unit import Calibrations, packed_groups
from keepmtp.quantize.plan.plan import Plan, make_plan
from keepmtp.quantize.plan.tensor_plan import TensorPlan
from keepmtp.quantize.run.statistics import Statistics
from keepmtp.recipes.find import find_recipe
from keepmtp.recipes.schemes import SCHEMES
from passes import as_calibrated
from releases import source_layout, write_checkpoint
from writing import recipe_with, written
from written_values import decompressed

pytestmark = pytest.mark.usefixtures("in_f32")

# Source form -> the model that stores it, and the scheme that it was written in before, if no
# release has the form.
FORMS = {
    "BF16": ("glm-4.7", ""),
    "F32": ("glm-4.7", ""),
    "stacked": ("qwen3.5-397b", ""),
    "FP8 blocks": ("deepseek-v3.1", ""),
    "MXFP4": ("dsv4-flash", ""),
    "NVFP4": ("glm-4.7", "NVFP4A16"),
    "INT4": ("glm-4.7", "W4A16"),
    "INT8": ("glm-4.7", "W8A8"),
    "FP8 rows": ("glm-4.7", "FP8_DYNAMIC"),
}


def served_parts(plan: Plan, statistics: Statistics) -> Iterator[tuple[torch.nn.Module, Binding]]:
    """The last decoder layer and the first MTP block, with the weights they are measured with."""
    skeleton = Skeleton(plan, device=torch.device("cpu"))
    index = len(skeleton) - 1
    binding = skeleton.bind_layer(index)
    path = f"{skeleton.layer_path}.{index}."
    with skeleton.layer(index) as layer:
        serve_weights(
            skeleton.model, plan, LayerWork.of(as_calibrated(plan), binding, path), statistics
        )
        yield layer, binding
    block = build_block(plan.view)
    binding = bind_block(block, plan)
    skeleton.fill(block, binding)
    serve_weights(block, plan, LayerWork.of(as_calibrated(plan), binding), statistics)
    yield block, binding


def compared_for(
    model: str, scheme: str, source: Path, folder: Path, algorithm: str = "minmax"
) -> int:
    """Plans experts of one scheme in both parts, writes them, and compares all quantized weights;
    returns their number. Latent attention takes no static scales.
    """
    words = dict.fromkeys(find_recipe(model)[0].backbone, "NVFP4") | {"experts": scheme}
    if model in ("deepseek-v3.1", "dsv4-flash"):
        words["attention"] = "FP8_BLOCK"
    mtp = {g: w for g, w in words.items() if g not in ("dense_mlp", "linear_attention")}
    data = find_recipe("glm-4.7.nvfp4-fp8")[0].calibration.model_dump() | {"algorithm": algorithm}
    words = {"backbone": words, "mtp": mtp, "calibration": data, "requantize": True}
    recipe = recipe_with(model, **words)
    plan = make_plan(recipe, open_source(source))
    statistics = saved(folder / "statistics", made_up(plan))
    tensors = written(plan, folder / "out", statistics=statistics)
    count = 0
    for module, binding in served_parts(plan, statistics):
        for name, pieces in binding.items():
            if not pieces[0].tensor.scheme or not name.endswith("weight"):
                continue
            parts = [decompressed(piece.tensor.scheme, piece.module, tensors) for piece in pieces]
            assert torch.equal(module.get_parameter(name).data, torch.cat(parts)), pieces[0].module
            count += 1
    return count


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """Folder of a source by its form, made once."""

    @cache
    def source(form: str) -> Path:
        model, scheme = FORMS[form]
        folder = tmp_path_factory.mktemp("source") / "release"
        config, tensors = source_layout(model)
        if form == "F32":
            tensors = {name: ("F32", shape) for name, (_, shape) in tensors.items()}
        write_checkpoint(folder, config, tensors, data="random")
        if not scheme:
            return folder
        groups = find_recipe(model)[0].backbone
        words = {"backbone": dict.fromkeys(groups, scheme), "mtp": scheme, "calibration": None}
        written(
            make_plan(recipe_with(model, **words), open_source(folder)), folder.with_name(scheme)
        )
        return folder.with_name(scheme)

    return source


@pytest.mark.few(16, 48)
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("form", FORMS)
def test_served_weights_are_those_of_the_file(form, scheme, sources, tmp_path):
    assert compared_for(FORMS[form][0], scheme, sources(form), tmp_path) > 8


@pytest.mark.parametrize(
    "form, scheme, options",
    [
        ("BF16", "NVFP4", {"algorithm": "gptq"}),
        ("stacked", "W4A16", {"algorithm": "gptq"}),
        ("MXFP4", "W4A16", {"algorithm": "awq"}),
        ("F32", "W8A8", {"algorithm": "smoothquant"}),
    ],
)
def test_weights_that_calibration_decides_are_those_of_the_file(
    form, scheme, options, sources, tmp_path
):
    assert compared_for(FORMS[form][0], scheme, sources(form), tmp_path, **options) > 8


def test_a_weight_rounded_otherwise_is_named(sources, tmp_path, monkeypatch):
    """The twin: DeepSeek-V4's experts rounded to NVFP4 again, where the file keeps their codes."""

    def rounded_again(plan: Plan, unit: Sequence[TensorPlan], given: Calibrations, **options):
        plain = [tensor._replace(form="plain") for tensor in unit]
        return packed_groups(plan, plain, given, **options)

    monkeypatch.setattr(served, "packed_groups", rounded_again)
    with pytest.raises(AssertionError, match=r"layers\.\d+\.ffn\.experts\.0\.w1"):
        compared_for("dsv4-flash", "NVFP4", sources("MXFP4"), tmp_path)
