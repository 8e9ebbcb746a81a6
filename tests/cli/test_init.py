"""`keepmtp init`: a recipe to edit that says what the command line without it would have done; and
`keepmtp where`: the make targets take the folder that was made by the same words, and guess none.
"""

import json
import shutil
from pathlib import Path

import pytest
import yaml
from commands import ROOT, keepmtp, refused
from keepmtp.cli.recipe import init
from keepmtp.recipes.find import named_file, read_file
from releases import MODELS, source_layout, write_checkpoint

TINY = ROOT / "models" / "tiny-glm4-moe"


@pytest.mark.few(1)
@pytest.mark.parametrize("variant", ["nvfp4a16-fp8", "w4a16-fp8"])
def test_an_unedited_recipe_makes_the_same_bytes(variant, tmp_path):
    shutil.copytree(TINY, tmp_path / "tune")
    done = keepmtp("init ./tune", cwd=tmp_path)
    assert done.returncode == 0 and done.stdout == "recipe.yaml\n", done.stderr
    for model, out in (("./tune", "one"), ("recipe.yaml", "other")):
        done = keepmtp(f"quantize {model} --scheme {variant} --out {out}", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    one, other = (
        {path.name: path.read_bytes() for path in (tmp_path / out).iterdir()}
        for out in ("one", "other")
    )
    assert one == other and "keepmtp.json" in one


def test_without_a_scheme_the_recipe_has_a_default(tmp_path):
    keepmtp(f"init {TINY} --out mine.yaml", cwd=tmp_path)
    done = keepmtp("plan mine.yaml --json", cwd=tmp_path)
    assert '"variant": "nvfp4a16-fp8"' in done.stdout, done.stderr


@pytest.mark.parametrize("model", MODELS)
def test_a_recipe_for_every_family_reads_back(model, tmp_path):
    folder = write_checkpoint(tmp_path / "it's: a #model", *source_layout(model, size="tiny"))
    file = tmp_path / "recipe.yaml"
    init(str(folder), out=file)
    read = read_file(file)
    assert {"nvfp4a16-fp8", "w4a16-fp8", "fp8-dynamic"} <= read.flat.keys()
    for variant in read.flat:
        recipe = read.recipe(variant)
        assert recipe.source == str(folder) and recipe.revision == "local"


def test_its_comments_are_examples_that_work(tmp_path):
    """The lines that begin with `#` at the end, uncommented, are keys of a model file."""
    keepmtp(f"init {TINY}", cwd=tmp_path)
    text = (tmp_path / "recipe.yaml").read_text()
    head, _, tail = text.partition("in one of them:\n")
    raw = yaml.safe_load(
        head + "in one of them:\n" + tail.replace("# ", "", 1).replace("\n# ", "\n")
    )
    assert {"keep", "overrides", "gates"} <= raw.keys()
    (tmp_path / "all.yaml").write_text(
        yaml.safe_dump({key: raw[key] for key in raw if key != "keep"})
    )
    done = keepmtp("plan all.yaml", cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_a_shipped_model_is_copied(tmp_path):
    keepmtp("init glm-4.7 --out mine.yaml", cwd=tmp_path)
    assert (tmp_path / "mine.yaml").read_text() == named_file("glm-4.7")[0].path.read_text()


def test_a_fine_tune_that_lost_its_block(tmp_path):
    """The recipe names the block, and makes what the command line makes; a model's own recipe takes
    no such word.
    """
    config, tensors = source_layout("glm-4.7", size="tiny")
    write_checkpoint(tmp_path / "release", config, tensors)
    lost = {name: each for name, each in tensors.items() if not name.startswith("model.layers.3.")}
    write_checkpoint(tmp_path / "tune", config, lost)
    words = "--mtp-source ./release"
    assert "Add --mtp-source" in keepmtp("init ./tune", cwd=tmp_path).stderr
    assert keepmtp(f"init ./tune {words}", cwd=tmp_path).returncode == 0
    plans = ["recipe.yaml", f"./tune --scheme nvfp4a16-fp8 {words}"]
    mine, other = (
        json.loads(keepmtp(f"plan {plan} --json", cwd=tmp_path).stdout) for plan in plans
    )
    assert mine["groups"] == other["groups"] and mine["mtp_layers"] == 1
    done = keepmtp(f"init glm-4.7 --out mine.yaml {words}", cwd=tmp_path)
    assert done.returncode == 2 and done.stderr.startswith("error: --mtp-source: belongs to"), (
        done.stderr
    )


def test_nothing_is_overwritten(tmp_path):
    (tmp_path / "recipe.yaml").write_text("mine")
    refused(
        f"init {TINY}",
        says="an existing file is never overwritten; got recipe.yaml",
        cwd=tmp_path,
    )
    assert (tmp_path / "recipe.yaml").read_text() == "mine"


# --- where ---------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path) -> Path:
    """A current folder whose out/ has what several runs leave."""
    made = (
        "glm-4.7.fp8-dynamic glm-4.7.w4a16-fp8 glm-4.7-flash.nvfp4a16-fp8 "
        "tune.nvfp4a16-fp8-mtp-w4a16"
    )
    for name in made.split():
        (tmp_path / "out" / name).mkdir(parents=True)
        for file in ("config.json", "keepmtp.json"):
            (tmp_path / "out" / name / file).write_text("{}")
    for suffix in ("partial", "report", "card", "calibration"):
        shutil.copytree(
            tmp_path / "out" / "glm-4.7.w4a16-fp8", tmp_path / "out" / f"glm-4.7.w4a16-fp8.{suffix}"
        )
    return tmp_path


def where(words: str, cwd: Path) -> str:
    done = keepmtp(f"where {words}", cwd=cwd)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_default_variant_is_meant_where_none_is_named(folder):
    assert where("glm-4.7-flash", cwd=folder) == "out/glm-4.7-flash.nvfp4a16-fp8"
    says = (
        "MODEL glm-4.7: out/glm-4.7.nvfp4a16-fp8 must be there; got only out/glm-4.7.fp8-dynamic, "
        "out/glm-4.7.w4a16-fp8. Name one by SCHEME or OUT."
    )
    refused("where glm-4.7", says=says, cwd=folder)
    refused("where mimo-7b", says="got no out/mimo-7b.*. Run make quantize", cwd=folder)


@pytest.mark.full
def test_the_words_of_the_run_find_its_folder(folder):
    assert where("glm-4.7 --scheme W4A16_FP8", cwd=folder) == "out/glm-4.7.w4a16-fp8"
    assert where("glm-4.7.fp8-dynamic", cwd=folder) == "out/glm-4.7.fp8-dynamic"
    assert where("zai-org/GLM-4.7 --scheme fp8-dynamic", cwd=folder) == "out/glm-4.7.fp8-dynamic"


@pytest.mark.full
def test_a_checkpoint_without_a_recipe(folder):
    for model in ("org/tune", "./tune", "https://huggingface.co/org/tune"):
        words = f"{model} --scheme NVFP4A16-fp8 --mtp W4A16"
        assert where(words, cwd=folder) == "out/tune.nvfp4a16-fp8-mtp-w4a16"
        says = (
            "SCHEME must be given where MODEL is a checkpoint; got only "
            "out/tune.nvfp4a16-fp8-mtp-w4a16"
        )
        refused(f"where {model}", says=says, cwd=folder)


@pytest.mark.few(1)
@pytest.mark.parametrize("words", ["--scheme nvfp4a16-fp8", "--scheme W8A16 --mtp fp8-dynamic"])
@pytest.mark.parametrize("model", ["tiny-glm4-moe", str(TINY)])
def test_it_is_the_folder_that_quantize_writes(model, words, tmp_path):
    done = keepmtp(f"quantize {model} {words}", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (made,) = [path for path in (tmp_path / "out").iterdir() if path.is_dir()]
    assert where(f"{model} {words}", cwd=tmp_path) == f"out/{made.name}"
