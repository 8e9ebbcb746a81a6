"""The value check: silent on good checkpoints of every dialect, and each broken value named by its
tensor.
"""

import math
import random

import pytest
import torch
from checkpoint_files import write
from good_checkpoints import GOOD
from keepmtp.recipes.errors import CheckpointError
from keepmtp.validate.check.reading import chosen, joined, summary
from keepmtp.validate.check.values import check_values
from written_values import fill, opened, overwrite

NVFP4 = "glm nvfp4"


@pytest.fixture
def folder(tmp_path):
    return write(tmp_path / "checkpoint", GOOD[NVFP4]())


@pytest.mark.few(20, 40)
@pytest.mark.parametrize("name", GOOD)
def test_good_values_pass_without_a_word(name, tmp_path):
    assert check_values(fill(write(tmp_path / "checkpoint", GOOD[name]())), "all") == ()


@pytest.mark.parametrize(
    "name", ["model.layers.2.mlp.experts.1.down_proj.weight_scale", "model.layers.3.eh_proj.weight"]
)
def test_vllm_53537_a_part_of_a_shard_that_was_garbled_is_found(name, folder):
    """Names and sizes stay right. Chance bytes are NaN now and then in any float; packed 4-bit
    codes never are.
    """
    entry = fill(folder).source.entries[name]
    overwrite(folder, entry, random.Random(0).randbytes(min(entry.num_bytes, 4096)))
    findings = check_values(opened(folder), "scales")
    assert ("finite", name) in {(finding.rule, finding.where) for finding in findings}


def test_a_level_reads_what_it_says(folder):
    runtime = fill(folder)
    levels = ("norms", "scalars", "scales", "all")
    norms, scalars, scales, everything = (chosen(runtime, level) for level in levels)
    assert {runtime.view.is_mtp(entry.name) for entry in norms} == {True}
    assert {len(entry.shape) for entry in norms} == {1}
    assert {entry.num_bytes for entry in scalars if entry not in norms} == {4}
    assert set(norms) < set(scalars) < set(scales) < set(everything)
    assert len(everything) == len(runtime.source.entries)


def test_neighbours_are_read_together_and_in_order(folder):
    runtime = fill(folder)
    entries = chosen(runtime, "all")
    runs = joined(runtime.source, entries)
    assert [entry for run in runs for entry in run.entries] == entries
    assert len(runs) < len(entries) / 10
    assert all(run.num_bytes <= 32 * 2**20 or len(run.entries) == 1 for run in runs)


def test_a_file_that_got_shorter_is_refused(folder):
    runtime = fill(folder)
    file = max(folder.glob("*.safetensors"))
    with open(file, "r+b") as shard:
        shard.truncate(file.stat().st_size - 100)
    with pytest.raises(CheckpointError, match="must be whole; got end of file"):
        check_values(runtime, "all")


@pytest.mark.parametrize(
    "dtype, torch_dtype",
    [
        ("F32", "float32"),
        ("BF16", "bfloat16"),
        ("F16", "float16"),
        ("F8_E4M3", "float8_e4m3fn"),
        ("F8_E5M2", "float8_e5m2"),
    ],
)
def test_a_summary_is_what_the_values_say(dtype, torch_dtype):
    """Against plain arithmetic on the values, with infinities and NaN where the dtype has them."""
    torch_dtype = getattr(torch, torch_dtype)
    values = (torch.randn(3_000_000, generator=torch.Generator().manual_seed(1)) * 5).to(
        torch_dtype
    )
    bad = [2_100_000, 2_100_007, 2_999_999]
    values[bad] = math.nan
    found = summary(values.view(torch.uint8).split(2**20), dtype, is_scale=True)
    real = values.float()
    finite = real[torch.isfinite(real)].abs()
    assert found.num_not_finite == int((~torch.isfinite(real)).sum()) == 3
    assert found.first_not_finite == bad[0]
    assert found.largest == finite.max().item()
    assert (found.has_negative, found.is_zero, found.is_constant) == (True, False, False)
    zeros = summary([torch.zeros(64, dtype=torch_dtype).view(torch.uint8)], dtype, is_scale=True)
    assert (zeros.is_zero, zeros.is_constant, zeros.has_negative) == (True, True, False)


def test_a_summary_of_exponents():
    raw = torch.tensor([120, 127, 255, 100], dtype=torch.uint8)
    found = summary([raw], "U8", is_scale=True)
    assert (found.num_not_finite, found.first_not_finite) == (1, 2)
    assert (found.largest, found.is_zero) == (1.0, False)
