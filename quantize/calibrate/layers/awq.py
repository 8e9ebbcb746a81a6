"""AWQ, with a cache that is bounded: experts that do not fit are searched some at a time.

In: mappings, and passes over the batches. Out: `BoundedAWQ`, an AWQModifier whose scales are the
same bits, however many experts are searched at once.

AWQ keeps what the module around each smoothing was handed, in every batch, on the host. For the
pairs of up and down projection that is the down projection's input, of every expert: 550 GB for 256
sequences of 2,048 tokens and 256 experts of 2,048 channels.

Easy to get wrong: scales are applied one smoothing after the other, and each search sees the
weights that the earlier ones left. The search of a pair within an expert runs its down projection
alone, which no other smoothing changes; so it gives the same scale before anything is applied, when
a further pass still computes the inputs that the first one had.

Source: llm-compressor 0.14.0.1 modifiers/transform/awq/base.py.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from compressed_tensors.offload import as_single_threaded
from llmcompressor.core import active_session
from llmcompressor.modifiers.transform.awq import AWQModifier
from llmcompressor.modifiers.transform.awq.mappings import ResolvedMapping
from llmcompressor.modifiers.utils.hooks import HooksMixin
from llmcompressor.pipelines.cache import IntermediatesCache
from llmcompressor.utils.helpers import calibration_forward_context
from pydantic import PrivateAttr
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ...run.ranks import gathered, has_others
from .expert_passes import ExpertPasses


class BoundedAWQ(AWQModifier):
    """AWQModifier whose cache fits the host, and which runs on CPUs, too.

    0.14.0.1 sums over ranks on an accelerator that may not be there.
    """

    offload_device: Any = torch.device("cpu")
    _passes: ExpertPasses = PrivateAttr()
    _caches: dict[str, "_Cache"] = PrivateAttr(default_factory=dict)
    """Name of a smoothed module -> the cache of the module around its smoothing."""
    _scales: dict[str, Tensor] = PrivateAttr(default_factory=dict)
    """Likewise -> its scale, where it was searched ahead."""
    _is_searching: bool = PrivateAttr(default=False)

    def with_passes(self, passes: ExpertPasses) -> "BoundedAWQ":
        """Experts whose inputs do not fit wait for further passes."""
        self._passes = passes
        return self

    def _setup_activation_cache_hooks(self) -> None:
        super()._setup_activation_cache_hooks()
        room = _CacheRoom(self._passes.room)
        for mapping in self._resolved_mappings:  # one for each parent (`smoothing.one_a_parent`)
            self._caches[mapping.smooth_name] = _Cache(room, may_wait=self._may_wait(mapping))
            # The hooks look their cache up when they are called.
            self._parent_args_cache[mapping.parent] = self._caches[mapping.smooth_name]

    def _may_wait(self, mapping: ResolvedMapping) -> bool:
        """Whether this smoothing is within one expert, and its search sees no weights that another
        one changes.
        """
        own = {*mapping.parent.modules()}
        if mapping.parent not in self._passes.expert_of or not own >= {*mapping.balance_layers}:
            return False
        others = (other for other in self._resolved_mappings if other is not mapping)
        return not any(own & {other.smooth_layer, *other.balance_layers} for other in others)

    def _apply_smoothing(self, model: nn.Module) -> None:
        self._search_ahead(model)
        super()._apply_smoothing(model)

    @torch.no_grad()
    def _search_ahead(self, model: nn.Module) -> None:
        """Where caches had to wait: the scales of all experts, before anything is applied."""
        own_sizes = {name: cache.whole_bytes for name, cache in self._caches.items()}
        own_waits = {name for name, cache in self._caches.items() if not cache.is_open}
        of_ranks = gathered((own_sizes, own_waits, self._passes.room))
        waits = set().union(*(names for _, names, _ in of_ranks))
        if not waits:
            return
        sizes = {name: max(found[name] for found, _, _ in of_ranks) for name in own_sizes}
        for cache in self._caches.values():
            cache.is_open, cache.room.limit = False, None
        within = [
            mapping
            for mapping in self._resolved_mappings
            if self._caches[mapping.smooth_name].may_wait
        ]
        for mapping in within:
            if mapping.smooth_name not in waits:
                self._scales[mapping.smooth_name] = self._searched(model, mapping)
            self._caches[mapping.smooth_name].forget()
        held = sum(sizes[name] for name, cache in self._caches.items() if not cache.may_wait)
        room = min((room for _, _, room in of_ranks if room is not None), default=held) - held
        for group in _groups(
            [mapping for mapping in within if mapping.smooth_name in waits], sizes, room
        ):
            # The sums of activations are those of the first pass already.
            sums = {
                name: [value.clone() for value in found]
                for name, found in self._smooth_activation_stats.items()
            }
            for mapping in group:
                self._caches[mapping.smooth_name].is_open = True
            self._passes.run({self._passes.expert_of[mapping.parent] for mapping in group})
            self._smooth_activation_stats = sums
            for mapping in group:
                self._scales[mapping.smooth_name] = self._searched(model, mapping)
                self._caches[mapping.smooth_name].forget()

    def _searched(self, model: nn.Module, mapping: ResolvedMapping) -> Tensor:
        """The best scale of a mapping; its weights are as they were."""
        with calibration_forward_context(model), HooksMixin.disable_hooks():
            outputs = self._run_samples(mapping.parent)
            layers: list[Any] = mapping.balance_layers
            weights = {layer: layer.weight.clone() for layer in layers}
            scales = self._compute_best_scale(mapping, outputs, weights)
            for layer, weight in weights.items():
                layer.weight.data.copy_(weight)
        return scales

    def _run_samples(self, module: nn.Module) -> Any:
        if any(
            mapping.parent is module and mapping.smooth_name in self._scales
            for mapping in self._resolved_mappings
        ):
            return [torch.zeros(1)]  # searched already
        # In the search, outputs are compared batch by batch, and only those of the rounded weights
        # are made anew.
        return self._outputs(module) if self._is_searching else super()._run_samples(module)

    def _outputs(self, module: nn.Module) -> Iterator[Tensor]:
        cache = self._parent_args_cache[module]
        for batch in cache.iter_prefetch() if active_session().state.sequential_prefetch else cache:
            output = module(**batch)
            yield output[0] if isinstance(output, tuple) else output

    def _compute_best_scale(
        self, mapping: ResolvedMapping, fp16_outputs: Any, orig_layer_weights: Any
    ) -> Tensor:
        if mapping.smooth_name in self._scales:
            return self._scales[mapping.smooth_name]
        if _sums_on_cpu():
            for value in self._smooth_activation_stats[mapping.smooth_name]:
                dist.all_reduce(value)
        self._is_searching = True
        try:
            with as_single_threaded() if _sums_on_cpu() else nullcontext():
                return super()._compute_best_scale(mapping, fp16_outputs, orig_layer_weights)
        finally:
            self._is_searching = False

    def _compute_loss(self, fp16_outputs: list[Tensor], int_w_outputs: Any) -> float:
        loss = super()._compute_loss(fp16_outputs, int_w_outputs)
        if not _sums_on_cpu():
            return loss
        count = sum(output.numel() for output in fp16_outputs)
        totals = torch.tensor([loss * count, count], dtype=torch.float64)
        dist.all_reduce(totals)
        return (totals[0] / totals[1]).item()


class _CacheRoom:
    """State: the caches of a layer; while there is a limit, the last ones that may wait are emptied
    to keep it.
    """

    def __init__(self, limit: int | None):
        self.limit = limit
        self.caches: list[_Cache] = []
        self.taken = 0

    def keep_limit(self) -> None:
        """After a batch was put into one of them."""
        for cache in reversed(self.caches):
            if self.limit is None or self.taken <= self.limit:
                return
            if cache.may_wait and cache.is_open:
                cache.forget()


class _Cache(IntermediatesCache):
    """IntermediatesCache that knows its size, and waits for another pass where it would not fit.

    It also works without an accelerator, where pinning memory is an error (0.14.0.1).

    Attributes:
        whole_bytes: of all batches so far, kept or not.
        held_bytes: of those that are kept.
        is_open: it keeps what it is given.
    """

    def __init__(self, room: _CacheRoom, *, may_wait: bool):
        super().__init__(None, torch.device("cpu"))
        self.may_wait, self.is_open, self.whole_bytes, self.held_bytes = may_wait, True, 0, 0
        self.room = room
        room.caches.append(self)

    def append(self, values: dict[str, Any]) -> None:
        num_bytes = sum(leaf.nbytes for leaf in tree_leaves(values) if isinstance(leaf, Tensor))
        self.whole_bytes += num_bytes
        if self.is_open:
            super().append(values)
            self.held_bytes += num_bytes
            self.room.taken += num_bytes
            self.room.keep_limit()

    def pin_memory(self, batch_index: int, input_names: list[str] | None = None) -> None:
        if torch.accelerator.is_available():
            super().pin_memory(batch_index, input_names)

    def forget(self) -> None:
        """Makes room, and keeps nothing from now on."""
        self.is_open = False
        self.batch_intermediates.clear()
        self.room.taken -= self.held_bytes
        self.held_bytes = 0


def _groups(
    mappings: Iterable[ResolvedMapping], sizes: Mapping[str, int], room: int
) -> list[list[ResolvedMapping]]:
    """Mappings whose caches fit together; one at least."""
    groups: list[list[ResolvedMapping]] = []
    left = 0
    for mapping in mappings:
        size = sizes[mapping.smooth_name]
        if not groups or size > left:
            groups.append([])
            left = room
        groups[-1].append(mapping)
        left -= size
    return groups


def _sums_on_cpu() -> bool:
    return has_others() and not torch.accelerator.is_available()
