"""What a plan says that a run needs, and the refusal where it cannot fit: before a byte is
downloaded.
"""

import json
from dataclasses import replace

import pytest
from commands import keepmtp
from keepmtp import pipeline
from keepmtp.checkpoints.source import open_source
from keepmtp.quantize.needs.cards import card_of
from keepmtp.quantize.needs.needs import Machine, lines, machine_of, needs_of, refuse_too_large
from keepmtp.quantize.plan.plan import Plan, make_plan
from keepmtp.recipes.errors import RecipeError
from keepmtp.recipes.find import find_recipe
from passes import ROOT
from releases import source_layout, write_checkpoint

TINY = f"tiny-glm4-moe.nvfp4 --source {ROOT}/models/tiny-glm4-moe"


@pytest.fixture(scope="module")
def air(tmp_path_factory) -> Plan:
    """GLM-4.5-Air at its real size, from headers over holes."""
    folder = tmp_path_factory.mktemp("air")
    write_checkpoint(folder, *source_layout("glm-4.5-air", size="full"), num_shards=None)
    return make_plan(find_recipe("glm-4.5-air.nvfp4-fp8")[0], open_source(folder))


def with_batches_of(plan: Plan, size: int) -> Plan:
    calibration = plan.recipe.calibration
    assert calibration is not None
    recipe = plan.recipe.model_copy(
        update={"calibration": calibration.model_copy(update={"batch_size": size})}
    )
    return replace(plan, recipe=recipe)


def test_a_real_model_on_eight_gpus_is_said_in_a_dozen_short_lines(air):
    found = needs_of(air, machine_of(8, "80"))
    said = lines(found)
    assert len(said) <= 12 and max(map(len, said)) <= 80
    assert (found.backbone, found.mtp, found.batch_size) == ("", "", 1)
    # One of 46 layers in BF16 is 4.4 GiB, and three draft steps of 2,048 tokens have 96 heads'
    # scores.
    assert (
        found.device is not None
        and 12 < found.device / 2**30 < 24
        and found.device_station == "MTP block"
    )
    assert 60 < found.output / 2**30 < 75 and found.states == 2 * 2 * (256 + 32) * 2048 * 4096


@pytest.mark.parametrize(
    ("batch_size", "gib", "cure"),
    [
        (
            64,
            "80",
            "Set calibration.batch_size: 16, lower calibration.sequence_length, use --scheme",
        ),
        (1, "8", "use --scheme nvfp4a16-fp8, which needs no batches, or take a machine with more."),
    ],
)
def test_what_cannot_fit_is_refused_with_the_way_out(air, batch_size, gib, cure):
    with pytest.raises(
        RecipeError, match=r"must fit a GPU: .* needs [\d.,]+ GiB; got [\d.]+ GiB"
    ) as refusal:
        refuse_too_large(with_batches_of(air, batch_size), machine_of(1, gib))
    assert cure in str(refusal.value)
    refuse_too_large(air, machine_of(1, "80"))


def test_main_memory_without_a_gpu_holds_everything(air):
    machine = Machine(
        title="this machine's CPU", gpus=0, device_bytes=8 * 2**30, host_bytes=8 * 2**30
    )
    with pytest.raises(RecipeError, match="must fit main memory: MTP block needs"):
        refuse_too_large(air, machine)
    refuse_too_large(air, replace(machine, host_bytes=64 * 2**30))


def test_what_transformers_cannot_build_is_refused_before_the_download(tmp_path, monkeypatch):
    write_checkpoint(tmp_path, *source_layout("mimo-v2.5", size="tiny"))
    recipe, _ = find_recipe("mimo-v2.5", scheme="NVFP4")
    made = make_plan(recipe, open_source(tmp_path))
    on_the_hub = replace(made, source=replace(made.source, folder=None))
    assert "cannot be calibrated: no class" in "\n".join(
        lines(needs_of(made, machine_of(1, "H100")))
    )
    monkeypatch.setattr(pipeline, "download", lambda *_, **__: pytest.fail("it was downloaded"))
    with pytest.raises(RecipeError, match="no class for model_type 'mimo_v2'"):
        pipeline.quantize(on_the_hub, "", out=tmp_path / "out")


def test_the_command_says_it_for_people_and_machines():
    printed = keepmtp(f"plan {TINY} --gpus 2 --gpu-memory h200", COLUMNS="80").stdout
    said = printed[printed.index("Needs, counted for 2 H200, in batches of 8:") :].splitlines()
    assert said[1:3] == ["  backbone   can be calibrated", "  MTP block  can be calibrated"]
    assert said[5].startswith("  disk ") and not any("time" in line for line in said[:7])
    found = json.loads(keepmtp(f"plan {TINY} --gpu-memory 141 --json").stdout)["needs"]
    assert (
        found["batch_size"] == 8
        and found["device_there"] < 141 * 2**30
        and found["host_there"] is None
    )
    here = json.loads(keepmtp(f"quantize {TINY} --dry-run --json").stdout)["needs"]
    assert here["machine"].startswith("this machine's") and here["host_there"] > 0


def test_a_card_is_a_name_or_a_number():
    assert card_of("NVIDIA H100 80GB HBM3").name == "H100" and card_of("0.5").memory_bytes == 2**29
