"""How much memory a calibrated run takes, station by station, counted from headers.

In: a plan. Out: a `StationMemory` for each part of the run whose tensors are in memory together, in
bytes, on the device that calibrates and on the host. And the largest batch that fits a device, and
how much of this machine's memory is free.

What is small is not counted; the count is right within a factor. Easy to get wrong: eager attention
holds the scores of all heads of a sequence in BF16 and twice in F32 together, heads x S x S of
each, and a batch has one sequence after the other (`forwards.adapted`; a checkpoint's own
code that does not ask transformers how to attend has all at once). And what counts for Hessians and
caches is not modules but inputs: q, k and v read one tensor, and so do the gate and up projections
of all experts.

A container has a limit of its own, which /proc/meminfo does not know; the smaller number counts.

Source: transformers 5.17 eager_attention_forward and decoder layers, llm-compressor 0.14.0.1
modeling/moe (LinearExperts2D) and modifiers/gptq, calibrate/layers/gptq.py and awq.py; compared
with what torch allocates in tests/quantize/needs/test_memory.py, and with what is held in
tests/quantize/calibrate/layers/test_bounded.py. Linux Documentation/filesystems/proc.rst
(MemAvailable), admin-guide/cgroup-v2.rst (memory.max, memory.current) and cgroup-v1/memory.rst.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from math import prod
from pathlib import Path

from ...recipes.frozen import Shape, frozen
from ...recipes.knobs import AutoRoundKnobs
from ...recipes.schemes import SCHEMES
from ..plan.plan import Plan
from ..plan.tensor_plan import TensorPlan

BF16, F32, F64 = 2, 4, 8
# Python with torch, transformers and llm-compressor, before a tensor is read.
PROCESS_BYTES = 1_200_000_000
# What CUDA and its libraries take of a GPU before a tensor is there.
CONTEXT_BYTES = 600_000_000
# What the allocator has of a GPU, over what tensors take at most, with segments that grow
# (`ranks.joined`); blocks of a fixed size that nothing fits again took 1.25.
FRAGMENTS = 1.05
# Weights to a byte of the scales and zero points that they have where they are rewritten: three
# bytes for a group of 16, the smallest.
_WEIGHTS_A_BYTE = 5
# Copies of its values that the reference of linear attention holds.
_LINEAR = 8
# F32 values that rounding one matrix, or one input, to a scheme holds at a time.
_ROUNDING = 3
# Slots whose logits are there at a time while a block is trained, and F32 values of each
# (`tuning.py`).
_LOSS_SLOTS, _LOSS_COPIES = 256, 6
# Draft steps whose keys an MTP block attends to while acceptance is measured
# (`acceptance.NUM_STEPS`).
_DRAFT_STEPS = 3
# Bytes: an offset of AutoRound, its gradient, and what autograd keeps of rounding by it; measured
# on the tiny models.
_A_LEARNED_WEIGHT = 26
_ATTENTION = ("attention", "linear_attention", "indexer", "compressor")
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


def stations(plan: Plan) -> list[StationMemory]:
    """The stations of a calibrated run, in their order; of the decoder layers the one with most
    weights.

    Args:
        plan: its recipe has a calibration block.
    """
    layers: dict[int, list[TensorPlan]] = defaultdict(list)
    around = []
    block = []
    for tensor in plan.tensors:
        if tensor.fate in ("drop", "add") or tensor.role == "vision":
            continue
        if tensor.part == "backbone" and tensor.layer is not None:
            layers[tensor.layer].append(tensor)
        elif tensor.part == "backbone":
            around.append(tensor)
        elif tensor.role not in ("embedding", "head"):
            block.append(tensor)
    head = [tensor for tensor in around if tensor.role == "head"]
    around = [tensor for tensor in around if tensor.role != "head"]
    head = head or [tensor for tensor in around if tensor.role == "embedding"]
    index = max(layers, key=lambda index: _elements(layers[index]), default=0)
    layer = layers[index]
    found = []

    def add(name: str, tensors: Sequence[TensorPlan], device: int, host: int) -> None:
        device += BF16 * (_elements(around) + _elements(tensors))
        found.append(StationMemory(name=name, device_bytes=device, host_bytes=PROCESS_BYTES + host))

    size = plan.calibration.batch_size
    length = plan.calibration.sequence_length
    vocabulary = max(tensor.shape[0] for tensor in head)
    # Three batches: one is computed, the next is read, the one before is written.
    states = 3 * size * length * channels(plan) * BF16
    device, host = _of_algorithm(plan, layer)
    device += _activations(plan, layer, size, length)
    add(f"decoder layer {index}", layer, device, host + plan.num_bytes_read(layer) + states)
    # Logits of one sequence, the same in F32, and the logarithm of their softmax.
    add("head", head, length * vocabulary * (BF16 + 2 * F32), 0)
    if plan.view.family.draft is not None and plan.view.num_mtp_layers:
        device, host = _of_algorithm(plan, block)
        drafts = _activations(plan, block, 1, _DRAFT_STEPS * length)
        if plan.recipe.measures_mtp or any(tensor.calibrated for tensor in block):
            drafts = max(drafts, _activations(plan, block, size, length))
        add("MTP block", [*head, *block], device + drafts, host + states)
    tuned = plan.recipe.mtp_tuned
    if tuned is not None:
        # Weights in F32, their gradients in F32 and BF16, AdamW's two moments, and what it computes
        # of them.
        device = _elements(tensor for tensor in block if tensor.tuned) * (5 * F32 + BF16)
        device += min(length, _LOSS_SLOTS) * vocabulary * F32 * _LOSS_COPIES
        chosen = plan.view.number("num_experts_per_tok") or 1
        for step in range(1, tuned.draft_steps + 1):
            device += _gradients(plan, block, 1, step * length, chosen, copies=2)
        add("training of the MTP block", [*head, *block], device, states)
    return found


def channels(plan: Plan) -> int:
    """Of the residual stream; of all streams together, where there are several."""
    return plan.view.number("hidden_size") * (plan.view.number("hc_mult") or 1)


def _num_scores(plan: Plan, keys: int) -> int:
    """Elements of one copy of a sequence's attention scores."""
    return plan.view.number("num_attention_heads") * plan.calibration.sequence_length * keys


