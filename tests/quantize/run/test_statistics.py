"""What calibration hands to the writer: files that are whole, values that fit the plan, and nothing
else.
"""

import os
import re
from operator import itemgetter

import pytest
import torch
from calibrated import made_up, planned, saved
from data_files import table
from keepmtp.checkpoints.source import open_source
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
from releases import source_layout, write_checkpoint
from safetensors import SafetensorError


def test_what_was_written_is_read(tmp_path):
    tensors = {
        HFName("b.weight"): torch.arange(12, dtype=torch.int32).reshape(3, 4).t(),
        HFName("a.scale"): torch.ones(2, 2).to(torch.float8_e4m3fn),
    }
    tensors |= dict.fromkeys(map(HFName, ("b.input_scale", "c.input_scale")), torch.tensor([2.0]))
    path = tmp_path / "s" / "layer-0.safetensors"
    metadata = {"fingerprint": "abc", "tokens": "7"}
    write_statistics(path, tensors, metadata)
    statistics = Statistics.open(path.parent, fingerprint="abc")
    assert set(statistics) == set(tensors) and "b.weight" in statistics and "d" not in statistics
    for name, value in tensors.items():
        read = statistics.read(name)
        assert read.dtype == value.dtype and torch.equal(read.float(), value.float())
    assert read_metadata(path) == metadata and [*path.parent.iterdir()] == [path]


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
    entry = statistics.entries[B]
    path = tmp_path / "model.layers.0.safetensors"
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


def test_statistics_of_another_run_are_refused(tmp_path):
    write_statistics(tmp_path / "0.safetensors", {A: torch.ones(1)}, {"fingerprint": "f"})
    assert A in Statistics.open(tmp_path, fingerprint="f")
    rule = r"must come from this recipe, source and dataset; got .*another run"
    with pytest.raises(CheckpointError, match=rule):
        Statistics.open(tmp_path, fingerprint="g")


def test_a_plan_without_calibration_needs_none(tmp_path):
    source = write_checkpoint(tmp_path / "source", *source_layout("glm-4.7"))
    plan = make_plan(find_recipe("glm-4.7")[0], open_source(source))
    refuse_statistics(plan, None)
    rule = "every tensor must be one that the plan takes from calibration"
    with pytest.raises(CheckpointError, match=rule):
        refuse_statistics(plan, saved(tmp_path / "statistics", {A: torch.ones(1)}))
    rule = "NVFP4 must be calibrated before it is written; got no statistics"
    with pytest.raises(RecipeError, match=rule):
        refuse_statistics(planned(source), None)


CASES = table("quantize/calibrate/unfit_statistics")


@pytest.mark.parametrize("case", CASES, ids=itemgetter("says"))
def test_statistics_that_do_not_fit(case, tmp_path):
    plan = planned(tmp_path / "source", **case["plan"])
    name = HFName(case["tensor"])
    made = made_up(plan)
    made.pop(name, None)
    if case["holds"]:
        dtype, shape, value = case["holds"]
        made[name] = torch.full(shape, value, dtype=getattr(torch, dtype))
    with pytest.raises(CheckpointError, match=re.escape(case["says"])):
        refuse_statistics(plan, saved(tmp_path / "statistics", made))
