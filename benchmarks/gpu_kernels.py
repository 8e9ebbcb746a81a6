"""Single operations of a device: the bits of its casts and packers, its rates, its collectives.

In: a device. Out: rows. The CPU's bits are the reference: the suite compares them with
compressed-tensors.
"""

import tempfile
from collections.abc import Mapping
from math import inf, nan
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from compressed_tensors.distributed import as_broadcastable
from figures import Figure
from gpu_row import seconds_of
from keepmtp.checkpoints.dequantize import dequantize
from keepmtp.quantize.calibrate.layers.layer import calibrate
from keepmtp.quantize.calibrate.layers.work import LayerWork
from keepmtp.quantize.pack.pack import pack
from keepmtp.recipes.errors import CheckpointError
from keepmtp.recipes.schemes import SCHEMES
from torch import Tensor

CPU = torch.device("cpu")
# Each stores weights in its own way; the others differ from one of them in what they do with
# activations.
STORED = ("NVFP4A16", "MXFP4A16", "FP8", "FP8_DYNAMIC", "FP8_BLOCK", "W4A16", "W8A16", "W8A8")
# What ranks send to each other: sums of figures and of Hessians, packed weights, scales.
SENT = (torch.float64, torch.float32, torch.bfloat16, torch.int32, torch.uint8, torch.float8_e4m3fn)


def casts(device: torch.device, *, small: bool) -> list[Figure]:
    """FP8 and FP4: every code, and values of every size, to the bit."""
    rows = []
    for name, values in _values(small).items():
        found, expected = (
            values.to(where).to(torch.float8_e4m3fn).cpu() for where in (device, CPU)
        )
        rows.append(_compared("casts", f"{name} to FP8 E4M3", found, expected))
    for dtype in (torch.float8_e4m3fn, torch.float8_e8m0fnu):
        codes = torch.arange(256, dtype=torch.uint8).view(dtype)
        found, expected = (codes.to(where).float().cpu() for where in (device, CPU))
        number = ~expected.isnan()
        rows.append(_compared("casts", f"{str(dtype)[6:]} to F32", found[number], expected[number]))
    for number, weight in enumerate(_weights(small)):
        for name in STORED:
            found, expected = (
                pack(SCHEMES[name], [weight.to(where)])[0] for where in (device, CPU)
            )
            for suffix, value in expected.items():
                rows.append(
                    _compared(
                        "packed", f"{name} {suffix}, weight {number}", found[suffix].cpu(), value
                    )
                )
            if name in ("NVFP4A16", "MXFP4A16"):
                values = _dequantized(found), _dequantized(expected)
                rows.append(
                    _compared(
                        "packed",
                        f"{name} back to BF16, weight {number}",
                        values[0].cpu(),
                        values[1],
                    )
                )
    return _merged(rows)


def _values(small: bool) -> Mapping[str, Tensor]:
    """Values that FP8 can hold: each BF16, and F32 with all kinds of last bits."""
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    bits = torch.randint(-(2**31), 2**31, (2**14 if small else 2**26,), generator=_seeded()).to(
        torch.int32
    )
    found = {"BF16": every, "F32": bits.view(torch.float32)}
    return {name: values[values.abs() <= 448] for name, values in found.items()}


def _weights(small: bool) -> list[Tensor]:
    """Normal ones as in a model; and rows of all sizes, with zeros and with outliers."""
    shape, rng = ((256, 512) if small else (4096, 8192)), _seeded()
    normal = torch.randn(shape, generator=rng) * 0.02
    sizes = torch.logspace(-9, 9, shape[0])[:, None]
    wild = torch.randn(shape, generator=rng) * sizes
    wild[::7] = 0
    wild[:, ::131] *= 100
    return [normal.bfloat16(), wild.bfloat16(), normal]


def _dequantized(packed: Mapping[str, Tensor]) -> Tensor:
    form = "nvfp4" if "weight_global_scale" in packed else "mxfp4"
    rows, num_bytes = packed["weight_packed"].shape
    return dequantize(form, packed, shape=(rows, 2 * num_bytes))


def _compared(part: str, what: str, found: Tensor, expected: Tensor) -> Figure:
    """Whether two tensors have the same bits, and how many elements have others."""
    found, expected = (value.contiguous().view(-1).view(torch.uint8) for value in (found, expected))
    different = (
        int((found != expected).sum()) if found.shape == expected.shape else expected.numel()
    )
    measured = f"{different} of {expected.numel()} bytes differ"
    return Figure(
        part=part, what=what, measured=measured, expected="the CPU's bits", met=not different
    )


def _merged(rows: list[Figure]) -> list[Figure]:
    """One row for all that is equal in a part, and one for each difference."""
    merged = []
    for part in dict.fromkeys(row.part for row in rows):
        own = [row for row in rows if row.part == part]
        if good := [row for row in own if row.met]:
            what = f"{good[0].what} ... {good[-1].what}"
            measured = f"{len(good)} of {len(own)} comparisons equal"
            merged.append(
                Figure(part=part, what=what, measured=measured, expected="the CPU's bits")
            )
        merged += [row for row in own if not row.met]
    return merged


