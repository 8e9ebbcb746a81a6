"""The dry load against its limits: a full-size checkpoint in seconds and under 1 GB, growth linear,
tiny ones at once.

In: nothing; sparse checkpoints in a temporary folder (headers alone). Out: figures (figures.py).
What is timed is the command as people type it, process start and static check included.
"""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "helpers"))
import releases
from figures import Figure, run, seconds_of_children
from keepmtp.checkpoints.source import open_source
from keepmtp.quantize.plan.configs import files_of
from keepmtp.quantize.plan.plan import make_plan
from keepmtp.recipes.find import find_recipe

KEEPMTP = str(Path(sys.executable).with_name("keepmtp"))
FULL = "dsv4-flash.nvfp4-fp8"
LAYERS = (11, 22, 43)  # a quarter, half and all of DeepSeek-V4-Flash
TINY = ("glm-4.7", "deepseek-r1", "qwen3-next-80b", "dsv4-flash", "glm-4.7-flash", "qwen3.5-397b")
SMALL_LAYERS = (4,)  # the first three layers choose their experts otherwise
# 17 to 36 s and 669 to 672 MiB were measured on machines of two cores; 6.6 to 8.2 s for a tiny one, and
# 0.3 s for each further one.
MOST_SECONDS, MOST_MIB = 45, 1000 * 1000 / 1024
MOST_FIRST, MOST_FURTHER = 20, 2
MOST_BEND = 1.25


def flash(folder: Path, num_layers: int, size: Literal["tiny", "full"]) -> Path:
    """What keepmtp writes for DeepSeek-V4-Flash with that many decoder layers, headers over
    holes.
    """
    recipe, _ = find_recipe(FULL)
    ratios = releases.MODELS[recipe.model]["compress_ratios"]
    changes = {"num_hidden_layers": num_layers, "compress_ratios": [*ratios[:num_layers], 0]}
    config, tensors = releases.source_layout(recipe.model, size=size, changes=changes)
    source = releases.write_checkpoint(
        folder / f"source-{num_layers}", config, tensors, num_shards=None
    )
    plan = make_plan(recipe, open_source(source))
    outputs = {
        output.name: (output.dtype, output.shape)
        for tensor in plan.tensors
        for output in tensor.outputs
    }
    return releases.write_checkpoint(
        folder / f"{num_layers}", files_of(plan)["config.json"], outputs, num_shards=None
    )


def check(*folders: Path) -> tuple[float, float, list[dict]]:
    """`keepmtp check --gpu sm100`: seconds, seconds of processor time (of both processes), and its
    reports.
    """
    started, worked = time.perf_counter(), seconds_of_children()
    words = [KEEPMTP, "check", *map(str, folders), "--gpu", "sm100", "--json"]
    done = subprocess.run(words, capture_output=True, text=True)
    seconds = time.perf_counter() - started
    reports = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(reports) == len(folders) and all(report["ok"] for report in reports), (
        done.stdout + done.stderr
    )
    return seconds, seconds_of_children() - worked, reports


def sizes(folder: Path, *, small: bool) -> Iterator[Figure]:
    """A quarter, half and all of a full-size checkpoint, and whether seconds grow faster than
    tensors.
    """
    runs, size = [], "tiny" if small else "full"
    for layers in SMALL_LAYERS if small else LAYERS:
        took, worked, (report,) = check(flash(folder, layers, size))
        count, dry = report["facts"]["num_tensors"], report["dry"][0]
        runs.append((count, dry["seconds"]))
        peak = dry["peak_mib"]
        is_full = layers == LAYERS[-1]
        yield Figure(
            what=f"DeepSeek-V4-Flash, {count:,} tensors",
            measured=f"{took:.1f} s, {worked:.1f} s of work, {peak} MiB",
            expected=f"<= {MOST_SECONDS} s, {MOST_MIB:.0f} MiB" if is_full else "",
            met=not is_full or (took <= MOST_SECONDS and peak <= MOST_MIB),
        )
    if not small:
        # Of the dry load alone: starting both processes costs the same at every size.
        (few, quarter), (more, half), (every, full) = runs
        bend = ((full - half) / (every - more)) / ((half - quarter) / (more - few))
        yield Figure(
            what="seconds a tensor, half to full over quarter to half",
            measured=f"{bend:.2f}x",
            expected=f"<= {MOST_BEND}x",
            met=bend <= MOST_BEND,
        )


def tiny(folder: Path, *, small: bool) -> Iterator[Figure]:
    """One tiny checkpoint, and what each further one in the same call adds."""
    folders = []
    for model in TINY[:2] if small else TINY:
        layout = releases.source_layout(model, size="tiny")
        folders.append(releases.write_checkpoint(folder / model, *layout))
    first, *_ = check(folders[0])
    yield Figure(
        what="one tiny checkpoint",
        measured=f"{first:.1f} s",
        expected=f"<= {MOST_FIRST} s",
        met=first <= MOST_FIRST,
    )
    together, *_ = check(*folders)
    further = (together - first) / (len(folders) - 1)
    yield Figure(
        what="each further one",
        measured=f"{further:.2f} s",
        expected=f"<= {MOST_FURTHER} s",
        met=further <= MOST_FURTHER,
    )


if __name__ == "__main__":
    run(__doc__, {"sizes": sizes, "tiny": tiny})
