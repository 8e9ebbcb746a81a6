"""What each quantized module sees during calibration: its tokens, and the ends of its inputs.

In: a model and the modules of a `LayerWork`. Out: an `Observed`: a `Coverage` of each module, the
smallest and largest value that it was handed, over all batches and ranks, and for some the mean
square of each input channel, which is how much its error counts. The static input scales follow.

Easy to get wrong: query, key and value projections see one tensor, and so do all experts, so each
distinct input is read once; but a tensor is not its address. A storage that was freed leaves its
address to the next one, and a buffer may be rewritten between two modules that read it. So a
storage is known by a weak reference, which keeps its address from being given away, and a rewritten
one by PyTorch's count of writes. That count sees every operation of PyTorch's but those through
`.data`; transformers' models have none between the modules of a layer.

During calibration every expert computes every token. How many tokens the router sent to an expert
is counted apart, from the router's choice.
"""

import math
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from compressed_tensors.quantization import QuantizationArgs, QuantizationStrategy
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from llmcompressor.modeling.moe.linear_experts import LinearExperts2D
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from ....recipes.errors import CheckpointError, RecipeError
from ....recipes.schemes import SCHEMES
from ...run.ranks import gathered, has_others
from ..model.binding import EXPERT
from ..model.hooks import hooked, input_of
from .work import LayerWork

_SQUARED_AT_ONCE = 2**22


@dataclass(frozen=True, slots=True)
class InputIdentity:
    """Which tensor this is; equal only for the same rows in the same memory, not written to since.

    It holds no data, and while it is held no other storage is equal to its own.
    """

    storage: StorageWeakRef
    version: object
    place: tuple[object, ...]

    @classmethod
    def of(cls, value: Tensor) -> "InputIdentity":
        """Of a tensor [..., K]."""
        # Rows in a row are the same whatever their batches are: a router's input and its shared
        # expert's.
        rows = (value.numel(),) if value.is_contiguous() else (*value.shape, *value.stride())
        place = (value.storage_offset(), value.dtype, value.shape[-1], *rows)
        # In inference mode nobody counts the writes.
        version = object() if value.is_inference() else value._version
        return cls(StorageWeakRef(value.untyped_storage()), version, place)

    def __hash__(self) -> int:
        return hash((self.storage.cdata, self.version, self.place))


@dataclass(frozen=True, slots=True, kw_only=True)
class Coverage:
    """What one quantized module saw.

    Attributes:
        tokens: rows of its input, over all batches and ranks.
        routed: for a routed expert, how many of them the router sent there; None for other modules.
        has_few_tokens: its statistics are of fewer tokens than it has input channels, and of none
            but the router's.
    """

    module: str
    tokens: int
    routed: int | None
    has_few_tokens: bool = False


