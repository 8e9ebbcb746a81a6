"""GPTQ on one layer: a Hessian for each distinct input, however many modules read it.

In: a model with one real layer, and what is to be rewritten in it. Out: `gptq`, a context for the
pass over the batches, at whose end the modules have rewritten weights and their scales. When every
routed expert computes every token, the gate and up projections of all of them have one Hessian.

Easy to get wrong: an address is no identity. The allocator gives the input of one expert's down
projection the memory of the one before it (`InputIdentity`). Which modules share is settled by
their first inputs; that they go on to share is checked at every call.

Source: llm-compressor 0.14.0.1 modifiers/gptq (`accumulate_hessian`, `GPTQModifier`), whose bits
these are.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from compressed_tensors.offload.dist_utils import as_broadcastable
from compressed_tensors.quantization import ActivationOrdering
from compressed_tensors.utils import patch_attr
from llmcompressor.modifiers.gptq import GPTQModifier, gptq_quantize
from llmcompressor.modifiers.gptq.helpers import (
    accumulate_hessian,
    factorize_hessian,
    make_empty_hessian,
)
from torch import Tensor, nn

from ....recipes.errors import CheckpointError
from ...run.ranks import gathered, has_others
from ..model.experts import run_again
from ..model.hooks import hooked
from .observed import InputIdentity
from .work import LayerWork, observe_weights


@contextmanager
def gptq(model: Any, work: LayerWork, batches: Iterable[Mapping[str, Tensor]]) -> Iterator[None]:
    """Sums Hessians while it lasts, and rewrites the modules at its end.

    Args:
        model: its modules have their schemes (`work.attach`).
        work: on the layer.
        batches: an expert that the router sent no token is rewritten from all of them.
    """
    names = {model.get_submodule(name): name for name in work.rewritten}
    hessians = Hessians(names)
    with hooked(module.register_forward_pre_hook(hessians.add) for module in names):
        yield
        if hessians.uncalled():
            run_again(model, batches)
            hessians.uncalled()
    hessians.sum_over_ranks()
    order = work.knobs.get("actorder", "static")
    for module in names:
        module.quantization_scheme.weights.actorder = order and ActivationOrdering(order)
    observe_weights(model, work)
    # One at a time: in batches, as 0.14.0.1 does on GPUs, the bits depend on the free memory.
    modifier = GPTQModifier(batched_quantization=None, **work.knobs)
    modifier._module_names = names
    rank, size = (dist.get_rank(), dist.get_world_size()) if has_others() else (0, 1)
    owner = {module: turn % size for turn, module in enumerate(names)}
    for own, modules in hessians.groups():
        with factored_once():
            for module in modules:
                if owner[module] == rank:
                    samples = torch.tensor(float(own.samples[module]), device=own.matrix.device)
                    modifier._hessians = {module: own.matrix}
                    modifier._num_samples = {module: samples}
                    modifier.compress_module_list([module])
    if has_others():
        for module, source in owner.items():
            for key, value in module.named_parameters(recurse=False):
                if key.startswith("weight"):
                    dist.broadcast(as_broadcastable(value.data), src=source)


@dataclass(slots=True, eq=False)
class _Sum:
    """One matrix, and how many inputs and samples each module has read that shares it.

    The leader adds the inputs.
    """

    matrix: Tensor
    leader: nn.Module
    calls: Counter[nn.Module] = field(default_factory=Counter)
    samples: Counter[nn.Module] = field(default_factory=Counter)
    latest: InputIdentity | None = None


class Hessians:
    """State: which module has which sum of x^T x; not to be changed by who reads it."""

    def __init__(self, name_of: Mapping[nn.Module, str]) -> None:
        """Sums of these modules."""
        self._name_of = name_of
        self.sums: dict[nn.Module, _Sum] = {}
        self._newest: dict[InputIdentity, _Sum] = {}
        self._only: Collection[nn.Module] = name_of

    def add(self, module: nn.Module, args: tuple[Tensor, ...]) -> None:
        """One call of a module, with its input.

        Raises:
            CheckpointError: it has shared its first input with others, and not this one.
        """
        value = args[0]
        if module not in self._only or not value.numel():
            return
        identity, own = InputIdentity.of(value), self.sums.get(module)
        if own is None:  # that of a module which has seen this one input and no more
            own = self._newest.get(identity)
            if own is None or own.calls[own.leader] != 1:
                own = _Sum(make_empty_hessian(module, device=value.device), module)
            self.sums[module] = self._newest[identity] = own
        own.calls[module] += 1
        # As the library counts: sequences, where there is a dimension of them.
        own.samples[module] += value.shape[0] if value.ndim > 2 else 1
        if module is own.leader:  # the library's own sum, bit for bit
            accumulate_hessian(value, module, own.matrix, torch.zeros(()))
            own.latest = identity
        elif own.latest != identity or own.calls[module] != own.calls[own.leader]:
            raise self._parted(module, own.leader)

    def uncalled(self) -> list[nn.Module]:
        """After a pass: what no rank has called; from now on only that is summed.

        Raises:
            CheckpointError: a module has read fewer inputs than those that it shares with.
        """
        self._newest.clear()
        for module, own in self.sums.items():
            if own.calls[module] != own.calls[own.leader]:
                raise self._parted(module, own.leader)
        called = set().union(*gathered({self._name_of[module] for module in self.sums}))
        self._only = [module for module, name in self._name_of.items() if name not in called]
        return self._only

    def sum_over_ranks(self) -> None:
        """Every rank's sums become those of all ranks, of the modules that any has called."""
        if not has_others():
            return
        modules, by_leader = {name: module for module, name in self._name_of.items()}, {}
        of_ranks = gathered(
            {
                self._name_of[module]: (self._name_of[own.leader], own.samples[module])
                for module, own in self.sums.items()
            }
        )
        for name, module in modules.items():
            found = [of_rank[name] for of_rank in of_ranks if name in of_rank]
            if not found:
                continue
            leader = found[0][0]
            if any(other != leader for other, _ in found):
                raise self._parted(module, modules[leader])
            if leader not in by_leader:
                own = self.sums.get(module)
                if own is None:  # of zeros where this rank has called none of them
                    weight: Any = module.weight
                    own = _Sum(make_empty_hessian(module, device=weight.device), module)
                dist.all_reduce(own.matrix)
                by_leader[leader] = own
            self.sums[module] = by_leader[leader]
            self.sums[module].samples[module] = sum(samples for _, samples in found)

    def groups(self) -> list[tuple[_Sum, list[nn.Module]]]:
        """Modules whose Hessian is the same: one sum, divided by one number of samples."""
        found: dict[tuple[_Sum, int], list[nn.Module]] = defaultdict(list)
        for module, own in self.sums.items():
            found[own, own.samples[module]].append(module)
        return [(own, modules) for (own, _), modules in found.items()]

    def _parted(self, module: nn.Module, leader: nn.Module) -> CheckpointError:
        rule = f"GPTQ needs it to read what {self._name_of[leader]} reads in every batch"
        cure = "Set calibration.algorithm: awq or minmax"
        return CheckpointError(self._name_of[module], rule, got="another input", cure=cure)


@contextmanager
def factored_once() -> Iterator[None]:
    """While modules of one Hessian are rewritten: the first factors it, and the others take that.

    Dead channels and a matrix that cannot be inverted are the same for all of them, too.
    """
    kept: list[tuple[Tensor, Tensor, Tensor]] = []

    def factor(
        weights: Tensor, hessians: Tensor, percdamp: float, used_rtn_fallback: Tensor
    ) -> Tensor:
        if not kept:
            dead = torch.diagonal(hessians, dim1=-2, dim2=-1) == 0
            factors = factorize_hessian(weights, hessians, percdamp, used_rtn_fallback)
            kept.append((dead, factors, used_rtn_fallback.clone()))
            return factors
        dead, factors, failed = kept[0]
        weights.masked_fill_(dead.unsqueeze(1), 0)
        used_rtn_fallback.copy_(failed)
        return factors

    # A patch, because nothing else reaches it: `quantize_weight` takes no factor, and calls this by
    # its name in the module (checked against llm-compressor 0.14.0.1). Without it, 256 experts
    # factor one Hessian 512 times.
    replaced: Callable[..., Any] = factor
    with patch_attr(gptq_quantize, "factorize_hessian", replaced):
        yield
