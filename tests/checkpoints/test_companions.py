"""Files besides weights: known names alone are carried, nothing through a link that leaves the
folder.
"""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from commands import shell
from data_files import cases, put_json, table
from hub import FIRST_COMMIT
from keepmtp import pipeline
from keepmtp.checkpoints.companions import companions_among
from keepmtp.checkpoints.files import partial_path
from keepmtp.checkpoints.source import download, open_source
from keepmtp.quantize.plan.own_code import code_left_out
from keepmtp.quantize.write.refusals import refusals, refuse
from keepmtp.recipes.errors import CheckpointError, RecipeError
from releases import source_layout, write_checkpoint

KNOWN = table("checkpoints/test_companions")["KNOWN"]
CODE = ("encoding/encoding_dsv4.py", "modeling_own.py")
STRAY = (
    "secrets.json",
    "notes.txt",
    "README.md",
    "id_ed25519",
    "training/args.json",
    "inference/model.py",
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "key").write_text("PRIVATE KEY")
    config, tensors = source_layout("glm-4.7")
    config["auto_map"] = {
        "AutoModelForCausalLM": "modeling_own.Own",
        "AutoConfig": ["org/other--configuration.C", None],
    }
    folder = write_checkpoint(tmp_path / "source", config, tensors, data="random")
    for name in (*KNOWN, *CODE, *STRAY):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("{}")
    return folder


def quantized(folder: Path, **choices: bool) -> dict[str, str]:
    """The output's small files, by name."""
    plan, text = pipeline.plan_for("glm-4.7", source=str(folder), scheme="FP8_DYNAMIC", **choices)
    out = folder.parent / "out"
    pipeline.quantize(plan, text, out=out, threads=1)
    files = (path for path in out.rglob("*") if path.is_file() and path.suffix != ".safetensors")
    return {path.relative_to(out).as_posix(): path.read_text() for path in files}


WRITTEN = {"config.json", "model.safetensors.index.json", "recipe.yaml", "keepmtp.json"}


def test_known_names_are_carried_and_nothing_else(folder):
    assert quantized(folder).keys() == {*KNOWN, *WRITTEN}


def test_a_tokenizer_of_sounds_is_carried_whole():
    """MiMo-V2.5's (XiaomiMiMo/MiMo-V2.5): without the folder vLLM serves it deaf, with a
    warning.
    """
    names = [
        "audio_tokenizer/config.json",
        "audio_tokenizer/model.safetensors",
        "audio_tokenizer/tokenizer_config.json",
    ]
    found = companions_among(
        [*names, "audio_tokenizer/notes.txt", "other/model.safetensors", "model.safetensors"]
    )
    assert (list(found.carried), found.left) == (names, ("audio_tokenizer/",))


def test_own_code_travels_only_with_the_flag(folder):
    plan, _ = pipeline.plan_for("glm-4.7", source=str(folder))
    assert plan.source.code == CODE
    said = code_left_out(plan)
    assert "encoding/encoding_dsv4.py, modeling_own.py, the checkpoint's own Python" in said
    assert "Carry it: --trust-remote-code" in said
    assert quantized(folder, trust_remote_code=True).keys() == {*KNOWN, *CODE, *WRITTEN}


def test_a_plan_says_what_is_carried_and_what_is_not(folder, capsys):
    from keepmtp.cli.options import ModelOptions
    from keepmtp.cli.plan import plan

    choices = ModelOptions(model="glm-4.7", source=str(folder))
    plan(choices, as_json=True)
    printed = json.loads(capsys.readouterr().out)
    assert set(printed["carried"]) == set(KNOWN)
    top = {name.partition("/")[0] + "/" if "/" in name else name for name in STRAY}
    assert set(printed["left"]) == {*CODE, *top}
    plan(choices)
    words = " ".join(capsys.readouterr().out.split())
    assert (
        "carried: LICENSE, LICENSE-MODEL" in words
        and "not carried: encoding/encoding_dsv4.py" in words
    )
    assert "left: README.md, id_ed25519" in words and "secrets.json" in words


@cases
def test_what_is_no_file_of_the_folder_is_refused(command, says, folder):
    shell(command, folder)
    with pytest.raises(CheckpointError, match=rf"source/.*{says}"):
        open_source(folder)


def test_a_link_made_after_the_plan_is_refused(folder):
    plan, text = pipeline.plan_for("glm-4.7", source=str(folder), scheme="FP8_DYNAMIC")
    shell("ln -sf ../key LICENSE", folder)
    out = folder.parent / "out"
    with pytest.raises(CheckpointError, match="must not change during a run"):
        pipeline.quantize(plan, text, out=out, threads=1)
    assert not out.exists()


def test_a_link_inside_the_folder_is_carried_as_a_file(folder):
    shell("ln -sf NOTICE.txt LICENSE", folder)
    assert quantized(folder)["LICENSE"] == "{}"


def test_the_hub_cache_keeps_its_links(folder, serve_hub):
    """A snapshot is a folder of links to blobs/ of its own repository; one that leads further is
    refused.
    """
    serve_hub(folder)
    remote = open_source("org/model")
    assert remote.companions == tuple(sorted(KNOWN)) and remote.code == CODE
    local = download(remote)
    assert local.folder is not None and local.revision == FIRST_COMMIT
    assert (
        (local.folder / "LICENSE").is_symlink()
        and local.companions == remote.companions
        and local.code == CODE
    )
    assert not [name for name in STRAY if (local.folder / name).exists()], (
        "strays are not even downloaded"
    )
    blob = (local.folder / "LICENSE").resolve()
    blob.unlink()
    blob.symlink_to(folder / "secrets.json")
    with pytest.raises(CheckpointError, match="must be in its folder"):
        open_source(local.folder)


def test_a_recipe_that_runs_code_needs_the_flag(folder, tmp_path):
    """The recipe may be a stranger's as well."""
    recipe, out = tmp_path / "mine.yaml", tmp_path / "out"
    plan, _ = pipeline.plan_for("glm-4.7.nvfp4-fp8", source=str(folder))
    raw = plan.recipe.model_dump(mode="json")
    raw["calibration"]["model_code"] = "checkpoint"
    put_json(recipe, raw)
    plan, _ = pipeline.plan_for(str(recipe), source=str(folder))
    rule = (
        r"needs --trust-remote-code; got calibration.model_code: checkpoint without it\. Read "
        r".*modeling_own\.py"
    )
    with pytest.raises(RecipeError, match=rule):
        refuse(plan, out)
    assert len(refusals(plan)) == 1 and not partial_path(out).exists()
    bare = replace(plan, source=replace(plan.source, code=()))
    with pytest.raises(RecipeError, match="Copy the release's Python into the checkpoint"):
        refuse(bare, out)
    trusted, _ = pipeline.plan_for(str(recipe), source=str(folder), trust_remote_code=True)
    assert refusals(trusted) == []
