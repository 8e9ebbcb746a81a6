"""GPTQ's Hessians of one layer: one for each distinct input, however many modules read it.

In: the input of each module, call by call. Out: for each module the sum of x^T x over its calls;
modules that read the same tensors share one matrix. When every routed expert computes every token,
the gate and up projections of all of them have one Hessian.

Easy to get wrong: an address is no identity. The allocator gives the input of one expert's down
projection the memory of the one before it (`inputs.InputIdentity`). Which modules share is settled
by their first inputs; that they go on to share is checked at every call.

Source: llm-compressor 0.14.0.1 modifiers/gptq/helpers.py (`accumulate_hessian`, whose bits these
are).
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from compressed_tensors.utils import patch_attr
from llmcompressor.modifiers.gptq import gptq_quantize
from llmcompressor.modifiers.gptq.helpers import (
    accumulate_hessian,
    factorize_hessian,
    make_empty_hessian,
)
from torch import Tensor, nn

from ....recipes.errors import CheckpointError
from ...run.ranks import gathered
from .inputs import InputIdentity


@dataclass(slots=True, eq=False)
class _Sum:
    """One matrix, and the modules that share it: module -> how many inputs it has read. The first
    adds them.
    """

    matrix: Tensor
    inputs: dict[nn.Module, int]
    latest: InputIdentity | None = None


class Hessians:
    """State: the distinct sums of x^T x, which modules each belongs to, and each module's number of
    samples.
    """

    def __init__(self, name_of: Mapping[nn.Module, str]) -> None:
        """Sums of these modules."""
        self._name_of = name_of
        self._sums: dict[nn.Module, _Sum] = {}
        self._samples: dict[nn.Module, int] = defaultdict(int)
        self._newest: dict[InputIdentity, _Sum] = {}
        self._only: Collection[nn.Module] = name_of

    def __contains__(self, module: object) -> bool:
        return module in self._sums

    def add(self, module: nn.Module, value: Tensor) -> None:
        """One call of a module.

        Raises:
            CheckpointError: it has shared its first input with others, and not this one.
        """
        if module not in self._only:
            return
        identity = InputIdentity.of(value)
        own = self._sums.get(module) or self._first(module, identity, value)
        leader = next(iter(own.inputs))
        own.inputs[module] += 1
        if module is leader:  # the library's own sum, bit for bit
            accumulate_hessian(value, module, own.matrix, torch.zeros(()))
            own.latest = identity
        elif own.latest != identity or own.inputs[module] != own.inputs[leader]:
            raise _parted(self._name_of[module], self._name_of[leader])
        # As the library counts: sequences, where there is a dimension of them.
        self._samples[module] += value.shape[0] if value.ndim > 2 else 1

    def groups(self, modules: Iterable[nn.Module]) -> list[list[nn.Module]]:
        """The modules, those together whose Hessian is the same: one sum, divided by one number of
        samples.
        """
        found: dict[tuple[int, int], list[nn.Module]] = defaultdict(list)
        for module in modules:
            found[id(self._sums[module]), self._samples[module]].append(module)
        return list(found.values())

    def matrix(self, module: nn.Module) -> Tensor:
        """The sum of x^T x [K, K] that this module shares with others; not to be changed."""
        return self._sums[module].matrix

    def samples(self, module: nn.Module) -> Tensor:
        """What the sum is divided by."""
        return torch.tensor(float(self._samples[module]), device=self.matrix(module).device)

    def drop(self, modules: Iterable[nn.Module]) -> None:
        """Forgets these modules; a matrix goes with the last of its own."""
        for module in modules:
            del self._sums[module].inputs[module], self._sums[module], self._samples[module]

    def uncalled(self) -> list[nn.Module]:
        """After a pass: what no rank has called; from now on only that is summed.

        Raises:
            CheckpointError: a module has read fewer inputs than those that it shares the first one
                with.
        """
        self._newest.clear()
        for module, own in self._sums.items():
            leader = next(iter(own.inputs))
            if own.inputs[module] != own.inputs[leader]:
                raise _parted(self._name_of[module], self._name_of[leader])
        called = set().union(*gathered({self._name_of[module] for module in self._sums}))
        self._only = [module for module, name in self._name_of.items() if name not in called]
        return self._only

    def sum_over_ranks(self, modules: Iterable[nn.Module]) -> None:
        """Every rank's sums become those of all ranks, of those modules that one of them has
        called.
        """
        leaders = {m: self._name_of[next(iter(own.inputs))] for m, own in self._sums.items()}
        of_ranks = gathered(
            {self._name_of[m]: (leader, self._samples[m]) for m, leader in leaders.items()}
        )
        by_leader: dict[str, _Sum] = {}
        for module in modules:
            name = self._name_of[module]
            found = [of_rank[name] for of_rank in of_ranks if name in of_rank]
            if not found:
                continue
            leader = found[0][0]
            if any(other != leader for other, _ in found):
                raise _parted(name, leader)
            if leader not in by_leader:
                own = self._sums.get(module)
                if own is None:  # of zeros where this rank has called none of them
                    weight: Any = module.weight
                    own = _Sum(make_empty_hessian(module, device=weight.device), {})
                dist.all_reduce(own.matrix)
                by_leader[leader] = own
            self._sums[module] = by_leader[leader]
            self._sums[module].inputs.setdefault(module, 0)
            self._samples[module] = sum(samples for _, samples in found)

    def _first(self, module: nn.Module, identity: InputIdentity, value: Tensor) -> _Sum:
        """The sum that a module starts with: another module's that has seen this one input and no
        more, or its own.
        """
        own = self._newest.get(identity)
        if own is None or next(iter(own.inputs.values()), 0) != 1:
            own = self._newest[identity] = _Sum(make_empty_hessian(module, device=value.device), {})
        own.inputs[module] = 0
        self._sums[module] = own
        return own


def _parted(name: str, leader: str) -> CheckpointError:
    rule = f"GPTQ needs it to read what {leader} reads in every batch, as in the first one"
    return CheckpointError(
        name, rule, got="another input", cure="Set calibration.algorithm: awq or minmax"
    )


@contextmanager
def factored_once() -> Iterator[None]:
    """While modules of one Hessian are rewritten one by one: the first factors it, and the others
    take its factor.

    Dead channels and a matrix that cannot be inverted are the same for all of them, too. The
    library's function is replaced because nothing else reaches it: `quantize_weight` takes no
    factor, and calls it by its name in the module (checked against llm-compressor 0.14.0.1).
    Without this, 256 experts factor one Hessian 512 times.
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

    replaced: Callable[..., Any] = factor
    with patch_attr(gptq_quantize, "factorize_hessian", replaced):
        yield
