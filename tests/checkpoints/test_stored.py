"""How a weight is stored is read from its tensors' names, dtypes and shapes alone."""

import pytest
from keepmtp.checkpoints.dialects.given import Fp8Given, read_given
from keepmtp.checkpoints.safetensors_file import Entry
from keepmtp.checkpoints.stored import stored_weights
from keepmtp.recipes.errors import CheckpointError
from keepmtp.recipes.family import HFName

N = 256
K = 512
GROUPS = 4


def weight_of(**shapes: tuple[int, ...]):
    """A module `m` of tensors in these shapes, as it is found."""
    entries = []
    for leaf, shape in shapes.items():
        name = HFName(f"m.{leaf}")
        entries.append(Entry(name=name, file="x", dtype="I32", shape=shape, start=0, num_bytes=0))
    weights, others = stored_weights(entries)
    assert others == []
    return weights[HFName("m")]


def test_transposed_weights_have_the_shape_of_the_matrix():
    """[N, K], whichever way the tool has packed: vLLM 0.32.0, auto_gptq.py and auto_awq.py."""
    scales = (GROUPS, N)
    zeros = (GROUPS, N // 8)
    awq = weight_of(qweight=(K, N // 8), scales=scales, qzeros=zeros)
    gptq = weight_of(qweight=(K // 8, N), scales=scales, qzeros=zeros)
    eight_bits = weight_of(qweight=(K // 4, N), scales=scales, qzeros=(GROUPS, N // 4))
    assert (awq.form, awq.shape) == ("awq", (N, K))
    assert (gptq.form, gptq.shape) == ("gptq", (N, K))
    assert (eight_bits.form, eight_bits.shape) == ("gptq", (N, K))


def test_a_weight_without_scales_is_of_no_form():
    assert weight_of(qweight=(K, N // 8)).form == "unknown"
    assert weight_of(qweight=(0, N), scales=(GROUPS, N)).form == "unknown"


def test_a_block_that_no_scale_shows_is_refused():
    with pytest.raises(CheckpointError, match="weight_block_size"):
        read_given(Fp8Given, {"weight_block_size": [200, 200]})
