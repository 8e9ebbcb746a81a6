"""Whole runs on a device: the shipped tiny model against the CPU, and one decoder layer as wide as
a real model's.

In: a device and a folder for files. Out: rows.

Easy to get wrong: a GPU adds up in another order than a CPU, so activations differ in their last
bits. What is made of weights alone must be the CPU's to the bit; what is made of activations is
compared within a tolerance.
"""

import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from figures import Figure
from gpu_row import forget_peak, peak_bytes, wait_for
from keepmtp.checkpoints.source import open_source
from keepmtp.checkpoints.values import TORCH_DTYPES
from keepmtp.pipeline import plan_before_measuring
from keepmtp.quantize.calibrate.data.data import CalibrationData
from keepmtp.quantize.calibrate.layers.backbone import calibrate_backbone
from keepmtp.quantize.calibrate.run import calibrate
from keepmtp.quantize.needs.memory import stations
from keepmtp.quantize.plan.plan import Plan
from keepmtp.quantize.run.ranks import Ranks
from keepmtp.quantize.write import writer
from keepmtp.quantize.write.output import claim
from keepmtp.recipes.find import find_recipe
from keepmtp.recipes.schema import Calibration
from safetensors.torch import load_file

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests" / "helpers"))
from releases import source_layout, write_checkpoint  # noqa: E402

CPU = torch.device("cpu")
SMALL = {"samples": 2, "held_out": 2, "sequence_length": 32, "batch_size": 2}
# A sum of some thousand products in BF16 differs by a few units of its last place (1/256) from one
# in another order.
SCALE_TOLERANCE = 0.02
PERPLEXITY_TOLERANCE = 0.01
ACCEPTANCE_TOLERANCE = 0.02
# Recipe -> what it proves: scales from data in backbone and block; rewritten weights.
LINES = ("tiny-glm4-moe.nvfp4-mtp-nvfp4", "tiny-glm4-moe.fp8", "tiny-glm4-moe.w4a16-gptq")
WIDE = {"glm-4.5-air": "nvfp4-fp8", "deepseek-v3.1": "nvfp4-fp8"}
# One sparse layer, and tables that are no wider than they must be.
ONE_LAYER = {"num_hidden_layers": 1, "first_k_dense_replace": 0, "vocab_size": 8192}
DEPTH = {"glm-4.5-air": 46, "deepseek-v3.1": 61}


# --- the tiny line --------------------------------------------------------------------------------


def tiny_line(device: torch.device, folder: Path, *, small: bool) -> list[Figure]:
    """Calibrate, measure and write the shipped model on the device and on the CPU."""
    rows = []
    for name in LINES[:1] if small else LINES:
        sides = {}
        for side, where in (("cpu", CPU), ("device", device)):
            wait_for(device)
            started = time.perf_counter()
            sides[side] = _line(name, folder / name / side, where, small=small)
            wait_for(device)
            rows.append(
                Figure(
                    part=name,
                    what=f"time, {side}",
                    measured=f"{time.perf_counter() - started:.1f} s",
                ),
            )
        rows += compared(name, sides["device"], sides["cpu"])
    return rows


def _line(
    name: str, folder: Path, device: torch.device, *, small: bool
) -> tuple[dict[str, Any], Path]:
    """The figures of a run, and the folder with its checkpoint."""
    recipe, _ = find_recipe(name)
    if small:
        assert recipe.calibration is not None
        recipe = recipe.model_copy(
            update={"calibration": recipe.calibration.model_copy(update=SMALL)}
        )
    plan = plan_before_measuring(recipe, open_source(ROOT / "models" / recipe.model))
    ranks = Ranks(rank=0, size=1, device=device)
    run = calibrate(plan, folder / "calibration", ranks=ranks)
    given = {"statistics": run.statistics, "calibration": run.summary, "ranks": ranks}
    # By itself, one process packs on every GPU that there is, also where the rest runs on the CPU.
    on_device = mock.patch.object(writer, "_devices", lambda: [device])
    with claim(run.plan, folder / "out", calibration=run.salt) as partial, on_device:
        writer.write(run.plan, partial, recipe_text="", threads=1, **given)
        return dict(run.summary), Path(partial)


