"""What keepmtp writes, finds, plans and reports today, kept so that a change can be compared with it.

    python benchmarks/baseline.py record FOLDER     writes outputs.json, calibrated.json, findings.json,
                                                    plans.json and rows.json
    python benchmarks/baseline.py compare FOLDER    does the same in build/baseline, prints what differs
                                                    by name, and ends with 1 if anything does

In: the keepmtp that PYTHONPATH gives, with the tests/helpers of the same checkout. Out: JSON files, a
name of a case to what it gave. `--only PART` takes one of the five parts. `--every N` takes one of N
cases, by a hash of their names: a quick look. What was not recorded is not compared. All of it takes
ten minutes on a quiet core.

Easy to get wrong: another processor may round otherwise in calibration, so both run on one machine.
"""

import argparse
import json
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Container, Iterator
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any
from zlib import crc32

os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", TQDM_DISABLE="1")

import keepmtp

sys.path.insert(0, str(Path(keepmtp.__file__).with_name("benchmarks")))
sys.path.insert(0, str(Path(keepmtp.__file__).parent / "tests" / "helpers"))

import cards
import dry_corpus
import good
import releases
import torch
import yaml
from f32_products import multiply_in_f32
from keepmtp import api
from keepmtp.cli.plan_tables import plan_json
from keepmtp.recipes.conventions import FORMATS
from keepmtp.recipes.errors import KeepMTPError
from keepmtp.recipes.schemes import SCHEMES
from outputs import digests
from pydantic import ValidationError
from releases import shipped_recipes

CHECKOUT = Path(keepmtp.__file__).parent
BUILD = Path(__file__).parents[1] / "build" / "baseline"
CALIBRATED = (
    "tiny-glm4-moe.fp8-kv",
    "tiny-glm4-moe.nvfp4",
    "tiny-glm4-moe.w4a16-awq",
    "tiny-glm4-moe.w4a16-gptq",
    "tiny-glm4-moe.w8a8-smoothquant",
    "tiny-qwen3_5.nvfp4",
)
# Versions and the commit are in it, which differ between checkouts.
RECORD = "keepmtp.json"
MOST_LINES = 6  # that are printed of one case
REFUSALS = (KeepMTPError, ValidationError)
Case = Callable[[Path], Any]


def outputs() -> Iterator[tuple[str, Case]]:
    """Every tiny family in every scheme without data, in both dialects, block and all."""
    for model in sorted(releases.MODELS):
        for scheme in sorted(SCHEMES):
            if not SCHEMES[scheme].needs_calibration:
                for dialect in FORMATS:
                    yield f"{model} {scheme} {dialect}", partial(_output, model, scheme, dialect)


def _output(model: str, scheme: str, dialect: Any, folder: Path) -> Any:
    try:
        recipe = good.planned(model, scheme, scheme, format=dialect).recipe
    except REFUSALS:
        recipe = good.planned(model, scheme, "bf16", format=dialect).recipe
    finally:
        good.planned.cache_clear()
    file = folder / "recipe.yaml"
    file.write_text(yaml.safe_dump(recipe.model_dump(mode="json", exclude_defaults=True)))
    source = folder / "source"
    releases.write_checkpoint(source, *releases.source_layout(model), data="random")
    return _written(str(file), folder / "out", source=str(source))


def _written(recipe: str, out: Path, **choices: str) -> dict[str, str]:
    api.quantize(api.plan(recipe, **choices), out, threads=1)
    found = digests(out)
    del found[RECORD]
    return found


def calibrated() -> Iterator[tuple[str, Case]]:
    """Recipes that run batches through the shipped models."""
    for name in CALIBRATED:
        yield name, partial(_calibrated, name)


def _calibrated(name: str, folder: Path) -> dict[str, str]:
    return _written(name, folder / "out")


def findings() -> Iterator[tuple[str, Case]]:
    """What the check finds in each checkpoint of the corpus, good and broken."""
    for cases in (dry_corpus.good_cases(), dry_corpus.broken_cases()):
        for case in sorted(cases, key=lambda case: case.name):
            yield case.name, partial(_findings, case)


def _findings(case: dry_corpus.DryCase, folder: Path) -> Any:
    dry_corpus.write(folder / "checkpoint", case.build())
    found = api.check(folder / "checkpoint").findings
    return [finding.model_dump(mode="json") for finding in found]


