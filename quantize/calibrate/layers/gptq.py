"""GPTQ on one layer: a Hessian for each distinct input, however many modules read it.

In: a model with one real layer, and what is to be rewritten in it. Out: `gptq`, a context for the
pass over the batches, at whose end the modules have rewritten weights and their scales. When every
routed expert computes every token, the gate and up projections of all of them have one Hessian.

Easy to get wrong: an address is no identity. The allocator gives the input of one expert's down
projection the memory of the one before it (`input_identity`). Which modules share is settled by
their first inputs; that they go on to share is checked at every call.

Source: llm-compressor 0.14.0.1 modifiers/gptq (`accumulate_hessian`, `GPTQModifier`), whose bits
these are.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
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
from ..model.hooks import hooked_before
from .observed import InputIdentity, input_identity
from .work import LayerWork, observe_weights


@contextmanager
def gptq(model: Any, work: LayerWork) -> Iterator[None]:
    """Sums Hessians while it lasts, and rewrites the modules at its end.

    Args:
        model: its modules have their schemes (`work.attach`).
        work: on the layer.
    """
    names = {model.get_submodule(name): name for name in work.rewritten}
    hessians = Hessians(names)
    with hooked_before(dict.fromkeys(names, hessians.add)):
        yield
    hessians.finish()
    for module in names:
        module.quantization_scheme.weights.actorder = ActivationOrdering.STATIC
    observe_weights(model, work)
    # One at a time: in batches, as 0.14.0.1 does on GPUs, the bits depend on the free memory.
    modifier = GPTQModifier(batched_quantization=None)
    modifier._module_names = names
    rank = 0
    size = 1
    if has_others():
        rank = dist.get_rank()
        size = dist.get_world_size()
    owner = {module: turn % size for turn, module in enumerate(names)}
    # Those whose Hessian is the same: one sum, divided by one number of samples.
    groups: dict[tuple[_Sum, int], list[nn.Module]] = defaultdict(list)
    for module, own in hessians.sums.items():
        groups[own, own.samples[module]].append(module)
    for (own, num_samples), modules in groups.items():
        with factored_once():
            for module in modules:
                if owner[module] == rank:
                    samples = torch.tensor(float(num_samples), device=own.matrix.device)
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
    latest: InputIdentity = ()


class Hessians:
    """State: which module has which sum of x^T x; not to be changed by who reads it."""

    def __init__(self, name_of: Mapping[nn.Module, str]) -> None:
        """Sums of these modules."""
        self._name_of = name_of
        self.sums: dict[nn.Module, _Sum] = {}
        self._newest: dict[InputIdentity, _Sum] = {}

    def add(self, module: nn.Module, args: tuple[Tensor, ...]) -> None:
        """One call of a module, with its input.

        Raises:
            CheckpointError: it has shared its first input with others, and not this one.
        """
        value = args[0]
        identity = input_identity(value)
        own = self.sums.get(module)
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
            raise self._parted(module, own)

    def finish(self) -> None:
        """After a pass: every rank's sums become those of all ranks.

        Raises:
            CheckpointError: a module has read fewer inputs than those that it shares with.
        """
        self._newest.clear()
        samples = {}
        for module, own in self.sums.items():
            if own.calls[module] != own.calls[own.leader]:
                raise self._parted(module, own)
            samples[self._name_of[module]] = own.samples[module]
        total = sum(map(Counter, gathered(samples)), Counter())
        for module, own in self.sums.items():
            own.samples[module] = total[self._name_of[module]]
        if has_others():
            for own in dict.fromkeys(self.sums.values()):
                dist.all_reduce(own.matrix)

    def _parted(self, module: nn.Module, own: _Sum) -> CheckpointError:
        return CheckpointError(
            self._name_of[module],
            f"GPTQ needs it to read what {self._name_of[own.leader]} reads in every batch",
            got="another input",
            cure="Set calibration.algorithm: awq or minmax",
        )


@contextmanager
def factored_once() -> Iterator[None]:
    """While modules of one Hessian are rewritten: the first factors it, and the others take that.

    Dead channels and a matrix that cannot be inverted are the same for all of them, too.
    """
    kept = []

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
