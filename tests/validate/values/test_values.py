"""The value check: silent on good checkpoints of every dialect, and each broken value named by its
tensor.
"""

import math
import random
from pathlib import Path

import pytest
import torch
from broken import GOOD
from checkpoint_files import write
from good import cached, outputs_of
from keepmtp.recipes.errors import CheckpointError
from keepmtp.validate.check.reading import chosen, joined, summary
from keepmtp.validate.check.values import check_values
from written_values import fill, opened, poke

MODELS = Path(__file__).parents[3] / "models"
NVFP4, MODELOPT, BLOCKS = "glm nvfp4", "glm modelopt", "v3 block"


@pytest.mark.parametrize(
    ("value", "rule"), [(math.nan, "finite"), (0.0, "scale-sign"), (-0.5, "scale-sign")]
)
@pytest.mark.parametrize(
    "name", ["model.layers.1.self_attn.k_scale", "model.layers.3.self_attn.attn.v_scale"]
)
def test_a_scale_of_the_cache_that_is_no_positive_number(name, value, rule, tmp_path):
    folder = write(tmp_path / "checkpoint", outputs_of(cached("glm-4.7")))
    fill(folder)
    assert check_values(opened(folder), "all").findings == ()
    poke(folder, name, value)
    (finding,) = check_values(opened(folder), "all").findings
    assert (finding.rule, finding.severity, finding.where) == (rule, "error", name)


@pytest.mark.few(20)
@pytest.mark.parametrize("name", GOOD)
def test_good_values_pass_without_a_word(name, tmp_path):
    folder = write(tmp_path / "checkpoint", GOOD[name]())
    runtime = fill(folder)
    assert check_values(runtime, "all").findings == ()


MTP, K = "model.layers.3", "model.layers.1.self_attn.k_proj"
DOWN = "model.layers.2.mlp.experts.1.down_proj"
GATE, UP = "model.layers.2.mlp.experts.1.gate_proj", "model.layers.2.mlp.experts.1.up_proj"

# base, the tensor, its new value, the rule, words of the sentence
BROKEN = {
    "vllm#45212, input scale inf": (
        NVFP4,
        f"{DOWN}.input_global_scale",
        math.inf,
        "finite",
        "1 of 1",
    ),
    "global scale 0": (NVFP4, f"{DOWN}.weight_global_scale", 0.0, "scale-sign", "is 0"),
    "vllm#45320, input scale 0": (MODELOPT, f"{DOWN}.input_scale", 0.0, "scale-sign", "divides"),
    "block scales below 0": (NVFP4, f"{DOWN}.weight_scale", -1.0, "scale-sign", "below 0"),
    "vllm#54150, gate and up": (
        MODELOPT,
        f"{UP}.weight_scale_2",
        8e-4,
        "fused-scales",
        "times what they should be",
    ),
    "q, k and v": (
        NVFP4,
        f"{K}.weight_global_scale",
        700.0,
        "fused-scales",
        "times what they should be",
    ),
    "a multiplier written as a divisor": (
        MODELOPT,
        f"{DOWN}.weight_scale_2",
        9e3,
        "scale-magnitude",
        "reciprocal",
    ),
    "a divisor written as a multiplier": (
        NVFP4,
        f"{DOWN}.weight_global_scale",
        1e-4,
        "scale-magnitude",
        "reciprocal",
    ),
    "FP8 blocks, reciprocal": (
        BLOCKS,
        f"{DOWN}.weight_scale",
        4000.0,
        "scale-magnitude",
        "reciprocal",
    ),
    "a matrix of zeros in the MTP block": (
        NVFP4,
        f"{MTP}.eh_proj.weight",
        0.0,
        "empty-weight",
        "nothing is accepted",
    ),
    "a norm of zeros in the MTP block": (NVFP4, f"{MTP}.enorm.weight", 0.0, "norm", "hidden state"),
    "a huge norm in the MTP block": (NVFP4, f"{MTP}.hnorm.weight", 1e30, "norm", "huge"),
}


