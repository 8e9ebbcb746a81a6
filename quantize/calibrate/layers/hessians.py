"""GPTQ's Hessians of one layer: one for each distinct input, however many modules read it.

In: the input of each module, call by call. Out: for each module the sum of x^T x over its calls; modules that read the
same tensors share one matrix. When every routed expert computes every token, the gate and up projections of all of
them have one Hessian.

Easy to get wrong: an address is no identity. The allocator gives the input of one expert's down projection the memory
of the one before it (`inputs.InputIdentity`).

Source: llm-compressor 0.14.0.1 modifiers/gptq/helpers.py (`accumulate_hessian`, whose bits these are).
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from compressed_tensors.utils import patch_attr
from llmcompressor.modifiers.gptq import gptq_quantize
from llmcompressor.modifiers.gptq.helpers import accumulate_hessian, factorize_hessian, make_empty_hessian
from torch import Tensor, nn

from ...run.ranks import gathered
from .inputs import InputIdentity


@dataclass(slots=True, eq=False)
class _Sum:
    """One matrix, and the modules that have seen the same inputs so far.

    An input is added when all of them have read it. Until then it waits, since those that read another one go on with
    the sum as it was.
    """

    matrix: Tensor
    members: set[nn.Module]
    num_inputs: int = 0
    waiting: tuple[InputIdentity, Tensor] | None = None
    arrived: set[nn.Module] = field(default_factory=set)

    def add(self, value: Tensor) -> None:
        """The library's own sum, bit for bit."""
        accumulate_hessian(value, next(iter(self.members)), self.matrix, torch.zeros(()))
        self.num_inputs += 1


