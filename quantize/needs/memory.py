"""How much memory a calibrated run takes, station by station, counted from headers.

In: a plan. Out: a `StationMemory` for each part of the run whose tensors are in memory together, in
bytes, on the device that calibrates and on the host. And the largest batch that fits a device, and
how much of this machine's memory is free.

The count is a simple one: the weights that are there, one factor for what a layer computes of each
token, one sequence's attention scores, and what the algorithm holds. It is right within a factor.

Easy to get wrong: eager attention holds the scores of all heads of a sequence, and a batch has one
sequence after the other (`forwards.adapted`). And what counts for Hessians and caches is not
modules but inputs: q, k and v read one tensor, and so do the gate and up projections of all
experts.

Source: transformers 5.17 eager_attention_forward, llm-compressor 0.14.0.1 modeling/moe
(LinearExperts2D), calibrate/layers/gptq.py and awq.py; compared with what torch allocates in
tests/quantize/needs/test_memory.py, with what is held in
tests/quantize/calibrate/layers/test_bounded.py, and with an H100 (docs/gpu.md). Linux
Documentation/filesystems/proc.rst (MemAvailable), admin-guide/cgroup-v2.rst (memory.max,
memory.current) and cgroup-v1/memory.rst.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from math import prod
from pathlib import Path

from ...recipes.frozen import frozen
from ...recipes.knobs import AutoRoundKnobs
from ..plan.plan import Plan
from ..plan.tensor_plan import TensorPlan

BF16, F32 = 2, 4
PROCESS_BYTES = 1_200_000_000
"""Python with torch, transformers and llm-compressor, before a tensor is read."""
CONTEXT_BYTES = 600_000_000
"""What CUDA and its libraries take of a GPU before a tensor is there."""
FRAGMENTS = 1.05
"""What the allocator has of a GPU, over what tensors take at most, with segments that grow
(`ranks.joined`); blocks of a fixed size that nothing fits again took 1.25."""
# BF16 values that a layer computes of a token, for each row or column of its widest matrix. On an
# H100, 5 is 1.05 times the peak of a layer of GLM-4.5-Air and 1.02 times that of DeepSeek-V3.1.
_COMPUTED = 5
# Without its own kernels, linear attention computes more, in F32.
_COMPUTED_BY_LINEAR = 16
# The same where autograd keeps them for the way back.
_KEPT_FOR_GRADIENTS = 14
# Bytes of an attention score: eager attention has each in BF16, and twice in F32.
_A_SCORE = BF16 + 2 * F32
# F32 values that rounding one matrix to a scheme holds at a time.
_ROUNDING = 3
# Weights to a byte of the scales and zero points that they have where they are rewritten: three
# bytes for a group of 16, the smallest.
_WEIGHTS_A_BYTE = 5
# Bytes: an offset of AutoRound, its gradient, and what autograd keeps of rounding by it; measured
# on the tiny models.
_A_LEARNED_WEIGHT = 26
# Of a trained weight: itself and its gradient in F32, AdamW's two moments and what it computes of
# them, and the gradient in BF16.
_A_TRAINED_WEIGHT = 5 * F32 + BF16
# Slots whose logits are there at a time while a block is trained, and F32 values of each
# (`tuning.py`).
_LOSS_SLOTS, _LOSS_COPIES = 256, 6
# Draft steps whose keys an MTP block attends to while acceptance is measured
# (`acceptance.NUM_STEPS`).
_DRAFT_STEPS = 3
_DENSE = ("dense_mlp", "shared_experts")
# The projection of an MLP that reads what the first ones computed.
_SECOND = ("down_proj", "w2")
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


def stations(plan: Plan, *, batch_size: int | None = None) -> list[StationMemory]:
    """The stations of a calibrated run, in their order; of the decoder layers the one with most
    weights.

    Args:
        plan: its recipe has a calibration block.
        batch_size: sequences in a batch, instead of the recipe's.
    """
    layers: dict[int, list[TensorPlan]] = defaultdict(list)
    around = list[TensorPlan]()
    head = list[TensorPlan]()
    block = list[TensorPlan]()
    for tensor in plan.tensors:
        if tensor.fate in ("drop", "add") or tensor.role == "vision":
            continue
        if tensor.part == "mtp":
            # The block's own copies of embedding and head are the target's.
            if tensor.role not in ("embedding", "head"):
                block.append(tensor)
        elif tensor.layer is not None:
            layers[tensor.layer].append(tensor)
        elif tensor.role == "head":
            head.append(tensor)
        else:
            around.append(tensor)
    if not head:  # a tied one
        head = [tensor for tensor in around if tensor.role == "embedding"]
    sizes = dict[int, int]()
    for number, tensors in layers.items():
        sizes[number] = _elements(tensors)
    index = max(sizes, key=sizes.__getitem__, default=0)
    layer = layers[index]

    length = plan.calibration.sequence_length
    vocabulary = max(tensor.shape[0] for tensor in head)
    tokens = (batch_size or plan.calibration.batch_size) * length
    # Two batches of states: one is read, one is written.
    states = 2 * tokens * channels(plan) * BF16
    counted = list[StationMemory]()

    def add(name: str, tensors: Sequence[TensorPlan], device: int, host: int) -> None:
        device += BF16 * (_elements(around) + _elements(tensors))
        counted.append(
            StationMemory(name=name, device_bytes=device, host_bytes=PROCESS_BYTES + host)
        )

    device, host = _of_algorithm(plan, layer)
    device += _computed(plan, layer, tokens, length)
    add(f"decoder layer {index}", layer, device, host + plan.num_bytes_read(layer) + states)
    # Logits of one sequence, the same in F32, and the logarithm of their softmax.
    add("head", head, length * vocabulary * (BF16 + 2 * F32), 0)
    if plan.view.family.draft is not None and plan.view.num_mtp_layers:
        device, host = _of_algorithm(plan, block)
        drafts = _computed(plan, block, length, _DRAFT_STEPS * length)
        if plan.recipe.measures_mtp or any(tensor.calibrated for tensor in block):
            drafts = max(drafts, _computed(plan, block, tokens, length))
        add("MTP block", [*head, *block], device + drafts, host + states)
    tuned = plan.recipe.mtp_tuned
    if tuned is not None:
        trained = [tensor for tensor in block if tensor.tuned]
        device = _A_TRAINED_WEIGHT * _elements(trained)
        device += min(length, _LOSS_SLOTS) * vocabulary * F32 * _LOSS_COPIES
        for step in range(1, tuned.draft_steps + 1):
            device += _kept_for_gradients(plan, block, length, step * length)
        add("training of the MTP block", [*head, *block], device, states)
    return counted


def largest_batch_size(plan: Plan, device_bytes: int, *, at_most: int) -> int:
    """The most sequences in a batch that a device with so many free bytes holds, a power of two; 0
    for none.

    Args:
        plan: its recipe has a calibration block.
        device_bytes: free before the model is there.
        at_most: no more than these, such as the sequences that there are.
    """
    for power in reversed(range(at_most.bit_length())):
        size = 2**power
        needed = [station.device_bytes for station in stations(plan, batch_size=size)]
        if max(needed) * FRAGMENTS <= device_bytes:
            return size
    return 0


def channels(plan: Plan) -> int:
    """Of the residual stream; of all streams together, where there are several."""
    return plan.view.number("hidden_size") * (plan.view.number("hc_mult") or 1)


def _width(tensors: Iterable[TensorPlan]) -> int:
    """Rows or columns of the widest matrix; of a stack of experts, one expert's."""
    widths = [max(tensor.shape[-2:]) for tensor in tensors if len(tensor.shape) > 1]
    return max(widths, default=0)


