"""What calibration hands to the writer: files that are whole, values that fit the plan, and nothing
else.
"""

import os
import re

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


A, B = (HFName(f"model.layers.0.{name}.input_scale") for name in "ab")


def test_a_file_that_changes_after_it_was_opened(tmp_path):
    statistics = saved(tmp_path, dict.fromkeys((A, B), torch.ones(64)))
    entry, path = statistics.entries[B], tmp_path / "model.layers.0.safetensors"
    raw = bytearray(path.read_bytes())
    raw[entry.start + 9] ^= 1
    path.write_bytes(raw)
    assert statistics.read(A).sum() == 64
    rule = r"b\.input_scale must have the bytes that calibration wrote; got others"
    with pytest.raises(CheckpointError, match=rule):
        statistics.read(B)
    os.truncate(path, path.stat().st_size - 1)
    rule = r"layers\.0\.safetensors: .*b\.input_scale must be whole; got end of file"
    with pytest.raises(CheckpointError, match=rule):
        statistics.read(B)


def test_a_disk_that_is_full_is_told(tmp_path, monkeypatch):
    def full(*_: object, **__: object) -> None:
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("keepmtp.quantize.run.statistics.save_file", full)
    rule = r"must be writable; got .*No space left.*Make room, and run the same"
    with pytest.raises(CheckpointError, match=rule):
        write_statistics(tmp_path / "layer-0.safetensors", {A: torch.ones(1)}, {})


def test_statistics_of_another_run_and_in_two_files_are_refused(tmp_path):
    write_statistics(tmp_path / "0.safetensors", {A: torch.ones(1)}, {"fingerprint": "f"})
    assert A in Statistics.open(tmp_path, fingerprint="f")
    rule = r"must come from this recipe, source and dataset; got .*another run"
    with pytest.raises(CheckpointError, match=rule):
        Statistics.open(tmp_path, fingerprint="g")
    write_statistics(tmp_path / "1.safetensors", {A: torch.ones(1)}, {"fingerprint": "f"})
    rule = r"1\.safetensors: .*a\.input_scale must be in one file only; got also in"
    with pytest.raises(CheckpointError, match=rule):
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
    source = write_checkpoint(tmp_path / "source", *source_layout("glm-4.7", size="tiny"))
    plan = make_plan(find_recipe("glm-4.7")[0], open_source(source))
    refuse_statistics(plan, None)
    rule = "every tensor must be one that the plan takes from calibration"
    with pytest.raises(CheckpointError, match=rule):
        refuse_statistics(plan, saved(tmp_path / "statistics", {A: torch.ones(1)}))
    rule = "NVFP4 must be calibrated before it is written; got no statistics"
    with pytest.raises(RecipeError, match=rule):
        refuse_statistics(planned(source), None)


def in_layer(name: str) -> HFName:
    return HFName(f"model.layers.{name}")


Q = in_layer("1.self_attn.q_proj.input_global_scale")
EXPERT = in_layer("2.mlp.experts.1.down_proj.input_global_scale")
O_SCALE = in_layer("1.self_attn.o_proj.weight_scale")
V = in_layer("1.self_attn.v_proj.weight")
AWQ = {"algorithm": "awq", "rest": "FP8_DYNAMIC", "experts": "W4A16"}


@pytest.mark.parametrize(
    ("words", "name", "value", "says"),
    [
        ({}, Q, None, f"statistics: calibration must give {Q}; got no such tensor"),
        ({}, EXPERT, None, f"statistics: calibration must give {EXPERT}; got no such tensor"),
        ({"algorithm": "gptq", "rest": "W4A16"}, O_SCALE, None, f"must give {O_SCALE}"),
        # What AWQ rescales is whole or not there.
        (AWQ, V, torch.ones(256, 256), f"must give {V}_scale; got no such tensor"),
        (AWQ, in_layer("0.input_layernorm.weight"), torch.ones(256), "got model.layers.0.input_"),
        ({}, in_layer("1.self_attn.q_proj.input_scale"), torch.ones(1), "takes from calibration; "),
        ({}, in_layer("1.input_layernorm.weight"), torch.ones(256), "got model.layers.1.input_lay"),
        ({}, Q, torch.ones(1).bfloat16(), f"{Q} must be F32[1]; got BF16[1]"),
        ({}, Q, torch.tensor(1.0), f"{Q} must be F32[1]; got F32[]"),
        ({}, EXPERT, torch.tensor([float("nan")]), f"{EXPERT} must be a positive number; got nan"),
        ({}, EXPERT, torch.tensor([float("inf")]), f"{EXPERT} must be a positive number; got inf"),
        ({}, EXPERT, torch.tensor([0.0]), f"{EXPERT} must be a positive number; got 0.0"),
        ({}, Q, torch.tensor([7.0]), "must be equal: vLLM fuses their modules; got "),
    ],
)
def test_statistics_that_do_not_fit(words, name, value, says, tmp_path):
    plan = planned(tmp_path / "source", **words)
    made = made_up(plan)
    made.pop(name, None)
    if value is not None:
        made[name] = value
    with pytest.raises(CheckpointError, match=re.escape(says)):
        refuse_statistics(plan, saved(tmp_path / "statistics", made))


def test_what_awq_rescales_may_be_there(tmp_path):
    """Beside the experts it rewrites: a norm, and attention in a scheme it does not know."""
    plan = planned(tmp_path / "source", **AWQ)
    made = made_up(plan)
    refuse_statistics(plan, saved(tmp_path / "without", made))
    made[in_layer("1.post_attention_layernorm.weight")] = torch.ones(256).bfloat16()
    (tensor,) = (tensor for tensor in plan.tensors if tensor.name == V)
    (packed,) = pack(SCHEMES["FP8_DYNAMIC"], [torch.ones(tensor.shape).bfloat16()])
    made |= {HFName(f"{tensor.module}.{leaf}"): value for leaf, value in packed.items()}
    refuse_statistics(plan, saved(tmp_path / "with", made))