class Hessians:
    """State: the distinct sums of x^T x, which modules each belongs to, and each module's number of samples.

    Attributes:
        waiting: modules that were called and not summed, because there was no room; for another pass.
    """

    def __init__(self, room: int | None = None, expert_of: Mapping[nn.Module, nn.Module] | None = None) -> None:
        """Sums of all modules.

        Args:
            room: bytes; modules of routed experts wait where their sum would take more. None for no limit.
            expert_of: module -> the routed expert that it belongs to.
        """
        self._room, self._expert_of = room, expert_of or {}
        self._sums: dict[nn.Module, _Sum] = {}
        self._samples: dict[nn.Module, int] = defaultdict(int)
        self._newest: dict[InputIdentity, _Sum] = {}
        self._only: Collection[nn.Module] | None = None
        self._num_bytes, self._took_one = 0, False
        self.waiting: dict[nn.Module, None] = {}

    def __iter__(self) -> Iterator[nn.Module]:
        """The modules that were called, in the order of their first calls."""
        return iter(self._sums)

    def __contains__(self, module: object) -> bool:
        return module in self._sums

    @property
    def num_matrices(self) -> int:
        """How many are in memory."""
        return len(self._distinct())

    def add(self, module: nn.Module, value: Tensor) -> None:
        """One call of a module."""
        if module in self.waiting or (self._only is not None and module not in self._only):
            return
        identity = InputIdentity.of(value)
        # As the library counts: sequences, where there is a dimension of them.
        self._samples[module] += value.shape[0] if value.ndim > 2 else 1
        own = self._sums.get(module)
        if own is None:
            first = self._first(module, identity, value)
            if first is None:
                self._samples.pop(module)
                self.waiting[module] = None
            else:
                self._sums[module] = first
            return
        if own.waiting is not None and (own.waiting[0] != identity or module in own.arrived):
            self._part(own)
            own = self._sums[module]
        if own.waiting is None:
            own.waiting = identity, value
        own.arrived.add(module)
        if own.arrived == own.members:
            self._settle(own)

    def settle(self) -> None:
        """Adds what still waits for modules that were not called again."""
        for own in self._distinct():
            if own.waiting is not None:
                self._part(own)

    def groups(self, modules: Iterable[nn.Module]) -> list[list[nn.Module]]:
        """The modules, those together whose Hessian is the same: one sum, divided by one number of samples."""
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
            own = self._sums.pop(module)
            own.members.discard(module)
            self._samples.pop(module)
            if not own.members:
                self._num_bytes -= own.matrix.nbytes

    def wait_for_uncalled(self, name_of: Mapping[nn.Module, str], done: Collection[nn.Module]) -> None:
        """What no rank has called waits, but for what is done."""
        called = set().union(*gathered({name_of[module] for module in (*self._sums, *done)}))
        self.waiting = {module: None for module, name in name_of.items() if name not in called}

    def next_pass(self) -> Collection[nn.Module]:
        """From now on only what waits is summed. Returns the experts that it belongs to."""
        self._only, self._took_one = {*self.waiting}, False
        self.waiting.clear()
        return {self._expert_of[module] for module in self._only}

    def agree(self, name_of: Mapping[nn.Module, str]) -> list[nn.Module]:
        """What waits on one rank waits on all of them.

        Returns: the modules whose sums belong to one routed expert on all ranks that called them: room for others, once
            they are rewritten and dropped.
        """
        own, others = set[str](), set[str]()
        for module, each in self._sums.items():
            expert = self._expert_of.get(module)
            is_alone = expert is not None and all(self._expert_of.get(member) is expert for member in each.members)
            (own if is_alone else others).add(name_of[module])
        of_ranks = gathered((own, others, {name_of[module] for module in self.waiting}))
        alone, shared, waiting = (set().union(*sets) for sets in zip(*of_ranks, strict=True))
        self.waiting = {module: None for module, name in name_of.items() if name in waiting}
        self.drop([module for module in self.waiting if module in self._sums])
        return [module for module, name in name_of.items() if name in alone - shared - waiting]

    def sum_over_ranks(self, name_of: Mapping[nn.Module, str]) -> None:
        """Every rank's sums become those of all ranks. Modules share one where they do so on every rank.

        Args:
            name_of: the modules that are wanted, called on this rank or not.
        """
        number = {id(own): index for index, own in enumerate(self._distinct())}
        called = {m: own for m, own in self._sums.items() if m in name_of}
        of_ranks = gathered({name_of[m]: (number[id(own)], self._samples[m]) for m, own in called.items()})
        together: dict[tuple[int, ...], list[nn.Module]] = defaultdict(list)
        for module, name in name_of.items():
            if any(name in found for found in of_ranks):
                together[tuple(found.get(name, (-1, 0))[0] for found in of_ranks)].append(module)
        for members in together.values():
            own = self._apart(members)
            dist.all_reduce(own.matrix)
            for module in members:
                self._samples[module] = sum(found.get(name_of[module], (-1, 0))[1] for found in of_ranks)

    def _distinct(self) -> list[_Sum]:
        return list({id(own): own for own in self._sums.values()}.values())

    def _first(self, module: nn.Module, identity: InputIdentity, value: Tensor) -> _Sum | None:
        """The sum that a module starts with: another module's that has seen this one input and no more, or its own.

        None where there is no room. In each pass there is some for one expert's at least.
        """
        found = self._newest.get(identity)
        if found is not None and found.num_inputs == 1 and found.waiting is None and found.members:
            found.members.add(module)
            return found
        if module in self._expert_of:
            num_bytes = 4 * value.shape[-1] ** 2
            if self._took_one and self._room is not None and self._num_bytes + num_bytes > self._room:
                return None
            self._took_one = True
        own = self._new(make_empty_hessian(module, device=value.device), {module})
        own.add(value)
        self._newest = {key: each for key, each in self._newest.items() if each.num_inputs == 1}
        self._newest[identity] = own
        return own

    def _new(self, matrix: Tensor, members: set[nn.Module], num_inputs: int = 0) -> _Sum:
        self._num_bytes += matrix.nbytes
        return _Sum(matrix, members, num_inputs)

    def _settle(self, own: _Sum) -> None:
        assert own.waiting is not None
        own.add(own.waiting[1])
        own.waiting, own.arrived = None, set()

    def _part(self, own: _Sum) -> None:
        """Those that have read the waiting input get a sum of their own; the others keep the one without it."""
        if own.arrived != own.members:
            apart = self._new(own.matrix.clone(), own.arrived, own.num_inputs)
            apart.waiting, apart.arrived = own.waiting, own.arrived
            own.members -= own.arrived
            own.waiting, own.arrived = None, set()
            for module in apart.members:
                self._sums[module] = apart
            own = apart
        self._settle(own)

    def _apart(self, members: Sequence[nn.Module]) -> _Sum:
        """A sum that belongs to these modules alone; of zeros where this rank has called none of them."""
        own = self._sums.get(members[0])
        if own is None:
            weight: Any = members[0].weight
            own = self._new(make_empty_hessian(members[0], device=weight.device), set(members))
        elif own.members != {*members}:
            own.members -= {*members}
            own = self._new(own.matrix.clone(), set(members), own.num_inputs)
        self._sums |= dict.fromkeys(members, own)
        return own


@contextmanager
def factored_once() -> Iterator[None]:
    """While modules of one Hessian are rewritten one by one: the first factors it, and the others take its factor.

    Dead channels and a matrix that cannot be inverted are the same for all of them, too. The library's function is
    replaced because nothing else reaches it: `quantize_weight` takes no factor, and calls it by its name in the module
    (checked against llm-compressor 0.14.0.1). Without this, 256 experts factor one Hessian 512 times.
    """
    kept: list[tuple[Tensor, Tensor, Tensor]] = []

    def factor(weights: Tensor, hessians: Tensor, percdamp: float, used_rtn_fallback: Tensor) -> Tensor:
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
