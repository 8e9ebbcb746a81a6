"""Stored forms of released checkpoints back to BF16, one tensor at a time.

In: the packed tensor and its scales as they are in the file, on any device. Out: the weight, [N,
K], BF16, same device. Every form is codes times scales, one scale for a block of rows and columns:
codes become F32 through a table of 256 entries, are multiplied in F32 and rounded to BF16 once; a
chunk of rows is in F32 at a time.

Easy to get wrong: two of these forms come in two conventions. A second-level NVFP4 scale is a
divisor in compressed-tensors and a multiplier in modelopt; E8M0 scales (byte e means 2**(e - 127))
are as often stored as plain uint8. Of two 4-bit codes in a byte, the low nibble is the even column.

Source: compressed-tensors 0.19.0 compressors/* (decompress) and entrypoints/convert/converters
(fp8block_dequantizer.py, modelopt_nvfp4.py). tests/checkpoints/test_dequantize.py holds this
against both and against float64 arithmetic.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from ..recipes.errors import CheckpointError
from ..recipes.forms import FORMS, TRANSPOSED, Form
from ..recipes.frozen import Shape
from .stored import num_slices, scale_of, weight_of
from .values import row_ranges

# Where in a word of AWQ the code of each of its eight outputs is (vLLM 0.32.0, awq_triton.py).
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
_E2M1_HALF = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def dequantize(
    form: Form,
    parts: Mapping[str, Tensor],
    *,
    shape: Shape,
    block: tuple[int, int] | None = None,
) -> Tensor:
    """A stored weight as values.

    Args:
        form: from `stored.stored_weights`, and none of `forms.NOT_COMPUTED` but one of
            `TRANSPOSED` with the codes of a scheme. Of the packed forms,
            the weight is [N, K] in FP8 or int8; [N, K / 2] bytes of E2M1; or int32 [N, ceil(K *
            bits / 32)] of offset binary, first column in the low bits.
        parts: the tensors it is stored as, by the last component of their names, all on one device.
            A scale is [ceil(N / rows), ceil(K / columns)] for each block, or a value a row or a
            tensor, in any float dtype or E8M0 as uint8. `weight_zero_point` is int32 [ceil(N * bits
            / 32), G]: the codes that mean 0.
        shape: the logical one, (N, K).
        block: rows and columns under one scale, for forms "fp8_block" and "fp8_sliced"; blocks at
            the right and lower edge may be smaller. Of "fp8_sliced", each slice of rows has blocks
            of its own (`stored.num_slices`).

    Returns: `shape`, on the same device. Packed forms come as BF16, a plain weight is returned as
        it is.

    Raises: CheckpointError if a shape, a dtype or a width does not fit.
    """
    if form in TRANSPOSED:
        parts = upright(form, parts, shape)
        form = "int_packed"
    weight = weight_of(parts)
    if form == "plain":
        return weight
    scale = scale_of(parts)
    if scale.ndim == 4:  # modelopt's blocks: [rows, 1, columns, 1]
        scale = scale.squeeze((1, 3))
    num_rows, num_columns = shape
    if form == "fp8_sliced" and block is not None:
        count = num_slices(num_rows, scale.shape[0], block[0]) or 1
        table = _byte_table(weight)
        slices = list[Tensor]()
        for rows, part in zip(weight.chunk(count), scale.chunk(count), strict=True):
            slices.append(_scaled(table, rows, part, rows.shape, block))
        return torch.cat(slices)
    if form == "int_packed":
        return _int_packed(weight, scale, parts.get("weight_zero_point"), (num_rows, num_columns))
    storage = FORMS[form]
    common = None
    if storage.codes == 2:
        half = torch.tensor(_E2M1_HALF, device=weight.device)
        table = _pair_table(torch.cat((half, -half)))
    else:
        table = _byte_table(weight)
    if storage.group:
        block = (1, storage.group)
    if storage.common:
        common = parts[storage.common]
        if common.numel() != 1:
            _expect_shape("global scale", common, (1,))
        common = common.float().reshape(1, 1)
    if block is None:  # a value a row, or a tensor
        block = (1, num_columns)
        if scale.numel() in (1, num_rows):
            scale = scale.reshape(-1, 1).expand(num_rows, 1)
    return _scaled(table, weight, scale, shape, block, common=common, divides=storage.divides)


def upright(form: Form, parts: Mapping[str, Tensor], shape: Shape) -> dict[str, Tensor]:
    """The integers of GPTQ or AWQ as compressed-tensors has them: the same codes and scales.

    Args:
        form: "gptq", int32 [K / pack, N], the first input in the low bits of a word; or "awq",
            int32 [K, N / 8], the outputs of a word in AWQ's order.
        parts: qweight, scales [G, N], and AWQ's qzeros, int32 [G, N / 8].
        shape: (N, K).
    """
    found = {"weight_scale": parts["scales"].T.contiguous(), "weight_shape": torch.tensor(shape)}
    if form == "gptq":
        return {**found, "weight_packed": parts["qweight"].T.contiguous()}
    zeros = _words(_in_order(parts["qzeros"])).T.contiguous()
    packed = _words(_in_order(parts["qweight"]).T)
    return {**found, "weight_packed": packed, "weight_zero_point": zeros}


def _in_order(words: Tensor) -> Tensor:
    """The codes of AWQ's words, by their outputs: int32 [R, C] -> [R, 8 * C]."""
    codes = (words.unsqueeze(-1) >> _shifts(words)) & 15
    return codes[..., _AWQ_ORDER].flatten(1)


