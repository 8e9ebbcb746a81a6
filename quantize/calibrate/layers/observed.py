"""What each quantized module sees during calibration: its tokens, and the ends of its inputs.

In: a model and the modules of a `LayerWork`. Out: an `Observed`: the tokens of each module, and the
smallest and largest value that it was handed, over all batches and ranks. The static input scales
follow.

Query, key and value projections see one tensor, and so do all experts, so each distinct input is
read once. Easy to get wrong: a tensor is not its address (`input_identity`).
"""

import math
from collections import Counter, defaultdict
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from compressed_tensors.quantization import QuantizationArgs, QuantizationStrategy
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from llmcompressor.modeling.moe.linear_experts import LinearExperts2D
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from ....recipes.errors import CheckpointError
from ....recipes.schemes import SCHEMES
from ...run.ranks import gathered, has_others
from ..model.binding import EXPERT
from ..model.hooks import hooked, input_of, modules_of
from .work import LayerWork

InputIdentity = tuple[object, ...]


def input_identity(value: Tensor) -> InputIdentity:
    """Which tensor [..., K] this is; equal only for the same rows in the same memory, not written
    to since.

    It holds no data, and while it is held no other storage is equal to its own.
    """
    # Rows in a row are the same whatever their batches are: a router's input and its shared
    # expert's.
    rows = (*value.shape, *value.stride())
    if value.is_contiguous():
        rows = (value.numel(),)
    # A storage that was freed leaves its address to the next one: a weak reference keeps it from
    # being given away.
    storage = StorageWeakRef(value.untyped_storage())
    # A buffer may be written anew between two modules that read it. PyTorch counts the writes of
    # all its operations but those through `.data`; transformers' models have none within a layer.
    writes = value._version
    offset = value.storage_offset()
    return storage, writes, offset, value.dtype, value.shape[-1], *rows


class Observed:
    """State: tokens of each quantized module, and the ends of its inputs.

    Nothing waits for the GPU here before `finish`.

    Attributes:
        modules: the quantized ones, by name.
        ends: module -> [2] in its dtype: minus the smallest value, and the largest; -inf if never
            called.
    """

    def __init__(self, model: Any, work: LayerWork):
        """Of the modules that are quantized."""
        self._model = model
        self._work = work
        self.modules = modules_of(model, work.schemes)
        self.ends = {
            name: module.weight.new_full((2,), -math.inf) for name, module in self.modules.items()
        }
        self._tokens = Counter(dict.fromkeys(self.modules, 0))
        # Stack of experts -> how many tokens the router sent to each.
        self._routed: dict[str, Any] = defaultdict(int)
        # The ends of each input of a batch.
        self._known: dict[InputIdentity, Tensor] = {}
        # One for each tensor that the model has returned.
        self._finite: list[Tensor] = []

    def watching(self) -> AbstractContextManager[None]:
        """Hooks on the modules look at what they are handed while this lasts."""
        handles = []
        for name, module in self._model.named_modules():
            if name in self.modules:
                hook = partial(self._see, name)
            elif isinstance(module, LinearExperts2D):
                hook = partial(self._count_routed, name)
            else:
                continue
            handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))
        return hooked(handles)

    def end_batch(self, output: Any) -> None:
        """After each forward, with what the model has returned."""
        self._known.clear()
        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor) and leaf.is_floating_point():
                self._finite.append(leaf.isfinite().all())

    def finish(self) -> None:
        """Sum over the ranks.

        Raises:
            CheckpointError: a module was never called; or a value was not finite: names the first
                module that has one as a weight, or else was handed one.
        """
        checks = {}
        for name, module in self.modules.items():
            checks[name, "weight"] = module.weight.isfinite().all()
        for name, ends in self.ends.items():
            checks[name, "input"] = ends.amax() < math.inf
        checks[self._work.path, "output"] = torch.stack(self._finite).all()
        finite = torch.stack([*checks.values()])
        for (where, what), is_finite in zip(checks, finite.tolist(), strict=True):
            if not is_finite:
                raise CheckpointError(
                    where,
                    "activations must be finite during calibration",
                    got=f"NaN or infinity in its {what}",
                    cure="Look for a broken weight in this layer, or calibrate in BF16",
                )
        own, *others = gathered((self._tokens, {n: c.cpu() for n, c in self._routed.items()}))
        self._tokens, self._routed = own
        for tokens, routed in others:
            self._tokens += tokens
            for name, counts in routed.items():
                self._routed[name] += counts
        for name in self.modules:
            if not self._tokens[name]:
                raise CheckpointError(
                    name,
                    "every quantized module must be called during calibration",
                    got="a module without a token",
                    cure="Keep it in the recipe",
                )
        if has_others() and self.ends:
            total = torch.stack([*self.ends.values()]).float()  # which every back-end reduces
            dist.all_reduce(total, dist.ReduceOp.MAX)
            for ends, largest in zip(self.ends.values(), total, strict=True):
                ends.copy_(largest)

    def set_input_scales(self) -> None:
        """Give the modules the static input scales that an observer of the extremes computes.

        One for modules that run as one: the inputs of fused ones are the same, those of experts
        differ.
        """
        for group in (*self._work.fused, *self._work.experts):
            self.ends |= dict.fromkeys(
                group, torch.stack([self.ends[name] for name in group]).amax(0)
            )
        for name, module in self.modules.items():
            args: QuantizationArgs = module.quantization_scheme.input_activations
            ends = self.ends[name]
            if not SCHEMES[self._work.schemes[name]].extra:
                continue
            if args.strategy == QuantizationStrategy.TENSOR_GROUP:
                largest = ends.amax(0, keepdim=True)
                module.input_global_scale.data.copy_(generate_gparam(-largest, largest))
            else:
                module.input_scale.data.copy_(calculate_qparams(-ends[:1], ends[1:], args)[0])

    def coverage(self) -> dict[str, int]:
        """Tokens that each module saw, over all batches and ranks; of routed experts, how many the
        router sent there.
        """
        found = {name: self._tokens[name] for name in self.modules}
        for name in found:
            expert = EXPERT.match(f"{name}.weight")
            if expert and expert["stack"] in self._routed:
                found[name] = int(self._routed[expert["stack"]][int(expert["expert"])])
        return found

    def _see(self, name: str, _module: nn.Module, args: tuple, kwargs: dict) -> None:
        value = input_of(args, kwargs)
        self._tokens[name] += value.numel() // value.shape[-1]
        identity = input_identity(value)
        if identity not in self._known:
            low, high = torch.aminmax(value)
            self._known[identity] = torch.stack([-low, high])
        self.ends[name] = torch.maximum(self.ends[name], self._known[identity])

    def _count_routed(self, name: str, stack: Any, args: tuple, kwargs: dict) -> None:
        # Every expert computes every token here, so how many the router sent to each is counted by
        # the router's choice.
        index = kwargs.get("top_k_index")
        if index is None:
            index = args[1]
        counts = torch.bincount(index.flatten(), minlength=stack.num_experts)
        self._routed[name] = self._routed[name] + counts[: stack.num_experts]
