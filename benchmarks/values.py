"""The value check against its limits: what it adds to reading, and what it asks of the Hub.

In: nothing; synthetic checkpoints in a temporary folder, of 3.5 GB, and one of full size that is all
holes. Out: figures (figures.py). Both sides read pages that are in memory: a disk makes the ratio
smaller.
"""

import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import _helpers  # noqa: F401
from checkpoint_files import write
from figures import Figure, run
from good import ours, planned
from keepmtp.validate.check.reading import Stretch, chosen, joined, summaries
from releases import write_checkpoint
from written_values import opened

REPEATS = 5
WIDE = {
    "hidden_size": 5120,
    "moe_intermediate_size": 1536,
    "n_routed_experts": 32,
    "num_hidden_layers": 5,
}
# 1.2 to 2.4 times were measured on machines of two cores, 1.8 to 2.1 times in processor time.
TIMES_OF_READING, SHARE_OF_THE_SCALES = 2.5, 0.05


def read_all(folder: Path, *, small: bool) -> Iterator[Figure]:
    """The best of interleaved repeats of both."""
    folder, sizes = folder / "checkpoint", {} if small else WIDE
    runtime = opened(write(folder, ours("glm-4.7", "NVFP4A16", **sizes)))
    entries = chosen(runtime, "all")
    stretches = joined(runtime.source, entries)
    num_bytes = sum(entry.num_bytes for entry in entries)
    best = {"read": float("inf"), "judged": float("inf")}
    for _ in range(REPEATS):
        best["read"] = min(best["read"], seconds(lambda: read(folder, stretches)))
        best["judged"] = min(best["judged"], seconds(lambda: summaries(runtime, entries)))
    ratio = best["judged"] / best["read"]
    rates = [num_bytes / best[side] / 1e9 for side in ("judged", "read")]
    yield Figure(
        what=f"{num_bytes / 1e9:.1f} GB, {len(entries):,} tensors, {os.cpu_count()} threads",
        measured=f"{rates[0]:.1f} GB/s, reading alone {rates[1]:.1f}: {ratio:.2f} times its time",
        expected=f"<= {TIMES_OF_READING:g} times",
        met=ratio <= TIMES_OF_READING,
    )


def on_the_hub(folder: Path, *, small: bool) -> Iterator[Figure]:
    """What `scalars` and `scales` would ask of the Hub for a quantization of GLM-4.7 at full size,
    in the shards of its plan, all holes.
    """
    size = "tiny" if small else "full"
    plan, checkpoint = (
        planned("glm-4.7", "NVFP4", "bf16", size),
        ours("glm-4.7", "NVFP4", size=size),
    )
    outputs = {}
    for shard in plan.shards:
        outputs |= {output.name: (output.dtype, output.shape) for output in shard.outputs}
    runtime = opened(write_checkpoint(folder / "hub", checkpoint.config, outputs, num_shards=None))
    asked = {}
    for level in ("scalars", "scales"):
        runs = joined(runtime.source, chosen(runtime, level))
        requests = sum(-(-run.num_bytes // 2**25) for run in runs)
        asked[level] = sum(run.num_bytes for run in runs)
        yield Figure(
            what=f"GLM-4.7 in NVFP4, {level}",
            measured=f"{asked[level] / 1e6:,.1f} MB by {requests:,} requests",
        )
    ratio = asked["scalars"] / asked["scales"]
    yield Figure(
        what="scalars over scales",
        measured=f"{ratio:.2%}",
        expected=f"<= {SHARE_OF_THE_SCALES:.0%}",
        met=ratio <= SHARE_OF_THE_SCALES,
    )


def read(folder: Path, stretches: list[Stretch]) -> None:
    """The bytes of every stretch, into memory and away."""

    def one(stretch: Stretch) -> None:
        room = bytearray(min(stretch.num_bytes, 32 * 2**20))
        first = stretch.entries[0]
        with open(folder / first.file, "rb", buffering=0) as file:
            file.seek(first.start)
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
    run(__doc__, {"reading": read_all, "hub": on_the_hub})
