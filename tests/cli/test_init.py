"""`keepmtp init`: a recipe to edit that says what the command line without it would have done."""

import json
import shutil

import pytest
import yaml
from commands import GLM, ran, refused
from keepmtp.cli.init import init
from keepmtp.recipes.find import named_file, read_file
from keepmtp.recipes.model_file import BLOCKS
from releases import MODELS, source_layout, write_checkpoint


@pytest.mark.full
@pytest.mark.parametrize("variant", ["nvfp4a16-fp8", "w4a16-fp8"])
def test_an_unedited_recipe_makes_the_same_bytes(variant, tmp_path):
    shutil.copytree(GLM, tmp_path / "tune")
    assert ran("init ./tune", cwd=tmp_path) == "recipe.yaml\n"
    text = (tmp_path / "recipe.yaml").read_text()
    assert text.startswith("# A recipe, written by `keepmtp init`. The comments say what each key")
    assert "\nmodel: tune  # outputs are called <model>.<variant>\n" in text
    assert "\n  w4a16-fp8:\n    attention: FP8_DYNAMIC\n    dense_mlp: FP8_DYNAMIC\n" in text
    made = []
    for model, out in (("./tune", "one"), ("recipe.yaml", "other")):
        ran(f"quantize {model} --scheme {variant} --out {out}", cwd=tmp_path)
        made.append({path.name: path.read_bytes() for path in (tmp_path / out).iterdir()})
    assert made[0] == made[1] and "keepmtp.json" in made[0]


def test_its_default_and_its_comments_are_examples_that_work(tmp_path):
    """The lines that begin with `#` at the end, uncommented, are keys of a model file."""
    ran(f"init {GLM}", cwd=tmp_path)
    assert '"variant": "nvfp4a16-fp8"' in ran("plan recipe.yaml --json", cwd=tmp_path)
    head, _, tail = (tmp_path / "recipe.yaml").read_text().partition("in one of them:\n")
    raw = yaml.safe_load(
        head + "in one of them:\n" + tail.replace("# ", "", 1).replace("\n# ", "\n")
    )
    assert {*BLOCKS, "budget", "backbone_auto"} <= raw.keys(), "a key is not listed"
    # Not for every variant.
    for key in ("keep", "mtp_tuned", "kv_cache", "mtp_source", "from", "format", "keeps_config"):
        del raw[key]
    raw["variants"]["nvfp4-fp8"]["calibration"] = "mine"
    (tmp_path / "my.jsonl").write_text('{"text": "a"}\n' * 600_000)
    (tmp_path / "all.yaml").write_text(yaml.safe_dump(raw))
    for words in ("--scheme nvfp4-fp8", "--scheme nvfp4-mtp-auto --calibration mine"):
        assert "dataset my.jsonl" in ran(f"plan all.yaml {words}", cwd=tmp_path)


@pytest.mark.parametrize("model", MODELS)
def test_a_recipe_for_every_family_reads_back(model, tmp_path):
    folder = write_checkpoint(tmp_path / "it's: a #model", *source_layout(model))
    file = tmp_path / "recipe.yaml"
    init(str(folder), out=file)
    read = read_file(file)
    assert {"nvfp4a16-fp8", "w4a16-fp8", "fp8-dynamic"} <= read.flat.keys()
    for variant in read.flat:
        recipe = read.recipe(variant)
        assert recipe.source == str(folder) and recipe.revision == "local"


def test_a_shipped_model_is_copied(tmp_path):
    ran("init glm-4.7 --out mine.yaml", cwd=tmp_path)
    assert (tmp_path / "mine.yaml").read_text() == named_file("glm-4.7")[0].path.read_text()


def test_a_fine_tune_that_lost_its_block(tmp_path):
    """The recipe names the block, and makes what the command line makes."""
    config, tensors = source_layout("glm-4.7")
    write_checkpoint(tmp_path / "release", config, tensors)
    lost = {name: each for name, each in tensors.items() if not name.startswith("model.layers.3.")}
    write_checkpoint(tmp_path / "tune", config, lost)
    refused("init ./tune", says="Add --mtp-source", cwd=tmp_path)
    words = "--mtp-source ./release"
    ran(f"init ./tune {words}", cwd=tmp_path)
    mine, other = (
        json.loads(ran(f"plan {plan} --json", cwd=tmp_path))
        for plan in ("recipe.yaml", f"./tune --scheme nvfp4a16-fp8 {words}")
    )
    assert mine["groups"] == other["groups"] and mine["mtp_layers"] == 1
