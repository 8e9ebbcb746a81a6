"""What fuzz cases start from: small checkpoints of every dialect, recipes, files that a user names,
and a checkpoint with its results.

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

import measured
import releases
import reports
import stations
from broken import BROKEN
from checkpoint_files import write
from commands import ROOT
from damage import INDEX, ODD
from data_files import json_of, put_json, put_lines
from good_checkpoints import GOOD
from keepmtp.checkpoints.identity import identify
from keepmtp.recipes.find import find_recipe
from keepmtp.validate.facts.results import write_result
from keepmtp.validate.report.report import refresh
from task_rows import TASK_ROWS
from test_wheels import WHEEL, WHOLE_WHEEL

REAL = ("tiny-glm4-moe", "tiny-qwen3_5")
MEASURED = "a measured checkpoint"
OTHER = "tiny-glm4-moe with another byte"
RECIPES = {
    "the model file of tiny-glm4-moe": None,
    "a flat recipe": "w4a16-fp8",
    "a calibrated recipe": "nvfp4-mtp-auto",
}
DIALECTS = {"compressed-tensors": "modelopt", "modelopt": "compressed-tensors"}
CURED = {f"one model, first in {dialect}": dialect for dialect in DIALECTS}
BROKEN_NAMES = {case.name: case for case in BROKEN}
OF = {
    "any": (*REAL * 20, *GOOD, *BROKEN_NAMES),
    "quantized": [name for name in GOOD if not name.startswith("released ")],
    "modelopt": ["glm modelopt file"],
    "real": REAL,
    "recipes": [*RECIPES],
    "asked": ["files that a user names"],
    "measured": [MEASURED],
    "named": (*REAL, MEASURED),
    "answered": ["a server's answers"],
    "cured": [*CURED],
    "a wheel": ["a wheel"],
}


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
    if name in GOOD:
        return write(path, GOOD[name]())
    if name in BROKEN_NAMES:
        return write(path, BROKEN_NAMES[name].build())
    if name == MEASURED:
        return _measured(path)
    if name in CURED:
        return _cured(path, CURED[name])
    # A hard link to the model's own file would change that file for a run that reads it.
    model = name if name in REAL else REAL[0]
    shutil.copytree(ROOT / "models" / model, path)
    if name == OTHER:
        shard = max(path.glob("*.safetensors"))
        shard.write_bytes(shard.read_bytes()[:-1] + b"\x01")
    elif name in RECIPES:
        text = (ROOT / "recipes" / "models" / "tiny-glm4-moe.yaml").read_text()
        if RECIPES[name]:
            text = find_recipe(f"tiny-glm4-moe.{RECIPES[name]}")[1]
        (path / "recipe.yaml").write_text(text)
    elif name in OF["asked"]:
        files = {"prompts": ODD["prompts"], "texts": ODD["texts"]}
        files |= {f"rows-{task}": rows["rows"] for task, rows in TASK_ROWS.items()}
        for start, rows in files.items():
            for end in (".jsonl", ".jsonl.txt", ".csv", ""):
                put_lines(path / f"{start}{end}", rows)
    elif name in OF["answered"]:
        copied(folder(OTHER), path / "source")
        put_lines(path / "rows.jsonl", TASK_ROWS["gsm8k"]["rows"])
        (path / "answers").mkdir()
        for place, said in ODD["answers"].items():
            put_json(path / "answers" / f"{place.replace('/', '+')}.json", said)
    elif name in OF["a wheel"]:
        (path / WHEEL).write_bytes(WHOLE_WHEEL)
    return path


def copied(source: Path, target: Path) -> None:
    """A copy of a base, by hard links."""

    def link(source: str, target: str) -> None:
        try:
            os.link(source, target)
        except OSError:  # another file system
            shutil.copy(source, target)

    shutil.copytree(source, target, copy_function=link)


def model_of(name: str) -> str:
    """The model whose recipes fit a checkpoint; "" where none is sure to."""
    model = name.removeprefix("released ")
    if model in (*REAL, *releases.MODELS):
        return model
    return "glm-4.7" * name.startswith("glm ")


def _measured(path: Path) -> Path:
    """Check, server, evaluation, speed and closeness of one checkpoint."""
    path.mkdir()
    evidence = measured.measured(path / "NAME")
    identity = identify(path / "NAME", cache=evidence)
    facts = {
        "bench": stations.bench_fact(with_source=False, sha256=identity.sha256),
        "closeness": stations.closeness(evidence, checkpoint=identity.sha256),
    }
    for fact in facts.values():
        write_result(evidence, fact, checkpoint=identity, vllm=reports.VLLM)
    refresh(evidence)
    return path


def _cured(path: Path, dialect: str) -> Path:
    """Made by a process of its own: quantizing starts threads, and this process is to be forked."""
    done = "import sys; sys.path[:0] = sys.argv[3:]; from pathlib import Path; import corpus; "
    done += "corpus.make(Path(sys.argv[1]), sys.argv[2])"
    places = [str(ROOT / "tests" / "helpers"), str(Path(__file__).parent)]
    words = [sys.executable, "-P", "-c", done, str(path), dialect, *places]
    subprocess.run(words, check=True, capture_output=True)
    return path


def make(folder: Path, first: str) -> None:
    """One model: its `release`, `first` in a dialect, `there` in the other one, `lost` without its
    block, and `broken` with an index that leaves the block out.
    """
    from calibrated import in_both_formats
    from keepmtp.pipeline import plan_for, quantize
    from written_values import drop_block

    forms = {"mtp": "bf16", "experts": "NVFP4", "rest": "FP8_DYNAMIC", "shared_experts": "FP8"}
    made = in_both_formats(folder / "made", **forms)
    (folder / "made" / "source").rename(folder / "release")
    made[first][1].rename(folder / "first")
    shutil.rmtree(folder / "made")
    other = plan_for(str(folder / "first"), changes=[f"format={DIALECTS[first]}"])
    quantize(*other, out=folder / "there")
    drop_block(folder / "first", folder / "lost")
    shutil.copytree(folder / "first", folder / "broken")
    index = json_of(folder / "first" / INDEX)
    weights = index["weight_map"]
    index["weight_map"] = {name: weights[name] for name in weights if ".layers.3." not in name}
    put_json(folder / "broken" / INDEX, index)
