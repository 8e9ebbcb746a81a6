"""The dry load against its limits: a full-size checkpoint in seconds and under 1 GB, growth linear,
tiny ones at once.

In: nothing; sparse checkpoints in a temporary folder (headers alone). Out: a table, or JSON with
--json; exit status 1 if a target is missed. What is timed is the command as people type it, process
start and static check included.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "helpers"))
import releases
from checkpoint_files import Checkpoint, as_source
from keepmtp.checkpoints.source import open_source
from keepmtp.quantize.config.written import files_of
from keepmtp.quantize.plan.plan import make_plan
from keepmtp.recipes.find import find_recipe
from keepmtp.validate.check.check import check_source

KEEPMTP = str(Path(sys.executable).with_name("keepmtp"))
FULL = "dsv4-flash.nvfp4-fp8"
LAYERS = (11, 22, 43)  # a quarter, half and all of DeepSeek-V4-Flash
TINY = ("glm-4.7", "deepseek-r1", "qwen3-next-80b", "dsv4-flash", "glm-4.7-flash", "qwen3.5-397b")
LIMIT_SECONDS, LIMIT_MIB = 35, 1000 * 1000 / 1024
LIMIT_FIRST, LIMIT_FURTHER = 20, 2
LIMIT_BEND = 1.25
LISTED = "minimax-m3"  # its published NVFP4 release lists each projection of each expert
LIMIT_LISTED = 1.5


def full_size(folder: Path, num_layers: int) -> Path:
    """What keepmtp writes for DeepSeek-V4-Flash with that many decoder layers, headers over
    holes.
    """
    recipe, _ = find_recipe(FULL)
    ratios = releases.MODELS[recipe.model]["compress_ratios"]
    changes = {"num_hidden_layers": num_layers, "compress_ratios": [*ratios[:num_layers], 0]}
    config, tensors = releases.source_layout(recipe.model, size="full", changes=changes)
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
    started, worked = time.perf_counter(), processor_seconds()
    words = [KEEPMTP, "check", *map(str, folders), "--gpu", "sm100", "--json"]
    done = subprocess.run(words, capture_output=True, text=True)
    seconds = time.perf_counter() - started
    reports = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(reports) == len(folders) and all(report["ok"] for report in reports), (
        done.stdout + done.stderr
    )
    return seconds, processor_seconds() - worked, reports


def listed_by_expert(folder: Path) -> tuple[float, int]:
    """The static check of modelopt's mixture with an entry an expert, over the same with an entry
    for all experts.
    """
    config, tensors = releases.source_layout(LISTED, size="full")
    names = [name.removesuffix(".weight") for name in tensors if ".experts." in name]
    stored = {name: spec for name, spec in tensors.items() if ".experts." not in name}
    for name in names:
        rows, columns = tensors[f"{name}.weight"][1]
        stored |= {
            f"{name}.weight": ("U8", (rows, columns // 2)),
            f"{name}.weight_scale_2": ("F32", ()),
        }
        stored |= {
            f"{name}.weight_scale": ("F8_E4M3", (rows, columns // 16)),
            f"{name}.input_scale": ("F32", ()),
        }
    took = []
    for entries in (names, sorted({name.partition(".experts.")[0] + ".experts" for name in names})):
        layers = {entry: {"quant_algo": "NVFP4", "group_size": 16} for entry in entries}
        said = {
            "quant_method": "modelopt",
            "quant_algo": "MIXED_PRECISION",
            "quantized_layers": layers,
        }
        source = as_source(
            Checkpoint(config=config | {"quantization_config": said}, tensors=stored), folder
        )
        started = time.process_time()
        check_source(source)
        took.append(time.process_time() - started)
    return took[0] / took[1], len(names)


def processor_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        sized = [full_size(Path(scratch), layers) for layers in LAYERS]
        runs = [check(folder) for folder in sized]
        tensors = [reports[0]["facts"]["num_tensors"] for *_, reports in runs]
        for count, (took, worked, (report,)) in zip(tensors, runs, strict=True):
            peak = report["dry"][0]["peak_mib"]
            is_full = count == max(tensors)
            rows.append(
                (
                    f"DeepSeek-V4-Flash, {count:,} tensors",
                    f"{took:.1f} s, {worked:.1f} s of work, {peak} MiB",
                    f"{LIMIT_SECONDS} s, {LIMIT_MIB:.0f} MiB" if is_full else "",
                    not is_full or (took <= LIMIT_SECONDS and peak <= LIMIT_MIB),
                )
            )
        # Of the dry load alone: starting both processes costs the same at every size.
        quarter, half, full = (reports[0]["dry"][0]["seconds"] for *_, reports in runs)
        bend = ((full - half) / (tensors[2] - tensors[1])) / (
            (half - quarter) / (tensors[1] - tensors[0])
        )
        rows.append(
            (
                "seconds a tensor, half to full over quarter to half",
                f"{bend:.2f}x",
                f"{LIMIT_BEND}x",
                bend <= LIMIT_BEND,
            )
        )
        layouts = {model: releases.source_layout(model, size="tiny") for model in TINY}
        tiny = [
            releases.write_checkpoint(Path(scratch) / model, *layout)
            for model, layout in layouts.items()
        ]
        first, *_ = check(tiny[0])
        together, *_ = check(*tiny)
        further = (together - first) / (len(tiny) - 1)
        rows.append(
            ("one tiny checkpoint", f"{first:.1f} s", f"{LIMIT_FIRST} s", first <= LIMIT_FIRST)
        )
        ratio, count = listed_by_expert(Path(scratch))
        what = f"static check, {count:,} entries over one for each layer's experts"
        rows.append((what, f"{ratio:.2f}x", f"{LIMIT_LISTED}x", ratio <= LIMIT_LISTED))
        rows.append(
            ("each further one", f"{further:.2f} s", f"{LIMIT_FURTHER} s", further <= LIMIT_FURTHER)
        )
    show(rows, as_json=options.json)
    return 0 if all(is_met for *_, is_met in rows) else 1


def show(rows: list[tuple[str, str, str, bool]], *, as_json: bool) -> None:
    if as_json:
        print(
            json.dumps(
                [
                    dict(zip(("what", "measured", "limit", "is_met"), row, strict=True))
                    for row in rows
                ]
            )
        )
        return
    table = Table(title="dry load")
    for column in ("what", "measured", "limit", ""):
        table.add_column(column)
    for what, measured, limit, is_met in rows:
        table.add_row(what, measured, limit, "" if is_met else "[red]missed[/]")
    Console().print(table)


if __name__ == "__main__":
    sys.exit(main())
