"""Stored forms of released checkpoints back to BF16, one tensor at a time.

In: the packed tensor and its scales as they are in the file, on any device. Out: the weight, [N,
K], BF16, same device. Every form is codes times scales, one scale for a block of rows and columns:
codes become F32 through a table of 256 entries, are multiplied in F32 and rounded to BF16 once; a
chunk of rows is in F32 at a time.

Easy to get wrong: a tensor that is not looked at. Every tensor of a weight is used, or the weight
is refused. And two of these forms come in two conventions. A second-level NVFP4 scale is a
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
from .stored import num_slices, scale_of, unused_leaves, weight_of
from .values import row_ranges

# Where in a word of AWQ the code of each of its eight outputs is (vLLM 0.32.0, awq_triton.py).
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
_RELEASE = "Start from the original release"
_E2M1_HALF = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def dequantize(
    form: Form,
    parts: Mapping[str, Tensor],
    *,
    shape: Shape,
    block: tuple[int, int] | None = None,
    where: object = "",
) -> Tensor:
    """A stored weight as values.

    Args:
        form: from `stored.stored_weights`, and none of `forms.NOT_COMPUTED` but one of
            `TRANSPOSED` with the codes of a scheme. Of the packed forms,
            the weight is [N, K] in FP8 or int8; [N, K / 2] bytes of E2M1; or int32 [N, ceil(K *
            bits / 32)] of offset binary, first column in the low bits.
        parts: the tensors it is stored as, by the last component of their names, all on one device.
            A scale is [ceil(N / rows), ceil(K / columns)] for each block, or a value a row or a
            tensor, in any float dtype or E8M0 as uint8. `weight_zero_point` is the codes that mean
            0, int32 [ceil(N * bits / 32), G] or int8 [N, G]. `weight_g_idx` is [K]: the group of
            each column; all are -1 where they are in order.
        shape: the logical one, (N, K).
        block: rows and columns under one scale, for forms "fp8_block" and "fp8_sliced"; blocks at
            the right and lower edge may be smaller. Of "fp8_sliced", each slice of rows has blocks
            of its own (`stored.num_slices`).
        where: the module, for a refusal.

    Returns: `shape`, on the same device. Packed forms come as BF16, a plain weight is returned as
        it is.

    Raises: CheckpointError if a shape, a dtype or a width does not fit, or the form has no use for
        one of the parts.
    """
    try:
        for leaf in sorted(unused_leaves(form, parts)):
            raise CheckpointError(
                leaf,
                f"a weight in form {form} must have no such tensor",
                got=list(parts[leaf].shape),
                cure=_RELEASE,
            )
        refuse_odd_integers(form, parts, shape)
        return _dequantized(form, parts, shape, block)
    except CheckpointError as error:
        if not where:
            raise
        raise error.at(where) from error


def refuse_odd_integers(form: Form, parts: Mapping[str, Tensor], shape: Shape) -> None:
    """Refuse integers whose small tensors say something else than their headers and their form.

    Args:
        form: see `dequantize`.
        parts: also some of them alone.
        shape: the logical one, (N, K).

    Raises:
        CheckpointError: `weight_shape` has another width. Or GPTQ's zero points are not those of
            symmetric integers: files have them less one or, in GPTQ's second version, as they are,
            and no tensor says which.
    """
    said = parts.get("weight_shape")
    if said is not None and int(said[-1]) != shape[-1]:
        rule = f"must have the width {shape[-1]} of the other tensors"
        raise CheckpointError("weight_shape", rule, got=said.tolist(), cure=_RELEASE)
    zeros = parts.get("qzeros")
    if form == "gptq" and zeros is not None and not is_symmetric(zeros, shape[0]):
        rule = "zero points of GPTQ must be those of symmetric integers"
        raise CheckpointError("qzeros", rule, got="others", cure=_RELEASE)


def refuse_other_order(form: Form, parts: Mapping[str, Tensor]) -> None:
    """Refuse columns of GPTQ in another order than their own where the config says that they are
    in it: a server then does not look.

    Raises:
        CheckpointError: see above.
    """
    order = parts.get("g_idx")
    if form == "gptq" and order is not None and is_reordered(order, int(order.max()) + 1):
        rule = "columns must be in their own order where the config has no desc_act"
        raise CheckpointError("g_idx", rule, got="another order", cure=_RELEASE)


def is_symmetric(zeros: Tensor, num_rows: int) -> bool:
    """Whether all zero points of GPTQ, int32 [G, N / pack], are the middle, as they are or less
    one.
    """
    bits = 32 * zeros.shape[-1] // num_rows
    if bits not in (4, 8):
        return False
    codes = (zeros.unsqueeze(-1) >> _shifts(zeros, bits)) & ((1 << bits) - 1)
    middle = 1 << (bits - 1)
    first = codes.reshape(-1)[:1]
    return bool((codes == first).all()) and int(first) in (middle, middle - 1)


def is_reordered(order: Tensor, num_groups: int) -> bool:
    """Whether the columns of a group are not next to each other.

    Args:
        order: the group of each column, [K]; all are -1 where they were never put in order.
        num_groups: each of the same size.
    """
    natural = torch.arange(len(order), device=order.device) * num_groups // len(order)
    return not (torch.equal(order.long(), natural) or bool((order == -1).all()))


def _dequantized(
    form: Form, parts: Mapping[str, Tensor], shape: Shape, block: tuple[int, int] | None
) -> Tensor:
    if form in TRANSPOSED:
        parts = upright(form, parts, shape)
        form = "int_packed"
    weight = weight_of(parts)
    if form == "plain":
        return weight
    scale = scale_of(parts)
    if scale.ndim == 4:  # modelopt's blocks: [rows, 1, columns, 1]
        scale = scale.squeeze((1, 3))
    if scale.dtype == torch.uint8:  # raw bytes are E8M0
        scale = scale.view(torch.float8_e8m0fnu)
    scale = scale.float()
    num_rows, num_columns = shape
    if form == "fp8_sliced" and block is not None:
        count = num_slices(num_rows, scale.shape[0], block[0]) or 1
        table = _byte_table(weight)
        slices = list[Tensor]()
        for rows, part in zip(weight.chunk(count), scale.chunk(count), strict=True):
            slices.append(_scaled(table, rows, part, rows.shape, block))
        return torch.cat(slices)
    if form == "int_packed":
        return _int_packed(parts, scale, shape)
    storage = FORMS[form]
    zero = parts.get("weight_zero_point")
    if zero is not None:
        zero = _plain_zero_points(zero, (num_rows, 1))
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
        common = common.float().reshape(())
        scale = scale / common if storage.divides else scale * common
    if block is None:  # a value a row, or a tensor
        block = (1, num_columns)
        if scale.numel() in (1, num_rows):
            scale = scale.reshape(-1, 1).expand(num_rows, 1)
    return _scaled(table, weight, scale, shape, block, zero)


def upright(form: Form, parts: Mapping[str, Tensor], shape: Shape) -> dict[str, Tensor]:
    """The integers of GPTQ or AWQ as compressed-tensors has them: the same codes and scales.

    Args:
        form: "gptq", int32 [K / pack, N], the first input in the low bits of a word; or "awq",
            int32 [K, N / 8], the outputs of a word in AWQ's order.
        parts: qweight, scales [G, N]; qzeros, int32 [G, N / pack]; GPTQ's g_idx, [K].
        shape: (N, K).

    Returns: GPTQ's have no zero points, see `refuse_odd_integers`.
    """
    found = {"weight_scale": parts["scales"].T.contiguous(), "weight_shape": torch.tensor(shape)}
    zeros = parts.get("qzeros")
    if form == "awq":
        found["weight_packed"] = _words(_in_order(parts["qweight"]).T)
        if zeros is not None:
            found["weight_zero_point"] = _words(_in_order(zeros)).T.contiguous()
        return found
    found["weight_packed"] = parts["qweight"].T.contiguous()
    if "g_idx" in parts:
        found["weight_g_idx"] = parts["g_idx"]
    return found


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


def _int_packed(parts: Mapping[str, Tensor], scale: Tensor, shape: Shape) -> Tensor:
    """Integers of compressed-tensors' pack-quantized: codes around the middle, or around their zero
    points.
    """
    weight = weight_of(parts)
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
    block = (1, max(1, num_columns // num_groups))
    if num_groups > 1 and block[1].bit_count() != 1 and "weight_g_idx" not in parts:
        # The last group may have fewer columns: then nothing says how many the others have.
        rule = "the columns of a group must be a power of two"
        got = f"{num_groups} groups of {num_columns} columns"
        raise CheckpointError("weight_scale", rule, got=got, cure=_RELEASE)
    middle = 1 << (bits - 1)
    zero = parts.get("weight_zero_point")
    if zero is not None and zero.dtype == torch.int32:
        _expect_shape("weight_zero_point", zero, (-(-num_rows * bits // 32), num_groups))
        codes = (zero.unsqueeze(1) >> _shifts(zero, bits).view(1, -1, 1)) & ((1 << bits) - 1)
        zero = codes.flatten(0, 1)[:num_rows].float() - middle
    elif zero is not None:
        zero = _plain_zero_points(zero, (num_rows, num_groups))
    order = parts.get("weight_g_idx")
    if order is not None and is_reordered(order, num_groups):
        _expect_groups(order, num_columns, num_groups)
        _expect_shape("weight_scale", scale, (num_rows, num_groups))
        scale = scale[:, order.long()]
        block = (1, 1)
        if zero is not None:
            zero = zero[:, order.long()]
    table = torch.arange(1 << bits, dtype=torch.float32, device=weight.device) - middle
    if bits == 4:
        table = _pair_table(table)
    return _scaled(table, weight, scale, shape, block, zero)


def _plain_zero_points(zero: Tensor, shape: tuple[int, int]) -> Tensor:
    """Zero points that are one code an element, as F32 [N, G]."""
    if zero.dtype != torch.int8:
        raise CheckpointError(
            "weight_zero_point", "must be integers", got=zero.dtype, cure="Use another source"
        )
    if zero.ndim == 1:
        zero = zero.unsqueeze(1)
    _expect_shape("weight_zero_point", zero, shape)
    return zero.float()


def _expect_groups(order: Tensor, num_columns: int, num_groups: int) -> None:
    """Refuse groups of columns that there are no scales of."""
    _expect_shape("weight_g_idx", order, (num_columns,))
    if order.min() < 0 or order.max() >= num_groups:
        raise CheckpointError(
            "weight_g_idx",
            f"must be groups from 0 to {num_groups - 1}",
            got=[int(order.min()), int(order.max())],
            cure=_RELEASE,
        )


def _scaled(
    table: Tensor,
    packed: Tensor,
    scale: Tensor,
    shape: Shape,
    block: tuple[int, int],
    zero: Tensor | None = None,
) -> Tensor:
    """Codes, less their zero points, times their blocks' scales: [N, K], BF16.

    Args:
        table: the value of every byte, [256] F32, or the two that it holds (`_pair_table`).
        packed: [N, B] of any dtype.
        scale: [ceil(N / rows), ceil(K / columns)], F32.
        shape: (N, K).
        block: (rows, columns).
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
