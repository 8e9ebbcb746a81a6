"""Round to nearest and pack: a float weight in, the tensors of one scheme out, byte for byte what
its peer writes.

In: the weights of one fused group, each [N, K] in BF16, F16 or F32 on any device. Out: per weight a
dict whose keys, dtypes and shapes are `scheme.weight_tensors(N, K)`, on the same device. No data is
seen: scales come from the largest magnitude of each row, group, block or weight; static input
scales are no business of the weight's. A chunk of rows that fits a CPU core's cache is taken at a
time, so nothing of the weight's size is ever held in F32.

Easy to get wrong: compressed-tensors computes in the weight's own dtype. A BF16 weight has BF16
scales, and its quotients are rounded to BF16 before they are rounded to the scheme (NVFP4 alone
divides in F32, by scale / global scale). Better arithmetic would be easy and would write other
bytes.

Differences from llm-compressor's model_free_ptq on a CPU, all meant: FP8_BLOCK scales are stored as
F32 (same values); the global scale spans the fused group we are given; F16 and F32 weights also get
BF16 scales where the scheme says BF16, and F16 counts as the same values in F32 (NVFP4's global
scale overflows F16 for any usual weight). Its CUDA path (a Triton kernel, read but not run) skips
the rounding to BF16; the operations below follow its CPU path on any device.

Source: compressed-tensors 0.19.0 quantization/utils/helpers.py (calculate_qparams,
generate_gparam), quantization/utils/mxfp_utils.py, quantization/lifecycle/forward_helpers.py
(_quantize on CPU) and compressors/*; llm-compressor 0.14.0.1 entrypoints/model_free and
observers/min_max.py. tests/quantize/pack/test_pack.py runs both side by side.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

import torch
from torch import Tensor

from ...checkpoints.values import TORCH_DTYPES, row_ranges
from ...recipes.errors import CheckpointError
from ...recipes.forms import GLOBAL_SCALE
from ...recipes.schemes import Scheme
from .chunk import (
    BITS_DTYPE,
    MANTISSA_BITS,
    Chunk,
    divided,
    finite,
    group_amax,
    linear_scale,
    magnitude_bits,
    store_nibbles,
)
from .pack_integers import int_kernel, int_pack_kernel

_E2M1_MAX = 6.0
_E4M3_MAX = 448.0
# Scales that round to zero become this: 2**-3, an arbitrary but agreed value (_get_dtype_eps of
# compressed-tensors).
_E4M3_EPS = 0.125


def pack(
    scheme: Scheme,
    weights: Sequence[Tensor],
    *,
    shared: Mapping[str, Tensor] | None = None,
) -> list[dict[str, Tensor]]:
    """Quantize the members of one fused group and lay them out as they go to disk.

    Args:
        scheme: a row of `recipes.schemes.SCHEMES`; only its weight counts here.
        weights: modules that are fused into one at run time, each [N_i, K], BF16, F16 or F32. A
            module on its own is a group of one. NVFP4 and static FP8 couple them: one scale, from
            the largest magnitude of the group. (vLLM 0.32.0 rounds fused static FP8 weights again,
            to the largest of their scales: fp8_utils.process_fp8_weight_tensor_strategy. Of one
            scale it changes nothing.)
        shared: outputs that are given, by suffix: those that say something of the whole matrix,
            where the weights are some of its rows. By default they are computed.

    Returns: one dict per weight, suffix -> tensor, as `scheme.weight_tensors(N_i, K)` lists them,
        on the weight's device.

    Raises:
        CheckpointError: a weight is no float matrix, or holds NaN or Inf. The caller knows the name
            and adds it.
    """
    for weight in weights:
        is_float = weight.dtype in (*BITS_DTYPE, torch.float16)
        if weight.ndim != 2 or not weight.numel() or not is_float:
            raise CheckpointError(
                "weight",
                "only a BF16, F16 or F32 matrix that is not empty can be quantized",
                got=f"{weight.dtype} {tuple(weight.shape)}",
                cure="Keep this tensor",
            )
    if shared is None:
        shared = {}
        if scheme.has_tensor_scale and weights:
            shared = shared_scale(scheme, largest(weights))
    return [_pack_weight(scheme, weight, shared) for weight in weights]


def largest(weights: Iterable[Tensor]) -> Tensor:
    """The largest magnitude of a fused group, or of slices of a matrix, in their dtype, F32 if they
    differ. Each is looked at once.

    Raises:
        CheckpointError: a weight holds NaN or Inf.
    """
    found = list[Tensor]()
    for weight in weights:
        chunks = (magnitude_bits(_working(weight[a:b])).amax() for a, b in row_ranges(weight))
        own = finite(torch.stack([*chunks]).amax(), _working(weight[:1]).dtype)
        found.append(own.view(1))
    return torch.cat(found).amax()


def shared_scale(scheme: Scheme, amax: Tensor) -> dict[str, Tensor]:
    """The scale that a fused group has in common, by its suffix.

    NVFP4's is a divisor, 448 * 6 / amax, and 1.0 where that is not finite (amax near 0). It is
    rounded as generate_gparam rounds: a reciprocal and a product, each in the weights' dtype, F32
    if they differ.
    """
    if not scheme.shares_global_scale:
        return {"weight_scale": linear_scale(amax, _E4M3_MAX, torch.bfloat16)}
    scale = amax.reciprocal() * (_E4M3_MAX * _E2M1_MAX)
    return {GLOBAL_SCALE: scale.nan_to_num(posinf=1.0).float().reshape(1)}


def _pack_weight(scheme: Scheme, weight: Tensor, shared: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Allocate the outputs of one weight and fill them chunk by chunk."""
    outputs = {}
    for spec in scheme.weight_tensors(*weight.shape):
        outputs[spec.suffix] = weight.new_empty(spec.shape, dtype=TORCH_DTYPES[spec.dtype])
    shared = {"weight_shape": torch.tensor(weight.shape), **shared}
    for suffix in shared.keys() & outputs.keys():
        outputs[suffix].copy_(shared[suffix])
    block_rows = 1
    if scheme.block:
        block_rows = scheme.block[0]
    # Rows of the weight for each row of an output. No two chunks divide those of a block, or of a
    # word of zero points.
    rows = {
        "weight_scale": block_rows,
        "weight_zero_point": scheme.n_multiple(),
        "weight": 1,
        "weight_packed": 1,
    }
    ranges = [*row_ranges(weight, max(block_rows, scheme.n_multiple()))]
    chunk = chunk_of(scheme, weight, ranges[0][1])
    for first, last in ranges:
        own = dict(outputs)
        for suffix in rows.keys() & outputs.keys() - shared.keys():
            own[suffix] = outputs[suffix][first // rows[suffix] : -(-last // rows[suffix])]
        _KERNELS[scheme.format](replace(chunk, values=_working(weight[first:last]), out=own))
    return outputs


def chunk_of(scheme: Scheme, weight: Tensor, num_rows: int) -> Chunk:
    """Buffers for so many rows of a weight."""
    size = num_rows * weight.shape[1]
    device = weight.device
    return Chunk(
        scheme=scheme,
        values=weight,
        out={},
        scaled=torch.empty(size, dtype=torch.float32, device=device),
        spare=torch.empty(size, dtype=torch.int32, device=device),
        codes=torch.empty(2, size, dtype=torch.uint8, device=device),
    )


def _working(values: Tensor) -> Tensor:
    """A contiguous chunk in the dtype its scales are computed in: BF16 as it is, F16 widened to F32
    (exact).
    """
    if values.dtype == torch.float16:
        values = values.float()
    return values.contiguous()


# 4-bit floats


def e2m1_codes(scaled: Tensor, chunk: Chunk) -> Tensor:
    """Nearest E2M1 code of each value, ties to the even code; the sign sits in bit 3.

    E2M1 steps by 2**(k-1) in the binade [2**k, 2**(k+1)), k = 0..2, and by the same 0.5 below 1 as
    above. Adding 2**(k+22), whose unit in the last place is that step, makes the adder round to it;
    the low mantissa bits are then the count of steps, and 2 * k more is the code. No comparison is
    made: those are the slow part on a CPU. A negative value that rounds to zero keeps its sign;
    -0.0 does not.

    Args:
        scaled: F32 [elements], contiguous, below 2**100 in magnitude; overwritten.
        chunk: `spare` and `codes` are overwritten.

    Returns: codes, U8 [elements], 0..15, a view of `chunk.codes`.

    Source: compressed-tensors 0.19.0 quantization/utils/fp4_utils.py (cast_to_fp4) and
    compressors/nvfp4/helpers.py.
    """
    power = chunk.spare[: len(scaled)]
    codes, sign = chunk.codes[:, : len(scaled)]
    bits = scaled.add_(0.0).view(torch.int32)  # -0.0 + 0.0 is +0.0
    sign.copy_(torch.bitwise_right_shift(bits, 28, out=power)).bitwise_and_(8)
    magnitude = bits.bitwise_and_(0x7FFFFFFF).view(torch.float32)
    torch.clamp(magnitude, min=1.0, out=power.view(torch.float32))
    power.bitwise_and_(0x7F800000)  # 2**k
    steps = magnitude.add_(power.view(torch.float32), alpha=2**22).view(torch.int32)
    # power >> 22 is 2 * (k + 127); its low byte is 2 * k - 2.
    codes.copy_(steps.add_(power.bitwise_right_shift_(22)))
    return codes.add_(2).clamp_(max=7).bitwise_or_(sign)


def _nvfp4_kernel(chunk: Chunk) -> None:
    """E2M1 codes, one E4M3 scale per group, in units of 1 / global_scale."""
    size = chunk.group_size
    global_scale = chunk.out[GLOBAL_SCALE]
    amax = group_amax(chunk.values, size)
    local = _local_scale(amax, global_scale)
    # F32 by F32: the one place where compressed-tensors' quotient is wider than a BF16 weight.
    scaled = chunk.scaled[: chunk.values.numel()].copy_(chunk.values.view(-1))
    scaled.view(*local.shape, -1).div_((local / global_scale).unsqueeze(-1))
    chunk.out["weight_scale"].copy_(local)
    store_nibbles(e2m1_codes(scaled, chunk), chunk.out["weight_packed"])


def _local_scale(amax: Tensor, global_scale: Tensor) -> Tensor:
    """E4M3 numbers as F32: amax becomes the largest code by them. 0.125 where that rounds to 0."""
    local = global_scale * divided(amax, _E2M1_MAX)
    local = local.clamp_(max=_E4M3_MAX).to(torch.float8_e4m3fn).float()
    return torch.where(local == 0, _E4M3_EPS, local)


def _mxfp4_kernel(chunk: Chunk) -> None:
    """E2M1 codes, one power of two per group."""
    values = chunk.values
    size = chunk.group_size
    exponent = e8m0_exponents(group_amax(values, size))
    chunk.out["weight_scale"].copy_(exponent)
    quotient = values.unflatten(1, (-1, size)) / power_of_two(exponent, values.dtype).unsqueeze(-1)
    scaled = chunk.scaled[: values.numel()].copy_(quotient.view(-1))
    store_nibbles(e2m1_codes(scaled, chunk), chunk.out["weight_packed"])


def e8m0_exponents(amax: Tensor) -> Tensor:
    """Biased exponent of each group's scale, int32, 0..253.

    amax is rounded to a power of two on its bits: a quarter of the mantissa's range is added, which
    carries into the exponent from 1.75 on, and the mantissa dropped. The scale is two binades
    below, so that amax lands in [3.5, 7). From 1.75 * 2**127 on the peer's power of two is infinite
    and it writes 255, a NaN scale; this rule just goes on.

    Source: compressed-tensors 0.19.0 quantization/utils/mxfp_utils.py (round_to_power_2,
    generate_mx_scales).
    """
    mantissa_bits = MANTISSA_BITS[amax.dtype]
    bits = amax.view(BITS_DTYPE[amax.dtype]).to(torch.int32)
    exponent = (bits + (1 << (mantissa_bits - 2))) >> mantissa_bits
    return (exponent - 2).clamp_(min=0)


def power_of_two(exponent: Tensor, dtype: torch.dtype) -> Tensor:
    """2**(exponent - 127) in `dtype`, from its bits; exponent 0 is the subnormal with the top
    mantissa bit set.
    """
    mantissa_bits = MANTISSA_BITS[dtype]
    bits = (exponent << mantissa_bits).clamp_(min=1 << (mantissa_bits - 1))
    return bits.to(BITS_DTYPE[dtype]).view(dtype)


# 8-bit floats


def _float8_kernel(chunk: Chunk) -> None:
    """E4M3 values, one scale a row, a block or, already there, a weight."""
    values = chunk.values
    weight = chunk.out["weight"]
    stored = chunk.out["weight_scale"]
    if chunk.scheme.block:
        _float8_blocks(chunk, *chunk.scheme.block)
        return
    scale = stored
    if chunk.scheme.weights["strategy"] != "tensor":
        scale = linear_scale(group_amax(values, chunk.group_size), _E4M3_MAX, stored.dtype)
        stored.copy_(scale)
    _store_float8(values, scale, weight)


def _float8_blocks(chunk: Chunk, rows: int, columns: int) -> None:
    """E4M3 values, one scale a block; blocks at the lower and the right edge may be smaller.

    The scale is rounded to the weight's dtype and stored wider, so a BF16 weight has the scales of
    its peer.
    """
    values = chunk.values
    width = values.shape[1]
    # All blocks are looked at before one is stored: a GPU is waited for once.
    bits = torch.stack([part.amax(0) for part in magnitude_bits(values).split(rows)])
    bits = torch.nn.functional.pad(bits, (0, -width % columns)).unflatten(1, (-1, columns))
    scales = linear_scale(finite(bits.amax(-1), values.dtype), _E4M3_MAX, values.dtype)
    for own, scale, stored, weight in zip(
        values.split(rows),
        scales,
        chunk.out["weight_scale"],
        chunk.out["weight"].split(rows),
        strict=True,
    ):
        stored.copy_(scale)
        _store_float8(own, scale.repeat_interleave(columns)[:width], weight)


def _store_float8(values: Tensor, scale: Tensor, weight: Tensor) -> None:
    """values / scale, rounded to the dtype of the values, saturated, rounded to E4M3."""
    weight.copy_((values / scale).clamp_(-_E4M3_MAX, _E4M3_MAX))


_KERNELS: Mapping[str, Callable[[Chunk], None]] = MappingProxyType(
    {
        "nvfp4-pack-quantized": _nvfp4_kernel,
        "mxfp4-pack-quantized": _mxfp4_kernel,
        "float-quantized": _float8_kernel,
        "pack-quantized": int_pack_kernel,
        "int-quantized": int_kernel,
    }
)
