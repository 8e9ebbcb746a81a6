"""Integers: a float weight's codes, with one scale for each row or group, and a zero point where
codes are shifted.

In: a chunk of rows, [N, K] in BF16 or F32. Out: the chunk's slices of the outputs are filled.
`pack.py` calls these functions and says what their bytes are compared with.

Easy to get wrong: codes are around 0 in memory and offset by half their count in a packed word.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from ...recipes.errors import CheckpointError
from ...recipes.schemes import Scheme
from .pack_shared import Workspace, divided, group_amax, linear_scale, store_nibbles, swept
from .search import integer_sweep, shifted_sweep

# Of the 16 codes of 4 bits: what is added to a code around 0.
_HALF = 8


def int_pack_kernel(
    scheme: Scheme, values: Tensor, outputs: Mapping[str, Tensor], work: Workspace, search: str
) -> None:
    """Unsigned codes (offset binary), 32 // bits a word, first column in the low bits; one scale
    per group.
    """
    assert scheme.group_size
    if scheme.has_zero_point:
        store_nibbles(
            _shifted_codes(scheme, values, outputs, work, search).view(-1), outputs["weight_packed"]
        )
        return
    codes = _int_codes(
        values, scheme.group_size, scheme.bits, outputs["weight_scale"], work, search
    )
    codes = codes.add_(1 << (scheme.bits - 1)).to(torch.uint8)
    if scheme.bits == 4:
        store_nibbles(codes.view(-1), outputs["weight_packed"])
    else:
        outputs["weight_packed"].view(torch.uint8).copy_(codes)


def int_kernel(
    scheme: Scheme, values: Tensor, outputs: Mapping[str, Tensor], work: Workspace, search: str
) -> None:
    """Signed integers, one scale a row."""
    codes = _int_codes(values, values.shape[1], scheme.bits, outputs["weight_scale"], work, search)
    outputs["weight"].copy_(codes)


def _int_codes(
    values: Tensor, group_size: int, bits: int, scale_out: Tensor, work: Workspace, search: str
) -> Tensor:
    """Symmetric integer codes, int16 [N, K], ties to even; fills the scales [N, K // group_size].

    The scale is amax over half the count of codes (7.5 for 4 bits), so the largest positive value
    is clipped.
    """
    scale = linear_scale(group_amax(values, group_size), (2**bits - 1) / 2, scale_out.dtype)
    if search:
        scale, values = swept(integer_sweep(bits, group_size, values.device), values, scale, work)
    scale_out.copy_(scale)
    grouped, per_group = values.unflatten(1, (-1, group_size)), scale.unsqueeze(-1)
    scaled = grouped.div_(per_group) if search else grouped / per_group
    # int16 holds every quotient there is: at most 191.25, where a subnormal scale was rounded down.
    return (
        scaled.round_().to(torch.int16).clamp_(-(1 << (bits - 1)), (1 << (bits - 1)) - 1).flatten(1)
    )


def _shifted_codes(
    scheme: Scheme, values: Tensor, outputs: Mapping[str, Tensor], work: Workspace, search: str
) -> Tensor:
    """4-bit codes around a zero point, U8 [N, K], 0..15; fills scales and zero points.

    A group's range includes 0, whose code is the zero point, and has 15 steps. A search makes the
    range narrower or wider around the same zero point.
    """
    assert scheme.group_size and scheme.bits == 4
    scale, zero = _range_scale(values, scheme.group_size, outputs["weight_scale"].dtype)
    if search:
        scale, values = swept(
            shifted_sweep(scheme.group_size, values.device), values, scale, work, zero
        )
    outputs["weight_scale"].copy_(scale)
    outputs["weight_zero_point"].copy_(_zero_words(zero))
    scaled = values.unflatten(1, (-1, scheme.group_size)) / scale.unsqueeze(-1)
    # The peer's codes are around 0: the sum is rounded to the dtype of the values, and its size
    # decides how finely.
    scaled.add_((zero - _HALF).to(values.dtype).unsqueeze(-1)).clamp_(-_HALF, _HALF - 1)
    return scaled.round_().add_(_HALF).to(torch.uint8).flatten(1)


def _range_scale(values: Tensor, group_size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The scale of each group [N, groups] in `dtype`, and its zero point 0..15 in F32."""
    group_amax(values, group_size)  # refuses NaN and Inf, which minima and maxima may lose
    grouped = values.unflatten(1, (-1, group_size))
    low, high = grouped.amin(-1).clamp_(max=0), grouped.amax(-1).clamp_(min=0)
    if (high - low).isinf().any():
        cure = "Give this module a scheme without zero points"
        raise CheckpointError("weight", "the range of a group must be finite", got="Inf", cure=cure)
    scale = divided(high - low, 15).to(dtype)
    # 0 / 0 in a group of zeros; the peer's conversion to integers makes 0 of it.
    zero = (
        (-_HALF - low / scale.to(values.dtype)).clamp_(-_HALF, _HALF - 1).nan_to_num_(0.0).round_()
    )
    return torch.where(scale == 0, torch.finfo(dtype).eps, scale), zero.float().add_(_HALF)


def _zero_words(zero: Tensor) -> Tensor:
    """Eight rows' zero points a word, the first one in the low bits: [N, groups] -> I32 [ceil(N /
    8), groups].
    """
    padded = torch.nn.functional.pad(zero.to(torch.int32), (0, 0, 0, -len(zero) % 8)).unflatten(
        0, (-1, 8)
    )
    shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=zero.device).view(1, 8, 1)
    return (padded << shifts).sum(1, dtype=torch.int32)
