"""The value check: silent on good checkpoints of every dialect, and each broken value named by its tensor."""

import math

import pytest
import torch
from broken import GOOD
from checkpoint_files import write
from keepmtp.recipes.errors import CheckpointError
from keepmtp.validate.values.reading import chosen, joined
from keepmtp.validate.values.summary import summary
from keepmtp.validate.values.values import check_values
from written_values import fill, opened, poke

NVFP4, MODELOPT, BLOCKS = "glm nvfp4", "glm modelopt", "v3 block"


@pytest.mark.parametrize("name", GOOD)
def test_good_values_pass_without_a_word(name, tmp_path):
    folder = write(tmp_path / "checkpoint", GOOD[name]())
    runtime = fill(folder)
    assert check_values(runtime, "all").findings == ()


MTP, K = "model.layers.3", "model.layers.1.self_attn.k_proj"
DOWN = "model.layers.2.mlp.experts.1.down_proj"
GATE, UP = "model.layers.2.mlp.experts.1.gate_proj", "model.layers.2.mlp.experts.1.up_proj"

# base, what is broken, the rule, the tensor that is named, and words of the sentence
BROKEN = {
    "vllm#45212, input scale inf": (
        NVFP4,
        lambda at: poke(at, f"{DOWN}.input_global_scale", math.inf),
        "finite",
        f"{DOWN}.input_global_scale",
        "1 of 1",
    ),
    "NaN in block scales": (
        NVFP4,
        lambda at: poke(at, f"{DOWN}.weight_scale", math.nan, at=5),
        "finite",
        f"{DOWN}.weight_scale",
        "[0, 5]",
    ),
    "global scale 0": (
        NVFP4,
        lambda at: poke(at, f"{DOWN}.weight_global_scale", 0.0),
        "scale-sign",
        f"{DOWN}.weight_global_scale",
        "is 0",
    ),
    "vllm#45320, input scale 0 of a modelopt expert": (
        MODELOPT,
        lambda at: poke(at, f"{DOWN}.input_scale", 0.0),
        "scale-sign",
        f"{DOWN}.input_scale",
        "divides",
    ),
    "block scale below 0": (
        NVFP4,
        lambda at: poke(at, f"{DOWN}.weight_scale", -1.0, at=0),
        "scale-sign",
        f"{DOWN}.weight_scale",
        "below 0",
    ),
    "vllm#54150, gate and up differ": (
        MODELOPT,
        lambda at: poke(at, f"{UP}.weight_scale_2", 8e-4),
        "fused-scales",
        f"{UP}.weight_scale_2",
        "times what they should be",
    ),
    "q, k and v differ": (
        NVFP4,
        lambda at: poke(at, f"{K}.weight_global_scale", 700.0),
        "fused-scales",
        f"{K}.weight_global_scale",
        "times what they should be",
    ),
    "a multiplier written as a divisor": (
        MODELOPT,
        lambda at: poke(at, f"{DOWN}.weight_scale_2", 9e3),
        "scale-magnitude",
        f"{DOWN}.weight_scale",
        "reciprocal",
    ),
    "a divisor written as a multiplier": (
        NVFP4,
        lambda at: poke(at, f"{DOWN}.weight_global_scale", 1e-4),
        "scale-magnitude",
        f"{DOWN}.weight_scale",
        "reciprocal",
    ),
    "FP8 blocks, reciprocal": (
        BLOCKS,
        lambda at: poke(at, f"{DOWN}.weight_scale", 4000.0),
        "scale-magnitude",
        f"{DOWN}.weight_scale",
        "reciprocal",
    ),
    "a matrix of zeros in the MTP block": (
        NVFP4,
        lambda folder: poke(folder, f"{MTP}.eh_proj.weight", 0.0),
        "empty-weight",
        f"{MTP}.eh_proj.weight",
        "nearly nothing is accepted",
    ),
    "a norm of zeros in the MTP block": (
        NVFP4,
        lambda folder: poke(folder, f"{MTP}.enorm.weight", 0.0),
        "norm",
        f"{MTP}.enorm.weight",
        "hidden state",
    ),
    "a huge norm in the MTP block": (
        NVFP4,
        lambda folder: poke(folder, f"{MTP}.hnorm.weight", 1e30),
        "norm",
        f"{MTP}.hnorm.weight",
        "huge",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_value_is_named(name, tmp_path):
    base, breaks, rule, where, says = BROKEN[name]
    folder = write(tmp_path / "checkpoint", GOOD[base]())
    fill(folder)
    breaks(folder)
    (finding,) = check_values(opened(folder), "scales").findings
    assert (finding.rule, finding.where, finding.severity) == (rule, where, "error")
    assert says in finding.says
    assert finding.origin == "values"
    assert finding.cure


def test_constant_scales_are_warned_about(tmp_path):
    folder = write(tmp_path / "checkpoint", GOOD[NVFP4]())
    runtime = fill(folder)
    poke(folder, f"{DOWN}.weight_scale", 1.0)
    for entry in runtime.source.entries.values():
        if entry.name.endswith("input_global_scale"):
            poke(folder, entry.name, 1.0)
    found = {(finding.rule, finding.severity) for finding in check_values(opened(folder), "scales").findings}
    assert found == {("scale-constant", "warning"), ("input-scale-constant", "warning")}


def test_input_scales_of_fused_modules_that_differ_are_warned_about(tmp_path):
    folder = write(tmp_path / "checkpoint", GOOD[NVFP4]())
    fill(folder)
    poke(folder, f"{UP}.input_global_scale", 3.0)
    (finding,) = check_values(opened(folder), "scalars").findings
    assert (finding.rule, finding.severity, finding.where) == ("fused-scales", "warning", f"{UP}.input_global_scale")


def test_a_norm_of_zeros_is_right_where_the_model_adds_one(tmp_path):
    folder = write(tmp_path / "checkpoint", GOOD["next nvfp4"]())
    fill(folder)
    poke(folder, "mtp.norm.weight", 0.0)
    assert check_values(opened(folder), "scales").findings == ()


def test_a_packed_weight_of_zeros_is_found_where_every_byte_is_read(tmp_path):
    folder = write(tmp_path / "checkpoint", GOOD[NVFP4]())
    fill(folder)
    poke(folder, f"{DOWN}.weight_packed", 0x80)
    assert check_values(opened(folder), "scales").findings == ()
    (finding,) = check_values(opened(folder), "all").findings
    assert (finding.rule, finding.severity, finding.where) == ("empty-weight", "warning", f"{DOWN}.weight_packed")


def test_a_level_reads_what_it_says(tmp_path):
    folder = write(tmp_path / "checkpoint", GOOD[NVFP4]())
    runtime = fill(folder)
    scalars, scales, everything = (chosen(runtime, level) for level in ("scalars", "scales", "all"))
    assert {entry.num_bytes for entry in scalars} == {4}
    assert {entry.name for entry in scalars} < {entry.name for entry in scales} < {entry.name for entry in everything}
    assert len(everything) == len(runtime.source.entries)
    read = check_values(runtime, "all")
    assert read.num_bytes == sum(entry.num_bytes for entry in runtime.source.entries.values())


def test_neighbours_are_read_together_and_in_order(tmp_path):
    runtime = fill(write(tmp_path / "checkpoint", GOOD[NVFP4]()))
    entries = chosen(runtime, "all")
    runs = list(joined(entries))
    assert [entry for run in runs for entry in run.entries] == entries
    assert len(runs) < len(entries) / 10
    assert all(run.num_bytes <= 32 * 2**20 or len(run.entries) == 1 for run in runs)


def test_a_file_that_got_shorter_is_refused(tmp_path):
    folder = write(tmp_path / "checkpoint", GOOD[NVFP4]())
    runtime = fill(folder)
    file = max(folder.glob("*.safetensors"))
    with open(file, "r+b") as shard:
        shard.truncate(file.stat().st_size - 100)
    with pytest.raises(CheckpointError, match="must be whole; got end of file"):
        check_values(runtime, "all")


@pytest.mark.parametrize(
    ("dtype", "torch_dtype"),
    [
        ("F32", torch.float32),
        ("BF16", torch.bfloat16),
        ("F16", torch.float16),
        ("F8_E4M3", torch.float8_e4m3fn),
        ("F8_E5M2", torch.float8_e5m2),
    ],
)
def test_a_summary_is_what_the_values_say(dtype, torch_dtype):
    """Against plain arithmetic on the values, with infinities and NaN where the dtype has them."""
    values = (torch.randn(3_000_000, generator=torch.Generator().manual_seed(1)) * 5).to(torch_dtype)
    bad = [2_100_000, 2_100_007, 2_999_999]
    values[bad] = math.nan
    found = summary(values.view(torch.uint8), dtype, is_scale=True)
    real = values.float()
    finite = real[torch.isfinite(real)].abs()
    assert found.num_not_finite == int((~torch.isfinite(real)).sum()) == 3
    assert found.first_not_finite == bad[0]
    assert (found.smallest, found.largest) == (finite.min().item(), finite.max().item())
    assert (found.has_negative, found.is_zero, found.is_constant) == (True, False, False)
    zeros = summary(torch.zeros(64, dtype=torch_dtype).view(torch.uint8), dtype, is_scale=True)
    assert (zeros.is_zero, zeros.is_constant, zeros.has_negative) == (True, True, False)


def test_a_summary_of_exponents():
    raw = torch.tensor([120, 127, 255, 100], dtype=torch.uint8)
    found = summary(raw, "U8", is_scale=True)
    assert (found.num_not_finite, found.first_not_finite) == (1, 2)
    assert (found.smallest, found.largest, found.is_zero) == (2.0**-27, 1.0, False)
