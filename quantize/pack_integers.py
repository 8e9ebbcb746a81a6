"""Integers: a float weight's codes, with one scale for each row or group.

In: a chunk of rows, [N, K] in BF16 or F32. Out: the chunk's slices of the outputs are filled. `pack.py` calls these
functions and says what their bytes are compared with.

Easy to get wrong: codes are around 0 in memory and offset by half their count in a packed word.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from ..recipes.schemes import Scheme
from .pack_shared import Workspace, group_amax, linear_scale, store_nibbles, swept
from .search import integer_sweep


def int_pack_kernel(
    scheme: Scheme, values: Tensor, outputs: Mapping[str, Tensor], work: Workspace, search: str
) -> None:
    """Unsigned codes (offset binary), 32 // bits a word, first column in the low bits; one scale per group."""
    assert scheme.group_size
    codes = _int_codes(values, scheme.group_size, scheme.bits, outputs["weight_scale"], work, search)
    codes = codes.add_(1 << (scheme.bits - 1)).to(torch.uint8)
    if scheme.bits == 4:
        store_nibbles(codes.view(-1), outputs["weight_packed"])
    else:
        outputs["weight_packed"].view(torch.uint8).copy_(codes)


def int_kernel(scheme: Scheme, values: Tensor, outputs: Mapping[str, Tensor], work: Workspace, search: str) -> None:
    """Signed integers, one scale a row."""
    codes = _int_codes(values, values.shape[1], scheme.bits, outputs["weight_scale"], work, search)
    outputs["weight"].copy_(codes)


def _int_codes(values: Tensor, group_size: int, bits: int, scale_out: Tensor, work: Workspace, search: str) -> Tensor:
    """Symmetric integer codes, int16 [N, K], ties to even; fills the scales [N, K // group_size].

    The scale is amax over half the count of codes (7.5 for 4 bits), so the largest positive value is clipped.
    """
    scale = linear_scale(group_amax(values, group_size), (2**bits - 1) / 2, scale_out.dtype)
    if search:
        scale, values = swept(integer_sweep(bits, group_size, values.device), values, scale, work)
    scale_out.copy_(scale)
    grouped, per_group = values.unflatten(1, (-1, group_size)), scale.unsqueeze(-1)
    scaled = grouped.div_(per_group) if search else grouped / per_group
    # int16 holds every quotient there is: at most 191.25, where a subnormal scale was rounded down.
    return scaled.round_().to(torch.int16).clamp_(-(1 << (bits - 1)), (1 << (bits - 1)) - 1).flatten(1)