def _scores(plan: Plan, keys: int) -> int:
    """Attention scores of one sequence, over so many keys."""
    heads = plan.view.number("num_attention_heads")
    return heads * plan.calibration.sequence_length * keys


def _computed(plan: Plan, tensors: Sequence[TensorPlan], tokens: int, keys: int) -> int:
    """Bytes of what a layer computes of so many tokens, where each sequence has so many keys."""
    factor = _COMPUTED
    if any(tensor.role == "linear_attention" for tensor in tensors):
        factor = _COMPUTED_BY_LINEAR
    rounded = [prod(tensor.shape[-2:]) for tensor in tensors if tensor.fate == "quantize"]
    # For a moment there are one sequence's scores, or what one matrix is rounded by.
    briefly = max(_A_SCORE * _scores(plan, keys), _ROUNDING * F32 * max(rounded, default=0))
    return factor * BF16 * tokens * _width(tensors) + briefly


def _kept_for_gradients(plan: Plan, tensors: Sequence[TensorPlan], tokens: int, keys: int) -> int:
    """Bytes of what autograd keeps of a layer that is trained on so many tokens."""
    num_sequences = tokens // plan.calibration.sequence_length
    kept = _KEPT_FOR_GRADIENTS * BF16 * tokens * _width(tensors)
    return kept + num_sequences * _A_SCORE * _scores(plan, keys)


