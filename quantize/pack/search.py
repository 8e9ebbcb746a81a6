"""The scale of least squared error for every group of a weight, among the scales that its scheme
can store.

In: values in units of the scale that the largest magnitude asks for, group by group. Out: which
candidate scale each group takes. `pack.py` computes the first scale, and rounds with the one that
is chosen here.

One pass finds the errors of all candidates. What a value adds to the error of each candidate
depends on the value in units of the first scale alone. So it is a row of a table, and the error of
a group is the sum of its values' rows. A table holds integers, and no sum of them is rounded: every
device and every order chooses the same scales.

Easy to get wrong: candidates are what is stored. NVFP4's scale is an E4M3 number, and the next one
is up to an eighth away, so its candidates are the neighbours of the first code, and what they do to
a value differs from code to code. A table therefore has classes: one for each place of the first
code in its binade, and for codes at either end.

Source: the sweeps of nvidia-modelopt 0.47.0 (torch/quantization/calib/mse.py: NVFP4MSECalibrator
tries all 126 E4M3 scales) and of llm-compressor 0.14.0.1 (observers/mse.py). Both
compute the error of each candidate for itself; tests/quantize/pack/test_search.py compares the
errors.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from itertools import count

import torch
from torch import Tensor

from ...recipes.frozen import frozen

# A sum of F32 integers is exact below this.
_EXACT = 2.0**24
_MOST_IN_A_BAG = 128
# Steps from NVFP4's first E4M3 code, itself first. Of 32,768 groups each of normal and of
# long-tailed weights at most one is better off further away; of evenly distributed ones 0.5 % are,
# with 0.1 % of the squared error.
_STEPS = (0, -1, -2, 1, 2, 3, 4, 5, 6, 7)
_LAST_CODE = 126
_TOP_OF_NVFP4 = 9.2

# Codes below 8 are subnormal, each with steps of its own, and from the last codes not every step
# leads to one. All others are alike in each binade.
_CODE_OF_CLASS = (
    *range(1, 8),
    *range(64, 72),
    *range(_LAST_CODE - max(_STEPS) + 1, _LAST_CODE + 1),
)


@frozen
class Sweep:
    """Candidates for the scale of a group, and what each value adds to their errors.

    Attributes:
        ratios: F32 [classes, candidates], in units of the first scale; the first candidate is 1.
        table: F32 [classes * levels, candidates], integers.
        first: F32 [classes], the row of the value 0 of each class.
        per_unit: rows for each unit of the first scale.
        is_signed: whether a value and its negative have rows of their own.
    """

    ratios: Tensor
    table: Tensor
    first: Tensor
    per_unit: float
    is_signed: bool

    def on(self, device: torch.device) -> "Sweep":
        """The same on a device."""
        return replace(
            self,
            ratios=self.ratios.to(device),
            table=self.table.to(device),
            first=self.first.to(device),
        )

    def errors(self, scaled: Tensor, classes: Tensor | None = None) -> Tensor:
        """The error of each candidate, in units of the table: F32 or F64 [G, candidates].

        Args:
            scaled: F32 [G, members], values in units of the first scale, contiguous; overwritten.
            classes: int64 [G]; None for the only one.
        """
        if not self.is_signed:
            scaled.abs_()
        zero = self.first[:1]
        if classes is not None:
            zero = self.first[classes].unsqueeze(1)
        # Half a row more, since the cast to integers cuts off. Rows past either end are of scales
        # that rounded to 0.
        places = scaled.mul_(self.per_unit).add_(zero + 0.5).clamp_(0, len(self.table) - 1)
        rows = places.to(torch.int32)
        bag = min(scaled.shape[1], _MOST_IN_A_BAG)
        rest = (0, -scaled.shape[1] % bag)
        rows = torch.nn.functional.pad(rows, rest, value=int(self.first[0])).view(-1, bag)
        sums = torch.nn.functional.embedding_bag(rows, self.table, mode="sum")
        sums = sums.view(len(scaled), -1, self.table.shape[1])
        if sums.shape[1] == 1:
            return sums.squeeze(1)
        return sums.double().sum(1)


def nvfp4_neighbour(local: Tensor, scaled: Tensor) -> Tensor:
    """The E4M3 number of least error near each of `local`, as F32.

    Args:
        local: F32, E4M3 numbers, one for each group.
        scaled: F32 [groups, 16], values in units of these scales; overwritten.
    """
    device = local.device
    code = local.to(torch.float8_e4m3fn).view(torch.uint8).flatten().long()
    sweep, class_of_code = _nvfp4_sweep(device)
    chosen = sweep.errors(scaled, class_of_code[code]).argmin(-1)
    found = (code + torch.tensor(_STEPS, device=device)[chosen]).to(torch.uint8)
    return found.view(torch.float8_e4m3fn).float().view(local.shape)


@cache
def _nvfp4_sweep(device: torch.device) -> tuple[Sweep, Tensor]:
    """E4M3 codes around the first one, and the class of each code."""
    values = torch.arange(128, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    codes = torch.tensor(_CODE_OF_CLASS).unsqueeze(1)
    reached = codes + torch.tensor(_STEPS)
    ratios = values[reached.clamp(1, _LAST_CODE)] / values[codes]
    is_code = (reached >= 1) & (reached <= _LAST_CODE)

    def nearest(scaled: Tensor) -> Tensor:  # ties lead to the same error
        known = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
        return known[(scaled.unsqueeze(-1) - known).abs().argmin(-1)]

    sweep = _sweep(ratios, nearest, 0.0, _TOP_OF_NVFP4, levels=2560, group=16, allowed=is_code)
    place = dict(zip(_CODE_OF_CLASS, count()))
    classes = [place.get(code, place[64 + code % 8]) for code in range(128)]
    return sweep.on(device), torch.tensor(classes, device=device)


@cache
def integer_sweep(bits: int, group: int, device: torch.device) -> Sweep:
    """Symmetric integers: finer ratios for 8 bits, where a scale that clips more than a little is
    never best.
    """
    half = (2**bits - 1) / 2
    ratios = _ratios(32, range(21, 45))
    if bits == 8:
        ratios = _ratios(128, range(123, 147))
        if group > _MOST_IN_A_BAG:
            # A whole row loses little to its largest value, and wants a scale that is hardly
            # smaller.
            ratios = _ratios(128, range(120, 132))

    def nearest(scaled: Tensor) -> Tensor:
        return scaled.round().clamp(-half - 0.5, half - 0.5)

    return _sweep(ratios, nearest, -1.02 * half, 1.02 * half, levels=2048, group=group).on(device)


@cache
def shifted_sweep(group: int, device: torch.device) -> Sweep:
    """4-bit integers with a zero point, which is their class; values are counted from the lowest
    code.

    The first scale covers the whole range, so most candidates are below 1 and clip; the zero point
    stays.
    """
    zeros = torch.arange(16.0).view(-1, 1, 1)

    def nearest(scaled: Tensor) -> Tensor:
        return (scaled.round() + zeros).clamp(0, 15) - zeros

    ratios = _ratios(96, range(76, 102)).repeat(16, 1)
    # Past either end: half a step by the rounding of the zero point, and what the BF16 scale is off
    # by.
    return _sweep(ratios, nearest, -0.7, 15.7, levels=2048, group=group, zeros=zeros).on(device)


@cache
def float8_sweep(group: int, device: torch.device) -> Sweep:
    """E4M3 values. They are as dense in each binade, so what a scale does to them is much the same
    at twice the scale.

    Candidates go from 1 to 2; below 1 the largest value is clipped.
    """

    def nearest(scaled: Tensor) -> Tensor:
        return scaled.clamp(max=448.0).to(torch.float8_e4m3fn).float()

    ratios = _ratios(32, range(31, 64))
    return _sweep(ratios, nearest, 0.0, 1.02 * 448, levels=4096, group=group).on(device)


def _ratios(divisor: int, numbers: Sequence[int]) -> Tensor:
    """[1, candidates]: 1 and the others."""
    return torch.tensor([[divisor, *(number for number in numbers if number != divisor)]]) / divisor


def _sweep(
    ratios: Tensor,
    nearest: Callable[[Tensor], Tensor],
    low: float,
    high: float,
    *,
    levels: int,
    group: int,
    allowed: Tensor | None = None,
    zeros: Tensor | float = 0.0,
) -> Sweep:
    """A table of squared errors, as integers of which a bag's sum is exact.

    Args:
        ratios: F32 [classes, candidates].
        nearest: values in units of the scale -> the nearest that the scheme has.
        low: the smallest value in units of the first scale.
        high: the largest.
        levels: rows of each class.
        group: values with one scale.
        allowed: bool [classes, candidates], False where there is no such scale.
        zeros: F32 [classes, 1, 1], where values of each class are counted from: minus this.
    """
    per_unit = (levels - 1) / (high - low)
    zero = round(-low * per_unit)
    values = ((torch.arange(levels) - zero) / per_unit).view(1, -1, 1) - zeros
    ratio = ratios.unsqueeze(1)
    most = _EXACT / min(group, _MOST_IN_A_BAG)
    errors = (values - ratio * nearest(values / ratio)).square()
    table = (errors * (most / errors.max())).floor()
    if allowed is not None:
        table = table.where(allowed.unsqueeze(1), most)
    first = (torch.arange(len(ratios)) * levels + zero).float()
    table = table.flatten(0, 1)
    return Sweep(ratios=ratios, table=table, first=first, per_unit=per_unit, is_signed=low < 0)