def finite(device: torch.device, *, small: bool) -> list[Figure]:
    """Whether one NaN or infinity among a layer's inputs is found: reductions of a device may skip
    a NaN.
    """
    model = torch.nn.Sequential(torch.nn.Linear(64, 8, bias=False)).to(device, torch.bfloat16)
    model.config = SimpleNamespace(name="one")
    work, rows = LayerWork(schemes={"0": "FP8_DYNAMIC"}, algorithm="minmax"), []
    for name, value, is_good in (
        ("1", 1.0, True),
        ("NaN", nan, False),
        ("inf", inf, False),
        ("-inf", -inf, False),
    ):
        values = torch.randn(4, 16 if small else 4096, 64, generator=_seeded()).bfloat16()
        values = values.to(device).index_fill(1, torch.tensor([3], device=device), value)
        found = True
        try:
            calibrate(model, [{"input": values}], work)
        except CheckpointError:
            found = False
        measured = f"{'finite' if found else 'not finite'}"
        rows.append(
            Figure(
                part="finite",
                what=f"inputs with {name}",
                measured=measured,
                expected="found",
                met=found == is_good,
            )
        )
    return rows


def rates(device: torch.device, *, small: bool) -> list[Figure]:
    """What the device can do at most: copies within it and to it, matrix products."""
    size, side = (2**22, 256) if small else (2**31, 8192)
    values = torch.empty(size, dtype=torch.uint8, device=device)
    host = torch.empty(size, dtype=torch.uint8, pin_memory=device.type != "cpu")
    matrix = torch.randn(side, side, dtype=torch.bfloat16, device=device)
    repeats = 3 if small else 10
    copies = {
        "copy within the device, bytes read and written": (lambda: values.clone(), 2 * size),
        "copy from pinned host memory": (lambda: values.copy_(host, non_blocking=True), size),
        "copy to pinned host memory": (lambda: host.copy_(values, non_blocking=True), size),
    }
    rows = [
        Figure(
            part="rates",
            what=what,
            measured=_per_second(num_bytes, seconds_of(call, device, repeats=repeats)),
        )
        for what, (call, num_bytes) in copies.items()
    ]
    seconds = seconds_of(lambda: matrix @ matrix, device, repeats=repeats)
    product = f"{2 * side**3 / seconds / 1e12:.3g} TFLOP/s"
    return [*rows, Figure(part="rates", what=f"BF16 matrix product, {side} wide", measured=product)]


def packing(device: torch.device, *, small: bool) -> list[Figure]:
    """How fast weights are packed, as a share of how fast the device copies them."""
    shape = (256, 512) if small else (8192, 16384)
    weight = (torch.randn(shape, generator=_seeded()) * 0.02).bfloat16().to(device)
    copied = seconds_of(lambda: weight.clone(), device, repeats=10)
    rows = []
    for name in STORED:
        scheme = SCHEMES[name]
        seconds = seconds_of(lambda scheme=scheme: pack(scheme, [weight]), device, repeats=3)
        share = (
            f"{_per_second(weight.nbytes, seconds)} of BF16, {copied / seconds:.1%} of the rate "
            "of a copy"
        )
        rows.append(Figure(part="packing", what=name, measured=share))
    return rows


def collectives(device: torch.device, *, small: bool) -> list[Figure]:
    """NCCL (gloo on a CPU) in a group of one: each collective that calibration calls, with each
    dtype.
    """
    backend = "gloo" if device.type == "cpu" else "nccl"
    if device.type != "cpu":
        torch.accelerator.set_device_index(device.index or 0)
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group(
            backend, init_method=f"file://{Path(folder) / 'store'}", rank=0, world_size=1
        )
        try:
            found = _exchanged(device, 8 if small else 2**20)
        finally:
            dist.destroy_process_group()
    what = f"{backend}: all_reduce, broadcast, all_gather_object, barrier"
    dtypes = ", ".join(str(dtype)[6:] for dtype in SENT)
    return [
        Figure(
            part="collectives",
            what=what,
            measured=found,
            expected=f"as sent: {dtypes}",
            met=found == "as sent",
        )
    ]


def _exchanged(device: torch.device, size: int) -> str:
    """What a group of one gives back; it is what was sent."""
    total = torch.arange(size, dtype=torch.float64, device=device)
    dist.all_reduce(total)
    if not torch.equal(total.cpu(), torch.arange(size, dtype=torch.float64)):
        return "all_reduce changed a sum"
    for dtype in SENT:
        value = torch.arange(size).remainder(16).to(dtype)
        sent = value.to(device)
        dist.broadcast(as_broadcastable(sent), src=0)
        if not torch.equal(sent.cpu().view(torch.uint8), value.view(torch.uint8)):
            return f"broadcast changed {dtype}"
    objects: list[object] = [None]
    dist.all_gather_object(objects, {"tokens": 1})
    dist.barrier()
    return "as sent" if objects == [{"tokens": 1}] else "all_gather_object changed an object"


def _per_second(num_bytes: int, seconds: float) -> str:
    return f"{num_bytes / seconds / 1e9:.3g} GB/s"


def _seeded() -> torch.Generator:
    return torch.Generator().manual_seed(0)
