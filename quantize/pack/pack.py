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
observers/min_max.py. tests/quantize/test_pack.py runs both side by side.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import torch
from torch import Tensor

from ...checkpoints.values import TORCH_DTYPES, row_ranges
from ...recipes.errors import CheckpointError, RecipeError
from ...recipes.schemes import SEARCHES, Scheme
from .pack_integers import int_kernel, int_pack_kernel
from .pack_shared import (
    BITS_DTYPE,
    MANTISSA_BITS,
    Kernel,
    Workspace,
    divided,
    finite,
    group_amax,
    in_units_of,
    linear_scale,
    magnitude_bits,
    store_nibbles,
    swept,
    times,
)
from .search import float8_sweep, nvfp4_class, nvfp4_step, nvfp4_sweep

_E2M1_MAX = 6.0
_E2M1_OF_FOUR = 4.0
_E4M3_MAX = 448.0
# What the largest magnitude's scale is under four-over-six: 256 leaves room for one half more, 384,
# where 448 does not (modelopt 0.47.0, torch/quantization/utils/numeric_utils.py: E4M3_MAX_46; arXiv
# 2512.02010).
_LARGEST_OF_FOUR_OVER_SIX = 256.0
# Scales that round to zero become this: 2**-3, an arbitrary but agreed value (_get_dtype_eps of
# compressed-tensors).
_E4M3_EPS = 0.125


def pack(
    scheme: Scheme,
    weights: Sequence[Tensor],
    *,
    search: str = "",
    importance: Sequence[Tensor] = (),
) -> list[dict[str, Tensor]]:
    """Quantize the members of one fused group and lay them out as they go to disk.

    Args:
        scheme: a row of `recipes.schemes.SCHEMES`; only its weight counts here.
        weights: modules that are fused into one at run time, each [N_i, K], BF16, F16 or F32. A
            module on its own is a group of one. NVFP4 and static FP8 couple them: one scale, from
            the largest magnitude of the group. (vLLM 0.32.0 rounds fused static FP8 weights again,
            to the largest of their scales: fp8_utils.process_fp8_weight_tensor_strategy. Of one
            scale it changes nothing.)
        search: a key of `recipes.schemes.SEARCHES`; "" for scales from the largest magnitude alone,
            which is also what schemes without a meaning for it get.
        importance: for `imatrix`: F32 [K] for each weight, the mean square of its input channels.

    Returns: one dict per weight, suffix -> tensor, as `scheme.weight_tensors(N_i, K)` lists them,
        on the weight's device.

    Raises:
        RecipeError: K does not suit the scheme.
        CheckpointError: a weight is no float matrix, or holds NaN or Inf. The caller knows the name
            and adds it.
    """
    for weight in weights:
        _check(scheme, weight)
    word = search if search and scheme.name in SEARCHES[search] else ""
    shared = _shared_scale(scheme, weights, word) if scheme.has_tensor_scale and weights else {}
    relative: Sequence[Tensor | None] = [None] * len(weights)
    if word == "imatrix":
        relative = [
            _relative(each, weight) for each, weight in zip(importance, weights, strict=True)
        ]
    return [
        _pack_weight(scheme, weight, shared, word, own)
        for weight, own in zip(weights, relative, strict=True)
    ]


def _relative(importance: Tensor, weight: Tensor) -> Tensor:
    """Importance in units of its mean, F32 on the weight's device; all the same where every channel
    is 0.
    """
    own = importance.to(weight.device, torch.float64)
    mean = own.mean()
    return torch.where(mean > 0, own / mean, torch.ones_like(own)).float()


def _check(scheme: Scheme, weight: Tensor) -> None:
    """Refuse what no kernel below is written for."""
    if (
        weight.ndim != 2
        or not weight.numel()
        or weight.dtype not in (torch.bfloat16, torch.float16, torch.float32)
    ):
        rule = "only a BF16, F16 or F32 matrix that is not empty can be quantized"
        raise CheckpointError(
            "weight", rule, got=f"{weight.dtype} {tuple(weight.shape)}", cure="Keep this tensor"
        )
    if weight.shape[1] % scheme.k_multiple():
        rule = f"{scheme.name} needs K divisible by {scheme.k_multiple()}"
        raise RecipeError(
            "weight",
            rule,
            got=f"K={weight.shape[1]}",
            cure="Keep this tensor or choose another scheme",
        )


