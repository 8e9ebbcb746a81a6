"""Stored forms of released checkpoints back to BF16, one tensor at a time.

In: the packed tensor and its scales as they are in the file, on any device. Out: the weight, [N,
K], BF16, same device. Codes become F32 through a table of 256 entries, are multiplied by their
scale in F32 and rounded to BF16 once; a chunk of rows is in F32 at a time.

Easy to get wrong: two of these forms come in two conventions. A second-level NVFP4 scale is a
divisor in compressed-tensors and a multiplier in modelopt; E8M0 scales (byte e means 2**(e - 127))
are as often stored as plain uint8. Of two 4-bit codes in a byte, the low nibble is the even column.

Source: compressed-tensors 0.19.0 compressors/* (decompress) and entrypoints/convert/converters
(fp8block_dequantizer.py, modelopt_nvfp4.py). tests/checkpoints/test_dequantize.py holds these
functions against both and against float64 arithmetic.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from ..recipes.errors import CheckpointError
from .stored import Form, num_slices, scale_of, weight_of
from .values import row_ranges

_E2M1_VALUES = (
    0.0,
    0.5,
    1.0,
    1.5,
    2.0,
    3.0,
    4.0,
    6.0,
    -0.0,
    -0.5,
    -1.0,
    -1.5,
    -2.0,
    -3.0,
    -4.0,
    -6.0,
)


def dequantize(
    form: Form,
    parts: Mapping[str, Tensor],
    *,
    shape: tuple[int, ...],
    block: tuple[int, int] | None = None,
) -> Tensor:
    """A stored weight as values.

    Args:
        form: from `stored.stored_weights`, and none of `stored.NOT_COMPUTED`.
        parts: the tensors it is stored as, by the last component of their names, all on one device.
        shape: the logical one.
        block: rows and columns under one scale, for form "fp8_block".

    Returns: `shape`, on the same device. Packed forms come as BF16, a plain weight is returned as
    it is.

    Raises: CheckpointError if a shape does not fit.
    """
    weight = weight_of(parts)
    if form == "plain":
        return weight
    scale = scale_of(parts)
    match form:
        case "fp8_block":
            assert block is not None
            return fp8_block(weight, scale, block)
        case "fp8_sliced":
            assert block is not None
            return fp8_sliced(weight, scale, block)
        case "mxfp8":
            return fp8_block(weight, scale, (1, 32))
        case "fp8_channel" | "fp8_tensor" | "int8":
            return fp8_channel(weight, scale)
        case "mxfp4":
            return mxfp4(weight, scale)
        case "nvfp4":
            return nvfp4(weight, scale, parts["weight_global_scale"], divisor=True)
        case "nvfp4_modelopt":
            return nvfp4(weight, scale, parts["weight_scale_2"], divisor=False)
        case "int_packed":
            num_rows, num_columns = shape
            bits, zero_point = 32 * weight.shape[1] // num_columns, parts.get("weight_zero_point")
            return int_packed(weight, scale, bits, (num_rows, num_columns), zero_point)
        case "gptq" | "awq" | "unknown":
            raise AssertionError(
                f"{', '.join(parts)}: a form that is not computed is refused before"
            )


def fp8_block(weight: Tensor, scale: Tensor, block: tuple[int, int]) -> Tensor:
    """FP8 with one multiplier per block (DeepSeek's `weight_scale_inv` and its kin).

    Args:
        weight: [N, K], float8_e4m3fn, float8_e5m2 or int8.
        scale: [ceil(N / rows), ceil(K / columns)], F32, BF16, F16, float8_e8m0fnu or E8M0 as raw
            uint8.
        block: rows and columns under one scale, usually (128, 128); blocks at the right and lower
            edge may be smaller.

    Returns: [N, K], BF16.

    Raises: CheckpointError if the scale's shape does not fit.
    """
    rows, columns = block
    num_rows, num_columns = weight.shape
    _expect_shape("block scale", scale, (-(-num_rows // rows), -(-num_columns // columns)))
    table, factor = _byte_table(weight), _scale_to_float(scale)

    def chunk(first: int, last: int) -> Tensor:
        row_scale = factor[first // rows].repeat_interleave(columns)[:num_columns]
        return _look_up(table, weight[first:last]).mul_(row_scale)

    return _by_rows((num_rows, num_columns), weight.device, chunk, max_rows=rows)


def fp8_sliced(weight: Tensor, scale: Tensor, block: tuple[int, int]) -> Tensor:
    """FP8 in blocks, in slices of rows of which each has blocks of its own (`stored.num_slices`).

    Args:
        weight: [N, K], as in `fp8_block`.
        scale: [slices * ceil(N / slices / rows), ceil(K / columns)], as in `fp8_block`.
        block: rows and columns under one scale.

    Returns: [N, K], BF16, the rows in their order on disk.

    Raises: CheckpointError if the scale's shape does not fit.
    """
    count = num_slices(weight.shape[0], scale.shape[0], block[0]) or 1
    pairs = zip(weight.chunk(count), scale.chunk(count), strict=True)
    return torch.cat([fp8_block(rows, factor, block) for rows, factor in pairs])


def fp8_channel(weight: Tensor, scale: Tensor) -> Tensor:
    """FP8, or plain INT8, with one multiplier per row or per tensor.

    Args:
        weight: [N, K], float8_e4m3fn, float8_e5m2 or int8.
        scale: [N, 1], [N], [1] or a scalar, any float dtype.

    Returns: [N, K], BF16.

    Raises: CheckpointError if the scale has neither one value nor one a row.
    """
    num_rows, num_columns = weight.shape
    if scale.numel() not in (1, num_rows):
        _expect_shape("row scale", scale, (num_rows, 1))
    table, factor = _byte_table(weight), _scale_to_float(scale).reshape(-1, 1).expand(num_rows, 1)

    def chunk(first: int, last: int) -> Tensor:
        return _look_up(table, weight[first:last]).mul_(factor[first:last])

    return _by_rows((num_rows, num_columns), weight.device, chunk)


def mxfp4(packed: Tensor, scale: Tensor) -> Tensor:
    """OCP MXFP4: E2M1 codes, one power of two per 32 input channels.

    Args:
        packed: [N, K // 2], uint8 or int8, two codes a byte.
        scale: [N, K // 32], float8_e8m0fnu or raw uint8.

    Returns: [N, K], BF16, exact but for results below 2**-133.

    Raises: CheckpointError if the scale's shape does not fit.
    """
    return _fp4(packed, scale, 32, lambda factor: factor)


def nvfp4(packed: Tensor, scale: Tensor, global_scale: Tensor, *, divisor: bool) -> Tensor:
    """NVFP4: E2M1 codes, one E4M3 scale per 16 input channels, one F32 scale for the whole weight.

    Args:
        packed: [N, K // 2], uint8 or int8, two codes a byte.
        scale: [N, K // 16], float8_e4m3fn.
        global_scale: [1] or a scalar, F32.
        divisor: True for compressed-tensors (`weight_global_scale`): code * (scale / global_scale).
            False for modelopt (`weight_scale_2`): code * (scale * global_scale).

    Returns: [N, K], BF16.

    Raises: CheckpointError if a scale's shape does not fit.
    """
    if global_scale.numel() != 1:
        _expect_shape("global scale", global_scale, (1,))
    common, rescale = global_scale.float().reshape(1, 1), torch.div if divisor else torch.mul
    return _fp4(packed, scale, 16, lambda factor: rescale(factor, common))


def int_packed(
    packed: Tensor,
    scale: Tensor,
    bits: int,
    shape: tuple[int, int],
    zero_point: Tensor | None = None,
) -> Tensor:
    """Integers of compressed-tensors' pack-quantized: offset binary, first column in the low bits.

    Args:
        packed: [N, ceil(K * bits / 32)], int32.
        scale: [N, G] with K a multiple of G (G = 1: one scale a row), BF16, F16 or F32.
        bits: 4 or 8.
        shape: (N, K) of the weight, `weight_shape` in the file.
        zero_point: [ceil(N * bits / 32), G], int32: the codes that mean 0, first row in the low
            bits; None where all are half the count of codes.

    Returns: [N, K], BF16.

    Raises: CheckpointError if a shape does not fit or codes straddle words (other widths than 4 and
    8).
    """
    if bits not in (4, 8):
        raise CheckpointError(
            "weight_packed", "only 4 or 8 bits can be read", got=bits, cure="Use another source"
        )
    num_rows, num_columns = (int(size) for size in shape)
    _expect_shape("weight_packed", packed, (num_rows, -(-num_columns * bits // 32)))
    if scale.ndim != 2 or scale.shape[0] != num_rows or num_columns % scale.shape[1]:
        _expect_shape("weight_scale", scale, (num_rows, 1))
    table, factor = _int_table(bits, packed.device), _scale_to_float(scale)
    zero = (
        None if zero_point is None else _zero_points(zero_point, bits, (num_rows, scale.shape[1]))
    )

    def chunk(first: int, last: int) -> Tensor:
        codes = _look_up(table, packed[first:last].contiguous().view(torch.uint8))[:, :num_columns]
        if zero is not None:
            codes.unflatten(1, (scale.shape[1], -1)).sub_(zero[first:last].unsqueeze(-1))
        return _scale_groups(codes, factor[first:last])

    return _by_rows((num_rows, num_columns), packed.device, chunk)


def _zero_points(packed: Tensor, bits: int, shape: tuple[int, int]) -> Tensor:
    """Zero points around 0, as the codes of `_int_table` are: F32 [N, G]."""
    per_word = 32 // bits
    _expect_shape("weight_zero_point", packed, (-(-shape[0] // per_word), shape[1]))
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=packed.device).view(1, -1, 1)
    codes = (packed.unsqueeze(1) >> shifts) & ((1 << bits) - 1)
    return codes.flatten(0, 1)[: shape[0]].float() - (1 << (bits - 1))


def _fp4(
    packed: Tensor, scale: Tensor, group_size: int, rescale: Callable[[Tensor], Tensor]
) -> Tensor:
    """E2M1 codes times their groups' scales, after `rescale`."""
    table = _pair_table(torch.tensor(_E2M1_VALUES, device=packed.device))
    num_rows, num_columns = packed.shape[0], packed.shape[1] * 2
    _expect_shape("scale", scale, (num_rows, num_columns // group_size))

    def chunk(first: int, last: int) -> Tensor:
        return _scale_groups(
            _look_up(table, packed[first:last]), rescale(_scale_to_float(scale[first:last]))
        )

    return _by_rows((num_rows, num_columns), packed.device, chunk)


def _by_rows(
    shape: tuple[int, int],
    device: torch.device,
    chunk: Callable[[int, int], Tensor],
    max_rows: int = 0,
) -> Tensor:
    """Assemble a BF16 matrix from F32 chunks `chunk(first_row, last_row)`; none crosses a multiple
    of `max_rows`.
    """
    weight = torch.empty(shape, dtype=torch.bfloat16, device=device)
    for top in range(0, shape[0], max_rows or max(1, shape[0])):
        band = weight[top : top + max_rows] if max_rows else weight
        for first, last in row_ranges(band):
            band[first:last].copy_(chunk(top + first, top + last))
    return weight


def _scale_groups(codes_NK: Tensor, scale_NG: Tensor) -> Tensor:
    """Multiply each run of K // G columns by its scale, in place."""
    codes_NK.unflatten(1, (scale_NG.shape[1], -1)).mul_(scale_NG.unsqueeze(-1))
    return codes_NK


def _scale_to_float(scale: Tensor) -> Tensor:
    """A stored scale as F32; raw bytes are E8M0."""
    return (scale.view(torch.float8_e8m0fnu) if scale.dtype == torch.uint8 else scale).float()


# Tables. A look-up by byte is several times faster than PyTorch's conversion from FP8 on a CPU, and
# keeps NaN.


def _look_up(table: Tensor, codes: Tensor) -> Tensor:
    """Entries of a 256-row table by byte: [N, B] bytes -> [N, B * values per byte], F32.

    Entries that hold two values are moved as one 8-byte word.
    """
    index = codes.contiguous().view(torch.uint8).reshape(-1).to(torch.int32)
    entries = table if table.ndim == 1 else table.view(torch.float64).squeeze(-1)
    return entries.index_select(0, index).view(torch.float32).view(codes.shape[0], -1)


def _byte_table(weight: Tensor) -> Tensor:
    """The F32 value of every byte read in the dtype of `weight`: [256]."""
    if weight.dtype not in (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8):
        raise CheckpointError(
            "weight", "only FP8 or INT8 can be read", got=weight.dtype, cure="Check the stored form"
        )
    return torch.arange(256, dtype=torch.uint8, device=weight.device).view(weight.dtype).float()


def _int_table(bits: int, device: torch.device) -> Tensor:
    """The F32 value of every byte of offset-binary codes: [256] for 8 bits, [256, 2] for 4."""
    values = torch.arange(1 << bits, dtype=torch.float32, device=device) - (1 << (bits - 1))
    return values if bits == 8 else _pair_table(values)


def _pair_table(values: Tensor) -> Tensor:
    """Both values of every byte that holds two 4-bit codes, low nibble first: [16] -> [256, 2]."""
    byte = torch.arange(256, device=values.device)
    return torch.stack((values[byte & 15], values[byte >> 4]), dim=1)


def _expect_shape(what: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    """Refuse a tensor that is not of this shape."""
    if tuple(tensor.shape) != shape:
        rule = f"this stored form has shape {list(shape)}"
        raise CheckpointError(
            what, rule, got=list(tensor.shape), cure="Check the source's quantization config"
        )
