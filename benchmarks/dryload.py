"""The dry load against its limits: a full-size checkpoint in seconds and under 1 GB.

In: nothing; a sparse checkpoint in a temporary folder (headers alone). Out: a figure (figures.py).
What is timed is the command as people type it, process start and static check included.
"""

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import _helpers  # noqa: F401
import releases
from figures import Figure, output_of, run, seconds_of_children
from keepmtp.checkpoints.source import open_source
from keepmtp.quantize.plan.configs import files_of
from keepmtp.quantize.plan.plan import make_plan
from keepmtp.recipes.find import find_recipe

KEEPMTP = str(Path(sys.executable).with_name("keepmtp"))
FULL = "dsv4-flash.nvfp4-fp8"
# The first three layers choose their experts otherwise.
SMALL_LAYERS = 4
# 17 to 36 s and 669 to 672 MiB were measured on machines of two cores.
MOST_SECONDS, MOST_MIB = 45, 1000 * 1000 / 1024


def flash(folder: Path, *, small: bool) -> Path:
    """What keepmtp writes for DeepSeek-V4-Flash, headers over holes."""
    recipe, _ = find_recipe(FULL)
    size, changes = "full", {}
    if small:
        ratios = releases.MODELS[recipe.model]["compress_ratios"]
        size = "tiny"
        changes = {
            "num_hidden_layers": SMALL_LAYERS,
            "compress_ratios": [*ratios[:SMALL_LAYERS], 0],
        }
    layout = releases.source_layout(recipe.model, size=size, changes=changes)
    source = releases.write_checkpoint(folder / "source", *layout, num_shards=None)
    plan = make_plan(recipe, open_source(source))
    outputs = {}
    for tensor in plan.tensors:
        outputs |= {output.name: (output.dtype, output.shape) for output in tensor.outputs}
    config = files_of(plan)["config.json"]
    return releases.write_checkpoint(folder / "out", config, outputs, num_shards=None)


def dryload(folder: Path, *, small: bool) -> Iterator[Figure]:
    """`keepmtp check --gpu sm100`: seconds, seconds of processor time (of both processes), and
    memory.
    """
    checkpoint = flash(folder, small=small)
    started, worked = time.perf_counter(), seconds_of_children()
    report = json.loads(output_of([KEEPMTP, "check", str(checkpoint), "--gpu", "sm100", "--json"]))
    took = time.perf_counter() - started
    worked = seconds_of_children() - worked
    peak = report["dry"][0]["peak_mib"]
    yield Figure(
        what=f"DeepSeek-V4-Flash, {report['facts']['num_tensors']:,} tensors",
        measured=f"{took:.1f} s, {worked:.1f} s of work, {peak} MiB",
        expected=f"<= {MOST_SECONDS} s, {MOST_MIB:.0f} MiB",
        met=took <= MOST_SECONDS and peak <= MOST_MIB,
    )


if __name__ == "__main__":
    run(__doc__, {"dryload": dryload})
