"""`search: imatrix`: what each input channel counts, from the batches to the packer, alone and on
two ranks.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
import yaml
from calibrated import made_up, planned, saved
from compressed_tensors.quantization import QuantizationArgs
from keepmtp.quantize.calibrate.layers import observed
from keepmtp.quantize.needs.room import calibration_bytes
from keepmtp.quantize.pack.unit import packed_groups
from keepmtp.quantize.plan.plan import Plan, make_plan
from keepmtp.quantize.run.statistics import Statistics, refuse_statistics
from keepmtp.recipes.errors import CheckpointError, RecipeError
from keepmtp.recipes.find import find_recipe
from keepmtp.recipes.schema import validated
from killed import finished, small_recipe, start
from layerwise import GLM, Skeleton, outliers, token_ids
from llmcompressor.observers import Observer
from passes import calls_of

pytestmark = pytest.mark.usefixtures("in_f32")


def searching(plan: Plan, search: str) -> Plan:
    return make_plan(plan.recipe.model_copy(update={"search": search}), plan.source)


@pytest.fixture(scope="module")
def searched(tmp_path_factory) -> Plan:
    """Schemes with static input scales and without, and one that the search leaves alone."""
    folder = tmp_path_factory.mktemp("searched") / "source"
    words = {"rest": "W4A16", "experts": "NVFP4", "shared_experts": "MXFP4"}
    return searching(planned(folder, **words, mtp="FP8_DYNAMIC"), "imatrix")


# --- what channels count --------------------------------------------------------------------------


def observer_of(module: torch.nn.Module) -> Any:
    """llm-compressor's own: from now on it sums the squares of what the module is handed."""
    args = QuantizationArgs(num_bits=4, strategy="group", group_size=128, observer="imatrix_mse")
    observer = Observer.load_from_registry("imatrix_mse", base_name="weight", args=args)
    observer.attach(module)
    return observer


def test_importance_is_that_of_llm_compressors_observer(monkeypatch):
    """One dense layer; theirs is summed in F32. q, k and v read one tensor, which is squared once
    in a batch.
    """
    ids = token_ids(3)
    skeleton = Skeleton(GLM)
    batches = skeleton.enter(0, ids, None)
    names = skeleton.linears(0)
    theirs = {name: observer_of(skeleton.model.get_submodule(name)) for name in names}
    squared = calls_of(monkeypatch, observed, "_sums_of_squares")
    found = skeleton.calibrated(batches, "W4A16", algorithm="minmax", weighted=names).tensors
    assert found.keys() == {f"{name}.input_importance" for name in names}
    for name, observer in theirs.items():
        value = observer._imatrix_sum / observer._imatrix_count
        assert torch.allclose(found[f"{name}.input_importance"], value, rtol=1e-5, atol=0), name
    assert len(names) == 7 and len(squared) == 4 * len(ids)


def test_each_expert_counts_by_its_own_inputs():
    skeleton = Skeleton(GLM)
    batches = skeleton.enter(1, token_ids(1), outliers(1, skeleton.model.config.hidden_size))
    names = skeleton.linears(1)
    found = skeleton.calibrated(batches, "FP8_DYNAMIC", algorithm="minmax", weighted=names).tensors
    downs = {tuple(found[f"{n}.input_importance"].tolist()) for n in names if "down_proj" in n}
    assert len(downs) == 4 + 1


# --- from calibration to the packer ---------------------------------------------------------------


def test_the_plan_takes_importance_of_what_is_searched_and_writes_none(searched):
    by_role = {(t.part, t.role): t for t in searched.tensors if t.fate == "quantize"}
    weighted = {key for key, tensor in by_role.items() if tensor.weighted}
    assert ("backbone", "shared_experts") in by_role.keys() - weighted
    assert {("backbone", "experts"), ("mtp", "attention")} <= weighted
    assert searched.needs_calibration == ["FP8_DYNAMIC", "NVFP4", "W4A16"]
    names = {output.name for tensor in searched.tensors for output in tensor.outputs}
    assert not any(name.endswith("input_importance") for name in names)


def test_statistics_have_exactly_the_importance_that_the_packer_reads(searched, tmp_path):
    made = made_up(searched)
    refuse_statistics(searched, saved(tmp_path / "right", made))
    name = next(name for name in made if name.endswith("experts.0.down_proj.input_importance"))
    without = {key: value for key, value in made.items() if key != name}
    short = made | {name: torch.ones(7)}
    unread = "every tensor must be one that the plan .* got "
    for folder, plan, given, says in (
        ("lacks", searched, without, f"calibration must give {name}; got no such tensor"),
        ("short", searched, short, rf"{name} must be F32\[\d+\]; got F32\[7\]"),
        ("unread", searching(searched, "mse"), made, unread + r"\S+\.input_importance"),
    ):
        with pytest.raises(CheckpointError, match=says):
            refuse_statistics(plan, saved(tmp_path / folder, given))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0])
def test_importance_that_is_no_number_is_named(value, searched, tmp_path):
    unit = next(unit for unit in searched.units if unit[0].weighted)
    name = unit[0].importances[0].name
    made = made_up(searched)
    made[name][3] = value
    rule = rf"^{name}: every value must be finite and not negative"
    with pytest.raises(CheckpointError, match=rule):
        list(packed_groups(searched, unit, saved(tmp_path, made), device=torch.device("cpu")))


def test_what_importance_takes_is_counted(searched):
    """On the device and on the disk."""
    tensors = tuple(tensor._replace(weighted=False) for tensor in searched.tensors)
    made = made_up(searched)
    plain = replace(searched, tensors=tensors)
    kept = sum(value.nbytes for name, value in made.items() if name.endswith("input_importance"))
    assert calibration_bytes(searched) - calibration_bytes(plain) == kept > 0


# --- recipes --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, changes, says",
    [
        ("glm-4.7.w4a16-fp8", {}, "calibration must be given for search: imatrix; got null"),
        ("glm-4.7.w4a16-gptq", {}, r"rounded to nearest; got calibration\.algorithm gptq"),
        (
            "tiny-docs.nvfp4",
            {
                "backbone": "auto",
                "budget": "7MiB",
                "backbone_auto": {"candidates": ["NVFP4", "bf16"]},
            },
            "must come with a word for every group; got backbone: auto",
        ),
    ],
)
def test_importance_stands_beside_nothing_that_has_scales_of_its_own(name, changes, says):
    recipe = find_recipe(name)[0].model_dump() | changes | {"search": "imatrix"}
    with pytest.raises(RecipeError, match=says):
        validated(recipe, "mine")


# --- whole passes ---------------------------------------------------------------------------------


def test_two_ranks_find_what_one_process_finds(tmp_path):
    """A sum over two ranks is in F64; here it is the same F32 number to the bit. One alone does the
    MTP block, too.
    """
    recipe = small_recipe(tmp_path, "tiny-glm4-moe.nvfp4", search="imatrix", samples=4, held_out=2)
    recipe.write_text(yaml.safe_dump(yaml.safe_load(recipe.read_text()) | {"mtp": "W4A16"}))
    one = tmp_path / "one"
    two = tmp_path / "two"
    alone = start(recipe, one, is_whole=True)
    together = start(recipe, two, size=2)
    assert finished(alone) == [0] and finished(together) == [0, 0]
    found, shared = (Statistics.open(folder / "statistics").sums for folder in (one, two))
    of_block = {name: found.pop(name) for name in [*found] if ".layers.3." in name}
    assert shared == found and any(name.endswith("input_importance") for name in of_block)