# base, the scale that differs from its partners', and the partners as the message has them
FUSED = {
    "q_a and kv_a of DeepSeek-V3": (
        "v3 nvfp4",
        "kv_a_proj_with_mqa.weight_global_scale",
        "kv_a_proj_with_mqa, q_a_proj",
    ),
    "q_a and kv_a, modelopt": (
        "v3 modelopt",
        "kv_a_proj_with_mqa.weight_scale_2",
        "kv_a_proj_with_mqa, q_a_proj",
    ),
    "wq_a and wkv of DeepSeek-V4": ("dsv4 bf16", "attn.wkv.weight_global_scale", "wkv, wq_a"),
    "w1 and w3 of DeepSeek-V4": ("dsv4 bf16", "experts.1.w3.weight_global_scale", "w1, w3"),
    "w1 and w3, modelopt": ("dsv4 nvfp4 experts", "experts.1.w3.weight_scale_2", "w1, w3"),
    "a shared expert": (
        "v3 nvfp4",
        "shared_experts.up_proj.weight_global_scale",
        "gate_proj, up_proj",
    ),
}


@pytest.mark.parametrize("name", FUSED)
def test_scales_of_fused_partners_that_disagree_are_named(name, tmp_path):
    base, ending, partners = FUSED[name]
    folder = write(tmp_path / "checkpoint", GOOD[base]())
    runtime = fill(folder)
    scale = next(each for each in runtime.source.entries if each.endswith(ending))
    poke(folder, scale, 9e-4 if ending.endswith("scale_2") else 700.0)
    (finding,) = check_values(opened(folder), "scalars").findings
    assert (finding.rule, finding.severity) == ("fused-scales", "error")
    assert finding.where.rpartition(".")[2] == scale.rpartition(".")[2]
    assert finding.where.startswith(scale.rpartition(".")[0].rpartition(".")[0])
    assert f"{partners} are one fused module" in finding.says, finding.says


# Complaints about published checkpoints: what was in the files, and what is said of it.
@pytest.mark.parametrize(
    ("base", "ending", "value", "rule"),
    [
        # vllm#45320: the input scale is zero in experts that no sample reached, and vLLM divides by
        # it.
        (MODELOPT, "gate_proj.input_scale", 0.0, "scale-sign"),
        # compressed-tensors#595: some of thousands are infinite.
        (NVFP4, "down_proj.input_global_scale", math.inf, "finite"),
    ],
)
def test_input_scales_of_some_experts_are_one_finding(base, ending, value, rule, tmp_path):
    folder = write(tmp_path / "checkpoint", GOOD[base]())
    scales = [name for name in fill(folder).source.entries if name.endswith(ending)][:5]
    for name in scales:
        poke(folder, name, value)
    findings = [
        each for each in check_values(opened(folder), "scalars").findings if each.rule == rule
    ]
    assert [(each.count, each.where) for each in findings] == [(5, scales[0])]
    assert "reach this module" in findings[0].cure


@pytest.mark.parametrize("name", [f"{DOWN}.weight_scale", f"{MTP}.eh_proj.weight"])
def test_vllm_53537_a_part_of_a_shard_that_was_garbled_is_found(name, tmp_path):
    """Names and sizes stay right. Chance bytes are NaN now and then in any float; packed 4-bit
    codes never are.
    """
    folder = write(tmp_path / "checkpoint", GOOD[NVFP4]())
    entry = fill(folder).source.entries[name]
    with open(folder / entry.file, "r+b") as file:
        file.seek(entry.start)
        file.write(random.Random(0).randbytes(min(entry.num_bytes, 4096)))
    findings = check_values(opened(folder), "scales").findings
    assert ("finite", name) in {(finding.rule, finding.where) for finding in findings}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_value_is_named(name, tmp_path):
    base, tensor, value, rule, says = BROKEN[name]
    folder = write(tmp_path / "checkpoint", GOOD[base]())
    fill(folder)
    poke(folder, tensor, value)
    (finding,) = check_values(opened(folder), "scales").findings
    where = f"{DOWN}.weight_scale" if rule == "scale-magnitude" else tensor
    assert (finding.rule, finding.where, finding.severity) == (rule, where, "error")
    assert says in finding.says
    assert finding.origin == "values"
    assert finding.cure


def test_minimax_m2_47_norms_as_they_were_made_are_warned_about(tmp_path):
    """The block was published, but not with what was trained."""
    folder = write(tmp_path / "checkpoint", GOOD[NVFP4]())
    for name in fill(folder).source.entries:
        if name.startswith(MTP) and "norm" in name:
            poke(folder, name, 1.0)
    (finding,) = check_values(opened(folder), "scales").findings
    assert (finding.rule, finding.severity) == ("mtp-untrained", "warning")
    assert "all 7 norms of this MTP layer hold 1 only" in finding.says


