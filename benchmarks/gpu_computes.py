"""What a GPU computes, against the CPU: the bits of casts and packers, whole calibrated runs, and the
rates of layers as wide as real ones.

In: a device. Out: figures. The CPU's bits are the reference: the suite compares them with
compressed-tensors.

Easy to get wrong: a GPU computes later than it is asked to, so a time counts only between two waits
for it. And it adds up in another order than a CPU: what is made of weights alone must be the CPU's
to the bit, what is made of activations is compared within a tolerance.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from math import inf, nan
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from _helpers import ROOT
from figures import Figure
from gpu_runs import line
from keepmtp.checkpoints.dequantize import dequantize
from keepmtp.checkpoints.source import open_source
from keepmtp.pipeline import plan_before_measuring
from keepmtp.quantize.calibrate.data.data import CalibrationData, calibration_data
from keepmtp.quantize.calibrate.layers.backbone import calibrate_backbone
from keepmtp.quantize.calibrate.layers.layer import calibrate
from keepmtp.quantize.calibrate.layers.work import LayerWork
from keepmtp.quantize.needs.memory import stations
from keepmtp.quantize.pack.pack import pack
from keepmtp.quantize.plan.plan import Plan
from keepmtp.quantize.run.ranks import Ranks
from keepmtp.recipes.errors import CheckpointError
from keepmtp.recipes.find import find_recipe
from keepmtp.recipes.schemes import SCHEMES
from releases import source_layout, write_checkpoint
from safetensors.torch import load_file
from torch import Tensor

CPU = torch.device("cpu")
# Each stores weights in its own way; the others differ from one of them in what they do with
# activations.
STORED = ("NVFP4A16", "MXFP4A16", "FP8", "FP8_DYNAMIC", "FP8_BLOCK", "W4A16", "W8A16", "W8A8")
SMALL = {"samples": 2, "held_out": 2, "sequence_length": 32, "batch_size": 2}
# A sum of some thousand products in BF16 differs by a few units of its last place (1/256) from one
# in another order.
SCALE_TOLERANCE = 0.02
PERPLEXITY_TOLERANCE = 0.01
ACCEPTANCE_TOLERANCE = 0.02
# Model -> its decoder layers, of which one is run, and that with tables no wider than they must be.
DEPTH = {"glm-4.5-air": 46, "deepseek-v3.1": 61}
TWICE = "copy within the device, bytes read and written"
ONE_LAYER = {"num_hidden_layers": 1, "first_k_dense_replace": 0, "vocab_size": 8192}

Pair = tuple[str, Tensor, Tensor]


# --- bits -----------------------------------------------------------------------------------------


def casts(device: torch.device, folder: Path, *, small: bool) -> Iterator[Figure]:
    """FP8: every code, and values of every size."""
    return _compared(_casts(device, small))


def packed(device: torch.device, folder: Path, *, small: bool) -> Iterator[Figure]:
    """What every scheme stores of three matrices, and FP4 read back."""
    return _compared(_packed(device, small))


def _casts(device: torch.device, small: bool) -> Iterator[Pair]:
    count = 2**26
    if small:
        count = 2**14
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    bits = torch.randint(-(2**31), 2**31, (count,), generator=_seeded()).to(torch.int32)
    for name, values in (("BF16", every), ("F32", bits.view(torch.float32))):
        values = values[values.abs() <= 448]
        found = values.to(device).to(torch.float8_e4m3fn).cpu()
        yield f"{name} to FP8 E4M3", found, values.to(torch.float8_e4m3fn)
    for dtype in (torch.float8_e4m3fn, torch.float8_e8m0fnu):
        codes = torch.arange(256, dtype=torch.uint8).view(dtype)
        expected = codes.float()
        is_number = ~expected.isnan()
        found = codes.to(device).float().cpu()
        yield f"{str(dtype)[6:]} to F32", found[is_number], expected[is_number]


def _packed(device: torch.device, small: bool) -> Iterator[Pair]:
    """Normal weights as in a model; and rows of all sizes, with zeros and with outliers."""
    shape = (4096, 8192)
    if small:
        shape = (256, 512)
    generator = _seeded()
    normal = torch.randn(shape, generator=generator) * 0.02
    wild = torch.randn(shape, generator=generator) * torch.logspace(-9, 9, shape[0])[:, None]
    wild[::7] = 0
    wild[:, ::131] *= 100
    for number, weight in enumerate((normal.bfloat16(), wild.bfloat16(), normal)):
        for name in STORED:
            found = pack(SCHEMES[name], [weight.to(device)])[0]
            expected = pack(SCHEMES[name], [weight])[0]
            for leaf, value in expected.items():
                yield f"{name} {leaf}, weight {number}", found[leaf].cpu(), value
            if "FP4" in name:
                form = name.removesuffix("A16").lower()
                back = dequantize(form, found, shape=shape).cpu()
                yield (
                    f"{name} back to BF16, weight {number}",
                    back,
                    dequantize(form, expected, shape=shape),
                )


def _compared(pairs: Iterable[Pair]) -> Iterator[Figure]:
    """One figure for all that are the same, and one for each that is not."""
    names = []
    for what, found, expected in pairs:
        different = _different(found, expected)
        if different:
            yield Figure(
                what=what,
                measured=f"{different} of {expected.nbytes} bytes differ",
                expected="the CPU's bits",
                met=False,
                at_any_size=True,
            )
        else:
            names.append(what)
    yield Figure(
        what=f"{names[0]} ... {names[-1]}",
        measured=f"{len(names)} comparisons equal",
        expected="the CPU's bits",
        at_any_size=True,
    )


def _different(found: Tensor | None, expected: Tensor) -> int:
    """How many bytes are others."""
    if found is None or found.shape != expected.shape or found.dtype != expected.dtype:
        return expected.nbytes
    sides = [value.contiguous().view(-1).view(torch.uint8) for value in (found, expected)]
    return int((sides[0] != sides[1]).sum())


def finite(device: torch.device, folder: Path, *, small: bool) -> Iterator[Figure]:
    """Whether one NaN or infinity among a layer's inputs is found: reductions of a device may skip
    a NaN.
    """
    model = torch.nn.Sequential(torch.nn.Linear(64, 8, bias=False)).to(device, torch.bfloat16)
    model.config = SimpleNamespace(name="one")
    work = LayerWork(schemes={"0": "FP8_DYNAMIC"}, algorithm="minmax")
    for value in (1.0, nan, inf, -inf):
        values = torch.randn(4, 64, 64, generator=_seeded()).bfloat16()
        values[:, 3] = value
        measured = "finite"
        try:
            calibrate(model, [{"input": values.to(device)}], work)
        except CheckpointError:
            measured = "not finite"
        yield Figure(
            what=f"inputs with {value:g}",
            measured=measured,
            expected="found",
            met=(measured == "finite") == (value == 1.0),
            at_any_size=True,
        )


# --- whole runs -----------------------------------------------------------------------------------


def tiny_line(scheme: str, device: torch.device, folder: Path, *, small: bool) -> Iterator[Figure]:
    """Calibrate, measure and write the shipped model on the device and on the CPU."""
    recipe, _ = find_recipe("tiny-glm4-moe", scheme=scheme)
    assert recipe.calibration is not None
    if small:
        text = recipe.calibration.model_copy(update=SMALL)
        recipe = recipe.model_copy(update={"calibration": text})
    source = ROOT / "models" / recipe.model
    data = calibration_data(recipe.calibration, open_source(source))
    sides = []
    for name, where in (("device", device), ("cpu", CPU)):
        started = time.perf_counter()
        out = folder / scheme / name
        _, summary = line(recipe, source, data, out, where)
        yield Figure(what=f"time, {name}", measured=f"{time.perf_counter() - started:.1f} s")
        sides.append((summary, tensors_in(out)))
    yield from compared(*sides, is_rewritten="gptq" in scheme)


Side = tuple[Mapping[str, Any], Mapping[str, Tensor]]


def compared(ours: Side, cpus: Side, *, is_rewritten: bool) -> Iterator[Figure]:
    """Figures of the record and tensors of two runs; weights that GPTQ has rewritten may differ."""
    (summary, found), (cpu_summary, expected) = ours, cpus
    scales, different = [0.0], []
    for name, value in expected.items():
        if name.rpartition(".")[2].startswith("input_"):
            scales.append(float((found[name].double() / value.double() - 1).abs().max()))
        elif _different(found.get(name), value):
            different.append(name)
    measured = "all equal"
    if different:
        measured = f"{len(different)} of {len(expected)} tensors differ, such as {different[0]}"
    yield Figure(
        what="bytes of the output but input scales",
        measured=measured,
        expected="" if is_rewritten else "the CPU's bits",
        met=is_rewritten or not different,
    )
    yield _within("input scales, largest relative difference", max(scales), SCALE_TOLERANCE)
    for here, there in zip(summary["rows"], cpu_summary["rows"], strict=True):
        what = f"{there['backbone']} backbone, {there['mtp']} block"
        apart = abs(here["perplexity"] / there["perplexity"] - 1)
        yield _within(f"perplexity, {what}, relative difference", apart, PERPLEXITY_TOLERANCE)
        if there["acceptance"]:
            first, second = (row["acceptance"]["by_position"]["1"][0] for row in (here, there))
            apart = abs(first - second)
            yield _within(f"acceptance, {what}, difference", apart, ACCEPTANCE_TOLERANCE)


def _within(what: str, apart: float, limit: float) -> Figure:
    return Figure(
        what=what, measured=f"{apart:.2%}", expected=f"at most {limit:.0%}", met=apart <= limit
    )


def tensors_in(folder: Path) -> dict[str, Tensor]:
    """Those of a run's checkpoint."""
    found = {}
    for file in folder.rglob("out*/*.safetensors"):
        found |= load_file(file)
    return found