def _words(codes: Tensor) -> Tensor:
    """Eight codes of a row in a word, the first in its low bits: int32 [R, 8 * C] -> [R, C]."""
    return (codes.unflatten(1, (-1, 8)) << _shifts(codes)).sum(-1, dtype=torch.int32)


def _shifts(words: Tensor, bits: int = 4) -> Tensor:
    """Where in a word each of its codes begins."""
    return torch.arange(0, 32, bits, dtype=torch.int32, device=words.device)


def _int_packed(
    weight: Tensor, scale: Tensor, zero: Tensor | None, shape: tuple[int, int]
) -> Tensor:
    """Integers of compressed-tensors' pack-quantized: codes around the middle, or around their zero
    points.
    """
    num_rows, num_columns = shape
    bits = 32 * weight.shape[1] // num_columns
    if bits not in (4, 8):  # others straddle words
        raise CheckpointError(
            "weight_packed", "only 4 or 8 bits can be read", got=bits, cure="Use another source"
        )
    _expect_shape("weight_packed", weight, (num_rows, -(-num_columns * bits // 32)))
    num_groups = 1
    if scale.ndim == 2:
        num_groups = scale.shape[1]
    middle = 1 << (bits - 1)
    per_word = 32 // bits
    if zero is not None:
        _expect_shape("weight_zero_point", zero, (-(-num_rows // per_word), num_groups))
        codes = (zero.unsqueeze(1) >> _shifts(zero, bits).view(1, -1, 1)) & ((1 << bits) - 1)
        zero = codes.flatten(0, 1)[:num_rows].float() - middle
    table = torch.arange(1 << bits, dtype=torch.float32, device=weight.device) - middle
    if bits == 4:
        table = _pair_table(table)
    return _scaled(table, weight, scale, shape, (1, max(1, num_columns // num_groups)), zero=zero)


def _scaled(
    table: Tensor,
    packed: Tensor,
    scale: Tensor,
    shape: Shape,
    block: tuple[int, int],
    *,
    common: Tensor | None = None,
    divides: bool = False,
    zero: Tensor | None = None,
) -> Tensor:
    """Codes, less their zero points, times their blocks' scales: [N, K], BF16.

    Args:
        table: the value of every byte, [256] F32, or the two that it holds (`_pair_table`).
        packed: [N, B] of any dtype.
        scale: [ceil(N / rows), ceil(K / columns)].
        shape: (N, K).
        block: (rows, columns).
        common: [1, 1], by which every scale is multiplied, or divided if `divides`.
        zero: [N, G], F32, for blocks of one row.
    """
    num_rows, num_columns = shape
    rows, columns = block
    num_groups = -(-num_columns // columns)
    _expect_shape("weight_scale", scale, (-(-num_rows // rows), num_groups))
    values = packed.new_empty(shape, dtype=torch.bfloat16)
    for first, last in row_ranges(values, rows):
        index = packed[first:last].contiguous().view(torch.uint8).reshape(-1).to(torch.int32)
        codes = table.index_select(0, index).view(torch.float32)
        codes = codes.view(last - first, -1)[:, :num_columns]
        factor = scale[first // rows : -(-last // rows)]
        if factor.dtype == torch.uint8:  # raw bytes are E8M0
            factor = factor.view(torch.float8_e8m0fnu)
        factor = factor.float()
        if common is not None and divides:
            factor = factor / common
        elif common is not None:
            factor = factor * common
        if zero is not None:
            codes.unflatten(1, (num_groups, -1)).sub_(zero[first:last].unsqueeze(-1))
        if rows > 1:
            factor = factor.repeat_interleave(rows, 0)[: last - first]
        if num_columns % columns:
            codes *= factor.repeat_interleave(columns, 1)[:, :num_columns]
        else:
            codes.unflatten(1, (num_groups, -1)).mul_(factor.unsqueeze(-1))
        values[first:last].copy_(codes)
    return values


# Tables. A look-up by byte is several times faster than PyTorch's conversion from FP8 on a CPU, and
# keeps NaN.


def _byte_table(weight: Tensor) -> Tensor:
    """The F32 value of every byte read in the dtype of `weight`: [256]."""
    if weight.dtype not in (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8):
        raise CheckpointError(
            "weight", "only FP8 or INT8 can be read", got=weight.dtype, cure="Check the stored form"
        )
    return torch.arange(256, dtype=torch.uint8, device=weight.device).view(weight.dtype).float()


def _pair_table(values: Tensor) -> Tensor:
    """Both values of every byte that holds two 4-bit codes, low nibble first: [16] -> [256].

    An entry is two F32 in one word of 8 bytes, so that a look-up moves both at once.
    """
    byte = torch.arange(256, device=values.device)
    pairs = torch.stack((values[byte & 15], values[byte >> 4]), dim=1)
    return pairs.view(torch.float64).squeeze(1)


def _expect_shape(what: str, tensor: Tensor, shape: Shape) -> None:
    """Refuse a tensor that is not of this shape."""
    if tuple(tensor.shape) != shape:
        raise CheckpointError(
            what,
            f"this stored form has shape {list(shape)}",
            got=list(tensor.shape),
            cure="Check the source's quantization config",
        )