def test_constant_scales_are_warned_about(tmp_path):
    folder = write(tmp_path / "checkpoint", GOOD[NVFP4]())
    runtime = fill(folder)
    poke(folder, f"{DOWN}.weight_scale", 1.0)
    for entry in runtime.source.entries.values():
        if entry.name.endswith("input_global_scale"):
            poke(folder, entry.name, 1.0)
    found = {
        (finding.rule, finding.severity)
        for finding in check_values(opened(folder), "scales").findings
    }
    assert found == {("scale-constant", "warning"), ("input-scale-constant", "warning")}


def test_input_scales_of_fused_modules_that_differ_are_warned_about(tmp_path):
    folder = write(tmp_path / "checkpoint", GOOD[NVFP4]())
    fill(folder)
    poke(folder, f"{UP}.input_global_scale", 3.0)
    (finding,) = check_values(opened(folder), "scalars").findings
    assert (finding.rule, finding.severity, finding.where) == (
        "fused-scales",
        "warning",
        f"{UP}.input_global_scale",
    )


@pytest.mark.parametrize(
    ("value", "rule"), [(math.nan, "finite"), (0.0, "scale-sign"), (-0.01, None)]
)
def test_scales_of_gptq_and_awq_are_read_and_may_be_negative(value, rule, tmp_path):
    checkpoint = GOOD["released glm-4.7"]()
    module = "model.layers.1.self_attn.o_proj"
    _, (rows, columns) = checkpoint.tensors.pop(f"{module}.weight")
    checkpoint.tensors[f"{module}.qweight"] = ("I32", (columns // 8, rows))
    checkpoint.tensors[f"{module}.scales"] = ("F16", (2, rows))
    folder = write(tmp_path / "checkpoint", checkpoint)
    fill(folder)
    poke(folder, f"{module}.scales", value, at=0 if value else slice(None))
    findings = check_values(opened(folder), "scales").findings
    assert [(each.rule, each.where) for each in findings] == (
        [(rule, f"{module}.scales")] if rule else []
    )


@pytest.mark.parametrize(
    ("dtype", "suffix", "rule"), [("I32", "_packed", None), ("I8", "", "scale-sign")]
)
def test_scales_of_integers_may_be_negative_where_activations_are_not_rounded(
    dtype, suffix, rule, tmp_path
):
    """AutoRound gives about half of its scales a sign; with rounded activations a kernel reads it
    as a number.
    """
    checkpoint = GOOD["released glm-4.7"]()
    module = "model.layers.1.self_attn.o_proj"
    _, (rows, columns) = checkpoint.tensors.pop(f"{module}.weight")
    checkpoint.tensors[f"{module}.weight{suffix}"] = (
        dtype,
        (rows, columns // (8 if suffix else 1)),
    )
    checkpoint.tensors[f"{module}.weight_scale"] = ("BF16", (rows, 2 if suffix else 1))
    if suffix:
        checkpoint.tensors[f"{module}.weight_shape"] = ("I64", (2,))
    folder = write(tmp_path / "checkpoint", checkpoint)
    fill(folder)
    poke(folder, f"{module}.weight_scale", -0.01, at=0)
    findings = check_values(opened(folder), "scales").findings
    assert [(each.rule, each.where) for each in findings] == (
        [(rule, f"{module}.weight_scale")] if rule else []
    )


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
    assert (finding.rule, finding.severity, finding.where) == (
        "empty-weight",
        "error",
        f"{DOWN}.weight_packed",
    )
    assert "those of other values" in finding.says
    poke(folder, f"{DOWN}.weight_scale", 1.0)  # as a release's own matrix of zeros is packed
    of_zeros = [
        each for each in check_values(opened(folder), "all").findings if each.rule == "empty-weight"
    ]
    assert [(each.severity, each.where) for each in of_zeros] == [
        ("warning", f"{DOWN}.weight_packed")
    ]


def test_a_level_reads_what_it_says(tmp_path):
    folder = write(tmp_path / "checkpoint", GOOD[NVFP4]())
    runtime = fill(folder)
    scalars, scales, everything = (chosen(runtime, level) for level in ("scalars", "scales", "all"))
    assert {entry.num_bytes for entry in scalars} == {4}
    assert (
        {entry.name for entry in scalars}
        < {entry.name for entry in scales}
        < {entry.name for entry in everything}
    )
    assert len(everything) == len(runtime.source.entries)
    read = check_values(runtime, "all")
    assert read.num_bytes == sum(entry.num_bytes for entry in runtime.source.entries.values())


def test_neighbours_are_read_together_and_in_order(tmp_path):
    runtime = fill(write(tmp_path / "checkpoint", GOOD[NVFP4]()))
    entries = chosen(runtime, "all")
    runs = joined(runtime.source, entries)
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