# --- rates ----------------------------------------------------------------------------------------


def rates(device: torch.device, folder: Path, *, small: bool) -> Iterator[Figure]:
    """Copies and a matrix product, and how fast weights are packed."""
    side = 8192
    if small:
        side = 256
    weight = torch.randn(side, side, generator=_seeded()).bfloat16().to(device)
    copy = weight.clone()
    host = torch.empty(side, side, dtype=torch.bfloat16, pin_memory=device.type == "cuda")
    calls: dict[str, Callable[[], object]] = {
        TWICE: weight.clone,
        "copy from pinned host memory": lambda: copy.copy_(host, non_blocking=True),
        "copy to pinned host memory": lambda: host.copy_(copy, non_blocking=True),
    }
    for name in STORED:
        calls[f"packing, {name}, of BF16"] = lambda name=name: pack(SCHEMES[name], [weight])
    for what, call in calls.items():
        rate = weight.nbytes / _least_seconds(call, device) / 1e9
        if what == TWICE:
            rate *= 2
        yield Figure(what=what, measured=f"{rate:.3g} GB/s")
    rate = 2 * side**3 / _least_seconds(lambda: weight @ weight, device) / 1e12
    yield Figure(what=f"BF16 matrix product, {side} wide", measured=f"{rate:.3g} TFLOP/s")


