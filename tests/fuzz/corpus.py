"""What fuzz cases start from: small checkpoints of every dialect, recipes, and a checkpoint with its results.

In: a name. Out: a folder, made when it is first asked for. The two tiny models are real; the other checkpoints have
headers and holes.
"""

import atexit
import random
import shutil
import tempfile
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path

import measured
import releases
from broken import BROKEN, GOOD
from checkpoint_files import Checkpoint, write
from keepmtp.recipes.find import find_recipe
from keepmtp.validate.report.report import refresh

ROOT = Path(__file__).parent.parent.parent
REAL = ("tiny-glm4-moe", "tiny-qwen3_5")
MODELOPT_FILE = "glm modelopt file"
MEASURED = "a measured checkpoint"
RECIPES = ("the model file of tiny-glm4-moe", "a flat recipe", "a calibrated recipe")


WHOLE: Mapping[str, Callable[[], Checkpoint]] = GOOD
BROKEN_NAMES = {case.name: case for case in BROKEN}


@cache
def _root() -> Path:
    """A folder for this campaign, gone with its process."""
    root = Path(tempfile.mkdtemp(prefix="keepmtp-fuzz-"))
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    return root


@cache
def folder(name: str) -> Path:
    """The folder of a name. It is read only: cases change copies."""
    if name in REAL:
        return ROOT / "models" / name
    path = _root() / f"{len(list(_root().iterdir()))}"
    if name in RECIPES:
        return _recipe(path, name)
    if name == MEASURED:
        path.mkdir()
        refresh(measured.measured(path / "NAME"))
        return path
    build = WHOLE[name] if name in WHOLE else BROKEN_NAMES[name].build
    return write(path, build())


def pick(rng: random.Random, *, quantized: bool = False) -> str:
    """A checkpoint: one of all dialects, one of the field's broken ones, or a real one."""
    if quantized:
        return rng.choice([name for name in WHOLE if not name.startswith("released ")])
    return rng.choice((rng.choice(REAL), rng.choice(list(WHOLE)), rng.choice(list(BROKEN_NAMES))))


def model_of(name: str) -> str:
    """The model whose recipes fit a checkpoint; "" where none is sure to."""
    if name in REAL:
        return name
    model = name.removeprefix("released ")
    return model if model in releases.MODELS else "glm-4.7" if name.startswith("glm ") else ""


def recipe_of(name: str) -> str:
    """The recipe's file name in its folder, which is also a source for it."""
    assert name in RECIPES
    return "recipe.yaml"


def _recipe(path: Path, name: str) -> Path:
    shutil.copytree(ROOT / "models" / "tiny-glm4-moe", path)
    shipped = ROOT / "recipes" / "models" / "tiny-glm4-moe.yaml"
    variant = {"a flat recipe": "w4a16-fp8", "a calibrated recipe": "nvfp4-mtp-auto"}.get(name)
    text = find_recipe(f"tiny-glm4-moe.{variant}")[1] if variant else shipped.read_text()
    (path / "recipe.yaml").write_text(text)
    return path
