"""What a plan says that a run needs, and the refusal where it cannot fit: before a byte is
downloaded.
"""

from dataclasses import replace

import pytest
from data_files import cases
from keepmtp import pipeline
from keepmtp.checkpoints.source import open_source
from keepmtp.quantize.needs.cards import card_of
from keepmtp.quantize.needs.memory import stations
from keepmtp.quantize.needs.needs import (
    Machine,
    lines,
    machine_of,
    needs_of,
    refuse_too_large,
)
from keepmtp.quantize.plan.plan import Plan, make_plan
from keepmtp.recipes.errors import RecipeError
from keepmtp.recipes.find import find_recipe
from releases import source_layout, write_checkpoint


@pytest.fixture(scope="module")
def air(tmp_path_factory) -> Plan:
    """GLM-4.5-Air at its real size, from headers over holes."""
    folder = tmp_path_factory.mktemp("air")
    write_checkpoint(folder, *source_layout("glm-4.5-air", size="full"), num_shards=None)
    return make_plan(find_recipe("glm-4.5-air.nvfp4-fp8")[0], open_source(folder))


def test_a_real_model_is_said_in_a_dozen_short_lines(air):
    """One of 46 layers in BF16 is 4.4 GiB, and three draft steps of 2,048 tokens have 96 heads'
    scores.
    """
    found = needs_of(air, machine_of("80"))
    assert lines(found) == [
        "Needs, counted for GPUs of 80 GiB, in batches of 1:",
        "  backbone   can be calibrated",
        "  MTP block  can be calibrated",
        "  GPU        18.8 GiB at most, MTP block; 79.4 GiB there",
        "  memory     5.5 GiB a process, decoder layer 1",
        "  disk       13.5 GiB for states, 66.8 GiB for the output",
    ]
    assert found.device is not None and 12 < found.device / 2**30 < 24
    head = next(station for station in stations(air) if station.name == "head")
    # Embedding and head in BF16; 2,048 tokens' logits in BF16, and twice in F32.
    assert head.device_bytes / 151_552 == pytest.approx(2 * 2 * 4096 + 2048 * 10, rel=0.01)
    assert 60 < found.output / 2**30 < 75 and found.states == 3 * 2 * (256 + 32) * 2048 * 4096


@cases
def test_what_cannot_fit_is_refused_with_the_way_out(air, batch_size, gib, cure):
    calibration = air.recipe.calibration.model_copy(update={"batch_size": batch_size})
    plan = replace(air, recipe=air.recipe.model_copy(update={"calibration": calibration}))
    says = r"must fit a GPU: .* needs [\d.,]+ GiB; got [\d.]+ GiB"
    with pytest.raises(RecipeError, match=says) as refusal:
        refuse_too_large(plan, machine_of(gib))
    assert cure in str(refusal.value)
    refuse_too_large(air, machine_of("80"))


def test_main_memory_without_a_gpu_holds_everything(air):
    size = 8 * 2**30
    machine = Machine(title="a CPU", device_bytes=None, host_bytes=size)
    with pytest.raises(RecipeError, match="must fit main memory: MTP block needs"):
        refuse_too_large(air, machine)
    refuse_too_large(air, replace(machine, host_bytes=8 * size))


def test_what_transformers_cannot_build_is_refused_before_the_download(tmp_path, monkeypatch):
    write_checkpoint(tmp_path, *source_layout("mimo-v2.5"))
    recipe, _ = find_recipe("mimo-v2.5", scheme="NVFP4")
    made = make_plan(recipe, open_source(tmp_path))
    on_the_hub = replace(made, source=replace(made.source, folder=None))
    said = "\n".join(lines(needs_of(made, machine_of("H100"))))
    assert "cannot be calibrated: no class" in said
    monkeypatch.setattr(pipeline, "download", lambda *_, **__: pytest.fail("it was downloaded"))
    with pytest.raises(RecipeError, match="no class for model_type 'mimo_v2'"):
        pipeline.quantize(on_the_hub, "", out=tmp_path / "out")


def test_a_card_is_a_name_or_a_number():
    assert card_of("NVIDIA H100 80GB HBM3")[0] == "H100" and card_of("0.5")[1] == 2**29
    assert card_of("8xH100") == card_of("H100") and card_of("80GB") == card_of("80 GiB")
    assert card_of("80GB") == card_of("80")
