"""CPU seconds that packing takes: keepmtp's `pack` against llm-compressor's `model_free_ptq`, same
tensors, one run.

Each repeat reads the same checkpoint from disk twice, once for either side, and times one core's
work on what was
read: `pack` here, `ModelFreePtqConverter.process` inside a real `model_free_ptq` call there.
Imports, reading, writing and the peer's dry run on meta tensors are not counted. Repeats alternate;
the best of each side counts, as anything else that runs on the machine only ever adds time. The
outputs of the last repeat are compared byte for byte.

A second table compares `pack` with itself where it searches the scales (`search` of a recipe), in
turns as well.

    python benchmarks/packing.py [--json] [--schemes NVFP4A16,MXFP4] [--repeats 3] [--tensors 4]

Needs the extras `quantize` and `llmcompressor`. Exit status 1 if a ratio misses its target or a
byte differs.
"""

import argparse
import importlib.metadata
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from unittest import mock

# Read when the packages are imported: one thread for either side, and nothing but our table on
# stdout.
os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", TQDM_DISABLE="1")
os.environ.update(LLM_COMPRESSOR_LOG_DISABLED="true", COMPRESSED_TENSORS_LOG_DISABLED="true")

import torch
from keepmtp.quantize.pack.pack import pack
from keepmtp.recipes.schemes import SCHEMES, SEARCHES, Scheme
from llmcompressor import model_free_ptq
from llmcompressor.entrypoints.model_free.converter import ModelFreePtqConverter
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file, save_file

TARGETS = {"NVFP4A16": 6.0, "MXFP4": 6.0, "FP8_DYNAMIC": 1.2, "FP8_BLOCK": 1.2, "W4A16": 1.2}
DEFAULT_SCHEMES = (*TARGETS, "MXFP4A16", "W8A16", "W8A8")
# Part of the plain rate that a search keeps.
SEARCH_TARGET = 0.25
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One row: Mparam per CPU second of either side, their ratio, and what it has to reach (0: no
    target).
    """

    scheme: str
    keepmtp: float
    llmcompressor: float
    ratio: float
    target: float
    is_identical: bool

    @property
    def is_good(self) -> bool:
        """The bytes are the peer's and the target, if any, is reached."""
        return self.is_identical and self.ratio >= self.target


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """One row: Mparam per CPU second with scales of the largest magnitude and with searched ones,
    and their ratio.
    """

    scheme: str
    search: str
    plain: float
    searched: float
    ratio: float

    @property
    def is_good(self) -> bool:
        """The target is reached."""
        return self.ratio >= SEARCH_TARGET


def write_checkpoint(folder: Path, num_tensors: int, shape: tuple[int, int]) -> None:
    """A one-shard checkpoint of expert weights with the spread of real ones: normal, rows of
    different size.
    """
    rng = torch.Generator().manual_seed(0)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "benchmark"}))
    tensors = {}
    for expert in range(num_tensors):
        rows = torch.randn(shape[0], 1, generator=rng).mul(0.3).exp() * 0.02
        # The peer fuses no module of this name, so each has its own global scale on both sides.
        name = f"model.layers.0.mlp.experts.{expert}.down_proj.weight"
        tensors[name] = (torch.randn(shape, generator=rng) * rows).bfloat16()
    save_file(tensors, folder / "model.safetensors")


def run_keepmtp(source: Path, scheme: Scheme) -> tuple[float, Tensors]:
    """CPU seconds of `pack` and what it made, by tensor name."""
    weights = load_file(source / "model.safetensors")
    start = time.process_time()
    packed = {name: pack(scheme, [weight])[0] for name, weight in weights.items()}
    seconds = time.process_time() - start
    outputs = {
        name.removesuffix("weight") + suffix: tensor
        for name, tensors in packed.items()
        for suffix, tensor in tensors.items()
    }
    return seconds, outputs


def measure_search(source: Path, scheme: Scheme, search: str, repeats: int) -> SearchResult:
    """Alternate packing with and without the search; the best time of each counts. The first call
    is a warm-up.
    """
    weights = [*load_file(source / "model.safetensors").values()]
    seconds: dict[str, list[float]] = {"": [], search: []}
    for repeat in range(repeats + 1):
        for word, spent in seconds.items():
            start = time.process_time()
            for weight in weights:
                pack(
                    scheme,
                    [weight],
                    search=word,
                    importance=[torch.linspace(0.1, 10, weight.shape[1])],
                )
            if repeat:
                spent.append(time.process_time() - start)
    num_params = sum(weight.numel() for weight in weights)
    plain, searched = (num_params / min(spent) / 1e6 for spent in seconds.values())
    return SearchResult(
        scheme=scheme.name, search=search, plain=plain, searched=searched, ratio=searched / plain
    )


def run_llmcompressor(source: Path, scheme: Scheme) -> tuple[float, Tensors]:
    """CPU seconds of the per-shard processing inside `model_free_ptq` and what it wrote, by tensor
    name.
    """
    with tempfile.TemporaryDirectory() as out, timed_process() as seconds:
        model_free_ptq(source, out, scheme=scheme.name, device="cpu")
        tensors = load_file(Path(out) / "model.safetensors")
        return sum(seconds), {name: tensor.clone() for name, tensor in tensors.items()}


