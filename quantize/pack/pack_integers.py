"""Integers: a float weight's codes, with one scale for each row or group, and a zero point where
codes are shifted.

In: a chunk of rows. Out: its slices of the outputs are filled. `pack.py` calls these functions and
says what their bytes are compared with.

Easy to get wrong: codes are around 0 in memory and offset by half their count in a packed word.
"""

import torch
from torch import Tensor

from ...recipes.errors import CheckpointError
from .chunk import Chunk, divided, group_amax, linear_scale, store_nibbles


def int_pack_kernel(chunk: Chunk) -> None:
    """Unsigned codes (offset binary), 32 // bits a word, first column in the low bits; one scale
    per group.
    """
    packed = chunk.out["weight_packed"]
    bits = chunk.scheme.bits
    if chunk.scheme.has_zero_point:
        codes = _shifted_codes(chunk)
    else:
        codes = _int_codes(chunk).add_(1 << (bits - 1)).to(torch.uint8)
    if bits == 4:
        store_nibbles(codes.view(-1), packed)
    else:
        packed.view(torch.uint8).copy_(codes)


def int_kernel(chunk: Chunk) -> None:
    """Signed integers, one scale a row."""
    chunk.out["weight"].copy_(_int_codes(chunk))


def _int_codes(chunk: Chunk) -> Tensor:
    """Symmetric integer codes, int16 [N, K], ties to even; fills the scales [N, K // group_size].

    The scale is amax over half the count of codes (7.5 for 4 bits), so the largest positive value
    is clipped.
    """
    values = chunk.values
    size = chunk.group_size
    half = 1 << (chunk.scheme.bits - 1)
    stored = chunk.out["weight_scale"]
    scale = linear_scale(group_amax(values, size), half - 0.5, stored.dtype)
    stored.copy_(scale)
    scaled = values.unflatten(1, (-1, size)) / scale.unsqueeze(-1)
    # int16 holds every quotient there is: at most 191.25, where a subnormal scale was rounded down.
    return scaled.round_().to(torch.int16).clamp_(-half, half - 1).flatten(1)


def _shifted_codes(chunk: Chunk) -> Tensor:
    """4-bit codes around a zero point, U8 [N, K], 0..15; fills scales and zero points.

    A group's range includes 0, whose code is the zero point, and has 15 steps.
    """
    values = chunk.values
    size = chunk.group_size
    stored = chunk.out["weight_scale"]
    group_amax(values, size)  # refuses NaN and Inf, which minima and maxima may lose
    grouped = values.unflatten(1, (-1, size))
    low = grouped.amin(-1).clamp_(max=0)
    high = grouped.amax(-1).clamp_(min=0)
    if (high - low).isinf().any():
        raise CheckpointError(
            "weight",
            "the range of a group must be finite",
            got="Inf",
            cure="Give this module a scheme without zero points",
        )
    scale = divided(high - low, 15).to(stored.dtype)
    # Codes are around 0 here: 8 less than in the file. 0 / 0 in a group of zeros; the peer's
    # conversion makes 0 of it.
    zero = (-8 - low / scale.to(values.dtype)).clamp_(-8, 7).nan_to_num_(0.0).round_()
    scale = torch.where(scale == 0, torch.finfo(stored.dtype).eps, scale)
    unsigned = zero.float() + 8
    stored.copy_(scale)
    # Eight rows' zero points a word, the first one in the low bits: [ceil(N / 8), groups].
    padded = torch.nn.functional.pad(unsigned.to(torch.int32), (0, 0, 0, -len(zero) % 8))
    shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=zero.device).view(1, 8, 1)
    words = (padded.unflatten(0, (-1, 8)) << shifts).sum(1, dtype=torch.int32)
    chunk.out["weight_zero_point"].copy_(words)
    scaled = values.unflatten(1, (-1, size)) / scale.unsqueeze(-1)
    # The peer's sum is rounded to the dtype of the values, and its size decides how finely.
    scaled.add_(zero.to(values.dtype).unsqueeze(-1)).clamp_(-8, 7)
    return scaled.round_().add_(8).to(torch.uint8).flatten(1)
