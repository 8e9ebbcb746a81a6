"""Every variant of the shipped models, and peers' own results, judged on the same held-out text:
docs/quality.md.

    python benchmarks/quality.py            runs what is missing, then writes docs/quality.{md,json,svg}
    python benchmarks/quality.py --only nvfp4,fp8 --model tiny-docs     these rows alone, and their bases

In: the rows of quality_rows.py. Out: a table for each model, a plot, and the facts behind both.
Each row is a recipe file, a command on one core in a process of its own, and a finished checkpoint,
which `judge.py` reads. A row whose recipe, release, versions and held-out text are those of an
earlier run is not run again; its checkpoint is removed once it is judged.

Easy to get wrong: times. Processor time of the command, without imports, is compared with that of
the NVFP4 row. The page gives ratios, without an interval. Most of it is measuring, which no peer
does: so a row that decides nothing by what it measures is run once more, with one held-out
sequence.
"""

import argparse
import hashlib
import json
import os
import shutil
import sys
import tempfile
import traceback
from collections.abc import Mapping
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, NoReturn

import quality_peers
import torch
import yaml
from judge import Judge, Reading
from keepmtp import __version__
from keepmtp.checkpoints.source import open_source
from keepmtp.cli.main import app
from keepmtp.quantize.calibrate.data.data import CalibrationData, calibration_data
from keepmtp.recipes.find import find_recipe
from keepmtp.recipes.schema import Recipe
from quality_page import write_page
from quality_rows import ALL, HELD_OUT, Row, rows_of

ROOT = Path(__file__).parent.parent
PACKAGES = ("torch", "transformers", "llmcompressor", "compressed-tensors", "nvidia-modelopt")


def main() -> None:
    """Run, judge, write."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--work", type=Path, default=ROOT / "build" / "quality", help="what a later run takes up"
    )
    parser.add_argument("--only", help="rows, with commas; the page keeps the others as they are")
    parser.add_argument("--model", choices=ALL, help="one model")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    # Not at import: tests import this module, and their children inherit the environment.
    os.environ["HF_HUB_OFFLINE"] = "1"
    facts = {}
    for model in (arguments.model,) if arguments.model else ALL:
        rows = rows_of(model)
        if arguments.only:
            keys = {"nvfp4", *arguments.only.split(",")}
            keys |= {row.base for row in rows if row.key in keys}
            rows = [row for row in rows if row.key in keys]
        facts[model] = run_model(model, rows, arguments.work / model)
    write_page(facts, versions(), ROOT / "docs")


def versions() -> dict[str, str]:
    """Of what computes."""
    return {"keepmtp": __version__, **{name: version(name) for name in PACKAGES}}


def run_model(model: str, rows: list[Row], work: Path) -> dict[str, dict[str, Any]]:
    """What each row's checkpoint does, by row, the release first: counts by sequence, bytes and
    seconds.
    """
    work.mkdir(parents=True, exist_ok=True)
    release, recipe = _release(model), find_recipe(model, scheme="nvfp4")[0]
    data = held_out(recipe, release, HELD_OUT[model])
    found: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(dir=work) as folder:
        judge = Judge(release, recipe, data, Path(folder) / "states")
        found["release"] = counts(judge.release) | {"seconds": 0.0, "bare": None}
        for number, row in enumerate(rows, start=1):
            stamp = stamp_of(row, model, data)
            kept = work / f"{row.key}.json"
            before = json.loads(kept.read_text()) if kept.is_file() else {}
            if before.get("stamp") != stamp:
                print(f"{model}, row {number} of {len(rows)}: {row.title}", flush=True)
                file, out = work / f"{row.key}.yaml", Path(folder) / row.key
                seconds = bare = run(row, model, file, out)
                before = counts(judge.read(out))
                shutil.rmtree(out)
                if decides_by_measuring(row, model):
                    bare = None
                elif not row.peer:
                    one = {"calibration": row.changes.get("calibration", {})}
                    if one["calibration"] is not None:
                        one["calibration"] = {**one["calibration"], "held_out": 1}
                        bare = run(replace(row, changes={**row.changes, **one}), model, file, out)
                        shutil.rmtree(out)
                before |= {"seconds": seconds, "bare": bare, "stamp": stamp}
                kept.write_text(json.dumps(before))
            found[row.key] = before
    return found


def held_out(recipe: Recipe, release: Path, num_sequences: int) -> CalibrationData:
    """Sequences behind the recipe's own held-out text: no run was calibrated on them, and none
    chose by them.
    """
    assert recipe.calibration is not None
    own = recipe.calibration.held_out
    calibration = recipe.calibration.model_copy(update={"held_out": own + num_sequences})
    data = calibration_data(calibration, open_source(release))
    written = data.held_out_written
    return replace(
        data,
        held_out_ids=data.held_out_ids[own:],
        held_out_written=None if written is None else written[own:],
        provenance={**data.provenance, "judged_from": own},
    )


def recipe_text(row: Row, model: str) -> str:
    """The row's recipe: a shipped variant with the row's keys."""
    recipe, text = find_recipe(model, scheme=row.variant)
    document = yaml.safe_load(text) | {"variant": row.key, "summary": row.title, "default": False}
    for key, value in row.changes.items():
        if key == "backbone" and value == "auto":
            document[key] = value
        elif key == "backbone":
            document[key] = dict.fromkeys(recipe.backbone, value)
        elif isinstance(value, Mapping) and isinstance(document.get(key), Mapping):
            document[key] = {**document[key], **value}
        else:
            document[key] = value
    return yaml.safe_dump(document, sort_keys=False)


def decides_by_measuring(row: Row, model: str) -> bool:
    """Whether held-out text chooses what is written: such a row has no time without it."""
    recipe = Recipe.model_validate(yaml.safe_load(recipe_text(row, model)))
    return recipe.measures_mtp or recipe.is_searched


def command(row: Row, model: str, file: Path, out: Path) -> list[str]:
    """What makes the row's checkpoint."""
    if row.peer:
        return ["benchmarks/quality_peers.py", row.peer, str(file), f"models/{model}", str(out)]
    return ["keepmtp", "quantize", str(file), "--out", str(out)]