def _shared_scale(scheme: Scheme, weights: Sequence[Tensor], word: str) -> dict[str, Tensor]:
    """The scale that a fused group has in common, by its suffix."""
    if scheme.shares_global_scale:
        largest = _LARGEST_OF_FOUR_OVER_SIX if word == "four-over-six" else _E4M3_MAX
        return {"weight_global_scale": _global_scale(weights, largest)}
    (spec,) = (
        spec for spec in scheme.weight_tensors(*weights[0].shape) if spec.suffix == "weight_scale"
    )
    amax = torch.stack([_weight_amax(weight).float() for weight in weights]).amax()
    dtype = (
        torch.bfloat16
        if all(weight.dtype == torch.bfloat16 for weight in weights)
        else torch.float32
    )
    return {"weight_scale": linear_scale(amax.to(dtype), _E4M3_MAX, TORCH_DTYPES[spec.dtype])}


def _pack_weight(
    scheme: Scheme,
    weight: Tensor,
    shared: Mapping[str, Tensor],
    search: str,
    importance: Tensor | None,
) -> dict[str, Tensor]:
    """Allocate the outputs of one weight and fill them chunk by chunk."""
    num_rows, num_columns = weight.shape
    outputs = {
        spec.suffix: torch.empty(spec.shape, dtype=TORCH_DTYPES[spec.dtype], device=weight.device)
        for spec in scheme.weight_tensors(num_rows, num_columns)
    }
    if "weight_shape" in outputs:
        outputs["weight_shape"].copy_(torch.tensor(weight.shape))
    for suffix, scale in shared.items():
        outputs[suffix].copy_(scale)
    is_one_scale = "weight_scale" in shared
    main = "weight_packed" if "weight_packed" in outputs else "weight"
    rows_per_scale = scheme.block[0] if scheme.block else 1
    work = _workspace(scheme, weight, importance, has_search=bool(search))
    for first, last in row_ranges(weight, _rows_together(scheme)):
        rows = (
            slice(None)
            if is_one_scale
            else slice(first // rows_per_scale, -(-last // rows_per_scale))
        )
        scale = outputs["weight_scale"][rows]
        chunk = outputs | {main: outputs[main][first:last], "weight_scale": scale}
        if scheme.has_zero_point:
            per_word = scheme.n_multiple()
            chunk["weight_zero_point"] = outputs["weight_zero_point"][
                first // per_word : -(-last // per_word)
            ]
        _KERNELS[scheme.format](scheme, _working(weight[first:last]), chunk, work, search)
    return outputs


def _rows_together(scheme: Scheme) -> int:
    """Rows that no two chunks divide: those of a block, or of a word of zero points."""
    return scheme.block[0] if scheme.block else scheme.n_multiple()


def _workspace(
    scheme: Scheme, weight: Tensor, importance: Tensor | None, *, has_search: bool
) -> Workspace:
    """Buffers for the largest chunk of a weight; empty where there is no F32 stage."""
    has_codes = scheme.format in ("nvfp4-pack-quantized", "mxfp4-pack-quantized")
    elements = (
        next(last - first for first, last in row_ranges(weight, _rows_together(scheme)))
        * weight.shape[1]
    )
    return Workspace(
        scaled=torch.empty(
            elements * (has_codes or has_search), dtype=torch.float32, device=weight.device
        ),
        spare=torch.empty(elements * has_codes, dtype=torch.int32, device=weight.device),
        codes=torch.empty(2, elements * has_codes, dtype=torch.uint8, device=weight.device),
        importance=importance,
    )


def _working(values: Tensor) -> Tensor:
    """A contiguous chunk in the dtype its scales are computed in: BF16 as it is, F16 widened to F32
    (exact).
    """
    return (values.float() if values.dtype == torch.float16 else values).contiguous()


# 4-bit floats


def _e2m1_codes(scaled: Tensor, work: Workspace) -> Tensor:
    """Nearest E2M1 code of each value, ties to the even code; the sign sits in bit 3.

    E2M1 steps by 2**(k-1) in the binade [2**k, 2**(k+1)), k = 0..2, and by the same 0.5 below 1 as
    above. Adding 2**(k+22), whose unit in the last place is that step, makes the adder round to it;
    the low mantissa bits are then the count of steps, and 2 * k more is the code. No comparison is
    made: those are the slow part on a CPU. A negative value that rounds to zero keeps its sign;
    -0.0 does not.

    Args:
        scaled: F32 [elements], contiguous, below 2**100 in magnitude; overwritten.
        work: `spare` and `codes` are overwritten.

    Returns: codes, U8 [elements], 0..15, a view of `work.codes`.

    Source: compressed-tensors 0.19.0 quantization/utils/fp4_utils.py (cast_to_fp4) and
    compressors/nvfp4/helpers.py.
    """
    power = work.spare[: len(scaled)]
    codes, sign = work.codes[:, : len(scaled)]
    bits = scaled.add_(0.0).view(torch.int32)  # -0.0 + 0.0 is +0.0
    sign.copy_(torch.bitwise_right_shift(bits, 28, out=power)).bitwise_and_(8)
    magnitude = bits.bitwise_and_(0x7FFFFFFF).view(torch.float32)
    torch.clamp(magnitude, min=1.0, out=power.view(torch.float32))
    power.bitwise_and_(0x7F800000)  # 2**k
    steps = magnitude.add_(power.view(torch.float32), alpha=2**22).view(torch.int32)
    # power >> 22 is 2 * (k + 127); its low byte is 2 * k - 2.
    codes.copy_(steps.add_(power.bitwise_right_shift_(22)))
    return codes.add_(2).clamp_(max=7).bitwise_or_(sign)


def _global_scale(weights: Sequence[Tensor], largest_scale: float) -> Tensor:
    """NVFP4's divisor 448 * 6 / amax over a fused group: [1], F32, and 1.0 where that is not finite
    (amax near 0).

    `largest_scale` is the 448: the scale of the group with the largest magnitude.

    Rounded as generate_gparam rounds: a reciprocal and a product, each in the weights' dtype, F32
    if they differ.
    """
    dtype = (
        torch.bfloat16
        if all(weight.dtype == torch.bfloat16 for weight in weights)
        else torch.float32
    )
    largest = torch.stack([_weight_amax(weight).to(dtype) for weight in weights]).amax()
    scale = largest.reciprocal() * (largest_scale * _E2M1_MAX)
    return scale.nan_to_num(posinf=1.0).float().reshape(1)


def _weight_amax(weight: Tensor) -> Tensor:
    """Largest magnitude of a whole weight, 0-d."""
    chunks = [
        magnitude_bits(_working(weight[first:last])).amax() for first, last in row_ranges(weight)
    ]
    return finite(
        torch.stack(chunks).amax(),
        torch.bfloat16 if weight.dtype == torch.bfloat16 else torch.float32,
    )


def _nvfp4_kernel(
    scheme: Scheme, values: Tensor, outputs: Mapping[str, Tensor], work: Workspace, search: str
) -> None:
    """E2M1 codes, one E4M3 scale per group, in units of 1 / global_scale."""
    assert scheme.group_size
    global_scale = outputs["weight_global_scale"]
    amax = group_amax(values, scheme.group_size)
    local = _local_scale(amax, _E2M1_MAX, global_scale)
    scaled = in_units_of(values, local / global_scale, work)
    match search:
        case "four-over-six":
            wider = _local_scale(amax, _E2M1_OF_FOUR, global_scale)
            errors = [
                _nvfp4_error(in_units_of(values, each / global_scale, work), work).view(each.shape)
                * each.square()
                for each in (local, wider)
            ]
            local = torch.where(errors[1] < errors[0], wider, local)
        case "mse" | "imatrix":
            counts = work.counts(len(values), scheme.group_size)
            local = _swept_local(scaled.view(-1, scheme.group_size), local, counts)
    if search:
        scaled = in_units_of(values, local / global_scale, work)
    outputs["weight_scale"].copy_(local)
    store_nibbles(_e2m1_codes(scaled, work), outputs["weight_packed"])


def _local_scale(amax: Tensor, largest_code: float, global_scale: Tensor) -> Tensor:
    """E4M3 numbers as F32 with which amax becomes `largest_code`; 0.125 where that rounds to 0."""
    local = (
        (global_scale * divided(amax, largest_code))
        .clamp_(max=_E4M3_MAX)
        .to(torch.float8_e4m3fn)
        .float()
    )
    return torch.where(local == 0, _E4M3_EPS, local)


def _swept_local(scaled: Tensor, local: Tensor, counts: Tensor | None) -> Tensor:
    """The E4M3 number of least error near each of `local`, as F32; `scaled` [groups, 16] is
    overwritten.
    """
    code = local.to(torch.float8_e4m3fn).view(torch.uint8).flatten().long()
    step = nvfp4_step(nvfp4_sweep(local.device).best(scaled, nvfp4_class(code), counts))
    return (code + step).to(torch.uint8).view(torch.float8_e4m3fn).float().view(local.shape)


def _nvfp4_error(scaled: Tensor, work: Workspace) -> Tensor:
    """The sum of squared errors of each group of 16 in units of its scale, in an order that no
    device changes.

    Args:
        scaled: F32 [elements], overwritten.
        work: `spare` is overwritten.
    """
    power = work.spare[: len(scaled)].view(torch.float32)
    magnitude = scaled.abs_()
    torch.clamp(magnitude, min=1.0, out=power).view(torch.int32).bitwise_and_(0x7F800000)  # 2**k
    step = power.mul_(2.0**22)  # as in `_e2m1_codes`: adding it rounds
    nearest = torch.add(magnitude, step).sub_(step).clamp_(max=_E2M1_MAX)
    squares = nearest.sub_(magnitude).square_().view(-1, 16)
    while half := squares.shape[1] // 2:
        squares = squares[:, :half] + squares[:, half:]
    return squares.squeeze(1)


def _mxfp4_kernel(
    scheme: Scheme, values: Tensor, outputs: Mapping[str, Tensor], work: Workspace, _: str
) -> None:
    """E2M1 codes, one power of two per group."""
    assert scheme.group_size
    exponent = _e8m0_exponents(group_amax(values, scheme.group_size))
    outputs["weight_scale"].copy_(exponent)
    quotient = values.unflatten(1, (-1, scheme.group_size)) / _power_of_two(
        exponent, values.dtype
    ).unsqueeze(-1)
    scaled = work.scaled[: values.numel()].copy_(quotient.view(-1))
    store_nibbles(_e2m1_codes(scaled, work), outputs["weight_packed"])


def _e8m0_exponents(amax: Tensor) -> Tensor:
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


def _power_of_two(exponent: Tensor, dtype: torch.dtype) -> Tensor:
    """2**(exponent - 127) in `dtype`, from its bits; exponent 0 is the subnormal with the top
    mantissa bit set.
    """
    mantissa_bits = MANTISSA_BITS[dtype]
    bits = (exponent << mantissa_bits).clamp_(min=1 << (mantissa_bits - 1))
    return bits.to(BITS_DTYPE[dtype]).view(dtype)


# 8-bit floats


def _float8_kernel(
    scheme: Scheme, values: Tensor, outputs: Mapping[str, Tensor], work: Workspace, search: str
) -> None:
    """E4M3 values, one scale a row, a block or, already there, a weight."""
    if scheme.block:
        _float8_blocks(
            values, outputs["weight"], outputs["weight_scale"], scheme.block, work, search
        )
        return
    if scheme.weights["strategy"] == "tensor":
        _store_float8(values, outputs["weight_scale"], outputs["weight"])
        return
    num_columns = values.shape[1]
    scale = linear_scale(group_amax(values, num_columns), _E4M3_MAX, outputs["weight_scale"].dtype)
    if search:
        scale, values = swept(float8_sweep(num_columns, values.device), values, scale, work)
    outputs["weight_scale"].copy_(scale)
    _store_float8(values, scale, outputs["weight"])


def _float8_blocks(
    values: Tensor,
    weight: Tensor,
    scale: Tensor,
    block: tuple[int, int],
    work: Workspace,
    search: str,
) -> None:
    """E4M3 values, one scale a block; blocks at the lower and the right edge may be smaller.

    The scale is rounded to the weight's dtype and stored wider, so a BF16 weight has the scales of
    its peer.
    """
    rows, columns = block
    for top in range(0, values.shape[0], rows):
        own = values[top : top + rows]
        amax = magnitude_bits(own).amax(0)
        amax = (
            torch.nn.functional.pad(amax, (0, -len(amax) % columns))
            .unflatten(0, (-1, columns))
            .amax(-1)
        )
        row_scale = linear_scale(finite(amax, values.dtype), _E4M3_MAX, values.dtype)
        if search:
            own = work.scaled[: own.numel()].view(own.shape).copy_(own)
            row_scale = _swept_blocks(own, row_scale, columns, work.importance)
        scale[top // rows].copy_(row_scale)
        per_column = row_scale.repeat_interleave(columns)[: values.shape[1]]
        _store_float8(own, per_column, weight[top : top + rows])


def _swept_blocks(values: Tensor, scale: Tensor, columns: int, importance: Tensor | None) -> Tensor:
    """The scale of least error for each block of a row of blocks: [blocks], dtype of `scale`.

    Args:
        values: F32 [rows, K].
        scale: [blocks], what the largest magnitudes ask for.
        columns: of a block.
        importance: F32 [K], or None.
    """
    sweep, edge = float8_sweep(columns, values.device), (0, -values.shape[1] % columns)
    scaled = values / scale.float().repeat_interleave(columns)[: values.shape[1]]
    scaled = torch.nn.functional.pad(scaled, edge).view(-1, columns)
    counts = None
    if importance is not None:
        counts = (
            torch.nn.functional.pad(importance, edge).expand(len(values), -1).reshape(-1, columns)
        )
    errors = sweep.errors(scaled, counts=counts).view(len(values), len(scale), -1).double().sum(0)
    return times(scale, sweep.ratios[0][errors.argmin(-1)])


def _store_float8(values: Tensor, scale: Tensor, weight: Tensor) -> None:
    """values / scale, rounded to the dtype of the values, saturated, rounded to E4M3."""
    weight.copy_((values / scale).clamp_(-_E4M3_MAX, _E4M3_MAX))


_KERNELS: Mapping[str, Kernel] = MappingProxyType(
    {
        "nvfp4-pack-quantized": _nvfp4_kernel,
        "mxfp4-pack-quantized": _mxfp4_kernel,
        "float-quantized": _float8_kernel,
        "pack-quantized": int_pack_kernel,
        "int-quantized": int_kernel,
    }
)
