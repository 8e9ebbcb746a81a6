"""AWQ, with a cache that is bounded: experts that do not fit are searched some at a time.

In: mappings, and passes over the batches. Out: `BoundedAWQ`, an AWQModifier whose scales are the same bits, however
many experts are searched at once.

AWQ keeps what the module around each smoothing was handed, in every batch, on the host. For the pairs of up and down
projection that is the down projection's input, of every expert: 550 GB for 256 sequences of 2,048 tokens and 256
experts of 2,048 channels.

Easy to get wrong: scales are applied one smoothing after the other, and each search sees the weights that the earlier
ones left. The search of a pair within an expert runs its down projection alone, which no other smoothing changes; so it
gives the same scale before anything is applied, when a further pass still computes the inputs that the first one had.

Source: llm-compressor 0.14.0.1 modifiers/transform/awq/base.py.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
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

from ...run.ranks import has_others
from .expert_passes import ExpertPasses


class BoundedAWQ(AWQModifier):
    """AWQModifier whose cache fits the host, and which runs on CPUs, too.

    0.14.0.1 sums over ranks on an accelerator that may not be there.
    """

    offload_device: Any = torch.device("cpu")
    _passes: ExpertPasses = PrivateAttr()
    _scales: dict[str, Tensor] = PrivateAttr(default_factory=dict)
    _is_searching: bool = PrivateAttr(default=False)

    def with_passes(self, passes: ExpertPasses) -> "BoundedAWQ":
        """Experts whose inputs do not fit wait for further passes."""
        self._passes = passes
        return self

    def _setup_activation_cache_hooks(self) -> None:
        super()._setup_activation_cache_hooks()
        # The hooks look their cache up when they are called.
        room = _CacheRoom(self._passes.room.host, max(1, len(self._passes)))
        may_wait = {id(mapping.parent) for mapping in self._resolved_mappings if self._may_wait(mapping)}
        self._parent_args_cache = {
            module: _Cache(room, may_wait=id(module) in may_wait) for module in self._parent_args_cache
        }

    def _may_wait(self, mapping: ResolvedMapping) -> bool:
        """Whether this smoothing is within one expert, and its search sees no weights that another one changes."""
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
        caches = {m.smooth_name: self._cache(m) for m in self._resolved_mappings}
        sizes, waits = _agreed({name: cache.whole_bytes for name, cache in caches.items()}, _waiting(caches))
        if not waits:
            return
        within = [mapping for mapping in self._resolved_mappings if caches[mapping.smooth_name].may_wait]
        for mapping in within:
            if mapping.smooth_name not in waits:
                self._scales[mapping.smooth_name] = self._searched(model, mapping)
            self._cache(mapping).forget()
        held = sum(sizes[name] for name, cache in caches.items() if not cache.may_wait)
        room = None if (own := self._passes.room.host) is None else _least(own) - held
        for group in _groups([m for m in within if m.smooth_name in waits], sizes, room):
            self._fill(group)
            for mapping in group:
                self._scales[mapping.smooth_name] = self._searched(model, mapping)
                self._cache(mapping).forget()

    def _fill(self, group: Sequence[ResolvedMapping]) -> None:
        """What these mappings' parents are handed, in every batch."""
        # The sums of activations are those of the first pass already.
        sums = {name: [value.clone() for value in found] for name, found in self._smooth_activation_stats.items()}
        for mapping in group:
            self._cache(mapping).open()
        self._passes.run({self._passes.expert_of[mapping.parent] for mapping in group}, every_token=True)
        self._smooth_activation_stats = sums

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
        if any(mapping.parent is module and mapping.smooth_name in self._scales for mapping in self._resolved_mappings):
            return [torch.zeros(1)]  # searched already
        # In the search, outputs are compared batch by batch, and only those of the rounded weights are made anew.
        return self._outputs(module) if self._is_searching else super()._run_samples(module)

    def _outputs(self, module: nn.Module) -> Iterator[Tensor]:
        cache = self._parent_args_cache[module]
        for batch in cache.iter_prefetch() if active_session().state.sequential_prefetch else cache:
            output = module(**batch)
            yield output[0] if isinstance(output, tuple) else output

    def _compute_best_scale(self, mapping: ResolvedMapping, fp16_outputs: Any, orig_layer_weights: Any) -> Tensor:
        if mapping.smooth_name in self._scales:
            return self._scales[mapping.smooth_name]
        self._is_searching = True
        try:
            return self._best_scale(mapping, fp16_outputs, orig_layer_weights)
        finally:
            self._is_searching = False

    def _best_scale(self, mapping: ResolvedMapping, fp16_outputs: Any, orig_layer_weights: Any) -> Tensor:
        if not _sums_on_cpu():
            return super()._compute_best_scale(mapping, fp16_outputs, orig_layer_weights)
        for value in self._smooth_activation_stats[mapping.smooth_name]:
            dist.all_reduce(value)
        with as_single_threaded():
            return super()._compute_best_scale(mapping, fp16_outputs, orig_layer_weights)

    def _compute_loss(self, fp16_outputs: list[Tensor], int_w_outputs: Any) -> float:
        loss = super()._compute_loss(fp16_outputs, int_w_outputs)
        if not _sums_on_cpu():
            return loss
        count = sum(output.numel() for output in fp16_outputs)
        totals = torch.tensor([loss * count, count], dtype=torch.float64)
        dist.all_reduce(totals)
        return (totals[0] / totals[1]).item()

    def _cache(self, mapping: ResolvedMapping) -> "_Cache":
        found = self._parent_args_cache[mapping.parent]
        assert isinstance(found, _Cache)
        return found


