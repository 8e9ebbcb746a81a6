"""AWQ and SmoothQuant on one layer; AWQ's cache is bounded: experts are searched some at a time.

In: a model with one real layer, and its smoothings. Out: `rescaling`, a context for the pass over
the batches, at whose end the modules are rescaled, and rounded to nearest.

AWQ keeps what the module around each smoothing was handed, in every batch, on the host. For the
pairs of up and down projection that is the down projection's input, of every expert: 550 GB for 256
sequences of 2,048 tokens and 256 experts of 2,048 channels. So experts wait for further passes,
as many in one as fit the memory; their scales are the same bits, however many these are.

Easy to get wrong: scales are applied one smoothing after the other, and each search sees the
weights that the earlier ones left. The search of a pair within an expert runs its down projection
alone, which no other smoothing changes; so it gives the same scale before anything is applied, when
a further pass still computes the inputs that the first one had.

Source: llm-compressor 0.14.0.1 modifiers/transform (awq/base.py, smoothquant/base.py).
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import torch
import torch.distributed as dist
from compressed_tensors.utils import patch_attr
from llmcompressor.core import State
from llmcompressor.modifiers.quantization.calibration import update_qparams
from llmcompressor.modifiers.transform.awq import AWQModifier, base
from llmcompressor.modifiers.transform.awq.mappings import ResolvedMapping
from llmcompressor.modifiers.transform.smoothquant import SmoothQuantModifier
from llmcompressor.modifiers.transform.smoothquant.base import SmoothQuantMapping
from llmcompressor.modifiers.utils.hooks import HooksMixin
from llmcompressor.pipelines.cache import IntermediatesCache
from llmcompressor.utils.helpers import calibration_forward_context
from pydantic import PrivateAttr
from torch import Tensor, nn

from ...needs.memory import free_host_bytes
from ...run.processes import place_of_process
from ..model.binding import EXPERT
from .forwards import without_bars
from .smoothing import Smoothing
from .work import LayerWork, observe_weights

_SHARE = 0.5  # of the free memory: a forward takes the rest, and other processes


def host_room() -> int:
    """Bytes that caches may take in main memory; the processes of this machine divide it."""
    return int(free_host_bytes() * _SHARE) // place_of_process().local_size


@contextmanager
def rescaling(
    model: Any,
    work: LayerWork,
    smoothings: Sequence[Smoothing],
    batches: Iterable[Mapping[str, Tensor]],
) -> Iterator[None]:
    """Looks at activations while it lasts, and rescales and rounds at its end.

    Args:
        model: its modules have their schemes (`work.attach`).
        work: on the layer, by awq or smoothquant.
        smoothings: what is rescaled; without any, modules are rounded to nearest.
        batches: for further passes.
    """
    modifier: Any = SmoothQuantModifier(resolved_mappings_=[], scales_={})
    if work.algorithm == "awq":
        modifier = BoundedAWQ()
        modifier._batches = batches
    for each in smoothings:
        smooth = model.get_submodule(each.smooth)
        balance = list(map(model.get_submodule, each.balance))
        if work.algorithm == "awq":
            name, parent = base.get_lowest_common_ancestor_with_avoid(iter(each.balance), model)
            modifier._resolved_mappings.append(
                ResolvedMapping(each.smooth, smooth, balance, [*each.balance], parent, name)
            )
        else:
            modifier.resolved_mappings_.append(SmoothQuantMapping(each.smooth, smooth, balance))
    state: Any = State(model=model)
    modifier.on_calibration_start(state, None)
    yield
    # 0.14.0.1 sums over ranks on an accelerator that may not be there.
    with without_bars(), patch_attr(base, "_allreduce_data_sum", _summed):
        modifier.on_sequential_epoch_end(state, None)
    modifier.on_calibration_end(state, None)
    update_qparams(observe_weights(model, work), "weight")


class BoundedAWQ(AWQModifier):
    """AWQModifier whose cache fits the host."""

    offload_device: Any = torch.device("cpu")
    _batches: Any = PrivateAttr()
    # Those within one expert, whose search sees no weight that another one changes.
    _waiting: list[ResolvedMapping] = PrivateAttr(default_factory=list)
    # The module around a smoothing -> its scale, once that was searched ahead.
    _scales: dict[nn.Module, Tensor] = PrivateAttr(default_factory=dict)
    _is_searching: bool = PrivateAttr(default=False)

    def _set_resolved_mappings(self, model: nn.Module) -> None:
        """They are known: `smoothing.py` has read them off the layer."""

    def _setup_activation_cache_hooks(self) -> None:
        super()._setup_activation_cache_hooks()
        for mapping in self._resolved_mappings:  # one for each parent (`smoothings_of`)
            is_alone = [mapping.parent] == mapping.balance_layers
            waits = is_alone and EXPERT.match(f"{mapping.parent_name}.weight") is not None
            if waits:
                self._waiting.append(mapping)
            # The hooks look their cache up when they are called.
            self._parent_args_cache[mapping.parent] = _Cache(is_open=not waits)

    @torch.no_grad()
    def _apply_smoothing(self, model: nn.Module) -> None:
        caches: dict[Any, Any] = self._parent_args_cache
        for cache in caches.values():
            cache.is_open = False
        for group in self._groups():
            # The sums of activations are those of the first pass already.
            sums = deepcopy(self._smooth_activation_stats)
            for mapping in group:
                caches[mapping.parent].is_open = True
            for batch in self._batches:
                model(**batch)
            self._smooth_activation_stats = sums
            for mapping in group:
                with calibration_forward_context(model), HooksMixin.disable_hooks():
                    outputs = self._run_samples(mapping.parent)
                    layers: list[Any] = mapping.balance_layers
                    weights = {layer: layer.weight.clone() for layer in layers}
                    scale = self._compute_best_scale(mapping, outputs, weights)
                    for layer, weight in weights.items():  # they are as they were
                        layer.weight.data.copy_(weight)
                self._scales[mapping.parent] = scale
                caches[mapping.parent] = _Cache(is_open=False)
        super()._apply_smoothing(model)

    def _groups(self) -> list[list[ResolvedMapping]]:
        """Mappings within experts whose caches fit together; one at least."""
        groups = []
        room = host_room()
        left = 0
        for mapping in self._waiting:
            _, count = self._smooth_activation_stats[mapping.smooth_name]
            weight: Any = mapping.parent.weight
            size = int(count) * weight[0].nbytes
            if not groups or size > left:
                groups.append([])
                left = room
            groups[-1].append(mapping)
            left -= size
        return groups

    def _run_samples(self, module: nn.Module) -> Any:
        if module in self._scales:
            return [torch.zeros(1)]
        # In the search, outputs are compared batch by batch, and only those of the rounded weights
        # are made anew.
        if self._is_searching:
            return self._outputs(module)
        return super()._run_samples(module)

    def _outputs(self, module: nn.Module) -> Iterator[Tensor]:
        for batch in self._parent_args_cache[module]:
            output = module(**batch)
            if isinstance(output, tuple):
                output = output[0]
            yield output

    def _compute_best_scale(
        self, mapping: ResolvedMapping, fp16_outputs: Any, orig_layer_weights: Any
    ) -> Tensor:
        if mapping.parent in self._scales:
            return self._scales[mapping.parent]
        self._is_searching = True
        try:
            return super()._compute_best_scale(mapping, fp16_outputs, orig_layer_weights)
        finally:
            self._is_searching = False


class _Cache(IntermediatesCache):
    """IntermediatesCache that keeps what it is given while it is open.

    It also works without an accelerator, where pinning memory is an error (0.14.0.1).
    """

    def __init__(self, *, is_open: bool):
        super().__init__(None, torch.device("cpu"))
        self.is_open = is_open

    def append(self, values: dict[str, Any]) -> None:
        if self.is_open:
            super().append(values)

    def pin_memory(self, batch_index: int, input_names: list[str] | None = None) -> None:
        if torch.accelerator.is_available():
            super().pin_memory(batch_index, input_names)


def _summed(values: list[Tensor]) -> list[Tensor]:
    """Over the ranks, where they can be summed."""
    device = torch.accelerator.current_accelerator() or "cpu"
    found = [value.to(device) for value in values]
    for value in found:
        dist.all_reduce(value)
    return found
