"""How much memory a calibrated run takes, station by station, counted from headers.

In: a plan. Out: a `StationMemory` for each part of the run whose tensors are in memory together: named terms in bytes,
on the device that calibrates and on the host. And the largest batch that fits a device.

Easy to get wrong: eager attention holds the scores of all heads in F32 and in BF16 together, B x heads x S x S of each,
and a decoder layer keeps the BF16 ones until it returns. At 2,048 tokens they are more than all other activations.

Source: transformers 5.17 eager_attention_forward and decoder layers, llm-compressor 0.14.0.1 modeling/moe
(LinearExperts2D) and modifiers/gptq; compared with what torch allocates in tests/quantize/test_memory.py.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

from ...recipes.knobs import AutoRoundKnobs
from ...recipes.schema import Calibration
from ...recipes.schemes import SCHEMES
from ..plan.plan import Plan
from ..plan.tensor_plan import TensorPlan
from .statistics_bytes import SECOND, awq_cache_bytes, group_hessian_bytes, hessian_bytes, squares_bytes

BF16, F32, INT64 = 2, 4, 8
PROCESS_BYTES = 1_200_000_000
"""Python with torch, transformers and llm-compressor, before a tensor is read."""
CONTEXT_BYTES = 600_000_000
"""What CUDA and its libraries take of a GPU before a tensor is there."""
FRAGMENTS = 1.05
"""The allocator's blocks are larger than what is asked for, and are not always used again."""
MAX_TOKENS = 65_536
"""In a batch that `batch_size: auto` chooses for a GPU: more at a time make no matrix product faster."""
# F32 values that rounding one matrix, or one input, to a scheme holds at a time.
_ROUNDING = 3
# Slots whose logits are there at a time while a block is trained, and F32 values of each (`draft_loss.py`).
_LOSS_SLOTS, _LOSS_COPIES = 256, 6
# Draft steps whose keys an MTP block attends to while acceptance is measured (`held_out.NUM_STEPS`).
_DRAFT_STEPS = 3


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


def stations(plan: Plan, *, batch_size: int | None = None, least: bool = False) -> tuple[StationMemory, ...]:
    """The stations of a calibrated run, in their order; of the decoder layers the one that takes most.

    Args:
        plan: its recipe has a calibration block.
        batch_size: sequences in a batch, instead of the recipe's; 1 where that is auto.
        least: count what a run takes in turns where memory is short (Hessians of experts, AWQ's inputs) as one turn.
    """
    return _Count.of(plan, least=least).stations(batch_size)


def peak(found: Iterable[StationMemory]) -> tuple[StationMemory, StationMemory]:
    """The stations that take most of the device and most of the host."""
    found = tuple(found)
    return max(found, key=lambda each: each.device_bytes), max(found, key=lambda each: each.host_bytes)


def largest_batch_size(plan: Plan, device_bytes: int, *, at_most: int) -> int:
    """The most sequences in a batch that a device with so many free bytes holds, a power of two; 0 for none.

    Args:
        plan: its recipe has a calibration block.
        device_bytes: free before the model is there.
        at_most: no more than these, such as the sequences that there are.
    """
    count, fitting, size = _Count.of(plan, least=True), 0, 1
    while size <= at_most:
        if peak(count.stations(size))[0].device_bytes * FRAGMENTS > device_bytes:
            break
        fitting, size = size, 2 * size
    return fitting


