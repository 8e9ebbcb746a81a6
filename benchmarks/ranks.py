"""Several processes against one: the same calibrated run, from its data to a finished checkpoint.

In: nothing. GLM-4.7's layout with narrow layers, under minmax. Out: figures (figures.py).
Each process has one thread, and its processor time is counted from its first use of the plan on:
states, statistics, figures and shards are in it, imports are not.

Easy to get wrong: this machine may have fewer cores than there are processes, and other work on
them. So the figure is the processor time of the busiest process over that of the single one: what
is left of the work where each process has a device of its own. Waiting costs no processor time.
"""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import yaml
from calibrating import ROOT, SMALL, TINY, narrow, recipe_of
from figures import Figure, output_of, run

SIZE = 4
REPEATS = 2
# With four processes, each has a quarter of the text and of the shards, and all of the weights to
# load and to round.
MOST = 0.5
# All processes of a run are forked from one that has imported everything.
CHILD = """
import os, socket, sys, time
from pathlib import Path
from keepmtp.pipeline import plan_for, quantize
import keepmtp.quantize.calibrate.run, keepmtp.quantize.write.writer
recipe, source, out, size = sys.argv[1:]
with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free.getsockname()[1]))
os.environ.update(WORLD_SIZE=size, LOCAL_WORLD_SIZE=size)
children = []
for rank in map(str, range(int(size))):
    child = os.fork()
    if not child:
        os.environ.update(RANK=rank, LOCAL_RANK=rank)
        started = time.process_time()
        plan, text = plan_for(recipe, source=source)
        quantize(plan, text, out=Path(out), threads=1)
        os.write(1, f"seconds {time.process_time() - started}\\n".encode())
        os._exit(0)
    children.append(child)
sys.exit(any([os.waitpid(child, 0)[1] for child in children]))
"""


def ranks(folder: Path, *, small: bool) -> Iterator[Figure]:
    """A single process and several, in turns."""
    size, repeats = (2, 1) if small else (SIZE, REPEATS)
    layout = TINY | {"num_hidden_layers": 2} if small else {"num_hidden_layers": 6}
    source = narrow(folder / "source", layout)
    recipe = folder / "recipe.yaml"
    text = SMALL if small else {"samples": 256, "held_out": 16, "batch_size": 8}
    recipe.write_text(yaml.safe_dump(recipe_of("nvfp4", **text), sort_keys=False))
    # Of processor time the least is the truest: caches that others use only add to it.
    single = busiest = every = float("inf")
    for number in range(repeats):
        single = min(single, *quantized(recipe, source, folder / f"1-{number}", 1))
        seconds = quantized(recipe, source, folder / f"{size}-{number}", size)
        busiest, every = min(busiest, max(seconds)), min(every, sum(seconds))
    for who, took, most in (("the busiest", busiest, MOST), ("all", every, MOST * SIZE)):
        yield Figure(
            what=f"processor time of {who} of {size} processes",
            measured=f"{took:.1f} s against {single:.1f} s, {took / single:.2f}x",
            expected=f"<= {most}x",
            met=took <= most * single,
        )
    is_same = weights(folder / "1-0") == weights(folder / f"{size}-0")
    yield Figure(
        what=f"shards of {size} processes",
        measured="the same" if is_same else "others",
        expected="byte for byte those of one",
        met=is_same,
        at_any_size=True,
    )


def quantized(recipe: Path, source: Path, out: Path, size: int) -> list[float]:
    """One run by so many processes; the processor seconds of each."""
    own = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    words = [sys.executable, "-c", CHILD, str(recipe), str(source), str(out), str(size)]
    said = output_of(words, cwd=ROOT, env=os.environ | own).splitlines()
    return [float(line.split()[1]) for line in said if line.startswith("seconds ")]


def weights(out: Path) -> dict[str, bytes]:
    """The shards of a checkpoint."""
    return {path.name: path.read_bytes() for path in sorted(out.glob("*.safetensors"))}


if __name__ == "__main__":
    run(__doc__, {"ranks": ranks})