def _num_experts(plan: Plan) -> int:
    return plan.view.number("n_routed_experts", "num_experts", "num_local_experts")


def _activations(plan: Plan, tensors: Sequence[TensorPlan], size: int, keys: int) -> int:
    """What so many sequences take: states, what attention or MLP keep while they compute, and the
    largest of what is computed for a moment.
    """
    tokens = size * plan.calibration.sequence_length
    # What attention's projections compute, and keys and values repeated for every head; rotated
    # copies too.
    linears = [shape for shape in _matrices(tensors, *_ATTENTION) if len(shape) == 2]
    inner = max((columns for _, columns in linears), default=0)
    attention = BF16 * (tokens * sum(rows for rows, _ in linears) + size * keys * inner * 4)
    # Without its own kernels, linear attention computes in F32.
    if _matrices(tensors, "linear_attention"):
        attention += _LINEAR * F32 * tokens * inner
    # Gate, up and two products of a dense MLP, the shared experts or one expert; and what a
    # router chooses, of all that there are.
    mlps = (min(shape[-2:]) for shape in _matrices(tensors, *_DENSE, "experts"))
    chosen = plan.view.number("num_experts_per_tok", "moe_topk") * _num_experts(plan)
    mlp = tokens * (BF16 * (4 * max(mlps, default=0) + 3 * channels(plan)) + chosen * F64)
    # Input, residual, normed copy, output; and the mask.
    states = tokens * (4 * channels(plan) + 2 * keys) * BF16
    # A sequence's scores; or rounding to a scheme: the widest matrix, one expert's of a stack,
    # or the widest input. A norm's F32 copies are fewer.
    largest = tokens * channels(plan)
    for tensor in tensors:
        if tensor.fate == "quantize":
            largest = max(largest, prod(tensor.shape[-2:]))
            if SCHEMES[tensor.scheme].inputs:
                largest = max(largest, tokens * tensor.shape[-1])
    briefly = max(_num_scores(plan, keys) * (BF16 + 2 * F32), _ROUNDING * F32 * largest)
    return states + max(attention, mlp) + briefly


