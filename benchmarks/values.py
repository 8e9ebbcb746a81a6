"""`check --values all` against its limit: the same bytes read from the same files by as many threads, and dropped.

In: nothing; a synthetic NVFP4 checkpoint of 3.5 GB, mostly holes, in a temporary folder. Out: a table, or JSON with
--json; exit status 1 if a target is missed. Both sides read pages that are in memory: a disk makes the ratio smaller.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "helpers"))
from checkpoint_files import write
from good import ours
from keepmtp.validate.values.reading import Stretch, chosen, joined, summaries
from written_values import opened

REPEATS = 5
WIDE = {"hidden_size": 5120, "moe_intermediate_size": 1536, "n_routed_experts": 32, "num_hidden_layers": 5}
GOAL = 3.0


def main() -> None:
    """Measure, print, and fail on a missed target."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    as_json = parser.parse_args().json
    with tempfile.TemporaryDirectory() as folder:
        row = measured(Path(folder) / "checkpoint")
    if as_json:
        print(json.dumps(row, indent=2))
    else:
        table = Table(title="keepmtp: every value of a checkpoint")
        for column in ("what", "measured", "target", "met"):
            table.add_column(column)
        table.add_row(row["what"], row["measured"], row["target"], "yes" if row["met"] else "[red]NO[/]")
        Console(width=120).print(table)
    sys.exit(not row["met"])


def measured(folder: Path) -> dict:
    """The best of interleaved repeats of both."""
    runtime = opened(write(folder, ours("glm-4.7", "NVFP4A16", **WIDE)))
    entries = chosen(runtime, "all")
    stretches = list(joined(entries))
    num_bytes = sum(entry.num_bytes for entry in entries)
    best = {"read": float("inf"), "judged": float("inf")}
    for _ in range(REPEATS):
        best["read"] = min(best["read"], seconds(lambda: read(folder, stretches)))
        best["judged"] = min(best["judged"], seconds(lambda: summaries(runtime, entries)))
    ratio = best["judged"] / best["read"]
    rates = [num_bytes / best[side] / 1e9 for side in ("judged", "read")]
    return {
        "what": f"{num_bytes / 1e9:.1f} GB, {len(entries):,} tensors, {os.cpu_count()} threads",
        "ratio": ratio,
        "measured": f"{rates[0]:.1f} GB/s, reading alone {rates[1]:.1f}: {ratio:.2f} times its time",
        "target": f"<= {GOAL:g} times",
        "met": ratio <= GOAL,
    }


def read(folder: Path, stretches: list[Stretch]) -> None:
    """The bytes of every stretch, into memory and away."""

    def one(stretch: Stretch) -> None:
        room = bytearray(min(stretch.num_bytes, 32 * 2**20))
        with open(folder / stretch.file, "rb", buffering=0) as file:
            file.seek(stretch.start)
            left = stretch.num_bytes
            while left > 0:
                left -= file.readinto(memoryview(room)[:left]) or left

    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        list(pool.map(one, stretches))


def seconds(work) -> float:
    """Wall time of one call."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
