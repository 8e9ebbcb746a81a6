"""The writer and the planner against their limits: both cores used, memory bounded by tensors,
plans in seconds.

In: nothing; synthetic checkpoints in a temporary folder (about 3 GB). Out: a table, or JSON with
--json; exit status 1 if a target is missed. Ratios come from runs interleaved in one process
family, so a busy machine shifts both sides.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "helpers"))
from keepmtp.checkpoints.files import partial_path
from releases import source_layout, write_checkpoint

SCHEMES = ("NVFP4A16", "FP8_BLOCK", "W4A16")
REPEATS = 3
# GLM-4.7's layout, narrow enough to be written in seconds: 5 experts' weights of 1536 x 5120 a
# layer.
LAYOUT = {
    "hidden_size": 5120,
    "moe_intermediate_size": 1536,
    "n_routed_experts": 5,
    "vocab_size": 4096,
}

CHILD = """
import json, os, re, sys, time
from pathlib import Path
source, out, model, scheme, threads, num_cores = sys.argv[1:]
os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:int(num_cores)])
from keepmtp.quantize.write.output import claim
from keepmtp.quantize.plan.plan import make_plan
from keepmtp.checkpoints.source import open_source
from keepmtp.recipes.find import find_recipe
def peak():
    # Not ru_maxrss: a child starts with its parent's. VmHWM begins anew with exec.
    return int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024
recipe, text = find_recipe(model, scheme=scheme)
started = time.perf_counter()
plan = make_plan(recipe, open_source(source), shard_bytes=8_000_000)
planned = time.perf_counter() - started
seconds = 0.0
if int(threads):
    from keepmtp.quantize.write.writer import write
before = peak()
if int(threads):
    started = time.perf_counter()
    with claim(plan, Path(out)) as partial:
        write(plan, partial, recipe_text=text, threads=int(threads))
    seconds = time.perf_counter() - started
largest = max((sum(plan.entries[n].num_bytes for t in unit for n in t.inputs) for unit in plan.units), default=0)
print(json.dumps({
    "planned": planned, "seconds": seconds, "bytes": plan.num_bytes_before, "largest_unit": largest,
    "tensors": sum(len(t.outputs) for t in plan.tensors),
    "rss_before": before, "rss": peak(),
}))
"""


def main() -> None:
    """Measure, print, and fail on a missed target."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    as_json = parser.parse_args().json
    with tempfile.TemporaryDirectory() as folder:
        rows = [*cores(Path(folder)), *memory(Path(folder)), *planning(Path(folder))]
    if as_json:
        print(json.dumps(rows, indent=2))
    else:
        table = Table(title="keepmtp: writer and planner")
        for column in ("what", "measured", "target", "met"):
            table.add_column(column)
        for row in rows:
            table.add_row(
                row["what"], row["measured"], row["target"], "yes" if row["met"] else "[red]NO[/]"
            )
        Console(width=120).print(table)
    sys.exit(not all(row["met"] for row in rows))


def cores(folder: Path) -> list[dict]:
    """Wall time on one core over wall time on all, a thread a core; the best of interleaved
    repeats.
    """
    num_cores = len(os.sched_getaffinity(0))
    source = synthetic(folder / "cores", num_layers=5)
    rows = []
    for scheme in SCHEMES:
        best = {1: float("inf"), num_cores: float("inf")}
        child(source, folder / f"warm-{scheme}", "glm-4.7", scheme, num_cores, num_cores)
        for repeat in range(REPEATS):
            for threads in best:
                out = folder / f"cores-{scheme}-{repeat}-{threads}"
                best[threads] = min(
                    best[threads],
                    child(source, out, "glm-4.7", scheme, threads, threads)["seconds"],
                )
        ratio = best[1] / best[num_cores]
        goal = 1.7 if num_cores == 2 else 0.85 * num_cores
        rows.append(
            {
                "what": f"{scheme}: {num_cores} cores over 1",
                "ratio": ratio,
                "measured": f"{ratio:.2f}x",
                "target": f">= {goal:.2f}x",
                "met": ratio >= goal,
            }
        )
    return rows


def memory(folder: Path) -> list[dict]:
    """Peak memory of the writer beyond its imports, at two model sizes."""
    small = child(
        synthetic(folder / "small", num_layers=3), folder / "small-out", "glm-4.7", "NVFP4A16", 2
    )
    large = child(
        synthetic(folder / "large", num_layers=12), folder / "large-out", "glm-4.7", "NVFP4A16", 2
    )
    extra = {
        name: run["rss"] - run["rss_before"] for name, run in (("small", small), ("large", large))
    }
    # Two units in flight and one being put away, each with its packed result.
    bound = 6 * large["largest_unit"]
    return [
        {
            "what": (
                f"peak memory, source {small['bytes'] / 2**20:.0f} and "
                f"{large['bytes'] / 2**20:.0f} MiB"
            ),
            "measured": f"{extra['small'] / 2**20:.0f} and {extra['large'] / 2**20:.0f} MiB above imports",
            "target": f"<= {bound / 2**20:.0f} MiB (6 x the largest unit)",
            "met": max(extra.values()) <= bound,
        },
    ]


def planning(folder: Path) -> list[dict]:
    """A plan of DeepSeek-V4-Flash at full size, process start included in nothing but the plan
    itself.
    """
    config, tensors = source_layout("dsv4-flash", size="full")
    source = write_checkpoint(folder / "flash", config, tensors, num_shards=None)
    run = child(source, folder / "unused", "dsv4-flash", "nvfp4-fp8", 0)
    return [
        {
            "what": f"plan of {run['tensors']:,} tensors from headers",
            "measured": f"{run['planned']:.1f} s, {run['rss'] / 2**20:.0f} MiB",
            "target": "< 10 s",
            "met": run["planned"] < 10,
        }
    ]


def synthetic(folder: Path, *, num_layers: int) -> Path:
    """A checkpoint with random BF16 weights."""
    config, tensors = source_layout(
        "glm-4.7", size="tiny", changes={**LAYOUT, "num_hidden_layers": num_layers}
    )
    return write_checkpoint(folder, config, tensors, num_shards=2, data="random")


def child(
    source: Path, out: Path, model: str, scheme: str, threads: int, num_cores: int = 2
) -> dict:
    """One run in a process of its own, so that its cores and its peak memory are its own."""
    words = [
        sys.executable,
        "-c",
        CHILD,
        str(source),
        str(out),
        model,
        scheme,
        str(threads),
        str(num_cores),
    ]
    result = json.loads(subprocess.run(words, check=True, capture_output=True, text=True).stdout)
    shutil.rmtree(partial_path(out), ignore_errors=True)  # gives its pages back to the next run
    return result


if __name__ == "__main__":
    main()