class _CacheRoom:
    """State: the caches of a layer, and whether it is decided which of them wait."""

    def __init__(self, limit: int | None, num_batches: int):
        self.limit, self.num_batches = limit, num_batches
        self.caches: list[_Cache] = []
        self.is_decided = False

    def decide(self) -> None:
        """After the first batch, which tells how large each cache will be: those that have to be kept come first."""
        if self.is_decided or self.limit is None:
            return
        self.is_decided = True
        taken = sum(cache.whole_bytes for cache in self.caches if not cache.may_wait)
        for cache in self.caches:
            if cache.may_wait:
                cache.waits = taken + cache.whole_bytes > self.limit
                taken += 0 if cache.waits else cache.whole_bytes
                if cache.waits:
                    cache.forget()


class _Cache(IntermediatesCache):
    """IntermediatesCache that knows its size, and waits for another pass where it would not fit.

    It also works without an accelerator, where pinning memory is an error (0.14.0.1).

    Attributes:
        whole_bytes: once all batches are in.
        waits: it was left empty.
    """

    def __init__(self, room: _CacheRoom, *, may_wait: bool):
        super().__init__(None, torch.device("cpu"))
        self.may_wait, self.waits, self.whole_bytes = may_wait, False, 0
        self._room = room
        room.caches.append(self)

    def append(self, values: dict[str, Any]) -> None:
        if self.whole_bytes:
            self._room.decide()
        else:
            tensors = (leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor))
            self.whole_bytes = sum(leaf.nbytes for leaf in tensors) * self._room.num_batches
        if not self.waits:
            super().append(values)

    def pin_memory(self, batch_index: int, input_names: list[str] | None = None) -> None:
        if torch.accelerator.is_available():
            super().pin_memory(batch_index, input_names)

    def forget(self) -> None:
        """Makes room."""
        self.batch_intermediates.clear()

    def open(self) -> None:
        """From now on it keeps what it is given. With one batch in the first pass, nothing was decided in it."""
        self.waits, self._room.is_decided = False, True


def _waiting(caches: Mapping[str, _Cache]) -> set[str]:
    return {name for name, cache in caches.items() if cache.waits}


def _groups(
    mappings: Iterable[ResolvedMapping], sizes: Mapping[str, int], room: int | None
) -> list[list[ResolvedMapping]]:
    """Mappings whose caches fit together; one at least."""
    groups: list[list[ResolvedMapping]] = []
    taken = 0
    for mapping in mappings:
        size = sizes[mapping.smooth_name]
        if not groups or (room is not None and taken + size > room):
            groups.append([])
            taken = 0
        groups[-1].append(mapping)
        taken += size
    return groups


def _agreed(sizes: Mapping[str, int], waits: set[str]) -> tuple[dict[str, int], set[str]]:
    """The largest sizes of all ranks, and what waits on any of them."""
    if not has_others():
        return dict(sizes), waits
    of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, (sizes, waits))
    largest = {name: max(found[name] for found, _ in of_ranks) for name in sizes}
    return largest, set().union(*(names for _, names in of_ranks))


def _least(value: int) -> int:
    """Of all ranks."""
    if not has_others():
        return value
    of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, value)
    return min(of_ranks)


def _sums_on_cpu() -> bool:
    return has_others() and not torch.accelerator.is_available()
