"""The judge agrees with a run's own record and sees what is broken; docs/tables/quality.md says what its
figures say.
"""

import shutil
from pathlib import Path

import pytest
import torch
import yaml
from data_files import json_of, put_json, table
from judge import Judge
from keepmtp.checkpoints.source import open_source
from keepmtp.checkpoints.values import read_tensor
from keepmtp.quantize.calibrate.data.data import calibration_data
from keepmtp.quantize.calibrate.run import calibrate
from keepmtp.quantize.write.output import claim, publish
from keepmtp.quantize.write.writer import write
from keepmtp.recipes.find import find_recipe
from keepmtp.recipes.schema import Recipe
from pages import with_part
from passes import ALONE, ROOT, plan_over
from quality import PAGE, ROWS, jackknife, recipe_text, written
from safetensors.torch import load_file, save_file
from written_values import poke

pytestmark = pytest.mark.usefixtures("in_f32")

FEW = {"samples": 8, "held_out": 6, "batch_size": 2}
# What differs on the way to a server: static input scales, rewritten weights, another family.
CASES = table("test_quality")["CASES"]


def made(folder: Path, case: str) -> tuple[Path, dict]:
    """A calibrated checkpoint, and the figures of its record."""
    model, variant = CASES[case]
    document = yaml.safe_load(find_recipe(model, scheme=variant)[1]) | {"default": False}
    document["calibration"] |= FEW
    plan = plan_over(ROOT / "models" / model, Recipe.model_validate(document))
    run = calibrate(plan, folder / "calibration", ranks=ALONE)
    with claim(run.plan, folder / "out", calibration=run.salt) as partial:
        write(
            run.plan,
            partial,
            recipe_text="",
            threads=1,
            statistics=run.statistics,
            calibration=run.summary,
        )
        publish(partial, folder / "out")
    shutil.rmtree(folder / "calibration")
    return folder / "out", {**run.summary, **run.summary["rows"][-1]}


@pytest.fixture(scope="module")
def judges(tmp_path_factory) -> dict[str, Judge]:
    """A judge for each model, over the held-out text of `FEW`."""
    found = {}
    for model in ("tiny-glm4-moe", "tiny-qwen3_5"):
        recipe, release = find_recipe(model, scheme="nvfp4")[0], ROOT / "models" / model
        data = calibration_data(recipe.calibration.model_copy(update=FEW), open_source(release))
        found[model] = Judge(release, recipe, data, tmp_path_factory.mktemp("states"))
    return found


@pytest.mark.full
@pytest.mark.parametrize("case", CASES)
def test_the_judge_agrees_with_the_runs_own_record(judges, tmp_path, case):
    """Other code on the way there: the file's tensors, and the scales that vLLM merges."""
    folder, recorded = made(tmp_path, case)
    judge = judges[CASES[case][0]]
    found = judge.read(folder)
    assert found.target.perplexity == pytest.approx(recorded["perplexity"], abs=1e-6)
    assert found.target.divergence == pytest.approx(recorded["divergence"], abs=1e-6)
    assert found.target.agreement == pytest.approx(recorded["agreement"], abs=1e-5)
    assert found.acceptance.fact().model_dump(mode="json") == recorded["acceptance"]
    assert found.mtp_bytes > 0 and found.backbone_bytes < judge.release.backbone_bytes
    if case == "nvfp4":
        a_broken_one_shows(judge, folder, found.target.divergence)


def a_broken_one_shows(judge: Judge, folder: Path, whole: float) -> None:
    """One layer's scales doubled."""
    name = "model.layers.1.mlp.shared_experts.down_proj.weight_global_scale"
    source = open_source(folder)
    poke(folder, name, read_tensor(source, source.entries[name]).item() / 2)
    assert judge.read(folder).target.divergence > 1.5 * whole


def test_a_checkpoint_without_an_mtp_block_gets_the_releases(judges, tmp_path):
    """As peers leave it: the backbone alone. Its own block is no part of its bytes."""
    judge = judges["tiny-qwen3_5"]
    folder = Path(shutil.copytree(ROOT / "models" / "tiny-qwen3_5", tmp_path / "alone"))
    tensors, kept = load_file(folder / "model.safetensors"), {}
    for name, value in tensors.items():
        if not name.startswith("mtp."):
            kept[name] = value
    save_file(kept, folder / "model.safetensors")
    index = {"metadata": {}, "weight_map": dict.fromkeys(kept, "model.safetensors")}
    put_json(folder / "model.safetensors.index.json", index)
    found = judge.read(folder)
    assert found.mtp_bytes == 0 and found.backbone_bytes == judge.release.backbone_bytes
    assert found.target.divergence == 0
    assert torch.equal(found.acceptance.counts, judge.release.acceptance.counts)


# --- the page -------------------------------------------------------------------------------------


def test_the_page_has_the_rows_and_says_what_the_figures_say():
    """Another row, or another figure, is another run of `make docs PAGE=quality`. Every row is a recipe and
    has its base.
    """
    figures = json_of(ROOT / "docs" / "tables" / "quality.json")
    assert [*figures["rows"]] == ["release", *ROWS]
    for key, row in ROWS.items():
        recipe = Recipe.model_validate(yaml.safe_load(recipe_text(key, row)))
        assert recipe.variant == key and (recipe.calibration or not row.is_peers)
        assert row.base in ("", *ROWS)
    assert PAGE.read_text() == with_part(PAGE, written(figures))


def test_an_interval_is_that_of_many_texts():
    """Played: of 300 texts of 48 sequences, about 95 % of the intervals hold the true ratio; a
    paired one is narrow.
    """
    draw_from = torch.Generator().manual_seed(0)
    held, reaches = 0, []
    for _ in range(300):
        hard = torch.rand(48, generator=draw_from, dtype=torch.float64) + 0.5
        noise = torch.randn(48, 2, generator=draw_from, dtype=torch.float64) * 0.05
        pair = torch.stack([hard * (0.9 + noise[:, 0]), hard * (1.0 + noise[:, 1])], dim=1)
        value, reach = jackknife(pair, lambda sums: float(sums[0] / sums[1]))
        held += abs(value - 0.9) <= reach
        reaches.append(reach)
    assert 270 <= held <= 297
    assert sum(reaches) / 300 < 0.03, "what is hard for both cancels out"
