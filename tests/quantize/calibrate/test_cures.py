"""What a refusal of a calibrated run says to do is done, and the same command then ends as if
nothing had happened.
"""

import os
import re
import shutil
from pathlib import Path

import pytest
from commands import ROOT
from keepmtp import pipeline
from keepmtp.quantize.needs.room import calibration_folder
from keepmtp.recipes.errors import CheckpointError, RecipeError
from killed import small_recipe
from outputs import digests

MODEL = "tiny-glm4-moe"


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """A folder with recipe and source, an output, and the calibration that it came from."""
    folder = tmp_path_factory.mktemp("made")
    shutil.copytree(ROOT / "models" / MODEL, folder / MODEL)
    small_recipe(folder, f"{MODEL}.fp8")
    quantized(folder, folder / "out")
    return folder


def quantized(made: Path, out: Path) -> dict[str, str]:
    plan, text = pipeline.plan_for(
        str(made / f"{MODEL}.fp8.yaml"), source=str(made / MODEL), mtp="FP8"
    )
    pipeline.quantize(plan, text, out=out, threads=1, keep_calibration=True)
    return digests(out)


def damage(how: str, path: Path) -> None:
    if how == "lost":
        path.unlink()
    elif how == "truncated":
        os.truncate(path, path.stat().st_size - 7)
    elif how == "flipped":
        raw = bytearray(path.read_bytes())
        raw[-3] ^= 64
        path.write_bytes(raw)
    else:  # another file, with size and time kept
        shutil.copy2(path, path.with_name("copy"))
        os.replace(path.with_name("copy"), path)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "how, pattern",
    [
        ("flipped", "statistics/layer-*"),
        ("truncated", "statistics/layer-*"),
        ("lost", "statistics/layer-*"),
        ("flipped", "mtp/*.safetensors"),
        ("lost", "mtp/*.safetensors"),
        ("truncated", "states/*/mtp-*"),
        ("replaced", "*.safetensors"),
    ],
)
def test_the_cure_works(how, pattern, made, tmp_path):
    """Exactly what the cure names is removed; nothing else is needed."""
    out = tmp_path / "out"
    folder = made / MODEL
    calibration = shutil.copytree(calibration_folder(made / "out"), calibration_folder(out))
    if how != "replaced":
        folder = calibration
    if pattern.startswith("states"):
        shutil.rmtree(calibration / "mtp")
    damage(how, min(folder.glob(pattern)))
    with pytest.raises((CheckpointError, RecipeError)) as caught:
        quantized(made, out)
    assert not out.exists()
    if "Remove it, or choose another OUT" in str(caught.value):
        named = [str(caught.value.where)]
    else:
        named = re.findall(rf"{re.escape(str(tmp_path))}[^ ,:]*", caught.value.cure)
    assert named
    for path in named:
        shutil.rmtree(path)
    assert quantized(made, out) == digests(made / "out")