def compared(
    name: str, device: tuple[dict[str, Any], Path], cpu: tuple[dict[str, Any], Path]
) -> list[Figure]:
    """Tensors and figures of two runs."""
    found, expected = (_tensors(folder) for _, folder in (device, cpu))
    rewritten = "gptq" in name
    of_data = {key for key in expected if key.rpartition(".")[2].startswith("input_")}
    of_weights = expected.keys() - of_data
    different = [key for key in sorted(of_weights) if not _same(found.get(key), expected[key])]
    measured = f"{len(of_weights) - len(different)} of {len(of_weights)} tensors equal"
    rows = [
        Figure(
            part=name,
            what="bytes of the output but input scales",
            measured=measured + (f", not {different[0]}" if different else ""),
            expected="" if rewritten else "the CPU's bits",
            met=rewritten or (found.keys() == expected.keys() and not different),
        )
    ]
    if of_data:
        apart = max(_apart(found[key], expected[key]) for key in of_data)
        rows.append(
            _within(name, "input scales, largest relative difference", apart, SCALE_TOLERANCE)
        )
    (theirs, _), (ours, _) = cpu, device
    for there, here in zip(theirs["rows"], ours["rows"], strict=True):
        what = f"{there['backbone']} backbone, {there['mtp']} block"
        apart = abs(here["perplexity"] / there["perplexity"] - 1)
        rows.append(
            _within(name, f"perplexity, {what}, relative difference", apart, PERPLEXITY_TOLERANCE)
        )
        if there["acceptance"] and here["acceptance"]:
            first = [each["acceptance"]["by_position"]["1"][0] for each in (here, there)]
            rows.append(
                _within(
                    name,
                    f"acceptance, {what}, difference",
                    abs(first[0] - first[1]),
                    ACCEPTANCE_TOLERANCE,
                )
            )
    return rows


def _within(part: str, what: str, apart: float, limit: float) -> Figure:
    return Figure(
        part=part,
        what=what,
        measured=f"{apart:.2%}",
        expected=f"at most {limit:.0%}",
        met=apart <= limit,
    )


def _apart(one: torch.Tensor, other: torch.Tensor) -> float:
    return float(((one.double() - other.double()) / other.double()).abs().max())


def _same(one: torch.Tensor | None, other: torch.Tensor) -> bool:
    if one is None or one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.equal(
        one.contiguous().view(-1).view(torch.uint8), other.contiguous().view(-1).view(torch.uint8)
    )


def _tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {
        name: value
        for file in sorted(folder.glob("*.safetensors"))
        for name, value in load_file(file).items()
    }


# --- one wide layer -------------------------------------------------------------------------------


def wide_layer(model: str, device: torch.device, folder: Path, *, small: bool) -> list[Figure]:
    """One decoder layer of a real model, of random weights: time, tokens a second, and the peak of
    the memory.
    """
    if device.type != "cpu":
        torch.accelerator.empty_cache()
    plan = wide_plan(model, folder / model, small=small)
    calibration = plan.recipe.calibration
    assert calibration is not None
    data = random_tokens(calibration, vocabulary=plan.view.text_config["vocab_size"])
    wait_for(device)
    forget_peak(device)
    seconds = seconds_of_pass(plan, data, folder / f"{model}.pass", device)
    tokens = data.ids.numel()
    minutes = seconds * DEPTH[model] / 60
    sizes = f"{len(data.ids)} x {data.ids.shape[1]} tokens, batches of {calibration.batch_size}"
    rows = [
        Figure(
            part=model,
            what=f"one layer, {sizes}",
            measured=f"{seconds:.1f} s, {tokens / seconds:.3g} tokens/s",
        ),
        Figure(
            part=model,
            what=f"{DEPTH[model]} such layers",
            measured=f"{minutes:.3g} min",
        ),
    ]
    return [*rows, *_memory(model, plan, peak_bytes(device))]


