"""MXFP4 re-encoded as NVFP4 keeps every value, by compressed-tensors' own reading; rounding it
again would not.
"""

import pytest
import torch
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from keepmtp.quantize.pack.unit import mxfp4_as_nvfp4
from keepmtp.recipes.schemes import SCHEMES


def member(seed: int, low: int, high: int, rows: int = 32) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes of [rows, 256] weights, and their scales."""
    generator = torch.Generator().manual_seed(seed)
    packed = torch.randint(0, 256, (rows, 128), dtype=torch.uint8, generator=generator)
    exponents = torch.randint(low, high + 1, (rows, 8), generator=generator)
    return packed, (exponents + 127).to(torch.uint8)


@pytest.mark.parametrize("low, high", [(-9, -5), (-17, 0), (-120, -110), (3, 20), (100, 117)])
def test_values_are_kept_exactly(low, high):
    members = [member(0, low, high), member(1, low, high, rows=16)]
    packed = mxfp4_as_nvfp4(members)
    assert packed is not None
    assert torch.equal(packed[0]["weight_global_scale"], packed[1]["weight_global_scale"])
    for (codes, scale), tensors in zip(members, packed, strict=True):
        rows = len(codes)
        for spec in SCHEMES["NVFP4A16"].tensors(rows, 256):
            assert tuple(tensors[spec.suffix].shape) == spec.shape
        given, found = (
            unpack_fp4_from_uint8(each, rows, 256, torch.float64)
            for each in (codes, tensors["weight_packed"])
        )
        local = tensors["weight_scale"].double() / tensors["weight_global_scale"].double()
        expected = given * torch.exp2(scale.double() - 127).repeat_interleave(32, 1)
        assert torch.equal(found * local.repeat_interleave(16, 1), expected)


@pytest.mark.parametrize("is_whole", [False, True])
def test_zero_blocks_do_not_widen_the_range(is_whole):
    codes, scale = member(3, -9, -5)
    codes[:, :16] = 0x80  # 32 zeros, some of them negative
    scale[:, 0] = 0
    if is_whole:
        codes[:] = 0
    (tensors,) = mxfp4_as_nvfp4([(codes, scale)]) or [{}]
    local = tensors["weight_scale"].float()
    assert torch.isfinite(local).all() and (local > 0).all()


def test_too_wide_a_range_is_left_to_rounding():
    codes, scale = member(4, -9, -5)
    codes[0, 0], scale[0, 0] = 0x77, 127 - 40
    assert mxfp4_as_nvfp4([(codes, scale)]) is None