def _least_seconds(call: Callable[[], object], device: torch.device) -> float:
    """Of a few calls, after one that is not counted."""
    call()
    return min(_seconds(call, device) for _ in range(3))


def _seconds(call: Callable[[], object], device: torch.device) -> float:
    _wait_for(device)
    started = time.perf_counter()
    call()
    _wait_for(device)
    return time.perf_counter() - started


def _wait_for(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def wide_layer(model: str, device: torch.device, folder: Path, *, small: bool) -> Iterator[Figure]:
    """One decoder layer of a real model, of random weights: time, tokens a second, and the peak of
    the memory.
    """
    plan = wide_plan(model, folder / model, small=small, data="random")
    calibration = plan.recipe.calibration
    assert calibration is not None
    samples, length = calibration.samples, calibration.sequence_length
    shape = (samples + calibration.held_out, length)
    ids = torch.randint(3, plan.view.text_config["vocab_size"], shape, generator=_seeded())
    data = CalibrationData(ids=ids[:samples], held_out_ids=ids[samples:], provenance={})
    ranks = Ranks(rank=0, size=1, device=device)
    out = folder / f"{model}.pass"
    out.mkdir()
    if device.type != "cpu":
        torch.accelerator.empty_cache()
        torch.accelerator.reset_peak_memory_stats(device)
    seconds = _seconds(
        lambda: calibrate_backbone(plan, data, out, device=device, ranks=ranks), device
    )
    yield Figure(
        what=f"one layer, {samples} x {length} tokens, batches of {calibration.batch_size}",
        measured=f"{seconds:.1f} s, {samples * length / seconds:.3g} tokens/s",
    )
    minutes = seconds * DEPTH[model] / 60
    yield Figure(what=f"{DEPTH[model]} such layers", measured=f"{minutes:.3g} min")
    if device.type != "cpu":
        peak = torch.accelerator.max_memory_reserved(device)
        planned = stations(plan)[0].device_bytes
        yield Figure(
            what="peak memory",
            measured=f"{peak / 2**30:.3g} GiB, {peak / planned:.2f} of what is planned",
            expected="at most what is planned",
            met=peak <= planned,
        )


def wide_plan(model: str, folder: Path, *, small: bool, data: Any) -> Plan:
    """A plan over one sparse layer of a real model; its MTP block is not run."""
    recipe, _ = find_recipe(model, scheme="nvfp4-fp8")
    assert recipe.calibration is not None
    size, text = "full", {"batch_size": 8, "samples": 256}
    if small:
        size, text = "tiny", SMALL
    config, tensors = source_layout(model, size=size, changes=ONE_LAYER)
    write_checkpoint(folder, config, tensors, num_shards=1, data=data)
    words = dict(recipe.backbone)
    words.pop("dense_mlp", None)
    changes = {"calibration": recipe.calibration.model_copy(update=text), "backbone": words}
    return plan_before_measuring(recipe.model_copy(update=changes), open_source(folder))


def _seeded() -> torch.Generator:
    return torch.Generator().manual_seed(0)
