"""What calibration hands to the writer: files that are whole, values that fit the plan, and nothing
else.
"""

import os

import pytest
import torch
from calibrated import made_up, planned, saved
from keepmtp.checkpoints.source import open_source
from keepmtp.quantize.pack.pack import pack
from keepmtp.quantize.plan.plan import make_plan
from keepmtp.quantize.run.statistics import (
    Statistics,
    read_metadata,
    refuse_statistics,
    write_statistics,
)
from keepmtp.recipes.errors import CheckpointError, RecipeError
from keepmtp.recipes.family import HFName
from keepmtp.recipes.find import find_recipe
from keepmtp.recipes.schemes import SCHEMES
from releases import source_layout, write_checkpoint
from safetensors import SafetensorError


def test_what_was_written_is_read(tmp_path):
    shared = torch.tensor([2.0])
    tensors = {
        HFName("b.weight"): torch.arange(12, dtype=torch.int32).reshape(3, 4).t(),
        HFName("b.input_scale"): shared,
        HFName("a.scale"): torch.ones(2, 2).to(torch.float8_e4m3fn),
        HFName("c.input_scale"): shared,
    }
    write_statistics(
        tmp_path / "s" / "layer-0.safetensors", tensors, {"fingerprint": "abc", "tokens": "7"}
    )
    statistics = Statistics.open(tmp_path / "s", fingerprint="abc")
    assert set(statistics) == set(tensors) and "b.weight" in statistics and "d" not in statistics
    for name, value in tensors.items():
        read = statistics.read(name)
        assert read.dtype == value.dtype and torch.equal(read.float(), value.float())
    assert read_metadata(tmp_path / "s" / "layer-0.safetensors") == {
        "fingerprint": "abc",
        "tokens": "7",
    }
    assert [path.name for path in (tmp_path / "s").iterdir()] == ["layer-0.safetensors"]


@pytest.mark.parametrize("keep", [0, 7, 60, -1])
def test_a_damaged_file_is_named(keep, tmp_path):
    path = tmp_path / "layer-0.safetensors"
    write_statistics(path, {HFName("a.input_scale"): torch.ones(64)}, {"fingerprint": "f"})
    os.truncate(path, keep if keep >= 0 else path.stat().st_size + keep)
    for read in (lambda: Statistics.open(tmp_path), lambda: read_metadata(path)):
        with pytest.raises(CheckpointError) as caught:
            read()
        assert str(caught.value).startswith(f"{path}: must ")
        cure = f"Remove {tmp_path.parent}, and run the same command again: calibration starts anew."
        assert str(caught.value).endswith(cure)


def test_a_file_cut_while_it_is_read(tmp_path):
    statistics = saved(tmp_path, {HFName("model.layers.0.a.input_scale"): torch.ones(64)})
    path = tmp_path / "model.layers.0.safetensors"
    os.truncate(path, path.stat().st_size - 1)
    with pytest.raises(
        CheckpointError,
        match=r"layers\.0\.safetensors: .*input_scale must be whole; got end of file",
    ):
        statistics.read(HFName("model.layers.0.a.input_scale"))


def test_a_bit_that_flips_is_found_when_it_is_read(tmp_path):
    names = [HFName("model.layers.0.a.input_scale"), HFName("model.layers.0.b.input_scale")]
    statistics = saved(tmp_path, {name: torch.ones(64) for name in names})
    path = tmp_path / statistics.entries[names[1]].file
    raw = bytearray(path.read_bytes())
    raw[statistics.entries[names[1]].start + 9] ^= 1
    path.write_bytes(raw)
    assert statistics.read(names[0]).sum() == 64
    with pytest.raises(
        CheckpointError,
        match=r"b\.input_scale must have the bytes that calibration wrote; got others",
    ):
        statistics.read(names[1])


def test_a_disk_that_is_full_is_told(tmp_path, monkeypatch):
    def full(*_: object, **__: object) -> None:
        raise SafetensorError(
            "Error while serializing: I/O error: No space left on device (os error 28)"
        )

    monkeypatch.setattr("keepmtp.quantize.run.statistics.save_file", full)
    with pytest.raises(
        CheckpointError, match=r"must be writable; got .*No space left.*Make room, and run the same"
    ):
        write_statistics(
            tmp_path / "layer-0.safetensors", {HFName("a.input_scale"): torch.ones(1)}, {}
        )


def test_statistics_of_another_run_are_refused(tmp_path):
    saved(tmp_path, {HFName("model.layers.0.a.input_scale"): torch.ones(1)})
    Statistics.open(tmp_path, fingerprint="f")
    with pytest.raises(
        CheckpointError, match=r"must come from this recipe, source and dataset; got .*another run"
    ):
        Statistics.open(tmp_path, fingerprint="g")


def test_one_tensor_in_two_files(tmp_path):
    for layer in range(2):
        tensors = {HFName("a.input_scale"): torch.ones(1)}
        write_statistics(tmp_path / f"{layer}.safetensors", tensors, {"fingerprint": "f"})
    with pytest.raises(
        CheckpointError,
        match=r"1\.safetensors: a\.input_scale must be in one file only; got also in",
    ):
        Statistics.open(tmp_path)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("glm-4.7", {}),
        ("glm-4.7", {"rest": "FP8", "mtp": "FP8"}),
        ("glm-4.7", {"rest": "W4A16", "algorithm": "gptq"}),
        ("glm-4.7", {"algorithm": "gptq", "mtp": "NVFP4"}),
        ("step-3.5-flash", {}),
        ("step-3.5-flash", {"rest": "bf16", "experts": "NVFP4", "algorithm": "gptq"}),
        ("dsv4-flash", {"rest": "FP8_BLOCK", "experts": "NVFP4"}),
    ],
)
def test_statistics_that_fit_their_plan(model, words, tmp_path):
    plan = planned(tmp_path / "source", model=model, **words)
    made = made_up(plan)
    assert made
    refuse_statistics(plan, saved(tmp_path / "statistics", made))


