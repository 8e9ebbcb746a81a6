"""The distinct inputs of a layer's modules: query, key and value projections see one tensor, and so do all experts.

In: the tensors that modules are handed during one forward. Out: a number for each, the same for the same values, and
the smallest and largest value that each module was handed; where it is wanted, the sum of squares of each channel, too.

Easy to get wrong: a tensor is not its address. A storage that was freed leaves its address to the next one, and a
buffer may be rewritten between two modules that read it. So a storage is known by a weak reference, which keeps its
address from being given away, and a rewritten one by PyTorch's count of writes. That count sees every operation of
PyTorch's but those through `.data`; transformers' models have none between the modules of a layer.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

_SQUARED_AT_ONCE = 2**22


@dataclass(frozen=True, slots=True)
class InputIdentity:
    """Which tensor this is; equal only for the same rows in the same memory, not written to in between.

    It holds no data, and while it is held no other storage is equal to its own.
    """

    storage: StorageWeakRef
    version: object
    place: tuple[object, ...]

    @classmethod
    def of(cls, value: Tensor) -> "InputIdentity":
        """Of a tensor [..., K]."""
        # Rows in a row are the same whatever their batches are: a router's input and its shared expert's.
        rows = (value.numel(),) if value.is_contiguous() else (*value.shape, *value.stride())
        place = (value.storage_offset(), value.dtype, value.shape[-1], *rows)
        # In inference mode nobody counts the writes.
        version = object() if value.is_inference() else value._version
        return cls(StorageWeakRef(value.untyped_storage()), version, place)

    def __hash__(self) -> int:
        return hash((self.storage.cdata, self.version, self.place))


class DistinctInputs:
    """State: the tensors of one forward, each with its number."""

    def __init__(self) -> None:
        self._numbers: dict[InputIdentity, int] = {}
        # The same for objects that were put in: experts are handed one object, one after the other.
        self._objects: dict[int, tuple[ref[Tensor], int, int]] = {}

    def number(self, value: Tensor) -> int:
        """The number of a tensor: that of an earlier one with the same elements, or the next one."""
        known, version, number = self._objects.get(id(value), (None, 0, 0))
        if known is not None and known() is value and version == value._version:
            return number
        number = self._numbers.setdefault(InputIdentity.of(value), len(self._numbers))
        if not value.is_inference():
            self._objects[id(value)] = ref(value), value._version, number
        return number

    def clear(self) -> None:
        """Before the next forward."""
        self._numbers.clear()
        self._objects.clear()


class InputRanges:
    """State: the smallest and largest value of the inputs of each module, and sums of squares, over all batches.

    Each distinct input is read once in a batch. Modules are known by their place in a list, their slot. Nothing waits
    for the GPU here.
    """

    def __init__(self, dtypes: Sequence[torch.dtype], device: torch.device, squared: Collection[int] = ()):
        """Inputs of modules whose weights have these dtypes, as have the inputs of those that are never called.

        Those of the slots in `squared` are squared and summed, channel by channel.
        """
        num_slots = len(dtypes)
        self._inputs = DistinctInputs()
        self._extremes: list[tuple[Tensor, Tensor]] = []
        self._calls: list[tuple[int, int]] = []
        self._squared, self._batch_squares = {*squared}, dict[int, Tensor]()
        self.squares: dict[int, Tensor] = {}
        self._indexed: tuple[list[tuple[int, int]], Tensor] = [], torch.empty(0)
        self._low = torch.full((num_slots,), math.inf, device=device)
        self._high = torch.full((num_slots,), -math.inf, device=device)
        self._widths, self._dtypes = [0] * num_slots, list(dtypes)

    def read(self, slot: int, value: Tensor) -> None:
        """A module is handed this tensor [..., K]."""
        if not value.numel():
            return
        number = self._inputs.number(value)
        if number == len(self._extremes):
            self._extremes.append(torch.aminmax(value))
        self._calls.append((slot, number))
        if slot in self._squared and number not in self._batch_squares:
            self._batch_squares[number] = _sums_of_squares(value)
        self._widths[slot], self._dtypes[slot] = value.shape[-1], value.dtype

    def end_batch(self) -> None:
        """Takes what the modules were handed in this batch into account."""
        if self._calls:
            lows, highs = (torch.stack(side).float() for side in zip(*self._extremes, strict=True))
            slots, numbers = self._indices()
            self._low.scatter_reduce_(0, slots, lows[numbers], "amin")
            self._high.scatter_reduce_(0, slots, highs[numbers], "amax")
        for slot, number in self._calls:
            if slot in self._squared:
                own = self._batch_squares[number]
                self.squares[slot] = self.squares[slot].add_(own) if slot in self.squares else own.clone()
        self._batch_squares.clear()
        self._inputs.clear()
        self._extremes.clear()
        self._calls = []

    def of_all(self, slots: Sequence[int]) -> tuple[Tensor, Tensor]:
        """The smallest and the largest value [1] of the inputs of some modules, in their dtype."""
        lows, highs = (
            torch.stack([side[slot].to(self._dtypes[slot]) for slot in slots]) for side in (self._low, self._high)
        )
        return lows.amin(0, keepdim=True), highs.amax(0, keepdim=True)

    def prove_finite(self, modules: Sequence[Any]) -> bool:
        """Whether no input and no output of these linear modules, one for each slot, can have been NaN or infinite.

        An output is a sum of products of finite numbers. It cannot overflow where the number of its terms times the
        largest input times the largest weight is small enough; half of the dtype's range is left to rounding.
        """
        inputs = torch.maximum(-self._low, self._high).clamp(min=0).double()  # 0: this rank never called it
        terms = [max(width, module.weight.shape[-1]) for width, module in zip(self._widths, modules, strict=True)]
        bound = inputs * _largest([module.weight for module in modules]) * torch.tensor(terms).to(inputs)
        biased = [slot for slot, module in enumerate(modules) if module.bias is not None]
        if biased:
            bound[biased] += _largest([modules[slot].bias for slot in biased])
        room = torch.tensor([torch.finfo(dtype).max / 2 for dtype in self._dtypes], dtype=torch.float64)
        return bool((bound < room.to(bound.device)).all())

    def _indices(self) -> Tensor:
        """[2, calls]: of each call its slot and its number; on the GPU since an earlier batch with the same calls."""
        calls, indices = self._indexed
        if calls != self._calls:
            indices = torch.tensor(self._calls).t().contiguous().to(self._low.device)
            self._indexed = self._calls, indices
        return indices


def _sums_of_squares(value: Tensor) -> Tensor:
    """[K] F64: over all rows of an input [..., K], each part of them summed in F32."""
    width = value.shape[-1]
    parts = value.detach().reshape(-1, width).split(max(1, _SQUARED_AT_ONCE // width))
    sums = [part.to(torch.float32, copy=True).square_().sum(0) for part in parts]
    return torch.stack(sums).double().sum(0)


def _largest(tensors: Sequence[Tensor]) -> Tensor:
    """[N] float64: the largest magnitude of each."""
    low, high = (torch.stack(side).double() for side in zip(*map(torch.aminmax, tensors), strict=True))
    return torch.maximum(-low, high)