def _of_algorithm(plan: Plan, tensors: Sequence[TensorPlan]) -> tuple[int, int]:
    """What the algorithm holds for a layer or block, on the device and on the host."""
    rewritten = _rewritten(tensors)
    if not rewritten:
        return 0, 0
    calibration = plan.calibration
    length = calibration.sequence_length
    text = calibration.samples * length
    scales = _elements(rewritten) // _WEIGHTS_A_BYTE
    match calibration.algorithm:
        case "gptq":  # a Hessian for each input; of the widest a copy, and an inverse
            widest = max(tensor.shape[-1] for tensor in rewritten)
            return scales + hessian_bytes(tensors) + 2 * F32 * widest**2, 0
        case "awq":  # the outputs of a module in all batches
            outputs = text * plan.view.number("hidden_size") * BF16
            return scales + outputs, awq_cache_bytes(tensors, text, one_turn=True)
        case "autoround":  # on the host what the layer is handed, and returns before and after
            knobs = calibration.autoround or AutoRoundKnobs()
            learned = _A_LEARNED_WEIGHT * _elements(rewritten)
            learned += _kept_for_gradients(plan, tensors, knobs.batch_size * length, length)
            return learned, 3 * text * channels(plan) * BF16
        case _:
            return scales, 0


def hessian_bytes(tensors: Iterable[TensorPlan]) -> int:
    """Of the modules that GPTQ rewrites: K x K in F32 for each distinct input.

    Args:
        tensors: of one layer, or of the MTP block.
    """
    return _of_inputs(tensors, lambda channels: F32 * channels**2)


def awq_cache_bytes(tensors: Iterable[TensorPlan], tokens: int, *, one_turn: bool) -> int:
    """What AWQ keeps on the host: the inputs of attention and MLP, and of each projection behind
    another one.

    Args:
        tensors: of one layer, or of the MTP block.
        tokens: of all batches of a process.
        one_turn: experts are taken in turns, one at a time, as where memory is short.
    """
    return _of_inputs(tensors, lambda channels: BF16 * tokens * channels, one_turn=one_turn)


def _of_inputs(
    tensors: Iterable[TensorPlan],
    num_bytes: Callable[[int], int],
    *,
    one_turn: bool = False,
) -> int:
    """Bytes for each distinct input of what is rewritten, by its channels."""
    shared = dict[object, int]()
    of_experts = dict[object, int]()
    for tensor in _rewritten(tensors):
        size = num_bytes(tensor.shape[-1])
        is_second = tensor.module.endswith(_SECOND)
        if tensor.role == "experts" and is_second:
            num_experts = 1
            if tensor.stacked:
                num_experts = tensor.shape[0]
            for expert in range(num_experts):
                of_experts[tensor.module, expert] = size
        elif tensor.role in (*_DENSE, "experts") and not is_second:
            shared["input of the MLP", tensor.shape[-1]] = size
        else:
            shared[tensor.runtime] = size
    held = sum(shared.values())
    if one_turn:
        return held + max(of_experts.values(), default=0)
    return held + sum(of_experts.values())


def _rewritten(tensors: Iterable[TensorPlan]) -> list[TensorPlan]:
    return [tensor for tensor in tensors if tensor.calibrated == "weights"]


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
        if not (groups / limit).is_file():
            continue
        most = (groups / limit).read_text().strip()
        if most.isdecimal():  # or "max"
            # A cache of files counts as used there, and is given back when memory is short: so this
            # is a lower bound.
            left = int(most) - int((groups / used).read_text())
            free = min(free, max(0, left))
    return free