def seconds_of_pass(plan: Plan, data: CalibrationData, folder: Path, device: torch.device) -> float:
    """How long the backbone's pass takes this process alone, into a new folder."""
    folder.mkdir()
    ranks = Ranks(rank=0, size=1, device=device)
    wait_for(device)
    started = time.perf_counter()
    calibrate_backbone(plan, data, folder, device=device, ranks=ranks)
    wait_for(device)
    return time.perf_counter() - started


def _memory(model: str, plan: Plan, peaks: tuple[int, int]) -> list[Figure]:
    """The peaks of the device against what `keepmtp plan` says: what the allocator has runs out."""
    counted = stations(plan)[0].device_bytes
    rows = []
    for what, peak, planned in zip(
        ("peak of tensors", "peak memory"), peaks, (counted, counted), strict=True
    ):
        measured = f"planned {planned / 2**30:.3g} GiB, not measured"
        if peak:
            measured = f"{peak / 2**30:.3g} GiB, {peak / planned:.2f} of what is planned"
        expected = "at most what is planned" if peak else ""
        rows.append(
            Figure(part=model, what=what, measured=measured, expected=expected, met=peak <= planned)
        )
    return rows


def wide_plan(model: str, folder: Path, *, small: bool, samples: int = 256) -> Plan:
    """A plan over one sparse layer of a real model with random weights; the MTP block holds zeros
    and is not run.
    """
    size, wanted = "full", {"batch_size": 8, "samples": samples}
    if small:
        size, wanted = "tiny", SMALL
    config, tensors = source_layout(model, size=size, changes=ONE_LAYER)
    write_checkpoint(folder, config, tensors, num_shards=1)
    recipe, _ = find_recipe(model, scheme=WIDE[model])
    assert recipe.calibration is not None
    words = {group: word for group, word in recipe.backbone.items() if group != "dense_mlp"}
    changes = {"calibration": recipe.calibration.model_copy(update=wanted), "backbone": words}
    plan = plan_before_measuring(recipe.model_copy(update=changes), open_source(folder))
    fill_with_noise(plan, folder)
    return plan_before_measuring(plan.recipe, open_source(folder))


def fill_with_noise(plan: Plan, folder: Path, *parts: str) -> None:
    """Small random weights for these parts of the model, the backbone if none is named, written
    into the file; all of one dtype repeat the same noise.
    """
    noise = {name: _noise(name) for name in ("BF16", "F32", "F8_E4M3")}
    for tensor in plan.tensors:
        if tensor.part not in (parts or ("backbone",)):
            continue
        for name in tensor.inputs:
            entry = plan.entries[name]
            is_scale = "scale" in name.rpartition(".")[2] or len(entry.shape) == 1
            values = (
                torch.full((2**16,), 0.002 if "scale" in name else 1.0)
                if is_scale
                else noise[entry.dtype]
            )
            _repeat(
                folder / entry.file,
                entry.start,
                entry.num_bytes,
                values.to(TORCH_DTYPES[entry.dtype]),
            )


def _noise(dtype: str) -> torch.Tensor:
    values = torch.randn(2**23 + 1, generator=torch.Generator().manual_seed(0))
    return (
        values.clamp(-4, 4).to(TORCH_DTYPES[dtype])
        if dtype.startswith("F8")
        else (values * 0.02).to(TORCH_DTYPES[dtype])
    )


def _repeat(path: Path, start: int, num_bytes: int, values: torch.Tensor) -> None:
    raw = values.view(torch.uint8).numpy().tobytes()
    with open(path, "r+b") as file:
        file.seek(start)
        while num_bytes:
            num_bytes -= file.write(raw[:num_bytes])


def random_tokens(calibration: Calibration, *, vocabulary: int) -> CalibrationData:
    """Sequences of random tokens, as many as the recipe says."""
    count = calibration.samples + calibration.held_out
    shape = (count, calibration.sequence_length)
    ids = torch.randint(3, vocabulary, shape, generator=torch.Generator().manual_seed(0))
    return CalibrationData(
        ids=ids[: calibration.samples],
        held_out_ids=ids[calibration.samples :],
        provenance={"drawn": "at random"},
    )
