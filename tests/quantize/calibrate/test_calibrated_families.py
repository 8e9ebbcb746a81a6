"""The calibrated line over families whose layers differ most, tiny and random: calibrate both
parts, write, check.

What a release stores quantized (DeepSeek: FP8, MXFP4), experts stacked on disk, latent attention,
hyper-connections. Of random weights there is nothing to accept: that the measurement is left out,
in words, is part of it.
"""

import re
from collections import defaultdict

import pytest
import torch
from decompressed import decompressed
from keepmtp.checkpoints.source import open_source
from keepmtp.quantize.calibrate import run as calibration
from keepmtp.quantize.calibrate.data.data import CalibrationData
from keepmtp.quantize.calibrate.layers import backbone
from keepmtp.quantize.calibrate.layers.served import serve_weights
from keepmtp.quantize.calibrate.model.binding import Piece, scheme_of
from keepmtp.quantize.calibrate.mtp import mtp_policy
from keepmtp.quantize.plan.plan import make_plan
from keepmtp.quantize.run.ranks import Ranks
from keepmtp.quantize.run.statistics import Statistics
from keepmtp.quantize.write.output import claim
from keepmtp.quantize.write.writer import write
from keepmtp.recipes.find import shipped_recipes
from keepmtp.recipes.schema import Calibration
from keepmtp.validate.check.check import check
from releases import source_layout, write_checkpoint
from safetensors.torch import load_file
from torch import Tensor

ALONE = Ranks(rank=0, size=1, device=torch.device("cpu"))
RECIPES = {recipe.model: recipe for recipe in shipped_recipes() if recipe.variant == "w4a16-fp8"}
IDS = torch.randint(3, 300, (6, 24), generator=torch.Generator().manual_seed(0))


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("model", "scheme", "algorithm"),
    [
        ("dsv4-flash", "NVFP4", "minmax"),
        ("dsv4-flash", "W4A16", "awq"),
        ("deepseek-v3.1", "W4A16", "awq"),
        ("qwen3.5-397b", "W4A16", "gptq"),
        ("qwen3-next-80b", "NVFP4", "minmax"),
    ],
)
def test_the_whole_line(model, scheme, algorithm, tmp_path, monkeypatch):
    data = CalibrationData(ids=IDS[:4], held_out_ids=IDS[4:], provenance={"drawn": "by the test"})
    monkeypatch.setattr(calibration, "calibration_data", lambda *_: data)
    write_checkpoint(tmp_path / "source", *source_layout(model, size="tiny"), data="random")
    block = Calibration(
        algorithm=algorithm,
        dataset="none.jsonl",
        dataset_revision="local",
        split="train",
        column="text",
        samples=4,
        held_out=2,
        sequence_length=24,
        batch_size=2,
        seed=0,
    )
    recipe = RECIPES[model]
    words = {
        group: scheme if group == "experts" else word for group, word in recipe.backbone.items()
    }
    mtp = {
        group: scheme if group == "experts" else "bf16"
        for group in recipe.backbone
        if group != "dense_mlp"
    }
    mtp.pop("linear_attention", None)
    recipe = recipe.model_copy(update={"calibration": block, "backbone": words, "mtp": mtp})
    plan = make_plan(recipe, open_source(tmp_path / "source"))
    measured = spied_weights(monkeypatch)
    run = calibration.calibrate(plan, tmp_path / "calibration", ranks=ALONE)
    assert (
        "must resemble what the model writes" in run.summary["unmeasured"]
        or run.summary["rows"][0]["acceptance"]
    )
    with claim(run.plan, tmp_path / "out", calibration=run.salt) as partial:
        write(
            run.plan,
            partial,
            recipe_text="",
            threads=1,
            statistics=run.statistics,
            calibration=run.summary,
        )
        report = check(partial, source=plan.source)
        tensors = {
            name: value
            for file in partial.glob("*.safetensors")
            for name, value in load_file(file).items()
        }
    assert report.ok, report.findings
    assert {"backbone", "mtp"} == {piece.tensor.part for piece, _ in measured}
    for piece, weight in measured:
        written = decompressed(piece.tensor.scheme, piece.module, tensors)
        assert torch.equal(weight, written), (
            f"{piece.module} was measured otherwise than it is written"
        )
    for (layer, projection), scales in input_scales_of_experts(run.statistics).items():
        assert len(scales) == 1, (
            f"vLLM takes one input scale for {projection} of all experts of {layer}"
        )
    parts = {tensor.part for tensor in plan.tensors if tensor.calibrated}
    assert parts == {"backbone", "mtp"}


def spied_weights(monkeypatch) -> list[tuple[Piece, Tensor]]:
    """Every quantized weight that the run measures with, filled while it runs."""
    found: list[tuple[Piece, Tensor]] = []

    def serve(model, plan, work, given):
        serve_weights(model, plan, work, given)
        for name, pieces in work.binding.items():
            if name.endswith("weight") and scheme_of(pieces[0]):
                rows = model.get_parameter(work.path + name).data.chunk(len(pieces))
                found.extend(
                    (piece, weight.clone()) for piece, weight in zip(pieces, rows, strict=True)
                )

    for module in (backbone, mtp_policy):
        monkeypatch.setattr(module, "serve_weights", serve)
    return found


def input_scales_of_experts(statistics: Statistics) -> dict[tuple[str, str], set[float]]:
    """The values by layer and projection."""
    found = defaultdict(set)
    for name in statistics:
        if match := re.fullmatch(r"(.*)\.experts\.\d+\.(\w+)\.input_(global_)?scale", name):
            found[match[1], match[2]].add(float(statistics.read(name)))
    return found