def plans() -> Iterator[tuple[str, Case]]:
    """What `keepmtp plan --json` says of each shipped recipe, over the release at its true widths
    with few layers and experts.
    """
    for recipe in sorted(shipped_recipes(), key=lambda recipe: recipe.name):
        yield recipe.name, partial(_plan, recipe.name, recipe.model)


def _plan(name: str, model: str, folder: Path) -> Any:
    source = CHECKOUT / "models" / model
    if not source.is_dir():
        source = folder / "source"
        releases.write_checkpoint(source, *releases.thin_layout(model))
    return plan_json(api.plan(name, source=str(source)))


def rows() -> Iterator[tuple[str, Case]]:
    """Report, gates and card of a checkpoint whose measurements are made up."""
    yield "report", partial(_rows, lambda made: api.report(made).model_dump(mode="json"))
    yield (
        "card",
        partial(
            _rows, lambda made: (made.with_name(f"{made.name}.card") / "README.md").read_text()
        ),
    )


def _rows(read: Callable[[Path], Any], folder: Path) -> Any:
    return read(cards.green(folder))


PARTS = {part.__name__: part for part in (outputs, calibrated, findings, plans, rows)}


def measured(part: str, *, every: int, recorded: Container[str] = ()) -> dict[str, Any]:
    """What each case of a part gives, or one of `every` cases, or those that were `recorded`; a
    refusal is its sentence.
    """
    found = {}
    for name, case in PARTS[part]():
        if crc32(name.encode()) % every or (recorded and name not in recorded):
            continue
        with tempfile.TemporaryDirectory() as scratch:
            try:
                value = case(Path(scratch))
            except REFUSALS as refusal:
                value = {"refused": str(refusal)}
            text = json.dumps(value, default=_as_json).replace(scratch, "SCRATCH")
        found[name] = json.loads(text.replace(str(CHECKOUT), "CHECKOUT"))
    return found


def _as_json(value: Any) -> Any:
    if hasattr(value, "model_dump"):
        return value.model_dump(mode="json")
    return str(value)


def differences(before: Any, now: Any, place: str = "") -> Iterator[str]:
    """Each value that is another now, with its place."""
    if isinstance(before, dict) and isinstance(now, dict):
        for key in sorted(before.keys() | now.keys()):
            yield from differences(before.get(key), now.get(key), f"{place}/{key}")
    elif isinstance(before, str) and isinstance(now, str) and "\n" in before:
        yield from differences(before.splitlines(), now.splitlines(), place)
    elif isinstance(before, list) and isinstance(now, list):
        for number, (old, new) in enumerate(zip_longest(before, now)):
            yield from differences(old, new, f"{place}/{number}")
    elif before != now:
        yield f"{place}: {_short(before)} -> {_short(now)}"


def _short(value: Any) -> str:
    text = json.dumps(value)
    if len(text) > 200:
        return f"{text[:200]}..."
    return text


def compare(part: str, before: dict[str, Any], now: dict[str, Any]) -> int:
    """Print what differs; returns the number of cases."""
    differing = 0
    for name, value in now.items():
        lines = [*differences(before[name], value)]
        if lines:
            differing += 1
            print(f"{part}: {name}")
        for line in lines[:MOST_LINES]:
            print(f"    {line}")
        if len(lines) > MOST_LINES:
            print(f"    and {len(lines) - MOST_LINES} more")
    print(f"{part}: {differing} of {len(now)} cases differ", flush=True)
    return differing


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("verb", choices=("record", "compare"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", choices=PARTS, action="append", default=[])
    parser.add_argument("--every", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(1)
    multiply_in_f32()
    warnings.simplefilter("ignore")
    os.chdir(CHECKOUT)
    into = args.folder if args.verb == "record" else BUILD
    into.mkdir(parents=True, exist_ok=True)
    differing = 0
    for part in args.only or PARTS:
        before = {}
        if args.verb == "compare":
            before = json.loads((args.folder / f"{part}.json").read_text())
        now = measured(part, every=args.every, recorded=before)
        (into / f"{part}.json").write_text(json.dumps(now, indent=1, sort_keys=True))
        if args.verb == "compare":
            differing += compare(part, before, now)
    raise SystemExit(min(differing, 1))


if __name__ == "__main__":
    main()
