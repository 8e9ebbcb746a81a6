"""Every form with every leaf that may be next to it: decoded as plain numpy decodes it, or refused;
never decoded without the leaf.
"""

import re
from collections.abc import Callable, Iterator
from itertools import product
from typing import NamedTuple

import numpy as np
import pytest
import torch
from keepmtp.checkpoints import values
from keepmtp.checkpoints.dequantize import dequantize
from keepmtp.checkpoints.dialects.dialect import Resolution, VLLMModule
from keepmtp.checkpoints.safetensors_file import Entry
from keepmtp.checkpoints.stored import stored_weights
from keepmtp.recipes.errors import CheckpointError
from keepmtp.recipes.family import HFName
from keepmtp.validate.check.against import as_built
from torch import Tensor

N = 72  # rows: whole words of zero points
K = 256
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
DTYPES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int32: "I32",
    torch.int64: "I64",
}
AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)


class Stored(NamedTuple):
    """The tensors of a module by their leaves, and its weight in float64."""

    parts: dict[str, Tensor]
    weight: np.ndarray
    bits: int = 0  # where the config says them


def drawn(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def floats(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Scales that differ by far more than rounding does."""
    return torch.from_numpy(drawn(1).uniform(0.01, 1.0, shape)).to(dtype)


def exact(tensor: Tensor) -> np.ndarray:
    return tensor.double().numpy()


def words(codes: np.ndarray, bits: int, places: tuple[int, ...] | None = None) -> Tensor:
    """Codes [R, C] in int32 words [R, ceil(C * bits / 32)], the first in the low bits, or as
    `places` says of those of a word.
    """
    per_word = 32 // bits
    places = places or tuple(range(per_word))
    padded = np.zeros((len(codes), -(-codes.shape[1] // per_word) * per_word), np.uint64)
    padded[:, : codes.shape[1]] = codes
    made = np.zeros((len(codes), padded.shape[1] // per_word), np.uint64)
    for place, column in enumerate(places):
        made |= padded[:, column::per_word] << np.uint64(bits * place)
    return torch.from_numpy(made.astype(np.uint32).view(np.int32).copy())


def groups_of(order: str, count: int, columns: int = K) -> np.ndarray:
    """The group of each column."""
    natural = np.arange(columns) * count // columns
    return drawn(2).permutation(natural) if order == "permuted" else natural


def orders(leaf: str, order: str, group: np.ndarray) -> dict[str, Tensor]:
    if order == "none":
        return {}
    if order == "unset":
        group = np.full_like(group, -1)
    return {leaf: torch.from_numpy(group.astype(np.int32))}


def integers(
    bits: int, count: int, zero: str, order: str, *, columns: int = K, rows: int = N
) -> Stored:
    """compressed-tensors' pack-quantized, with so many groups of columns."""
    middle = 1 << (bits - 1)
    codes = drawn().integers(0, 2 * middle, (rows, columns))
    zeros = np.full((rows, count), middle)
    scale = floats(rows, count, dtype=torch.bfloat16)
    group = groups_of(order, count, columns)
    parts = {
        "weight_packed": words(codes, bits),
        "weight_scale": scale,
        "weight_shape": torch.tensor([rows, columns]),
        **orders("weight_g_idx", order, group),
    }
    if zero != "none":
        zeros = drawn(3).integers(0, 2 * middle, (rows, count))
        parts["weight_zero_point"] = words(zeros.T, bits).T.contiguous()
    if zero == "plain":
        parts["weight_zero_point"] = torch.from_numpy((zeros - middle).astype(np.int8))
    return Stored(parts, (codes - zeros[:, group]) * exact(scale)[:, group], bits)


def gptq(bits: int, zero: str, order: str) -> Stored:
    count = 4
    middle = 1 << (bits - 1)
    codes = drawn().integers(0, 2 * middle, (N, K))
    scale = floats(count, N, dtype=torch.float16)
    group = groups_of(order, count)
    zeros = np.full((count, N), middle)
    parts = {
        "qweight": words(codes, bits).T.contiguous(),
        "scales": scale,
        **orders("g_idx", order, group),
    }
    if zero == "others":
        zeros = drawn(3).integers(1, 2 * middle, zeros.shape)
    if zero != "none":
        parts["qzeros"] = words(zeros - (zero != "second version"), bits)
    return Stored(parts, (codes - zeros.T[:, group]) * exact(scale).T[:, group], bits)


def awq(zero: str) -> Stored:
    codes = drawn().integers(0, 16, (N, K))
    scale = floats(4, N, dtype=torch.float16)
    zeros = np.full((4, N), 8)
    parts = {"qweight": words(codes.T, 4, AWQ_COLUMNS), "scales": scale}
    if zero != "none":
        zeros = drawn(3).integers(0, 16, zeros.shape)
        parts["qzeros"] = words(zeros, 4, AWQ_COLUMNS)
    group = groups_of("natural", 4)
    return Stored(parts, (codes - zeros.T[:, group]) * exact(scale).T[:, group])


def exponents(*shape: int) -> Tensor:
    return torch.from_numpy(drawn(4).integers(110, 130, shape).astype(np.uint8))


EIGHT_BITS = {
    "rows": (N, 1),
    "rows in one dimension": (N,),
    "tensor": (1,),
    "rows with zeros": (N, 1),
}
"""What has a scale -> the shape of the scales."""
BLOCKS = {"blocks of odd sides": (130, 200, 128, 128)}  # an edge on both sides
for rows, columns in ((64, 64), (1, 128), (128, 8)):
    BLOCKS[f"blocks of {rows} x {columns}"] = (256, 512, rows, columns)
"""Rows and columns of a weight, and those that have one scale."""


def eight_bits(kind: str, of: str, dtype: torch.dtype) -> Stored:
    """FP8 or INT8."""
    num_rows, num_columns, rows, columns = BLOCKS.get(of, (N, K, 1, 1))
    codes = drawn().integers(-100, 100, (num_rows, num_columns))
    weight = torch.from_numpy(codes.astype(np.int8))
    if kind == "fp8":
        weight = torch.from_numpy(codes / 8).to(torch.float8_e4m3fn)
    shape = EIGHT_BITS.get(of, (-(-num_rows // rows), -(-num_columns // columns)))
    if dtype == torch.uint8:
        scale = exponents(*shape)
        factor = np.exp2(scale.numpy().astype(float) - 127)
    else:
        scale = floats(*shape, dtype=dtype)
        factor = exact(scale)
    if of in BLOCKS:
        factor = factor.repeat(rows, 0)[:num_rows].repeat(columns, 1)[:, :num_columns]
    parts = {"weight": weight, "weight_scale": scale}
    zeros = np.zeros((num_rows, 1))
    if of == "rows with zeros":
        zeros = drawn(3).integers(-100, 100, zeros.shape)
        parts["weight_zero_point"] = torch.from_numpy(zeros.astype(np.int8))
    return Stored(parts, (exact(weight) - zeros) * factor.reshape(factor.shape[0], -1))


def four_bits(form: str) -> Stored:
    codes = drawn().integers(0, 16, (N, K))
    packed = torch.from_numpy((codes[:, ::2] | codes[:, 1::2] << 4).astype(np.uint8))
    if form == "mxfp4":
        scale = exponents(N, K // 32)
        factor = np.exp2(scale.numpy().astype(float) - 127)
        parts = {"weight_packed": packed, "weight_scale": scale}
        return Stored(parts, E2M1[codes] * factor.repeat(32, 1))
    scale = floats(N, K // 16).mul(100).to(torch.float8_e4m3fn)
    values = E2M1[codes] * exact(scale).repeat(16, 1)
    if form == "nvfp4":
        common = {"weight_global_scale": torch.tensor([512.0])}
        return Stored({"weight_packed": packed, "weight_scale": scale, **common}, values / 512)
    common = {"weight_scale_2": torch.tensor(1 / 512)}
    return Stored({"weight": packed, "weight_scale": scale, **common}, values / 512)


def other_words() -> Stored:
    stored = four_bits("mxfp4")
    packed, scale = stored.parts.values()
    parts = {"weight": packed.view(torch.int8), "scale": scale.view(torch.float8_e8m0fnu)}
    return stored._replace(parts=parts)


SCALES = (torch.float32, torch.bfloat16, torch.float16)


def forms() -> Iterator[tuple[str, Callable[[], Stored]]]:
    """Each form by a name, with the leaves that its tools write."""
    for bits, count, zero, order in product(
        (4, 8), (1, 4), ("none", "packed", "plain"), ("none", "natural", "permuted", "unset")
    ):
        name = f"integers of {bits} bits, {count} groups, zeros {zero}, order {order}"
        yield name, lambda of=(bits, count, zero, order): integers(*of)
    yield "integers, rows that fill no word", lambda: integers(4, 4, "packed", "none", rows=37)
    yield "integers, part of a word", lambda: integers(4, 1, "packed", "none", columns=100)
    yield "integers, part of a group", lambda: integers(4, 2, "none", "none", columns=192)
    yield "integers, part of a group, order", lambda: integers(4, 2, "none", "natural", columns=192)
    zeros = ("none", "first version", "second version", "others")
    for bits, zero, order in product((4, 8), zeros, ("none", "natural", "permuted")):
        name = f"gptq of {bits} bits, zeros {zero}, order {order}"
        yield name, lambda of=(bits, zero, order): gptq(*of)
    for zero in ("none", "packed"):
        yield f"awq, zeros {zero}", lambda zero=zero: awq(zero)
    for kind, dtype, of in product(("fp8", "int8"), SCALES, (*EIGHT_BITS, *BLOCKS)):
        yield f"{kind} {of}, {dtype}", lambda of=(kind, of, dtype): eight_bits(*of)
    for of in ("rows", *BLOCKS):
        yield f"fp8 {of}, E8M0", lambda of=of: eight_bits("fp8", of, torch.uint8)
    for form in ("mxfp4", "nvfp4", "nvfp4_modelopt"):
        yield form, lambda form=form: four_bits(form)
    yield "mxfp4, in other words for its bytes", other_words


STRANGE: dict[str, Tensor] = {
    "weight_g_idx": torch.from_numpy(groups_of("permuted", 4).astype(np.int32)),
    "weight_zero_point": torch.ones(N, 1, dtype=torch.int32),
    "weight_global_scale": torch.tensor([3.0]),
    "weight_scale_2": torch.tensor(3.0),
    "weight_scale_inv": floats(N, 1),
    "scale": floats(N, 1),
    "pre_quant_scale": floats(K),
    "qzeros": torch.ones(4, N // 8, dtype=torch.int32),
    "g_idx": torch.zeros(K, dtype=torch.int32),
    "weight": torch.ones(N, K, dtype=torch.bfloat16),
    "codebook": floats(16),
}
# A form has these, but for single cases above.
OWN = {
    "integers": ("weight_g_idx", "weight_zero_point"),
    "integers,": ("weight_g_idx", "weight_zero_point"),
    "int8": ("weight_zero_point",),
    "gptq": ("qzeros", "g_idx"),
    "awq,": ("qzeros",),
}


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """Chunks of a few rows, so that small weights have many."""
    monkeypatch.setattr(values, "_CHUNK_CPU", 1024)


HARMLESS = {"bias": floats(N), "input_scale": floats(1), "k_scale": floats(1)}
FORMS = dict(forms())


def outcome(stored: Stored) -> str:
    """ "right", "wrong", or why it is refused."""
    entries = []
    for leaf, tensor in stored.parts.items():
        shape = tuple(tensor.shape)
        name = HFName(f"m.{leaf}")
        dtype = DTYPES[tensor.dtype]
        entries.append(Entry(name=name, file="f", dtype=dtype, shape=shape, start=0, num_bytes=8))
    (weight,) = stored_weights(entries)[0].values()
    built = VLLMModule(weight.form, frozenset(stored.parts), bits=stored.bits)
    weight = as_built(weight, Resolution(built))
    if weight.form == "unknown":
        return "no form"
    parts = {leaf: stored.parts[leaf] for leaf in weight.parts}
    try:
        found = dequantize(weight.form, parts, shape=weight.shape, block=weight.block)
    except CheckpointError as error:
        assert str(error).count("; got ") == 1
        return str(error)
    if found.shape != stored.weight.shape:
        return "wrong"
    if weight.form.startswith("nvfp4"):  # two roundings in F32 before the one to BF16
        close = np.isclose(exact(found), stored.weight, rtol=2**-8 * (1 + 2**-12), atol=0)
        return "right" if close.all() else "wrong"
    expected = torch.from_numpy(stored.weight).float().bfloat16()
    return "right" if torch.equal(found, expected) else "wrong"


REFUSALS = {
    r"integers, part of a word": "must have the width 104",
    r"integers, part of a group": "a power of two",
    r"gptq .* zeros others.*": "symmetric integers",
    r"int8 (blocks|tensor).*": "no form",
    r"fp8 rows with zeros.*": "no form",
}


def refusal(name: str) -> str:
    """Why a form is refused; "" where it is not."""
    return next((why for words, why in REFUSALS.items() if re.fullmatch(words, name)), "")


@pytest.mark.parametrize("name", FORMS)
def test_a_form_is_decoded_by_all_its_tensors(name):
    found = outcome(FORMS[name]())
    if refusal(name):
        assert refusal(name) in found
    else:
        assert found == "right"


@pytest.mark.parametrize("leaf", STRANGE)
def test_a_tensor_that_a_form_has_no_use_for_is_refused(leaf):
    for name, build in FORMS.items():
        stored = build()
        if leaf in {*stored.parts, *OWN.get(name.partition(" ")[0], ())}:
            continue
        found = outcome(stored._replace(parts={**stored.parts, leaf: STRANGE[leaf]}))
        assert found not in ("right", "wrong"), name


@pytest.mark.parametrize("leaf", HARMLESS)
def test_a_tensor_that_is_not_of_the_weight_changes_nothing(leaf):
    for name in filter(lambda name: not refusal(name), FORMS):
        stored = FORMS[name]()
        parts = {**stored.parts, leaf: HARMLESS[leaf]}
        assert outcome(stored._replace(parts=parts)) == "right", name
