"""What a tensor holds, in five numbers: read from its bits, at memory speed and exactly.

In: pieces of a tensor's bytes, in order. Out: a `Summary`. In each dtype the magnitudes of floats have the order of
their bits without the sign. So the smallest and the largest integer answer all: finite, zero, negative, constant.

Easy to get wrong: FP4 codes are two a byte, and one byte has two signs. A byte of U8 is an E8M0 exponent where the
tensor is a scale, and two codes where it is a weight.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

# Elements looked at at a time: what fits a core's cache.
_CHUNK_BYTES = 1024 * 1024


class Bits(NamedTuple):
    """How a dtype's bits are read.

    Attributes:
        holder: an integer dtype of the same width.
        magnitude: the bits that are not a sign.
        not_finite: the smallest magnitude that is infinite or NaN; None where every value is finite.
        values: the dtype that gives a magnitude's value; None where a magnitude is only zero or not.
    """

    holder: torch.dtype
    magnitude: int
    not_finite: int | None
    values: torch.dtype | None


_BITS: Mapping[str, Bits] = MappingProxyType(
    {
        "F32": Bits(torch.int32, 0x7FFFFFFF, 0x7F800000, torch.float32),
        "BF16": Bits(torch.int16, 0x7FFF, 0x7F80, torch.bfloat16),
        "F16": Bits(torch.int16, 0x7FFF, 0x7C00, torch.float16),
        "F8_E4M3": Bits(torch.int8, 0x7F, 0x7F, torch.float8_e4m3fn),
        "F8_E5M2": Bits(torch.int8, 0x7F, 0x7C, torch.float8_e5m2),
        "F8_E8M0": Bits(torch.uint8, 0xFF, 0xFF, torch.float8_e8m0fnu),
    }
)
_FP4_PAIR = Bits(torch.uint8, 0x77, None, None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """What a tensor holds.

    Attributes:
        smallest, largest: the magnitudes among finite values; NaN where there is none, or where a dtype has no values.
        num_not_finite: elements that are infinite or NaN.
        first_not_finite: the position of the first of them, row by row; -1 if there is none.
        has_negative: an element below zero.
        is_zero: every element is zero.
        is_constant: every element, or every byte of a packed weight, is the same; False for a single one.
    """

    smallest: float
    largest: float
    num_not_finite: int
    first_not_finite: int
    has_negative: bool
    is_zero: bool
    is_constant: bool


def bits_of(dtype: str, *, is_scale: bool) -> Bits | None:
    """How the bits of a tensor are read; None where the bytes say nothing alone, as packed integers."""
    if dtype == "U8":
        return _BITS["F8_E8M0"] if is_scale else _FP4_PAIR
    return _BITS.get(dtype)


class Summing:
    """Collects a `Summary` piece by piece."""

    def __init__(self, bits: Bits | None) -> None:
        self._bits = bits or Bits(torch.uint8, 0xFF, None, None)
        self._knows_zero = bits is not None
        self._count = 0
        self._raw: list[tuple[int, int]] = []
        self._magnitudes: list[tuple[int, int]] = []
        self._num_not_finite = 0
        self._first_not_finite = -1

    def add(self, raw: Tensor) -> None:
        """Take the next bytes of the tensor: U8, one dimension, a whole number of elements."""
        elements = raw.view(self._bits.holder)
        width = elements.element_size()
        for piece in elements.split(_CHUNK_BYTES // width):
            self._add(piece)
            self._count += piece.numel()

    def _add(self, piece: Tensor) -> None:
        self._raw.append(_ends(piece))
        magnitude = piece & self._bits.magnitude
        smallest, largest = _ends(magnitude)
        limit = self._bits.not_finite
        if limit is not None and largest >= limit:
            bad = magnitude >= limit
            if self._first_not_finite < 0:
                self._first_not_finite = self._count + int(bad.nonzero()[0])
            self._num_not_finite += int(bad.sum())
            if bad.all():
                return
            smallest, largest = _ends(magnitude[~bad])
        self._magnitudes.append((smallest, largest))

    def done(self) -> Summary:
        """The summary of everything that was added; at least one element."""
        low, high = min(first for first, _ in self._raw), max(last for _, last in self._raw)
        smallest = min((first for first, _ in self._magnitudes), default=None)
        largest = max((last for _, last in self._magnitudes), default=None)
        return Summary(
            smallest=self._value(smallest),
            largest=self._value(largest),
            num_not_finite=self._num_not_finite,
            first_not_finite=self._first_not_finite,
            has_negative=low < 0 and self._bits.values is not None,
            is_zero=self._knows_zero and largest == 0 and not self._num_not_finite and not self._is_exponent,
            is_constant=low == high and self._count > 1,
        )

    @property
    def _is_exponent(self) -> bool:
        return self._bits.values == torch.float8_e8m0fnu

    def _value(self, magnitude: int | None) -> float:
        if magnitude is None or self._bits.values is None:
            return float("nan")
        return torch.tensor([magnitude], dtype=self._bits.holder).view(self._bits.values).float().item()


def summary(raw: Tensor, dtype: str, *, is_scale: bool) -> Summary:
    """The summary of a tensor that is in memory: its bytes, U8."""
    summing = Summing(bits_of(dtype, is_scale=is_scale))
    summing.add(raw)
    return summing.done()


def _ends(piece: Tensor) -> tuple[int, int]:
    low, high = torch.aminmax(piece)
    return int(low), int(high)