class Observed:
    """State: tokens of each quantized module, the ends of its inputs, and sums of their squares.

    Nothing waits for the GPU here before `finish`.

    Attributes:
        modules: the quantized ones, by name.
        ends: module -> [2] in its dtype: minus the smallest value, and the largest; -inf if never
            called.
    """

    def __init__(self, model: Any, work: LayerWork):
        """Of the modules that are quantized; inputs of the weighted ones are squared, too."""
        self._model, self._work = model, work
        self.modules: dict[str, Any] = {name: model.get_submodule(name) for name in work.schemes}
        self.ends = {
            name: module.weight.new_full((2,), -math.inf) for name, module in self.modules.items()
        }
        self._squares: dict[str, Tensor] = {}
        self._tokens = dict.fromkeys(self.modules, 0)
        self._routed: dict[str, Tensor] = {}
        """Stack of experts -> how many tokens the router sent to each."""
        self._ends_of: dict[InputIdentity, Tensor] = {}
        self._squares_of: dict[InputIdentity, Tensor] = {}
        self._finite: list[Tensor] = []
        """One for each tensor that the model has returned."""

    def watching(self) -> AbstractContextManager[None]:
        """Hooks on the modules look at what they are handed while this lasts."""
        hooks = [(module, partial(self._see, name)) for name, module in self.modules.items()]
        for name, module in self._model.named_modules():
            if isinstance(module, LinearExperts2D):
                hooks.append((module, partial(self._count_routed, name)))
        return hooked(
            module.register_forward_pre_hook(hook, with_kwargs=True) for module, hook in hooks
        )

    def end_batch(self, output: Any) -> None:
        """After each forward, with what the model has returned."""
        self._ends_of.clear()
        self._squares_of.clear()
        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor) and leaf.is_floating_point():
                self._finite.append(leaf.isfinite().all())

    def finish(self, batches: Iterable[Mapping[str, Tensor]]) -> None:
        """Sum over the ranks.

        Raises:
            RecipeError: there was no batch.
            CheckpointError: a module was never called, or a value was not finite: the batches run
                once more, to find the first module that has computed one. An expert may be without
                tokens where each computes its own.
        """
        if not self._finite:
            raise no_batch()
        finite = [*self._finite, *(ends.amax() < math.inf for ends in self.ends.values())]
        # What an expert returns for a token that is not its own goes nowhere.
        finite += [module.weight.isfinite().all() for module in self.modules.values()]
        if not torch.stack(finite).all():
            _name_what_is_not_finite(self._model, self.modules, batches)
        routed = {name: counts.cpu() for name, counts in self._routed.items()}
        of_ranks = gathered((self._tokens, routed))
        self._tokens = {name: sum(tokens[name] for tokens, _ in of_ranks) for name in self.modules}
        for name in routed:
            self._routed[name] = torch.stack([counts[name] for _, counts in of_ranks]).sum(0)
        for name, tokens in self._tokens.items():
            if not tokens and not (self._work.routed and self._routed_to(name) is not None):
                raise CheckpointError(
                    name,
                    "every quantized module must be called during calibration",
                    got="a module without a token",
                    cure="Keep it in the recipe",
                )
        if has_others() and self.ends:
            total = torch.stack([*self.ends.values()]).float()  # which every back-end reduces
            dist.all_reduce(total, dist.ReduceOp.MAX)
            for ends, found in zip(self.ends.values(), total, strict=True):
                ends.copy_(found)

    def set_input_scales(self) -> None:
        """Give the modules the static input scales that an observer of the extremes computes.

        One for modules that run as one: the inputs of fused ones are the same, those of experts
        differ, and an expert without a token has those of the others.
        """
        for group in (*self._work.fused, *self._work.experts):
            common = torch.stack([self.ends[name] for name in group]).amax(0)
            self.ends |= dict.fromkeys(group, common)
        for name, module in self.modules.items():
            args: QuantizationArgs = module.quantization_scheme.input_activations
            low, high = -self.ends[name][:1], self.ends[name][1:]
            if not SCHEMES[self._work.schemes[name]].extra:
                continue
            if args.strategy == QuantizationStrategy.TENSOR_GROUP:
                largest = torch.maximum(-low, high)
                module.input_global_scale.data.copy_(generate_gparam(-largest, largest))
            else:
                module.input_scale.data.copy_(calculate_qparams(low, high, args)[0])

    def importances(self) -> dict[str, Tensor]:
        """Of the weighted modules: F32 [K] on the CPU, ones for an expert without a token."""
        found = {}
        for name, module in self.modules.items():
            if name not in self._work.weighted:
                continue
            # A rank that has never called it adds nothing.
            zeros = module.weight.new_zeros(module.weight.shape[-1], dtype=torch.float64)
            squares = zeros + self._squares.get(name, 0)
            if has_others():
                dist.all_reduce(squares)
            found[name] = torch.ones(len(squares))
            if self._tokens[name]:
                found[name] = (squares / self._tokens[name]).float().cpu()
        return found

    def coverage(self) -> tuple[Coverage, ...]:
        """One entry for each quantized module, in their order."""
        found = []
        for name, module in self.modules.items():
            routed = self._routed_to(name)
            has_few = self._work.routed and 0 < (routed or 0) < module.weight.shape[-1]
            found.append(
                Coverage(
                    module=name, tokens=self._tokens[name], routed=routed, has_few_tokens=has_few
                )
            )
        return tuple(found)

    def _routed_to(self, name: str) -> int | None:
        """Tokens that the router sent to a module's expert; None outside routed experts."""
        expert = EXPERT.match(f"{name}.weight")
        if expert is None or expert["stack"] not in self._routed:
            return None
        return int(self._routed[expert["stack"]][int(expert["expert"])])

    def _see(self, name: str, _module: nn.Module, args: tuple, kwargs: dict) -> None:
        value = input_of(args, kwargs)
        if not value.numel():
            return
        self._tokens[name] += value.numel() // value.shape[-1]
        identity = InputIdentity.of(value)
        if identity not in self._ends_of:
            low, high = torch.aminmax(value)
            self._ends_of[identity] = torch.stack([-low, high])
        self.ends[name] = torch.maximum(self.ends[name], self._ends_of[identity])
        if name in self._work.weighted:
            if identity not in self._squares_of:
                self._squares_of[identity] = _sums_of_squares(value)
            self._squares[name] = self._squares.get(name, 0) + self._squares_of[identity]

    def _count_routed(self, name: str, stack: Any, args: tuple, kwargs: dict) -> None:
        index = kwargs["top_k_index"] if "top_k_index" in kwargs else args[1]
        counts = torch.bincount(index.flatten(), minlength=stack.num_experts)
        self._routed[name] = self._routed.get(name, 0) + counts[: stack.num_experts]


def _sums_of_squares(value: Tensor) -> Tensor:
    """[K] F64: over all rows of an input [..., K], each part of them summed in F32."""
    width = value.shape[-1]
    parts = value.detach().reshape(-1, width).split(max(1, _SQUARED_AT_ONCE // width))
    sums = [part.to(torch.float32, copy=True).square_().sum(0) for part in parts]
    return torch.stack(sums).double().sum(0)


def _name_what_is_not_finite(
    model: Any, modules: Mapping[str, Any], batches: Iterable[Mapping[str, Tensor]]
) -> None:
    """Raises CheckpointError for the first module, in the order of calls, that is to blame."""

    def refuse(where: str, got: str) -> NoReturn:
        rule = "activations must be finite during calibration"
        cure = "Look for a broken weight in this layer, or calibrate in BF16 instead of F16"
        raise CheckpointError(where, rule, got=got, cure=cure)

    def watch(name: str, _module: nn.Module, args: tuple, kwargs: dict, output: Tensor) -> None:
        for side, value in (("input", input_of(args, kwargs)), ("output", output)):
            if not value.isfinite().all():
                refuse(name, f"NaN or infinity in its {side}, batch {number}")

    hooks = {module: partial(watch, name) for name, module in modules.items()}
    with hooked(m.register_forward_hook(hook, with_kwargs=True) for m, hook in hooks.items()):
        for number, batch in enumerate(batches, start=1):  # noqa: B007
            model(**batch)
    refuse("the layer", "NaN or infinity in what it returns")


def no_batch() -> RecipeError:
    """The refusal of a rank that has nothing to calibrate with."""
    rule = "there must be a batch for every rank"
    return RecipeError("calibration", rule, got="none", cure="Raise calibration.samples")
