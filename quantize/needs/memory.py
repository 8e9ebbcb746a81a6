"""How much memory a calibrated run takes, station by station, counted from headers.

In: a plan. Out: a `StationMemory` for each part of the run whose tensors are in memory together:
named terms in bytes, on the device that calibrates and on the host. And the largest batch that fits
a device.

Easy to get wrong: eager attention holds the scores of all heads in F32 and in BF16 together, B x
heads x S x S of each, and a decoder layer keeps the BF16 ones until it returns. At 2,048 tokens
they are more than all other activations. And what counts for Hessians and caches is not modules but
inputs: q, k and v read one tensor, and so do the gate and up projections of all experts, unless
each is calibrated on the tokens that the router sends it.

Source: transformers 5.17 eager_attention_forward and decoder layers, llm-compressor 0.14.0.1
modeling/moe (LinearExperts2D) and modifiers/gptq, calibrate/layers/gptq.py and awq.py; compared
with what torch allocates in tests/quantize/test_memory.py, and with what is held in
tests/quantize/calibrate/test_bounded.py.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

from ...recipes.knobs import AutoRoundKnobs
from ...recipes.schema import Calibration
from ...recipes.schemes import SCHEMES
from ..plan.plan import Plan
from ..plan.tensor_plan import TensorPlan

BF16, F32, F64 = 2, 4, 8
PROCESS_BYTES = 1_200_000_000
"""Python with torch, transformers and llm-compressor, before a tensor is read."""
CONTEXT_BYTES = 600_000_000
"""What CUDA and its libraries take of a GPU before a tensor is there."""
FRAGMENTS = 1.05
"""The allocator's blocks are larger than what is asked for, and are not always used again."""
MAX_TOKENS = 65_536
"""In a batch that `batch_size: auto` chooses for a GPU: more at a time make no matrix product
faster.
"""
# F32 values that rounding one matrix, or one input, to a scheme holds at a time.
_ROUNDING = 3
# Slots whose logits are there at a time while a block is trained, and F32 values of each
# (`draft_loss.py`).
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


@dataclass(frozen=True, slots=True, kw_only=True)
class StationMemory:
    """A part of the run whose tensors are in memory together.

    Attributes:
        name: for people.
        device: term -> bytes, on the device that calibrates.
        host: term -> bytes, in the memory of one process, whatever the device is.
    """

    name: str
    device: Mapping[str, int]
    host: Mapping[str, int]

    @property
    def device_bytes(self) -> int:
        """Of all terms on the device."""
        return sum(self.device.values())

    @property
    def host_bytes(self) -> int:
        """Of all terms on the host."""
        return sum(self.host.values())


def stations(
    plan: Plan, *, batch_size: int | None = None, least: bool = False
) -> tuple[StationMemory, ...]:
    """The stations of a calibrated run, in their order; of the decoder layers the one that takes
    most.

    Args:
        plan: its recipe has a calibration block.
        batch_size: sequences in a batch, instead of the recipe's; 1 where that is auto.
        least: count what a run takes in turns where memory is short (AWQ's inputs of experts) as
            one turn.
    """
    count = _Count.of(plan, least=least)
    return (
        count.stations() if batch_size is None else replace(count, batch_size=batch_size).stations()
    )


def peak(found: Iterable[StationMemory]) -> tuple[StationMemory, StationMemory]:
    """The stations that take most of the device and most of the host."""
    found = tuple(found)
    return max(found, key=lambda each: each.device_bytes), max(
        found, key=lambda each: each.host_bytes
    )


def largest_batch_size(plan: Plan, device_bytes: int, *, at_most: int) -> int:
    """The most sequences in a batch that a device with so many free bytes holds, a power of two; 0
    for none.

    Args:
        plan: its recipe has a calibration block.
        device_bytes: free before the model is there.
        at_most: no more than these, such as the sequences that there are.
    """
    count, fitting, size = _Count.of(plan, least=True), 0, 1
    while size <= at_most:
        if (
            peak(replace(count, batch_size=size).stations())[0].device_bytes * FRAGMENTS
            > device_bytes
        ):
            break
        fitting, size = size, 2 * size
    return fitting


