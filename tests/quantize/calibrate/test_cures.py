"""What a refusal of a calibrated run says to do is done, and the same command then ends as if
nothing had happened.
"""

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from keepmtp import pipeline
from keepmtp.quantize.needs.room import calibration_folder
from keepmtp.recipes.errors import CheckpointError, RecipeError
from killed import small_recipe
from outputs import digests

ROOT = Path(__file__).parent.parent.parent.parent
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


def damaged(
    change: Callable[[bytearray], bytearray | None], pattern: str
) -> Callable[[Path, Path], None]:
    def damage(_: Path, calibration: Path) -> None:
        path = min(calibration.glob(pattern))
        raw = change(bytearray(path.read_bytes()))
        path.unlink() if raw is None else path.write_bytes(raw)

    return damage


def flipped(raw: bytearray) -> bytearray:
    raw[-3] ^= 64
    return raw


def truncated(raw: bytearray) -> bytearray:
    return raw[:-7]


def lost(_: bytearray) -> None:
    return None


def another_source(made: Path, _: Path) -> None:
    """With size and time kept. It comes last: what was calibrated on the first one is no other
    test's any more.
    """
    shard = next((made / MODEL).glob("*.safetensors"))
    shutil.copy2(shard, made / "copy")
    os.replace(made / "copy", shard)


def truncated_state(made: Path, calibration: Path) -> None:
    """In a run that was killed before the MTP pass, which reads it."""
    shutil.rmtree(calibration / "mtp")
    damaged(truncated, "states/*/mtp-*")(made, calibration)


DAMAGES = {
    "flipped layer": damaged(flipped, "statistics/layer-*"),
    "truncated layer": damaged(truncated, "statistics/layer-*"),
    "lost layer": damaged(lost, "statistics/layer-*"),
    "flipped MTP block": damaged(flipped, "mtp/*.safetensors"),
    "lost MTP block": damaged(lost, "mtp/*.safetensors"),
    "truncated state": truncated_state,
    "another source": another_source,
}


@pytest.mark.few(2)
@pytest.mark.parametrize("name", DAMAGES)
def test_the_cure_works(name, made, tmp_path):
    """Exactly what the cure names is removed; nothing else is needed."""
    out = tmp_path / "out"
    shutil.copytree(calibration_folder(made / "out"), calibration_folder(out))
    DAMAGES[name](made, calibration_folder(out))
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