def test_a_plan_without_calibration_needs_none(tmp_path):
    config, tensors = source_layout("glm-4.7", size="tiny")
    plan = make_plan(
        find_recipe("glm-4.7")[0],
        open_source(write_checkpoint(tmp_path / "source", config, tensors)),
    )
    refuse_statistics(plan, None)
    one = saved(
        tmp_path / "statistics",
        {HFName("model.layers.0.self_attn.q_proj.weight_scale"): torch.ones(1)},
    )
    with pytest.raises(
        CheckpointError, match="every tensor must be one that the plan takes from calibration"
    ):
        refuse_statistics(plan, one)


Q = HFName("model.layers.1.self_attn.q_proj.input_global_scale")
EXPERT = HFName("model.layers.2.mlp.experts.1.down_proj.input_global_scale")


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        (Q, None, f"statistics: calibration must give {Q}; got no such tensor"),
        (EXPERT, None, f"statistics: calibration must give {EXPERT}; got no such tensor"),
        (
            HFName("model.layers.1.self_attn.q_proj.weight_packed"),
            torch.ones(1),
            "takes from calibration; got model.layers.1.self_attn.q_proj.weight_packed",
        ),
        (
            HFName("model.layers.1.self_attn.q_proj.input_scale"),
            torch.ones(1),
            "got model.layers.1.self_attn.q_proj.i",
        ),
        (
            HFName("model.layers.1.input_layernorm.weight"),
            torch.ones(256).bfloat16(),
            "got model.layers.1.input_layer",
        ),
        (Q, torch.ones(1).bfloat16(), f"{Q} must be F32[1]; got BF16[1]"),
        (Q, torch.tensor(1.0), f"{Q} must be F32[1]; got F32[]"),
        (EXPERT, torch.tensor([float("nan")]), f"{EXPERT} must be a positive number; got nan"),
        (EXPERT, torch.tensor([float("inf")]), f"{EXPERT} must be a positive number; got inf"),
        (EXPERT, torch.tensor([0.0]), f"{EXPERT} must be a positive number; got 0.0"),
        (Q, torch.tensor([7.0]), "must be equal: vLLM fuses their modules; got "),
    ],
)
def test_statistics_that_do_not_fit(name, value, says, tmp_path):
    plan = planned(tmp_path / "source")
    made = made_up(plan)
    made.pop(name, None)
    if value is not None:
        made[name] = value
    with pytest.raises(CheckpointError) as caught:
        refuse_statistics(plan, saved(tmp_path / "statistics", made))
    assert says in str(caught.value)


def test_a_rewritten_module_is_rewritten_whole(tmp_path):
    plan = planned(tmp_path / "source", algorithm="gptq", rest="W4A16")
    made = made_up(plan)
    del made[HFName("model.layers.1.self_attn.o_proj.weight_scale")]
    with pytest.raises(
        CheckpointError, match=r"must give model\.layers\.1\.self_attn\.o_proj\.weight_scale"
    ):
        refuse_statistics(plan, saved(tmp_path / "statistics", made))


def test_what_awq_rescales_is_whole_or_not_there(tmp_path):
    """Beside the experts it rewrites: a norm, and attention in a scheme it does not know."""
    plan = planned(tmp_path / "source", algorithm="awq", rest="FP8_DYNAMIC", experts="W4A16")
    made = made_up(plan)
    refuse_statistics(plan, saved(tmp_path / "without", made))
    made[HFName("model.layers.1.post_attention_layernorm.weight")] = torch.ones(256).bfloat16()
    module = next(t for t in plan.tensors if t.name == "model.layers.1.self_attn.v_proj.weight")
    (packed,) = pack(SCHEMES["FP8_DYNAMIC"], [torch.ones(module.shape).bfloat16()])
    made |= {HFName(f"{module.module}.{leaf}"): value for leaf, value in packed.items()}
    refuse_statistics(plan, saved(tmp_path / "with", made))
    del made[HFName("model.layers.1.self_attn.v_proj.weight_scale")]
    with pytest.raises(
        CheckpointError, match=r"must give model\.layers\.1\.self_attn\.v_proj\.weight_scale"
    ):
        refuse_statistics(plan, saved(tmp_path / "half", made))
    other = made_up(plan) | {
        HFName("model.layers.0.input_layernorm.weight"): torch.ones(256).bfloat16()
    }
    with pytest.raises(CheckpointError, match=r"got model\.layers\.0\.input_layernorm\.weight"):
        refuse_statistics(plan, saved(tmp_path / "dense layer", other))


def test_a_calibrated_plan_without_statistics(tmp_path):
    with pytest.raises(
        RecipeError, match="NVFP4 must be calibrated before it is written; got no statistics"
    ):
        refuse_statistics(planned(tmp_path / "source"), None)