@dataclass(frozen=True)
class _Count:
    """Counts one plan.

    Attributes:
        batch_size: sequences in a batch.
        least: see `stations`.
        layers: tensors of the decoder layers by their index; of layers that are alike, the first
            one.
        around: bytes of everything around the decoder layers but the head; it stays on the device
            for the whole pass.
        head: the head; the embedding where they are tied.
        block: tensors of the MTP block but its copies of embedding and head.
    """

    plan: Plan
    calibration: Calibration
    batch_size: int
    least: bool
    layers: Mapping[int, Sequence[TensorPlan]]
    around: int
    head: Sequence[TensorPlan]
    block: Sequence[TensorPlan]

    @classmethod
    def of(cls, plan: Plan, *, least: bool) -> "_Count":
        calibration = plan.recipe.calibration
        assert calibration is not None, f"{plan.recipe.name}: nothing is calibrated"
        layers: dict[int, list[TensorPlan]] = {}
        embedding, head, block, around = [], [], [], 0
        for tensor in plan.tensors:
            if tensor.fate in ("drop", "add") or tensor.role == "vision":
                continue
            if tensor.part == "mtp":
                if tensor.role not in ("embedding", "head"):
                    block.append(tensor)
            elif tensor.part == "backbone" and tensor.layer is not None:
                layers.setdefault(tensor.layer, []).append(tensor)
            elif tensor.part == "backbone" and tensor.role == "head":
                head.append(tensor)
            elif tensor.part == "backbone":
                around += BF16 * _numel(tensor)
                if tensor.role == "embedding":
                    embedding.append(tensor)
        alike = {
            frozenset(Counter(map(_kind, layers[index])).items()): index
            for index in sorted(layers, reverse=True)
        }
        size: object = calibration.batch_size
        return cls(
            plan=plan,
            calibration=calibration,
            batch_size=size if isinstance(size, int) else 1,
            least=least,
            layers={index: layers[index] for index in sorted(alike.values())},
            around=around,
            head=head or embedding,
            block=block,
        )

    def stations(self) -> tuple[StationMemory, ...]:
        found = [self._layer(index, tensors) for index, tensors in self.layers.items()]
        found = [max(found, key=lambda each: each.device_bytes)] if found else []
        # Logits of one sequence, the same in F32, and the logarithm of their softmax.
        logits = self.length * self.vocabulary * (BF16 + 2 * F32)
        found.append(self._station("head", self.head, {"logits": logits}, {}))
        if self.plan.view.family.draft is not None and self.plan.view.num_mtp_layers:
            found.append(self._mtp())
        if self.plan.recipe.mtp_tuned is not None:
            found.append(self._training(self.plan.recipe.mtp_tuned.draft_steps))
        return (*found, self._packing())

    # --- stations
    # ----------------------------------------------------------------------------------------------

    def _station(
        self,
        name: str,
        tensors: Sequence[TensorPlan],
        device: Mapping[str, int],
        host: Mapping[str, int],
    ) -> StationMemory:
        """Where weights and what is around the layers are on the device."""
        weights = {"embedding": self.around, "weights": BF16 * sum(map(_numel, tensors))}
        return StationMemory(
            name=name, device={**weights, **device}, host={"process": PROCESS_BYTES, **host}
        )

    def _layer(self, index: int, tensors: Sequence[TensorPlan]) -> StationMemory:
        """One decoder layer with a batch."""
        device, host = self._algorithm(tensors)
        device |= self._with_batch(tensors, self.length)
        host |= {"weights as stored": sum(map(self._stored, tensors)), "batches": self._batches}
        return self._station(f"decoder layer {index}", tensors, device, host)

    def _mtp(self) -> StationMemory:
        """The MTP block with a batch, or one sequence with the keys of all draft steps."""
        largest = replace(self, batch_size=1)._with_batch(self.block, _DRAFT_STEPS * self.length)
        if self.plan.recipe.measures_mtp or any(tensor.calibrated for tensor in self.block):
            batch = self._with_batch(self.block, self.length)
            largest = max(largest, batch, key=lambda terms: sum(terms.values()))
        device, host = self._algorithm(self.block)
        device |= {"head": self._head_bytes, **largest}
        return self._station("MTP block", self.block, device, {"batches": self._batches, **host})

    def _training(self, draft_steps: int) -> StationMemory:
        """The MTP block while it is trained, one sequence at a time."""
        trained = sum(_numel(tensor) for tensor in self.block if tensor.tuned)
        alone = replace(self, batch_size=1)
        kept = sum(
            alone._kept_for_gradients(step * self.length) for step in range(1, draft_steps + 1)
        )
        device = {
            "head": self._head_bytes,
            # Weights in F32, their gradients in F32 and BF16, AdamW's two moments, and what it
            # computes of them.
            "training": trained * (5 * F32 + BF16),
            "draft steps": kept,
            "logits": min(self.length, _LOSS_SLOTS) * self.vocabulary * F32 * _LOSS_COPIES,
        }
        return self._station(
            "training of the MTP block", self.block, device, {"batches": self._batches}
        )

    def _packing(self) -> StationMemory:
        """The unit that takes most while it is read and packed; an expert of a stack is a unit of
        its own there.
        """
        widest = stored = 0
        for unit in self.plan.units:
            if unit[0].fate in ("quantize", "dequantize"):
                widest = max(widest, sum(map(_one_read, unit)))
                stored = max(
                    stored, sum(self._stored(t) // (t.shape[0] if t.stacked else 1) for t in unit)
                )
        host = {"process": PROCESS_BYTES, "weights": stored + 2 * BF16 * widest}
        return StationMemory(name="packing", device={"weights": 2 * BF16 * widest}, host=host)

    # --- sizes
    # ----------------------------------------------------------------------------------------------

    @cached_property
    def length(self) -> int:
        return self.calibration.sequence_length

    @cached_property
    def vocabulary(self) -> int:
        return max(tensor.shape[0] for tensor in self.head)

    @cached_property
    def hidden_size(self) -> int:
        """Channels of the residual stream, all streams together."""
        view = self.plan.view
        return view.number("hidden_size") * (view.number("hc_mult") or 1)

    @cached_property
    def num_tokens(self) -> int:
        """In a batch."""
        return self.batch_size * self.length

    @property
    def _head_bytes(self) -> int:
        return BF16 * sum(map(_numel, self.head))

    @property
    def _batches(self) -> int:
        """States of two batches, one that is read and one that is written."""
        return 2 * self.num_tokens * self.hidden_size * BF16

    def _stored(self, tensor: TensorPlan) -> int:
        return sum(self.plan.entries[name].num_bytes for name in tensor.inputs)

    # --- activations
    # ----------------------------------------------------------------------------------------------

    def _with_batch(self, tensors: Sequence[TensorPlan], num_keys: int) -> dict[str, int]:
        """States, and whichever holds more at its peak: the attention, or the MLP while the scores
        are kept.
        """
        scores = self._scores(num_keys)
        # What attention's projections compute, and keys and values repeated for every head; rotated
        # copies too.
        linears = [shape for shape in _matrices(tensors, *_ATTENTION) if len(shape) == 2]
        rows, inner = (
            sum(shape[0] for shape in linears),
            max((shape[1] for shape in linears), default=0),
        )
        projected = self.num_tokens * rows * BF16 + self.batch_size * num_keys * inner * 4 * BF16
        attention = scores * (BF16 + F32 + BF16) + projected
        # Gate, up and two products of a dense MLP, or of the shared experts.
        dense = (
            4 * BF16 * max((min(shape[-2:]) for shape in _matrices(tensors, *_DENSE)), default=0)
        )
        mlp = scores * BF16 + self.num_tokens * max(self._experts(tensors), dense)
        # Rounding the widest matrix, or the widest input, to its scheme.
        rounded = [tensor for tensor in tensors if tensor.fate == "quantize"]
        matrix = max(map(_one_read, rounded), default=0)
        inputs = max(
            (tensor.shape[-1] for tensor in rounded if SCHEMES[tensor.scheme].inputs), default=0
        )
        return {
            # Input, residual, normed copy, output, and the F32 copies that a norm makes.
            "states": self.num_tokens * self.hidden_size * (4 * BF16 + 2 * F32),
            "mask": self.length * num_keys * F64,
            "attention" if attention >= mlp else "MLP and kept scores": max(attention, mlp),
            "rounding": _ROUNDING * F32 * max(matrix, self.num_tokens * inputs),
        }

    def _scores(self, num_keys: int) -> int:
        """Elements of one copy of the attention scores of a batch; PyTorch's own kernel keeps
        none.
        """
        if self.calibration.attention == "sdpa":
            return 0
        heads = self.plan.view.number("num_attention_heads")
        return self.batch_size * heads * self.length * num_keys

    def _experts(self, tensors: Sequence[TensorPlan]) -> int:
        """A token's part of one expert: gate, up, their concatenation, two products; and the
        router's choices.
        """
        matrices = _matrices(tensors, "experts")
        if not matrices:
            return 0
        chosen = self.plan.view.number("num_experts_per_tok", "moe_topk") or 1
        # A table of experts by token has a row a token of the vocabulary.
        routers = [shape for shape in _matrices(tensors, "router") if len(shape) == 2]
        experts = max((count for count, width in routers if width > chosen), default=0)
        width = min(min(shape[-2:]) for shape in matrices)
        return 4 * width * BF16 + chosen * experts * F64 + self.hidden_size * 3 * BF16

    def _kept_for_gradients(self, num_keys: int) -> int:
        """What one draft step leaves for its gradient: every layer's input and output, and the
        scores in F32 and BF16.

        A norm keeps its input in F32 and BF16; a packed layer its rounded input, too.
        """
        experts = _matrices(self.block, "experts")
        wide = sum(sum(tensor.shape[-2:]) for tensor in self.block if len(tensor.shape) > 1)
        wide -= sum(sum(shape[-2:]) for shape in experts)
        if experts:
            chosen = self.plan.view.number("num_experts_per_tok") or 1
            wide += chosen * 6 * min(min(shape[-2:]) for shape in experts)
        states = self.hidden_size * (12 * BF16 + 4 * F32)
        return self.num_tokens * (wide * 2 * BF16 + states) + self._scores(num_keys) * (
            2 * BF16 + F32
        )

    # --- algorithms
    # ----------------------------------------------------------------------------------------------

    def _algorithm(self, tensors: Sequence[TensorPlan]) -> tuple[dict[str, int], dict[str, int]]:
        """What the algorithm holds on the device and on the host, sums for `search: imatrix`
        included.
        """
        device, host = {}, {}
        if squares := squares_bytes(tensors):
            device["squares of inputs"] = squares
        algorithm, all_tokens = self.calibration.algorithm, self.calibration.samples * self.length
        if algorithm == "awq":  # the inputs of what its search runs again, for every batch
            host["AWQ's inputs"] = awq_cache_bytes(tensors, all_tokens, one_turn=self.least)
        elif (
            algorithm == "autoround"
        ):  # what the layer is handed in all batches, and what it returns before and after
            host["AutoRound's states"] = 3 * all_tokens * self.hidden_size * BF16
        rewritten = _rewritten(tensors)
        widest = max((tensor.shape[-1] for tensor in rewritten), default=0)
        if not rewritten:
            pass
        elif algorithm == "gptq":
            routed = self.calibration.experts == "routed"
            device["Hessians"] = hessian_bytes(tensors, routed=routed)
            device["an inverse"] = 2 * F32 * widest**2
        elif algorithm == "awq":  # the outputs of a module in all batches
            device["AWQ's outputs"] = all_tokens * self.plan.view.number("hidden_size") * BF16
        elif algorithm == "autoround":
            device["offsets"] = _A_LEARNED_WEIGHT * sum(map(_numel, rewritten))
            device["a step"] = self._step(tensors)
        elif (
            algorithm == "local-hessian"
        ):  # what it reads is there twice in F32, as it is and turned
            device["Hessians of groups"] = group_hessian_bytes(tensors)
            device["an input in F32"] = 2 * F32 * self.num_tokens * widest
        return device, host

    def _step(self, tensors: Sequence[TensorPlan]) -> int:
        """What autograd keeps of one of AutoRound's steps: products, scores, and F32 copies that
        norms make.
        """
        knobs = self.calibration.autoround or AutoRoundKnobs()
        rows = sum(shape[0] for shape in _matrices(tensors, *_ATTENTION) if len(shape) == 2)
        a_token = 3 * BF16 * rows + 6 * F32 * self.hidden_size
        # Gate, up, and their two products; what the down projection returns, also by its share.
        for shape in (
            tensor.shape for tensor in tensors if _is_second(tensor) and len(tensor.shape) > 1
        ):
            a_token += (
                BF16 * (4 * shape[-1] + 2 * self.hidden_size) * (shape[0] if len(shape) > 2 else 1)
            )
        scores = replace(self, batch_size=knobs.batch_size)._scores(self.length) * (
            BF16 + F32 + BF16
        )
        return knobs.batch_size * self.length * a_token + scores


# --- statistics of one layer
# ------------------------------------------------------------------------------------------


def hessian_bytes(tensors: Iterable[TensorPlan], *, routed: bool = False) -> int:
    """Of the modules that GPTQ rewrites: K x K in F32 for each distinct input.

    Args:
        tensors: of one layer, or of the MTP block.
        routed: each expert reads its own tokens.
    """
    return _of_inputs(tensors, lambda channels: F32 * channels**2, routed=routed, one_turn=False)


def awq_cache_bytes(tensors: Iterable[TensorPlan], tokens: int, *, one_turn: bool = False) -> int:
    """What AWQ keeps on the host: the inputs of attention and MLP, and of each projection behind
    another one.

    Args:
        tensors: of one layer, or of the MTP block.
        tokens: of all batches of a process.
        one_turn: experts are taken in turns, one at a time.
    """
    return _of_inputs(
        tensors, lambda channels: BF16 * tokens * channels, routed=False, one_turn=one_turn
    )


def group_hessian_bytes(tensors: Iterable[TensorPlan]) -> int:
    """Of the modules whose scales modelopt's local-hessian sweeps: 16 x 16 in F32 for each 16 input
    channels.
    """
    return sum(
        F32
        * 16
        * tensor.shape[-1]
        * (tensor.shape[0] * len(tensor.stacked) if tensor.stacked else 1)
        for tensor in _rewritten(tensors)
    )


def squares_bytes(tensors: Iterable[TensorPlan]) -> int:
    """Of the modules whose importance is summed: their input channels in F64, of all batches and of
    the present one.
    """
    return sum(2 * F64 * output.shape[0] for tensor in tensors for output in tensor.importances)


def _of_inputs(
    tensors: Iterable[TensorPlan], num_bytes: Callable[[int], int], *, routed: bool, one_turn: bool
) -> int:
    """Bytes for each distinct input of what is rewritten, by its channels."""
    shared: dict[object, int] = {}
    of_experts: dict[object, int] = {}
    for tensor in _rewritten(tensors):
        size, is_second = num_bytes(tensor.shape[-1]), _is_second(tensor)
        if tensor.role == "experts" and (routed or is_second):
            # The first projections of an expert share an input. A stack holds all experts.
            layer = tensor.module.rpartition(".")[0]
            for expert in range(tensor.shape[0] if tensor.stacked else 1):
                of_experts[layer, expert, is_second] = size
        elif tensor.role in (*_DENSE, "experts") and not is_second:
            shared["input of the MLP", tensor.shape[-1]] = size
        else:
            shared[tensor.runtime] = size
    together = max(of_experts.values(), default=0) if one_turn else sum(of_experts.values())
    return sum(shared.values()) + together


def _rewritten(tensors: Iterable[TensorPlan]) -> list[TensorPlan]:
    return [tensor for tensor in tensors if tensor.calibrated == "weights"]


def _matrices(tensors: Iterable[TensorPlan], *roles: str) -> list[tuple[int, ...]]:
    """The shapes of what is no vector."""
    return [tensor.shape for tensor in tensors if tensor.role in roles and len(tensor.shape) > 1]


def _is_second(tensor: TensorPlan) -> bool:
    return tensor.module.endswith(_SECOND)


def _kind(tensor: TensorPlan) -> tuple[object, ...]:
    """What a tensor of a layer contributes to its memory."""
    return tensor.role, tensor.shape, tensor.scheme, tensor.fate, tensor.calibrated, tensor.stacked


def _numel(tensor: TensorPlan) -> int:
    return prod(tensor.shape)


def _one_read(tensor: TensorPlan) -> int:
    """Elements that are read at a time: one expert's of a stack."""
    return _numel(tensor) // tensor.shape[0] if tensor.stacked else _numel(tensor)
