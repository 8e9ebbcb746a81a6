"""How much memory a calibrated run takes, station by station, from headers.

In: a plan. Out: a `StationMemory` for each part of the run whose tensors are in memory together, in
bytes, on the device that calibrates and on the host. And how much of this machine's memory is free.

It is a bound of a few terms: a factor of the weights, by the algorithm; the scores of one sequence,
since eager attention holds those of all heads in BF16 and twice in F32; and so many bytes a token
and channel. What an H100 took of two layers of true width (docs/tables/gpu.md) is below it.

A container has a limit of its own, which /proc/meminfo does not know; the smaller number counts.

Source: Linux Documentation/filesystems/proc.rst (MemAvailable), admin-guide/cgroup-v2.rst
(memory.max, memory.current) and cgroup-v1/memory.rst.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from math import prod
from pathlib import Path

from ...recipes.frozen import frozen
from ..plan.plan import Plan
from ..plan.tensor_plan import TensorPlan

BF16 = 2
F32 = 4
# Python with torch, transformers and llm-compressor, before a tensor is read.
PROCESS_BYTES = 1_200_000_000
# What CUDA and its libraries take of a GPU before a tensor is there.
CONTEXT_BYTES = 600_000_000
# What BF16 weights take while they are calibrated; and what those take besides that an algorithm
# rewrites: Hessians and an inverse; outputs that are compared; an offset a weight that is learned,
# its gradient, and what autograd keeps.
_WEIGHTS = 1.1
_REWRITTEN: Mapping[str, float] = {"gptq": 1, "awq": 0.5, "autoround": 13}
# A block that is trained: weights and gradients in F32, AdamW's moments, and what they are made of.
_TRAINED = 12
# Bytes a token and channel, of the residual stream and inside attention: input, residual, normed
# copies and outputs; queries, and keys and values for every head. And what linear attention
# computes in F32 without its own kernels.
_A_CHANNEL = 12
_LINEAR = 100
# F32 values that rounding one matrix to a scheme holds at a time.
_ROUNDING = 3
# Draft steps whose keys an MTP block attends to while acceptance is measured
# (`acceptance.NUM_STEPS`).
_DRAFT_STEPS = 3
# The limit and the use of the container this process is in: version 2, and version 1.
_LIMITS = (
    ("memory.max", "memory.current"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
)


@frozen
class StationMemory:
    """A part of the run whose tensors are in memory together.

    Attributes:
        name: for people.
        device_bytes: on the device that calibrates.
        host_bytes: in the memory of one process, whatever the device is.
    """

    name: str
    device_bytes: int
    host_bytes: int


def stations(plan: Plan) -> list[StationMemory]:
    """The stations of a calibrated run, in their order; of the decoder layers the one with most
    weights.

    Args:
        plan: its recipe has a calibration block.
    """
    layers: dict[int, list[TensorPlan]] = defaultdict(list)
    tables = dict[str, int]()
    block = []
    for tensor in plan.tensors:
        if tensor.fate in ("drop", "add") or tensor.role == "vision":
            continue
        if tensor.role in ("embedding", "head"):
            tables[tensor.role] = max(tables.get(tensor.role, 0), prod(tensor.shape))
        elif tensor.part == "mtp":
            block.append(tensor)
        elif tensor.layer is not None:
            layers[tensor.layer].append(tensor)
    index = max(layers, key=lambda index: _elements(layers[index]), default=0)
    layer = layers[index]
    calibration = plan.calibration
    length = calibration.sequence_length
    tokens = length * calibration.batch_size
    num_tokens = tokens
    if calibration.algorithm in ("awq", "autoround"):  # which keep a layer's states of all text
        num_tokens = length * calibration.samples
    # Three batches: one is computed, the next is read, the one before is written.
    states = 3 * num_tokens * channels(plan) * BF16
    inner = max((tensor.shape[-1] for tensor in layer if tensor.role == "attention"), default=0)
    inputs = _A_CHANNEL * tokens * (channels(plan) + inner)
    scores = plan.view.number("num_attention_heads") * length**2 * (BF16 + 2 * F32)
    embedding = BF16 * tables["embedding"]
    head = BF16 * tables.get("head", tables["embedding"])
    vocabulary = tables["embedding"] // plan.view.number("hidden_size")
    # Of one sequence, the same in F32, and the logarithm of their softmax.
    logits = length * vocabulary * (BF16 + 2 * F32)

    def station(name: str, device: float, host: int) -> StationMemory:
        return StationMemory(
            name=name, device_bytes=int(device) + embedding, host_bytes=PROCESS_BYTES + host
        )

    calibrated = _calibrated(layer, calibration.algorithm) + scores + inputs
    if any(tensor.role == "linear_attention" for tensor in plan.tensors):
        calibrated += _LINEAR * tokens * channels(plan)
    found = [
        station(f"decoder layer {index}", calibrated, plan.num_bytes_read(layer) + states),
        station("head", head + logits, 0),
    ]
    if plan.view.family.draft is not None and plan.view.num_mtp_layers:
        drafts = head + _calibrated(block, calibration.algorithm)
        drafts += _DRAFT_STEPS * scores + inputs
        found.append(station("MTP block", drafts, states))
    if plan.recipe.mtp_tuned is not None:
        steps = plan.recipe.mtp_tuned.draft_steps
        trained = (
            head + _TRAINED * BF16 * _elements(block) + 2 * steps * scores + steps * inputs + logits
        )
        found.append(station("training of the MTP block", trained, states))
    return found


def channels(plan: Plan) -> int:
    """Of the residual stream; of all streams together, where there are several."""
    return plan.view.number("hidden_size") * (plan.view.number("hc_mult") or 1)


def _calibrated(tensors: Iterable[TensorPlan], algorithm: str) -> float:
    """What the weights of a layer or of the MTP block take."""
    total = largest = 0.0
    for tensor in tensors:
        factor = _WEIGHTS
        if tensor.calibrated == "weights":
            factor += _REWRITTEN.get(algorithm, 0)
        total += factor * BF16 * prod(tensor.shape)
        if tensor.fate == "quantize":
            largest = max(largest, _ROUNDING * F32 * prod(tensor.shape[-2:]))
    return total + largest


def _elements(tensors: Iterable[TensorPlan]) -> int:
    return sum(prod(tensor.shape) for tensor in tensors)


def free_host_bytes(
    *, meminfo: Path = Path("/proc/meminfo"), groups: Path = Path("/sys/fs/cgroup")
) -> int:
    """Free bytes of main memory, for all processes of this machine or container together.

    Args:
        meminfo: the kernel's account of the machine.
        groups: where the files of control groups are.
    """
    lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
    free = int(lines["MemAvailable"].split()[0]) * 1024
    for limit, used in _LIMITS:
        if (groups / limit).is_file() and (
            words := (groups / limit).read_text().strip()
        ).isdecimal():
            # A cache of files counts as used there, and is given back when memory is short: so this
            # is a lower bound.
            free = min(free, max(0, int(words) - int((groups / used).read_text())))
    return free
