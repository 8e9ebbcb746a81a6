"""What the packing of every scheme is made of: a chunk of rows with its working memory, largest
magnitudes, linear scales, 4-bit codes in bytes.

In: a chunk of a weight's rows in BF16 or F32, and its scales. Out: tensors on the same device.

Easy to get wrong: the dtype. What a peer divides in BF16 is divided in BF16 here, on every device.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from ...recipes.errors import CheckpointError
from ...recipes.frozen import frozen
from ...recipes.schemes import Scheme

BITS_DTYPE = {torch.bfloat16: torch.int16, torch.float32: torch.int32}
MANTISSA_BITS = {torch.bfloat16: 7, torch.float32: 23}


@frozen
class Chunk:
    """Some rows of a weight, what they fill, and buffers for the F32 stage.

    The buffers are used again for the next rows. Fresh ones of this size go back to the system when
    they are freed, and the page faults of getting them again took as long as the arithmetic.

    Attributes:
        values: BF16 or F32 [n, K], contiguous.
        out: the rows' slices of the outputs, by suffix.
        scaled: F32 [elements].
        spare: I32 [elements].
        codes: U8 [2, elements].
    """

    scheme: Scheme
    values: Tensor
    out: Mapping[str, Tensor]
    scaled: Tensor
    spare: Tensor
    codes: Tensor

    @property
    def group_size(self) -> int:
        """Values with one scale: the scheme's group, or a row."""
        return self.scheme.group_size or self.values.shape[1]


# Largest magnitudes, taken on the integer view: the order of non-negative floats is the order of
# their bits, integer maxima are several times faster than BF16 ones, and NaN and Inf come out on
# top instead of getting lost.


def magnitude_bits(values: Tensor) -> Tensor:
    """|values| as the integers of its bit patterns, same shape: int16 for BF16, int32 for F32."""
    bits = BITS_DTYPE[values.dtype]
    return values.view(bits) & torch.iinfo(bits).max


def finite(amax_bits: Tensor, dtype: torch.dtype) -> Tensor:
    """Magnitudes back in `dtype`, unless one of them is Inf or NaN."""
    if int(amax_bits.max()) >= 0xFF << MANTISSA_BITS[dtype]:
        raise CheckpointError(
            "weight",
            "every value must be finite",
            got="NaN or Inf",
            cure="Get an intact checkpoint",
        )
    return amax_bits.view(dtype)


def group_amax(values_NK: Tensor, group_size: int) -> Tensor:
    """Largest magnitude per group of input channels: [N, K // group_size], dtype of the values."""
    bits = magnitude_bits(values_NK).unflatten(1, (-1, group_size))
    return finite(bits.amax(-1), values_NK.dtype)


def divided(amax: Tensor, divisor: float) -> Tensor:
    """amax / divisor in the dtype of amax. A CUDA division by a Python number multiplies by its
    reciprocal instead.
    """
    return amax / amax.new_full((), divisor)


def linear_scale(amax: Tensor, largest: float, dtype: torch.dtype) -> Tensor:
    """Linear scales in `dtype`: amax / largest, and that dtype's eps where this rounds to zero."""
    scale = divided(amax, largest).to(dtype)
    return torch.where(scale == 0, torch.finfo(dtype).eps, scale)


def store_nibbles(codes: Tensor, packed: Tensor) -> None:
    """Two codes a byte, the even column in the low nibble: U8 [2 * B] of 0..15, overwritten, into B
    bytes.
    """
    pairs = codes.view(torch.int16)
    # The low byte of a little-endian pair is the even column; the cast keeps this byte.
    packed.view(torch.uint8).view(-1).copy_(pairs.bitwise_or_(pairs >> 4))
