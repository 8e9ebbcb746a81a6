"""vllm #54150: fused NVFP4 weights whose global scales differ get one, and every product of scales stays the same."""

import math
import struct

import pytest
import torch
from broken import GOOD
from checkpoint_files import write
from keepmtp.cure import fix
from keepmtp.validate.check.check import examine
from keepmtp.validate.check.values import check_values, with_values
from live_tensors import tensors_of
from written_values import fill, poke

UP = "model.layers.2.mlp.experts.1.up_proj"
GLOBAL = {"glm nvfp4": "weight_global_scale", "glm modelopt": "weight_scale_2"}


def products(folder, module: str, leaf: str) -> list[float]:
    found = tensors_of(folder)
    (value,) = struct.unpack("<f", found[f"{module}.{leaf}"][2])
    value = 1 / value if leaf == "weight_global_scale" else value
    codes = torch.frombuffer(bytearray(found[f"{module}.weight_scale"][2]), dtype=torch.float8_e4m3fn)
    return (codes.double() * value).tolist()


def broken(folder, base: str, factor: float):
    """Up has a global scale of its own."""
    fill(write(folder, GOOD[base]()))
    (value,) = struct.unpack("<f", tensors_of(folder)[f"{UP}.{GLOBAL[base]}"][2])
    poke(folder, f"{UP}.{GLOBAL[base]}", value * factor)
    return folder


@pytest.mark.parametrize("base", GLOBAL)
@pytest.mark.parametrize("factor", [2.0, 0.5])
def test_a_power_of_two_is_cured_exactly(base, factor, tmp_path):
    old = broken(tmp_path / "old", base, factor)
    before = with_values(examine(old), "scalars").data
    assert [each.rule for each in before.findings] == ["fused-scales"] and UP in before.findings[0].where
    found = fix.proposed(str(old), with_scales=True)
    assert {edit.name.rpartition(".")[2] for edit in found.proposal.edits} == {"weight_scale", GLOBAL[base]}
    assert [each.rule for each in found.cured] == ["fused-scales"] and found.left == ()
    fix.write(found, tmp_path / "new")
    checked = examine(tmp_path / "new")
    assert checked.runtime is not None and checked.data.ok and not check_values(checked.runtime, "scalars").findings
    for module in {edit.name.rpartition(".")[0] for edit in found.proposal.edits}:
        assert products(tmp_path / "new", module, GLOBAL[base]) == products(old, module, GLOBAL[base])


def test_another_factor_is_left_alone(tmp_path):
    old = broken(tmp_path / "old", "glm modelopt", 1.3)
    found = fix.proposed(str(old), with_scales=True)
    assert not found.proposal.edits and not found.after.ok and UP in found.left[0].where


def test_what_no_edit_cures_is_still_found(tmp_path):
    """A global scale that is no number stays an error beside one that is cured."""
    old, other = broken(tmp_path / "old", "glm nvfp4", 2.0), UP.replace("experts.1.up", "experts.0.down")
    poke(old, f"{other}.weight_global_scale", math.nan)
    found = fix.proposed(str(old), with_scales=True)
    assert found.proposal.edits and [each.where for each in found.left] == [f"{other}.weight_global_scale"]
    assert not found.after.ok and [each.rule for each in found.cured] == ["fused-scales"]