@contextmanager
def timed_process() -> Iterator[list[float]]:
    """Collect the CPU seconds of each call of the peer's `process` on real tensors, this side of
    its I/O.
    """
    seconds: list[float] = []
    original = ModelFreePtqConverter.process

    def process(self: ModelFreePtqConverter, tensors: Tensors) -> Tensors:
        is_dry_run = any(tensor.is_meta for tensor in tensors.values())
        start = time.process_time()
        outputs = original(self, tensors)
        if not is_dry_run:
            seconds.append(time.process_time() - start)
        return outputs

    with mock.patch.object(ModelFreePtqConverter, "process", process):
        yield seconds


def same_bytes(ours: Tensors, theirs: Tensors) -> bool:
    """Equal names, shapes and bytes; FP8_BLOCK's scales are F32 here and BF16 there, and compared
    as values.
    """
    if set(ours) != set(theirs):
        return False
    for name, tensor in ours.items():
        expected = theirs[name].to(tensor.dtype) if name.endswith("_scale") else theirs[name]
        if tensor.dtype != expected.dtype or tensor.shape != expected.shape:
            return False
        if not torch.equal(
            tensor.reshape(-1).view(torch.uint8), expected.reshape(-1).view(torch.uint8)
        ):
            return False
    return True


def measure(source: Path, scheme: Scheme, repeats: int) -> Result:
    """Alternate the two sides; the best time of each counts. The first call of each side is a
    warm-up.
    """
    num_params = sum(tensor.numel() for tensor in load_file(source / "model.safetensors").values())
    sides: tuple[Callable[[Path, Scheme], tuple[float, Tensors]], ...] = (
        run_keepmtp,
        run_llmcompressor,
    )
    seconds: list[list[float]] = [[], []]
    outputs: list[Tensors] = [{}, {}]
    for repeat in range(repeats + 1):
        for i, side in enumerate(sides):
            spent, outputs[i] = side(source, scheme)
            if repeat:
                seconds[i].append(spent)
    rates = [num_params / min(side_seconds) / 1e6 for side_seconds in seconds]
    return Result(
        scheme=scheme.name,
        keepmtp=rates[0],
        llmcompressor=rates[1],
        ratio=rates[0] / rates[1],
        target=TARGETS.get(scheme.name, 0.0),
        is_identical=same_bytes(*outputs),
    )


def show(results: list[Result], shape: tuple[int, int], num_tensors: int) -> None:
    """The table, for people."""
    title = (
        f"Mparam per CPU second, one thread, {num_tensors} BF16 weights of {shape[0]} x {shape[1]}"
    )
    table = Table(title=title)
    table.add_column("scheme")
    for column in ("keepmtp", "llm-compressor", "ratio", "target", "same bytes"):
        table.add_column(column, justify="right")
    for result in results:
        target = f"{result.target:.1f}" if result.target else "-"
        rates = (f"{result.keepmtp:.1f}", f"{result.llmcompressor:.1f}", f"{result.ratio:.1f}")
        table.add_row(result.scheme, *rates, target, "yes" if result.is_identical else "NO")
    Console().print(table)


def show_searches(results: list[SearchResult]) -> None:
    """The second table, for people."""
    table = Table(
        title=f"Mparam per CPU second with searched scales, target {SEARCH_TARGET:.2f} of the "
        "plain rate"
    )
    table.add_column("scheme")
    table.add_column("search")
    for column in ("plain", "searched", "ratio"):
        table.add_column(column, justify="right")
    for result in results:
        rates = (f"{result.plain:.1f}", f"{result.searched:.1f}", f"{result.ratio:.2f}")
        table.add_row(result.scheme, result.search, *rates)
    Console().print(table)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--schemes", default=",".join(DEFAULT_SCHEMES))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--tensors", type=int, default=4)
    parser.add_argument("--rows", type=int, default=2048)
    parser.add_argument("--columns", type=int, default=4096)
    args = parser.parse_args()
    torch.set_num_threads(1)
    shape = (args.rows, args.columns)
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "source"
        write_checkpoint(source, args.tensors, shape)
        names = args.schemes.split(",")
        results = [measure(source, SCHEMES[name], args.repeats) for name in names]
        searched = [
            measure_search(source, SCHEMES[name], search, args.repeats)
            for name in names
            for search, schemes in SEARCHES.items()
            if name in schemes
        ]
    if args.json:
        packages = ("torch", "compressed-tensors", "llmcompressor")
        report = {
            "unit": "Mparam per CPU second, one thread",
            "tensors": args.tensors,
            "shape": shape,
            "repeats": args.repeats,
            "versions": {package: importlib.metadata.version(package) for package in packages},
            "results": [asdict(result) for result in results],
            "searches": [asdict(result) for result in searched],
        }
        print(json.dumps(report, indent=2))
    else:
        show(results, shape, args.tensors)
        show_searches(searched)
    return 0 if all(result.is_good for result in (*results, *searched)) else 1


if __name__ == "__main__":
    sys.exit(main())