def _gradients(
    plan: Plan,
    tensors: Sequence[TensorPlan],
    size: int,
    keys: int,
    num_experts: int,
    copies: int = 1,
) -> int:
    """What autograd keeps of a layer's inputs and outputs, where each token is sent to so many
    experts.

    A norm keeps its input in F32 and BF16; a packed layer its rounded input, too.
    """
    narrow = min((min(shape[-2:]) for shape in _matrices(tensors, "experts")), default=0)
    wide = 6 * num_experts * narrow
    for tensor in tensors:
        if len(tensor.shape) > 1 and tensor.role != "experts":
            wide += sum(tensor.shape[-2:])
    states = channels(plan) * (12 * BF16 + 4 * F32)
    scores = _num_scores(plan, keys) * (2 * BF16 + F32)
    tokens = size * plan.calibration.sequence_length
    return tokens * (wide * copies * BF16 + states) + size * scores


def _of_algorithm(plan: Plan, tensors: Sequence[TensorPlan]) -> tuple[int, int]:
    """What the algorithm holds for a layer or block, on the device and on the host."""
    calibration = plan.calibration
    text = calibration.samples * calibration.sequence_length
    rewritten = _rewritten(tensors)
    scales = _elements(rewritten) // _WEIGHTS_A_BYTE
    if rewritten and calibration.algorithm == "gptq":  # and an inverse
        widest = max(tensor.shape[-1] for tensor in rewritten)
        return scales + hessian_bytes(tensors) + 2 * F32 * widest**2, 0
    if rewritten and calibration.algorithm == "awq":  # the outputs of a module in all batches
        outputs = text * plan.view.number("hidden_size") * BF16
        return scales + outputs, awq_cache_bytes(tensors, text, one_turn=True)
    if rewritten and calibration.algorithm == "autoround":
        knobs = calibration.autoround or AutoRoundKnobs()
        length = calibration.sequence_length
        learned = _A_LEARNED_WEIGHT * _elements(rewritten)
        learned += _gradients(plan, tensors, knobs.batch_size, length, _num_experts(plan))
        # All states: what the layer is handed, and what it returns before and after.
        return learned, 3 * text * channels(plan) * BF16
    return scales, 0


def hessian_bytes(tensors: Iterable[TensorPlan]) -> int:
    """Of the modules that GPTQ rewrites: K x K in F32 for each distinct input.

    Args:
        tensors: of one layer, or of the MTP block.
    """
    return F32 * sum(width**2 for width in _inputs(tensors))


def awq_cache_bytes(tensors: Iterable[TensorPlan], tokens: int, *, one_turn: bool) -> int:
    """What AWQ keeps on the host: the inputs of attention and MLP, and of each projection behind
    another one.

    Args:
        tensors: of one layer, or of the MTP block.
        tokens: of all batches of a process.
        one_turn: experts are taken in turns, one at a time, as where memory is short.
    """
    return BF16 * tokens * sum(_inputs(tensors, one_turn=one_turn))


def _inputs(tensors: Iterable[TensorPlan], *, one_turn: bool = False) -> list[int]:
    """The channels of each distinct input of what is rewritten."""
    found = {}
    for tensor in _rewritten(tensors):
        width = tensor.shape[-1]
        is_second = tensor.module.endswith(_SECOND)
        if tensor.role in (*_DENSE, "experts") and not is_second:
            found["input of the MLP", width] = width
        elif tensor.role != "experts":
            found[tensor.runtime] = width
        elif one_turn or not tensor.stacked:
            found["one expert" if one_turn else tensor.module] = width
        else:  # a stack holds all experts
            found |= dict.fromkeys(((tensor.module, e) for e in range(tensor.shape[0])), width)
    return [*found.values()]


def _rewritten(tensors: Iterable[TensorPlan]) -> list[TensorPlan]:
    return [tensor for tensor in tensors if tensor.calibrated == "weights"]


def _matrices(tensors: Iterable[TensorPlan], *roles: str) -> list[Shape]:
    """The shapes of what is no vector."""
    return [tensor.shape for tensor in tensors if tensor.role in roles and len(tensor.shape) > 1]


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