def run(row: Row, model: str, file: Path, out: Path) -> float:
    """Make the row's checkpoint on one core; the processor seconds that it took."""
    file.write_text(recipe_text(row, model))
    return in_child(command(row, model, file, out), file.with_suffix(".log"))


def in_child(words: list[str], log: Path) -> float:
    """Run a command in a process of its own; the processor seconds that it took."""
    print(f"  {' '.join(words)}", flush=True)
    sys.stdout.flush()
    child = os.fork()
    if not child:
        _become(words, log)
    _, status, used = os.wait4(child, 0)
    if status:
        sys.exit(f"{' '.join(words)}\n{log.read_text()[-5000:]}")
    return used.ru_utime + used.ru_stime


def _become(words: list[str], log: Path) -> NoReturn:
    """Run a command in this process, which has imported what it needs: an import takes as long as a
    tiny model.
    """
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.chdir(ROOT)
    sys.argv = words
    try:
        if words[0] == "keepmtp":
            app(words[1:], standalone_mode=False)
        else:
            quality_peers.main()
        sys.stdout.flush()
    except BaseException:  # noqa: BLE001 - whatever it is, a forked child must not go on as its parent would
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def stamp_of(row: Row, model: str, data: CalibrationData) -> str:
    """SHA-256 of what a row's numbers depend on."""
    weights = [
        hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(_release(model).glob("*.safetensors"))
    ]
    parts = [recipe_text(row, model), row.peer, versions(), weights, dict(data.provenance)]
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()


def _release(model: str) -> Path:
    return ROOT / "models" / model


def counts(reading: Reading) -> dict[str, Any]:
    """A reading as sums by sequence: JSON values only; `choices` are compared once all rows are
    there.
    """
    target = reading.target
    return {
        "slots": [len(choices) for choices in target.choices],
        "log_likelihood": target.log_likelihoods.tolist(),
        "divergence": target.divergences.tolist(),
        "choices": target.choices.tolist(),
        "accepted": reading.acceptance.counts[:, 1:].tolist(),
        "num_slots": reading.acceptance.num_slots,
        "bytes": [reading.backbone_bytes, reading.mtp_bytes],
    }


if __name__ == "__main__":
    main()
