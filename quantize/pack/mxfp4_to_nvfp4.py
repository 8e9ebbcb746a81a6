"""MXFP4 weights as NVFP4 without rounding.

In: the members of a fused group as DeepSeek-V4 releases them: E2M1 codes and a power of two per 32
channels. Out: the same codes as NVFP4, whose scale per 16 channels and global scale can say any 18
neighbouring powers of two exactly.

Rounding such weights again costs accuracy for nothing: a block whose largest code is 4 would get a
scale of 4/6 and every code a new error. Easy to get wrong: blocks of zeros carry arbitrary
exponents and must not widen the range.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

# E4M3 has the powers of two from 2**-9, its smallest subnormal, to 2**8.
_TOP, _BOTTOM = 8, -9
_MAGNITUDE_BITS = 0x77


def mxfp4_as_nvfp4(members: Sequence[tuple[Tensor, Tensor]]) -> list[dict[str, Tensor]] | None:
    """The NVFP4 tensors with exactly the same values, one dict per member, or None if the exponents
    span too much.

    Args:
        members: (packed [N_i, K // 2] uint8 or int8, low nibble the even column; scale [N_i, K //
            32], E8M0 as uint8 or float8_e8m0fnu) of modules that share a global scale at run time.

    Returns: `weight_packed` uint8 [N, K // 2], `weight_scale` float8_e4m3fn [N, K // 16] and
        `weight_global_scale` F32 [1], a divisor: value = code * weight_scale / weight_global_scale.
    """
    exponents = [scale.view(torch.uint8).to(torch.int16) - 127 for _, scale in members]
    used = []
    for (packed, _), exponent in zip(members, exponents, strict=True):
        blocks = (packed.view(torch.uint8) & _MAGNITUDE_BITS).unflatten(1, (exponent.shape[1], -1))
        used.append(exponent[blocks.ne(0).any(-1)])
    occupied = torch.cat(used)
    highest = int(occupied.max()) if occupied.numel() else 0
    if occupied.numel() and highest - int(occupied.min()) > _TOP - _BOTTOM:
        return None
    shift, found = _TOP - highest, []
    global_scale = torch.tensor([2.0**shift], dtype=torch.float32, device=occupied.device)
    for (packed, _), exponent in zip(members, exponents, strict=True):
        # Powers of two become E4M3 without rounding.
        scale = (exponent + shift).clamp(_BOTTOM, _TOP).float().exp2().to(torch.float8_e4m3fn)
        tensors = {"weight_packed": packed.view(torch.uint8), "weight_global_scale": global_scale}
        found.append(tensors | {"weight_scale": scale.repeat_interleave(2, dim=1)})
    return found