@dataclass(frozen=True)
class _Count:
    """Counts one plan.

    Attributes:
        batch_size: sequences in a batch.
        least: see `stations`.
        layers: tensors of the decoder layers by their index; of layers that are alike, the first one.
        top: tensors around the decoder layers.
        block: tensors of the MTP block but its copies of embedding and head.
    """

    plan: Plan
    calibration: Calibration
    batch_size: int
    least: bool
    layers: Mapping[int, Sequence[TensorPlan]]
    top: Sequence[TensorPlan]
    block: Sequence[TensorPlan]

    @classmethod
    def of(cls, plan: Plan, *, least: bool) -> "_Count":
        calibration = plan.recipe.calibration
        assert calibration is not None, f"{plan.recipe.name}: nothing is calibrated"
        loaded = [tensor for tensor in plan.tensors if tensor.fate not in ("drop", "add") and tensor.role != "vision"]
        layers: dict[int, list[TensorPlan]] = {}
        for tensor in loaded:
            if tensor.part == "backbone" and tensor.layer is not None:
                layers.setdefault(tensor.layer, []).append(tensor)
        alike = {frozenset(Counter(map(_kind, layers[index])).items()): index for index in sorted(layers, reverse=True)}
        return cls(
            plan=plan,
            calibration=calibration,
            batch_size=size if isinstance(size := calibration.batch_size, int) else 1,
            least=least,
            layers={index: layers[index] for index in sorted(alike.values())},
            top=[tensor for tensor in loaded if tensor.part == "backbone" and tensor.layer is None],
            block=[tensor for tensor in loaded if tensor.part == "mtp" and tensor.role not in ("embedding", "head")],
        )

    def stations(self, batch_size: int | None) -> tuple[StationMemory, ...]:
        """With another batch size than the recipe's, if there is one."""
        if batch_size is not None:
            return replace(self, batch_size=batch_size).stations(None)
        found = (self.layer(index, block) for index, block in self.layers.items())
        widest = max(found, key=lambda each: each.device_bytes, default=None)
        return tuple(filter(None, (widest, self.head(), self.mtp(), self.training(), self.packing())))

    @cached_property
    def hidden_size(self) -> int:
        """Channels of the residual stream, all streams together."""
        view = self.plan.view
        return view.number("hidden_size") * (view.number("hc_mult") or 1)

    @cached_property
    def num_tokens(self) -> int:
        """In a batch."""
        return self.batch_size * self.calibration.sequence_length

    @cached_property
    def embedding(self) -> int:
        """Everything around the decoder layers but the head; it stays on the device for the whole pass."""
        return BF16 * sum(_numel(tensor) for tensor in self.top if tensor.role != "head")

    @cached_property
    def head_weights(self) -> list[TensorPlan]:
        """The head; the embedding where they are tied."""
        found = [tensor for tensor in self.top if tensor.role == "head"]
        return found or [tensor for tensor in self.top if tensor.role == "embedding"]

    def layer(self, index: int, tensors: Sequence[TensorPlan]) -> StationMemory:
        """One decoder layer with a batch."""
        device = {
            "embedding": self.embedding,
            "weights": BF16 * sum(map(_numel, tensors)),
            **self._with_batch(tensors, self.calibration.sequence_length),
            **self._of_algorithm(tensors),
            **_squares(tensors),
        }
        host = {
            "process": PROCESS_BYTES,
            "weights as stored": sum(map(self._stored, tensors)),
            "batches": self._stream_bytes(),
            **self._cache(tensors),
        }
        return StationMemory(name=f"decoder layer {index}", device=device, host=host)

    def head(self) -> StationMemory:
        """The head with the logits of one sequence, for the released and for the quantized backbone."""
        length, vocabulary = self.calibration.sequence_length, max(tensor.shape[0] for tensor in self.head_weights)
        device = {
            "embedding": self.embedding,
            "weights": BF16 * sum(map(_numel, self.head_weights)),
            # Logits, the same in F32, and the logarithm of their softmax.
            "logits": length * vocabulary * (BF16 + 2 * F32),
        }
        return StationMemory(name="head", device=device, host={"process": PROCESS_BYTES})

    def mtp(self) -> StationMemory | None:
        """The MTP block with a batch, or one sequence with the keys of all draft steps; None where it is not run."""
        view = self.plan.view
        if view.family.draft is None or not view.num_mtp_layers:
            return None
        tensors = [
            tensor for tensor in self.plan.tensors if tensor.part == "mtp" and tensor.fate not in ("drop", "add")
        ]
        own = [tensor for tensor in tensors if tensor.role not in ("embedding", "head")]
        length = self.calibration.sequence_length
        drafted = replace(self, batch_size=1)
        runs = [drafted._with_batch(own, _DRAFT_STEPS * length)]
        if self.plan.recipe.measures_mtp or any(tensor.calibrated for tensor in own):
            runs.append(self._with_batch(own, length))
        largest = max(runs, key=lambda terms: sum(terms.values()))
        device = {
            "embedding": self.embedding,
            "weights": BF16 * sum(map(_numel, own)),
            "head": BF16 * sum(map(_numel, self.head_weights)),
            **largest,
            **self._of_algorithm(own),
            **_squares(own),
        }
        host = {"process": PROCESS_BYTES, "batches": self._stream_bytes(), **self._cache(own)}
        return StationMemory(name="MTP block", device=device, host=host)

    def training(self) -> StationMemory | None:
        """The MTP block while it is trained, one sequence at a time; None where it is not."""
        tuned = self.plan.recipe.mtp_tuned
        if tuned is None:
            return None
        trained = sum(_numel(tensor) for tensor in self.block if tensor.tuned)
        length, vocabulary = self.calibration.sequence_length, max(tensor.shape[0] for tensor in self.head_weights)
        alone = replace(self, batch_size=1)
        steps = [alone._kept_for_gradients(self.block, step * length) for step in range(1, tuned.draft_steps + 1)]
        device = {
            "embedding": self.embedding,
            "weights": BF16 * sum(map(_numel, self.block)),
            "head": BF16 * sum(map(_numel, self.head_weights)),
            # Weights in F32, their gradients in F32 and BF16, AdamW's two moments, and what it computes of them.
            "training": trained * (5 * F32 + BF16),
            "draft steps": sum(steps),
            "logits": min(length, _LOSS_SLOTS) * vocabulary * F32 * _LOSS_COPIES,
        }
        host = {"process": PROCESS_BYTES, "batches": self._stream_bytes()}
        return StationMemory(name="training of the MTP block", device=device, host=host)

    def packing(self) -> StationMemory:
        """The unit that takes most while it is read and packed; an expert of a stack is a unit of its own there."""
        computed = [unit for unit in self.plan.units if unit[0].fate in ("quantize", "dequantize")]
        widest = max((sum(map(_one_read, unit)) for unit in computed), default=0)
        stored = max(
            (sum(self._stored(t) // (t.shape[0] if t.stacked else 1) for t in unit) for unit in computed), default=0
        )
        return StationMemory(
            name="packing",
            device={"weights": 2 * BF16 * widest},
            host={"process": PROCESS_BYTES, "weights": stored + 2 * BF16 * widest},
        )

    # --- activations --------------------------------------------------------------------------------------------------

    def _kept_for_gradients(self, tensors: Sequence[TensorPlan], num_keys: int) -> int:
        """What one draft step leaves for its gradient: every layer's input and output, and the scores in F32 and BF16.

        A norm keeps its input in F32 and BF16; a packed layer its rounded input, too.
        """
        wide = sum(
            tensor.shape[-2] + tensor.shape[-1]
            for tensor in tensors
            if len(tensor.shape) > 1 and not _is_expert(tensor)
        )
        states = self.hidden_size * (12 * BF16 + 4 * F32)
        chosen = self.plan.view.number("num_experts_per_tok") or 1
        experts = [tensor.shape for tensor in tensors if _is_expert(tensor) and len(tensor.shape) > 1]
        inside = chosen * 6 * _narrowest(experts) if experts else 0
        return self.num_tokens * ((wide + inside) * 2 * BF16 + states) + self._scores(num_keys) * (2 * BF16 + F32)

    def _with_batch(self, tensors: Sequence[TensorPlan], num_keys: int) -> dict[str, int]:
        """States, and whichever holds more at its peak: the attention, or the MLP while the scores are kept."""
        rounding = self._rounding(tensors)
        scores = self._scores(num_keys)
        attention = scores * (BF16 + F32 + BF16) + self._projected(tensors, num_keys)
        mlp = scores * BF16 + max(self._experts(tensors), self._dense(tensors))
        # Input, residual, normed copy, output, and the F32 copies that a norm makes.
        states = self.num_tokens * self.hidden_size * (4 * BF16 + 2 * F32)
        name = "attention" if attention >= mlp else "MLP and kept scores"
        mask = self.calibration.sequence_length * num_keys * INT64
        return {"states": states, "mask": mask, name: max(attention, mlp), "rounding": rounding}

    def _scores(self, num_keys: int) -> int:
        """Elements of one copy of the attention scores of a batch; PyTorch's own kernel keeps none."""
        if self.calibration.attention == "sdpa":
            return 0
        heads = self.plan.view.number("num_attention_heads")
        return self.batch_size * heads * self.calibration.sequence_length * num_keys

    def _projected(self, tensors: Sequence[TensorPlan], num_keys: int) -> int:
        """What attention's projections compute, and keys and values repeated for every head; rotated copies too."""
        linears = [tensor for tensor in tensors if tensor.role in _ATTENTION and len(tensor.shape) == 2]
        rows = sum(tensor.shape[0] for tensor in linears)
        inner = max((tensor.shape[1] for tensor in linears), default=0)
        return self.num_tokens * rows * BF16 + self.batch_size * num_keys * inner * 4 * BF16

    def _experts(self, tensors: Sequence[TensorPlan]) -> int:
        """One routed expert on every token: gate, up, their concatenation, two products; and the router's choices."""
        matrices = [tensor.shape for tensor in tensors if tensor.role == "experts" and len(tensor.shape) > 1]
        if not matrices:
            return 0
        chosen = self.plan.view.number("num_experts_per_tok", "moe_topk") or 1
        routers = [tensor.shape for tensor in tensors if tensor.role == "router" and len(tensor.shape) == 2]
        # A table of experts by token has a row a token of the vocabulary.
        experts = max((count for count, width in routers if width > chosen), default=0)
        width = _narrowest(matrices)
        outputs = self.num_tokens * self.hidden_size * 3 * BF16
        return self.num_tokens * (4 * width * BF16 + chosen * experts * INT64) + outputs

    def _dense(self, tensors: Sequence[TensorPlan]) -> int:
        """Gate, up and two products of a dense MLP, or of the shared experts."""
        matrices = [t.shape for t in tensors if t.role in ("dense_mlp", "shared_experts") and len(t.shape) > 1]
        return self.num_tokens * 4 * BF16 * max((_narrowest([shape]) for shape in matrices), default=0)

    def _rounding(self, tensors: Sequence[TensorPlan]) -> int:
        """What rounding the widest matrix, or the widest input, to its scheme holds in F32."""
        rounded = [tensor for tensor in tensors if tensor.fate == "quantize"]
        matrix = max((_one_read(tensor) for tensor in rounded), default=0)
        inputs = [tensor.shape[-1] for tensor in rounded if SCHEMES[tensor.scheme].inputs]
        return _ROUNDING * F32 * max(matrix, self.num_tokens * max(inputs, default=0))

    # --- algorithms ---------------------------------------------------------------------------------------------------

    def _of_algorithm(self, tensors: Sequence[TensorPlan]) -> dict[str, int]:
        """GPTQ's Hessians and one that is inverted; what AWQ compares, the outputs of a module in all batches.

        AutoRound's offsets, and what it keeps of a step to find the gradient.
        """
        widths = [tensor.shape[-1] for tensor in tensors if tensor.calibrated == "weights"]
        if widths and self.calibration.algorithm == "local-hessian":
            # What it reads is there twice in F32, as it is and turned.
            reads = 2 * F32 * self.num_tokens * max(widths)
            return {"Hessians of groups": group_hessian_bytes(tensors), "an input in F32": reads}
        if not widths or self.calibration.algorithm not in ("gptq", "awq", "autoround"):
            return {}
        if self.calibration.algorithm == "autoround":
            learned = sum(_numel(tensor) for tensor in tensors if tensor.calibrated == "weights")
            return {"offsets": _A_LEARNED_WEIGHT * learned, "a step": self._step(tensors)}
        if self.calibration.algorithm == "awq":
            channels = self.plan.view.number("hidden_size")
            return {"AWQ's outputs": self._all_tokens() * channels * BF16}
        routed = self.calibration.experts == "routed"
        hessians = hessian_bytes(tensors, routed=routed, one_turn=self.least)
        return {"Hessians": hessians, "an inverse": 2 * F32 * max(widths) ** 2}

    def _step(self, tensors: Sequence[TensorPlan]) -> int:
        """What autograd keeps of one of AutoRound's steps: products, scores, and F32 copies that norms make."""
        knobs = self.calibration.autoround or AutoRoundKnobs()
        length = self.calibration.sequence_length
        rows = sum(each.shape[0] for each in tensors if each.role in _ATTENTION and len(each.shape) == 2)
        a_token = 3 * BF16 * rows + 6 * F32 * self.hidden_size
        # Gate, up, and their two products; what the down projection returns, also by its share.
        for shape in (each.shape for each in tensors if each.module.endswith(SECOND) and len(each.shape) > 1):
            a_token += BF16 * (4 * shape[-1] + 2 * self.hidden_size) * (shape[0] if len(shape) > 2 else 1)
        scores = replace(self, batch_size=knobs.batch_size)._scores(length) * (BF16 + F32 + BF16)
        return knobs.batch_size * length * a_token + scores

    def _cache(self, tensors: Sequence[TensorPlan]) -> dict[str, int]:
        """AWQ's cache on the host: the inputs of what its search runs again, for every batch.

        AutoRound's: what the layer is handed in all of them, and what it returns before and after.
        """
        if self.calibration.algorithm == "autoround":
            return {"AutoRound's states": 3 * self._all_tokens() * self.hidden_size * BF16}
        if self.calibration.algorithm != "awq":
            return {}
        return {"AWQ's inputs": awq_cache_bytes(tensors, self._all_tokens(), one_turn=self.least)}

    def _all_tokens(self) -> int:
        """Of all batches."""
        return self.calibration.samples * self.calibration.sequence_length

    # --- on the host --------------------------------------------------------------------------------------------------

    def _stored(self, tensor: TensorPlan) -> int:
        return sum(self.plan.entries[name].num_bytes for name in tensor.inputs)

    def _stream_bytes(self) -> int:
        """States of two batches, one that is read and one that is written."""
        return 2 * self.num_tokens * self.hidden_size * BF16


# Bytes: an offset, its gradient, and what autograd keeps of rounding by it; measured on the tiny models.
_A_LEARNED_WEIGHT = 26
_ATTENTION = frozenset({"attention", "linear_attention", "indexer", "compressor"})


def _squares(tensors: Iterable[TensorPlan]) -> dict[str, int]:
    """What is summed of the inputs under `search: imatrix`."""
    num_bytes = squares_bytes(tensors)
    return {"squares of inputs": num_bytes} if num_bytes else {}


def _kind(tensor: TensorPlan) -> tuple[object, ...]:
    """What a tensor of a layer contributes to its memory."""
    return tensor.role, tensor.shape, tensor.scheme, tensor.fate, tensor.calibrated, tensor.stacked


def _numel(tensor: TensorPlan) -> int:
    return prod(tensor.shape)


def _one_read(tensor: TensorPlan) -> int:
    """Elements that are read at a time: one expert's of a stack."""
    return _numel(tensor) // tensor.shape[0] if tensor.stacked else _numel(tensor)


def _narrowest(shapes: Iterable[tuple[int, ...]]) -> int:
    """The inner width of an MLP: the smaller side of its matrices."""
    return min(min(shape[-2:]) for shape in shapes)


def _is_expert(tensor: TensorPlan) -> bool:
    return tensor.role == "experts"
