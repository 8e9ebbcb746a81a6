"""The backbone pass on its own: killed and resumed, and out of memory."""

import gc
import os
from pathlib import Path

import pytest
import torch
from calibrated import planned
from keepmtp.quantize.calibrate.data.data import CalibrationData
from keepmtp.quantize.calibrate.layers.backbone import calibrate_backbone
from keepmtp.quantize.calibrate.model import states
from keepmtp.quantize.plan.plan import Plan
from keepmtp.quantize.run.progress import CalibrationStep
from keepmtp.recipes.errors import RecipeError
from killed import events, finished, small_recipe, start, statistics
from passes import ALONE, prepared
from transformers.models.glm4_moe import modeling_glm4_moe


# Each rerun is killed at another place, later than the last; the fourth has finished its layer, but
# told no one.
@pytest.mark.few(1, 4)
@pytest.mark.parametrize(
    "name, places, told",
    [
        (
            "tiny-glm4-moe.nvfp4",
            [
                ["before statistics", 0],
                ["after statistics", 1],
                ["amid states", 1],
                ["amid removal", 1],
            ],
            [1, 3],
        ),
        ("tiny-glm4-moe.w4a16-gptq", [["amid states", 1]], [1, 2, 3]),
        ("tiny-glm4-moe.w4a16-awq", [["after statistics", 2]], [1, 2, 3]),
        ("tiny-qwen3_5.w4a16-gptq", [["amid states", 2]], [1, 2, 3]),
        ("tiny-qwen3_5.w4a16-awq", [["amid states", 1]], [1, 2, 3]),
    ],
)
def test_a_killed_pass_goes_on_and_leaves_the_same_bytes(name, places, told, tmp_path):
    recipe = small_recipe(tmp_path, name)
    unbroken = tmp_path / "unbroken"
    broken = tmp_path / "broken"
    straight = start(recipe, unbroken)
    for place in places:
        assert finished(start(recipe, broken, kill=place)) == [-9], place
    assert finished(start(recipe, broken)) == finished(straight) == [0]
    assert len(statistics(unbroken)) == 3
    assert statistics(broken) == statistics(unbroken)
    assert events(unbroken) == [1, 2, 3] and events(broken) == told, "no layer twice"
    assert [path.name for path in (broken / "states").iterdir()] == ["00003"]


# --- in this process ------------------------------------------------------------------------------


def run(plan: Plan, data: CalibrationData, folder: Path, *, stop_at: int = 0) -> list[int]:
    """The layers that were done."""
    told: list[int] = []

    def tell(step: CalibrationStep) -> None:
        told.append(step.done)
        if step.done == stop_at:
            raise KeyboardInterrupt

    calibrate_backbone(plan, data, folder, device=ALONE.device, ranks=ALONE, progress=tell)
    return told


def test_an_unchanged_run_computes_nothing_again(tmp_path, monkeypatch):
    """Nor on another day, after the machine was off."""
    given = prepared(small_recipe(tmp_path, "tiny-glm4-moe.nvfp4", samples=4))
    assert run(*given, tmp_path / "pass") == [1, 2, 3]
    assert run(*given, tmp_path / "pass") == []
    monkeypatch.setattr(states, "_boot", lambda: "another")
    assert run(*given, tmp_path / "pass") == []


def test_a_machine_that_stopped_goes_on_at_the_last_states_on_the_disk(tmp_path, monkeypatch):
    """Those of layer 1 are; those of layer 2 were in its memory, and are torn."""
    given = prepared(small_recipe(tmp_path, "tiny-glm4-moe.nvfp4", samples=4))
    assert run(*given, tmp_path / "straight") == [1, 2, 3]
    folder = tmp_path / "pass"
    for seconds, layer in ((0, 1), (300, 2)):
        monkeypatch.setattr(states, "_LASTING_SECONDS", seconds)
        with pytest.raises(KeyboardInterrupt):
            run(*given, folder, stop_at=layer)
    for path in (folder / "states" / "00002").glob("*.safetensors"):
        os.truncate(path, 0)
    monkeypatch.setattr(states, "_boot", lambda: "another")
    assert run(*given, folder) == [2, 3]
    assert statistics(folder) == statistics(tmp_path / "straight")


def test_out_of_memory_says_what_helps(tmp_path, monkeypatch):
    def forward(*_args, **_kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    plan, data = prepared(small_recipe(tmp_path, "tiny-glm4-moe.nvfp4"))
    monkeypatch.setattr(modeling_glm4_moe.Glm4MoeMoE, "forward", forward)
    rule = (
        "decoder layer 1 and a batch must fit cpu; got out of memory in batches of 2. Free .* or "
        "lower calibration.batch_size or calibration.sequence_length"
    )
    with pytest.raises(RecipeError, match=rule):
        run(plan, data, tmp_path / "pass")


def test_minmax_runs_each_calibration_batch_once(tmp_path, monkeypatch):
    """A layer computes held-out text twice, and calibration text once, or twice by GPTQ."""
    calls: list[int] = []
    forward = modeling_glm4_moe.Glm4MoeDecoderLayer.forward

    def counted(self, hidden_states, *args, **kwargs):
        calls.append(len(hidden_states))
        return forward(self, hidden_states, *args, **kwargs)

    monkeypatch.setattr(modeling_glm4_moe.Glm4MoeDecoderLayer, "forward", counted)
    for variant, times in (("nvfp4", 1), ("w4a16-gptq", 2)):
        calls.clear()
        recipe = small_recipe(tmp_path, f"tiny-glm4-moe.{variant}", samples=6, held_out=2)
        assert run(*prepared(recipe), tmp_path / variant) == [1, 2, 3]
        assert sum(calls) == 3 * (2 + times * 6 + 2)


@pytest.mark.full
def test_nothing_is_held_from_layer_to_layer(tmp_path):
    """Between layers there is embedding, norm and no more than a batch of states, after the third
    as after the first.

    Tensors, not the process's size: that grows by oneDNN's cache of kernels, one for each number of
    tokens an expert is sent, up to 1024 of them.
    """
    held: list[int] = []

    def look(_step: object) -> None:
        gc.collect()
        storages = {}
        for each in gc.get_objects():
            if type(each) in (torch.Tensor, torch.nn.Parameter) and not each.is_meta:
                storages[each.untyped_storage().data_ptr()] = each.untyped_storage().nbytes()
        held.append(sum(storages.values()))

    plan, data = prepared(small_recipe(tmp_path, "tiny-glm4-moe.nvfp4"))
    look(None)
    calibrate_backbone(
        plan, data, tmp_path / "pass", device=ALONE.device, ranks=ALONE, progress=look
    )
    before, *after = held
    assert len(after) == 3
    assert max(after) - min(after) < 2**14
    assert max(after) - before < 2**20


def test_layers_that_hand_on_more_than_states_can_be_resumed(tmp_path):
    """GLM-5's layers return (hidden states, indices): so must the stand-ins of a run that has seen
    none of them.
    """
    plan = planned(tmp_path / "source", model="glm-5", data="random", attention="FP8_DYNAMIC")
    ids = torch.randint(3, 500, (2, 32), generator=torch.Generator().manual_seed(0))
    given = plan, CalibrationData(ids=ids, held_out_ids=ids, provenance={})
    whole = run(*given, tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        run(*given, tmp_path / "cut", stop_at=2)
    assert run(*given, tmp_path / "cut") == whole[2:] != []
    assert statistics(tmp_path / "cut") == statistics(tmp_path / "whole")
