"""The distinct inputs of a layer's modules: query, key and value projections see one tensor, and so
do all experts.

In: the tensors that modules are handed, batch by batch. Out: the smallest and largest value that
each module was handed; where it is wanted, the sum of squares of each channel, too.

Easy to get wrong: a tensor is not its address. A storage that was freed leaves its address to the
next one, and a buffer may be rewritten between two modules that read it. So a storage is known by a
weak reference, which keeps its address from being given away, and a rewritten one by PyTorch's
count of writes. That count sees every operation of PyTorch's but those through `.data`;
transformers' models have none between the modules of a layer.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

_SQUARED_AT_ONCE = 2**22


@dataclass(frozen=True, slots=True)
class InputIdentity:
    """Which tensor this is; equal only for the same rows in the same memory, not written to in
    between.

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


class InputRanges:
    """State: the ends of the inputs of each module, and sums of squares, over all batches.

    Each distinct input is read once in a batch. Nothing waits for the GPU here.

    Attributes:
        ends: module -> [2] in the inputs' dtype: minus the smallest value, and the largest; -inf if
            never called.
        squares: module -> [K] F64, over all its tokens, where they were asked for.
    """

    def __init__(self, modules: Mapping[str, Any]):
        """Of linear modules, by name."""
        self._modules = modules
        self.ends = {
            name: module.weight.new_full((2,), -math.inf) for name, module in modules.items()
        }
        self.squares: dict[str, Tensor] = {}
        self._of_batch: dict[InputIdentity, Tensor] = {}
        self._squares_of_batch: dict[InputIdentity, Tensor] = {}

    def read(self, name: str, value: Tensor, *, squared: bool = False) -> None:
        """A module is handed this tensor [..., K]."""
        if not value.numel():
            return
        identity = InputIdentity.of(value)
        if identity not in self._of_batch:
            low, high = torch.aminmax(value)
            self._of_batch[identity] = torch.stack([-low, high])
        self.ends[name] = torch.maximum(self.ends[name], self._of_batch[identity])
        if squared:
            if identity not in self._squares_of_batch:
                self._squares_of_batch[identity] = _sums_of_squares(value)
            own = self._squares_of_batch[identity]
            self.squares[name] = self.squares[name] + own if name in self.squares else own

    def end_batch(self) -> None:
        """Before the next forward."""
        self._of_batch.clear()
        self._squares_of_batch.clear()

    def are_finite(self) -> bool:
        """Whether no input and no output of the modules can have been NaN or infinite.

        An output is a sum of products of finite numbers. It cannot overflow where the number of its
        terms times the largest input times the largest weight is small enough; half of the dtype's
        range is left to rounding.
        """
        bounds = []
        for name, module in self._modules.items():
            ends = self.ends[name]
            bound = (
                ends.double().amax().clamp(min=0)
                * _largest(module.weight)
                * module.weight.shape[-1]
            )
            if module.bias is not None:
                bound = bound + _largest(module.bias)
            bounds.append(bound / (torch.finfo(ends.dtype).max / 2))
        return bool((torch.stack(bounds) < 1).all())


def _sums_of_squares(value: Tensor) -> Tensor:
    """[K] F64: over all rows of an input [..., K], each part of them summed in F32."""
    width = value.shape[-1]
    parts = value.detach().reshape(-1, width).split(max(1, _SQUARED_AT_ONCE // width))
    sums = [part.to(torch.float32, copy=True).square_().sum(0) for part in parts]
    return torch.stack(sums).double().sum(0)


def _largest(tensor: Tensor) -> Tensor:
    """The largest magnitude, F64."""
    low, high = torch.aminmax(tensor)
    return torch.maximum(-low, high).double()
