"""`keepmtp where`: the make targets take the folder that was made by the same words, and guess
none.
"""

import shutil
from pathlib import Path

import pytest
from commands import keepmtp, refused

TINY = Path(__file__).parent.parent.parent / "models" / "tiny-glm4-moe"


@pytest.fixture
def folder(tmp_path) -> Path:
    """A current folder whose out/ has what several runs leave."""
    made = (
        "glm-4.7.fp8-dynamic",
        "glm-4.7.w4a16-fp8",
        "glm-4.7-flash.nvfp4a16-fp8",
        "tune.nvfp4a16-fp8-mtp-w4a16",
    )
    for name in made:
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
