"""checkpoints/dequantize.py against compressed-tensors' readers, and at the ends of what dtypes and
shapes hold; test_leaves.py has every form against plain float64 arithmetic.
"""

from functools import partial
from typing import Any

import pytest
import torch
from keepmtp.checkpoints import values as values_module
from keepmtp.checkpoints.dequantize import dequantize
from keepmtp.quantize.pack.pack import pack
from keepmtp.recipes.errors import CheckpointError
from keepmtp.recipes.schemes import SCHEMES

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """Chunks of a few rows, so that small weights have many."""
    monkeypatch.setattr(values_module, "_CHUNK_CPU", 1024)


def all_fp8(shape: tuple[int, int], dtype: torch.dtype = torch.float8_e4m3fn) -> torch.Tensor:
    """Every finite FP8 byte, over and over."""
    codes = torch.arange(256, dtype=torch.uint8)
    codes = codes[codes.view(dtype).float().isfinite()]
    count = shape[0] * shape[1]
    return codes.repeat(-(-count // len(codes)))[:count].reshape(shape).view(dtype)


def read(form: Any, shape: tuple[int, ...], block: Any = None, **parts: torch.Tensor):
    return dequantize(form, parts, shape=shape, block=block)


def fp8(weight: torch.Tensor, scale: torch.Tensor, block: Any = None) -> torch.Tensor:
    """FP8 or INT8 with a scale for each block, row or tensor."""
    form = "fp8_block" if block else "fp8_channel"
    return read(form, tuple(weight.shape), block, weight=weight, weight_scale=scale)


def fp4(form: str, packed: torch.Tensor, scale: torch.Tensor, **common: Any) -> torch.Tensor:
    shape = packed.shape[0], 2 * packed.shape[1]
    return read(form, shape, weight_packed=packed, weight_scale=scale, **common)


integers = partial(read, "int_packed")


def test_mxfp8_is_fp8_in_blocks_of_32():
    weight = all_fp8((8, 64))
    scale = torch.arange(110, 126, dtype=torch.uint8).view(8, 2)
    found = read("mxfp8", (8, 64), weight=weight, weight_scale=scale)
    assert torch.equal(found, fp8(weight, scale, (1, 32)))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_every_code_has_its_value_and_nan_stays_nan(dtype):
    weight = torch.arange(256, dtype=torch.uint8).view(dtype).reshape(2, 128)
    found = fp8(weight, torch.tensor(1.0)).float()
    assert found.isnan().any() and torch.allclose(found, weight.float(), 0, 0, equal_nan=True)


def test_mxfp4_at_the_ends_of_e8m0():
    packed = torch.full((1, 48), 0x72, dtype=torch.uint8)  # 1.0 in even columns, 6.0 in odd ones
    found = fp4("mxfp4", packed, torch.tensor([[0, 254, 255]], dtype=torch.uint8)).double()
    assert found[0, 0] == 2.0**-127 and found[0, 1] == 6 * 2.0**-127
    assert found[0, 32] == 2.0**127 and found[0, 33].isinf()
    assert found[0, 64:].isnan().all()
    zeros = torch.full((1, 16), 0x80, dtype=torch.uint8)  # 0 and -0
    assert fp4("mxfp4", zeros, zeros[:, :1])[0, :2].signbit().tolist() == [False, True]


@pytest.mark.parametrize(
    "name",
    [
        "NVFP4A16",
        "MXFP4",
        "FP8_DYNAMIC",
        "W4A16",
        "W4A16_G32",
        "W4A16_ASYM",
        "W8A16",
        "W8A8",
    ],
)
def test_same_values_as_compressed_tensors_reads(name):
    """A packed weight, read here and by the compressor that owns the format."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme

    scheme = SCHEMES[name]
    weight = torch.randn(72, 384, generator=torch.Generator().manual_seed(9)).mul(0.02).bfloat16()
    (packed,) = pack(scheme, [weight])
    compressor = BaseCompressor.get_value_from_registry(scheme.format)
    expected = compressor.decompress(
        dict(packed), QuantizationScheme(targets=["Linear"], **scheme.config_group())
    )["weight"]
    found = dequantize(scheme.form, packed, shape=tuple(weight.shape), block=scheme.block)
    assert torch.equal(found, expected)


def test_shapes_that_do_not_fit_are_refused():
    weight, byte = all_fp8((256, 256)), torch.zeros(4, 64, dtype=torch.uint8)
    ones, words = torch.ones, {"weight_packed": byte.view(torch.int32)}
    cases = {
        r"shape \[2, 2\]; got \[2, 1\]": lambda: fp8(weight, ones(2, 1), (128, 128)),
        r"shape \[256, 1\]; got \[255, 1\]": lambda: fp8(weight, ones(255, 1)),
        "only FP8 or INT8": lambda: fp8(weight.bfloat16(), ones(1)),
        r"\[4, 4\]": lambda: fp4("mxfp4", byte, byte[:, :8]),
        "global scale": lambda: fp4("nvfp4", byte, ones(4, 8), weight_global_scale=ones(2)),
        "4 or 8 bits": lambda: integers((4, 170), weight_scale=ones(4, 1), **words),
        "weight_packed": lambda: integers((4, 110), weight_scale=ones(4, 1), **words),
        "weight_scale": lambda: integers((4, 128), weight_scale=ones(4, 3), **words),
        r"weight_zero_point: .*\[1, 2\]; got \[2, 2\]": lambda: integers(
            (4, 128),
            weight_scale=ones(4, 2),
            weight_zero_point=words["weight_packed"][:2, :2],
            **words,
        ),
    }
    for says, refused in cases.items():
        with pytest.raises(CheckpointError, match=says):
            refused()
