"""The variants of a checkpoint without a recipe: every family has them, they fit it, and vLLM's
rules find no fault.
"""

from pathlib import Path

import pytest
import releases
from checked import check
from checkpoint_files import Checkpoint, as_source
from good import companions, released
from keepmtp.quantize.plan.configs import files_of
from keepmtp.quantize.plan.plan import Plan, make_plan
from keepmtp.quantize.plan.tensor_plan import outputs_of
from keepmtp.recipes.families import find_view
from keepmtp.recipes.family_wide import COMMON, model_mapping
from keepmtp.recipes.find import find_recipe
from keepmtp.recipes.frozen import without
from keepmtp.recipes.model_file import flat_recipes
from keepmtp.recipes.schema import Recipe, validated
from keepmtp.recipes.schemes import SCHEMES

NOWHERE = Path("/nonexistent")
CASES = [(model, variant) for model in releases.MODELS for variant in COMMON]


def recipe_of(checkpoint: Checkpoint, variant: str, *, model: str = "mine") -> Recipe:
    source = as_source(checkpoint, NOWHERE)
    view = find_view(source.config, model, source.entries)
    raw = model_mapping(view, model=model, source="/data/mine", revision="local")
    return validated(flat_recipes(raw, "mine")[variant], "mine")


def planned(checkpoint: Checkpoint, variant: str) -> Plan:
    return make_plan(recipe_of(checkpoint, variant), as_source(checkpoint, NOWHERE))


@pytest.mark.parametrize("model, variant", CASES)
def test_a_common_variant_fits_every_family(model, variant):
    plan = planned(released(model), variant)
    heavy, _ = COMMON[variant]
    assert heavy in {tensor.scheme for tensor in plan.tensors}
    assert (heavy in plan.needs_calibration) == SCHEMES[heavy].needs_calibration
    assert {*plan.needs_calibration} <= {heavy}


@pytest.mark.few(48, 96)
@pytest.mark.parametrize("model, variant", CASES)
def test_what_it_writes_has_no_findings(model, variant):
    plan = planned(released(model), variant)
    tensors = {}
    for name, dtype, shape in outputs_of(plan.tensors):
        tensors[str(name)] = (dtype, shape)
    config = files_of(plan)["config.json"]
    written = Checkpoint(config=config, tensors=tensors, json_files=companions(config))
    findings = check(as_source(written, NOWHERE)).findings
    assert "error" not in [finding.severity for finding in findings]


@pytest.mark.parametrize("variant", ["nvfp4a16-fp8", "nvfp4-fp8", "w4a16-fp8", "fp8-dynamic"])
def test_a_release_gets_the_words_of_its_own_recipe(variant):
    """What `keepmtp quantize glm-4.7 --source FOLDER` does, under another name."""
    ours = recipe_of(released("glm-4.7"), variant)
    shipped, _ = find_recipe(f"glm-4.7.{variant}")
    for key in ("backbone", "mtp", "calibration"):
        assert getattr(ours, key) == getattr(shipped, key)
    assert ours.name == f"mine.{variant}" and ours.source == "/data/mine"


def test_source_becomes_a_scheme_in_a_fine_tune_in_bf16():
    config, tensors = releases.source_layout("deepseek-r1")
    plain = {}
    for name, (_, shape) in tensors.items():
        if not name.endswith("_scale_inv"):
            plain[name] = ("BF16", shape)
    config = without(config, "quantization_config")
    recipe = recipe_of(Checkpoint(config=config, tensors=plain), "w4a16-fp8")
    assert recipe.backbone["attention"] == "FP8_BLOCK" and recipe.mtp == "source"
    assert recipe_of(released("deepseek-r1"), "w4a16-fp8").backbone["attention"] == "source"


def test_a_group_that_the_checkpoint_lacks_is_not_named():
    config, tensors = releases.source_layout("glm-4.7", changes={"first_k_dense_replace": 0})
    checkpoint = Checkpoint(config=config, tensors=dict(tensors))
    assert set(recipe_of(checkpoint, "nvfp4a16-fp8").backbone) == {
        "attention",
        "shared_experts",
        "experts",
    }
    assert planned(checkpoint, "nvfp4a16-fp8")


def test_a_summary_says_every_word():
    recipe = recipe_of(released("glm-4.7"), "nvfp4a16-fp8")
    assert recipe.summary == (
        "NVFP4A16 experts, FP8_DYNAMIC elsewhere, MTP block BF16; no calibration"
    )
    draft = recipe_of(released("gemma-4-26b-assistant"), "nvfp4a16-fp8")
    assert draft.summary == "MTP block FP8_DYNAMIC attention, NVFP4A16 dense mlp; no calibration"
