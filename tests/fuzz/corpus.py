"""What fuzz cases start from: small checkpoints of every dialect, recipes, and a checkpoint with
its results.

In: a name. Out: a folder, made when it is first asked for. The two tiny models are real; the other
checkpoints have headers and holes.
"""

import atexit
import os
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from random import Random

import cures
import measured
import releases
import reports
import stations
from broken import BROKEN
from checkpoint_files import write
from good_checkpoints import GOOD
from keepmtp.checkpoints.identity import identify
from keepmtp.recipes.find import find_recipe
from keepmtp.validate.facts.results import write_result
from keepmtp.validate.report.report import refresh

ROOT = Path(__file__).parent.parent.parent
REAL = ("tiny-glm4-moe", "tiny-qwen3_5")
MODELOPT_FILE = "glm modelopt file"
MEASURED = "a measured checkpoint"
OTHER = "tiny-glm4-moe with another byte"
RECIPES = ("the model file of tiny-glm4-moe", "a flat recipe", "a calibrated recipe")


WHOLE = GOOD
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
    path = _root() / f"{len(list(_root().iterdir()))}"
    if (
        name in REAL
    ):  # a hard link to the model's own file would change that file for a run that reads it
        return Path(shutil.copytree(ROOT / "models" / name, path))
    if name in RECIPES:
        return _recipe(path, name)
    if name == MEASURED:
        return _measured(path)
    if name in cures.BASES:
        return _cured(path, cures.BASES[name])
    if name == OTHER:
        shutil.copytree(ROOT / "models" / "tiny-glm4-moe", path)
        shard = max(path.glob("*.safetensors"))
        shard.write_bytes(shard.read_bytes()[:-1] + b"\x01")
        return path
    build = WHOLE[name] if name in WHOLE else BROKEN_NAMES[name].build
    return write(path, build())


def checkpoint_in(name: str) -> str:
    """The checkpoint's own folder where its results lie beside it."""
    if name == MEASURED:
        return "NAME"
    return "."


def pick(rng: Random, *, quantized: bool = False) -> str:
    """A checkpoint: one of all dialects, one of the field's broken ones, or a real one."""
    if quantized:
        return rng.choice([name for name in WHOLE if not name.startswith("released ")])
    return rng.choice((rng.choice(REAL), rng.choice(list(WHOLE)), rng.choice(list(BROKEN_NAMES))))


def copied(source: Path, target: Path) -> None:
    """A copy of a base, by hard links."""
    shutil.copytree(source, target, copy_function=_link)


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system
        shutil.copy(source, target)


def model_of(name: str) -> str:
    """The model whose recipes fit a checkpoint; "" where none is sure to."""
    if name in REAL:
        return name
    model = name.removeprefix("released ")
    if model in releases.MODELS:
        return model
    if name.startswith("glm "):
        return "glm-4.7"
    return ""


def _recipe(path: Path, name: str) -> Path:
    shutil.copytree(ROOT / "models" / "tiny-glm4-moe", path)
    shipped = ROOT / "recipes" / "models" / "tiny-glm4-moe.yaml"
    variant = {"a flat recipe": "w4a16-fp8", "a calibrated recipe": "nvfp4-mtp-auto"}.get(name)
    text = find_recipe(f"tiny-glm4-moe.{variant}")[1] if variant else shipped.read_text()
    (path / "recipe.yaml").write_text(text)
    return path


def _measured(path: Path) -> Path:
    """Check, server, evaluation, speed and closeness of one checkpoint."""
    path.mkdir()
    evidence = measured.measured(path / "NAME")
    identity = identify(path / "NAME", cache=evidence)
    bench = stations.bench_fact(with_source=False, sha256=identity.sha256)
    write_result(evidence, "bench", bench, checkpoint=identity, vllm=reports.VLLM)
    found = stations.closeness(evidence, checkpoint=identity.sha256)
    write_result(evidence, "closeness", found, checkpoint=identity, vllm=reports.VLLM)
    refresh(evidence)
    return path


def _cured(path: Path, dialect: str) -> Path:
    """Made by a process of its own: quantizing starts threads, and this process is to be forked."""
    places = [str(ROOT / "tests" / "helpers"), str(Path(__file__).parent)]
    made = f"import sys; sys.path[:0] = {places!r}; import cured; from pathlib import Path; "
    made += f"cured.make(Path({str(path)!r}), {dialect!r})"
    path.mkdir()
    subprocess.run([sys.executable, "-P", "-c", made], check=True, capture_output=True)
    return path
