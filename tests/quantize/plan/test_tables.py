"""A recipe's word for embedding and head: what stays without one, what is packed with one, and what
vLLM's classes do not take. tests/vllm/test_heads.py asks vLLM itself.
"""

from pathlib import Path

import pytest
from checkpoint_files import as_source
from good import outputs_of, planned
from heads import packed
from keepmtp.quantize.plan.configs import config_of
from keepmtp.quantize.plan.plan import make_plan
from keepmtp.recipes.errors import RecipeError
from keepmtp.recipes.schema import Recipe
from pydantic import ValidationError
from tables import table

CALIBRATION = table("helpers/good")["calibration"]


def of_role(plan, role):
    """The backbone's embedding or head."""
    (tensor,) = [
        tensor
        for tensor in plan.tensors
        if tensor.role == role and tensor.part == "backbone" and tensor.layer is None
    ]
    return tensor


def test_without_a_word_both_stay():
    plan = planned("glm-4.7", "FP8_DYNAMIC", "bf16")
    for role in ("head", "embedding"):
        assert (of_role(plan, role).fate, of_role(plan, role).scheme) == ("keep", "")


@pytest.mark.parametrize("format", ["compressed-tensors", "modelopt"])
@pytest.mark.parametrize("model", ["glm-4.7", "qwen3.5-27b", "deepseek-r1", "hy3"])
def test_a_packed_head_is_named_in_the_config_by_every_name(model, format):
    """Of the target and of the draft that builds a placeholder."""
    plan = packed(model, "head", "FP8_DYNAMIC", format)
    head = of_role(plan, "head")
    assert (head.fate, head.scheme, head.calibrated) == ("quantize", "FP8_DYNAMIC", "")
    config = config_of(plan).value
    said = str(config.get("config_groups") or config["quantized_layers"])
    assert "lm_head" in said
    assert not any("lm_head" in entry for entry in config["ignore"])


def test_a_packed_embedding_is_looked_up_by_its_own_group():
    plan = packed("deepseek-r1", "embedding", "W4A16")
    assert of_role(plan, "embedding").scheme == "W4A16"
    groups = config_of(plan).value["config_groups"].values()
    assert any("embed_tokens" in str(group["targets"]) for group in groups)


def test_a_table_of_ngrams_is_no_embedding_that_a_recipe_names():
    plan = planned("qwen3.8-flash-next", "FP8_DYNAMIC", "bf16")
    recipe = plan.recipe.model_dump()
    recipe["backbone"]["embedding"] = "bf16"
    again = make_plan(Recipe.model_validate(recipe), plan.source)
    assert {tensor.name: tensor.fate for tensor in again.tensors} == {
        tensor.name: tensor.fate for tensor in plan.tensors
    }


@pytest.mark.parametrize(
    "model, group, word, format, got",
    [
        ("mimo-7b", "head", "FP8_DYNAMIC", "compressed-tensors", "mimo_mtp.py"),
        ("dsv4-flash", "head", "NVFP4A16", "compressed-tensors", "deepseek_v4/nvidia/model.py"),
        ("qwen3-next-80b", "head", "W4A16", "compressed-tensors", "qwen3_next.py"),
        ("glm-4.7", "head", "FP8_BLOCK", "compressed-tensors", "vocab_parallel_embedding.py"),
        ("glm-4.7", "head", "NVFP4A16", "modelopt", "fills a plain head of its own"),
        ("glm-4.7", "embedding", "W8A16", "compressed-tensors", "its class"),
        ("deepseek-r1", "embedding", "FP8_DYNAMIC", "compressed-tensors", "without zero points"),
        ("deepseek-r1", "embedding", "W4A16_ASYM", "compressed-tensors", "without zero points"),
        (
            "deepseek-v3.2",
            "embedding",
            "W4A16",
            "compressed-tensors",
            "plain copy in the MTP block",
        ),
        ("ernie-4.5-21b", "head", "FP8_DYNAMIC", "compressed-tensors", "tied to the embedding"),
    ],
)
def test_what_vllm_does_not_load_is_refused_with_its_file(model, group, word, format, got):
    with pytest.raises(RecipeError) as caught:
        packed(model, group, word, format)
    assert got in str(caught.value.got) and group in str(caught.value.where)


def test_the_input_scale_of_a_head_needs_batches():
    recipe = packed("glm-4.7", "head", "W4A16").recipe.model_dump()
    recipe["backbone"]["head"] = "NVFP4"
    with pytest.raises(ValidationError, match="calibration must be given for NVFP4"):
        Recipe.model_validate(recipe)
    plan = packed("glm-4.7", "head", "NVFP4")
    assert of_role(plan, "head").calibrated == "scales"
    assert plan.needs_calibration == ["NVFP4"]


def test_what_looks_at_inputs_leaves_a_head_to_its_weights():
    """No batch passes through it as through a layer's modules."""
    plan = packed("glm-4.7", "head", "W4A16")
    recipe = plan.recipe.model_dump() | {"calibration": CALIBRATION, "search": "imatrix"}
    plan = make_plan(Recipe.model_validate(recipe), plan.source)
    head = of_role(plan, "head")
    assert (head.calibrated, head.weighted) == ("", False)
    assert head.reason.endswith("scales by mse")


def test_a_scheme_for_every_group_is_none_for_a_head():
    """`--scheme` chooses for what is quantized by default."""
    recipe = packed("glm-4.7", "head", "FP8_DYNAMIC").recipe
    chosen = recipe.with_choices(scheme="W4A16", mtp=None)
    assert {**chosen.backbone, "head": ""} == dict.fromkeys(recipe.backbone, "W4A16") | {"head": ""}
    assert chosen.backbone["head"] == "FP8_DYNAMIC"


def of_finished(plan, word):
    """A plan that takes another one's output as its source, and gives the head a word."""
    source = as_source(outputs_of(plan), Path("/nonexistent"))
    recipe = plan.recipe.model_dump()
    recipe["backbone"] = dict.fromkeys(recipe["backbone"], "source") | {"head": word}
    return make_plan(Recipe.model_validate(recipe | {"mtp": "source"}), source)


def test_of_a_finished_checkpoint_the_head_alone_is_written_anew():
    plan = of_finished(planned("qwen3.5-27b", "FP8_DYNAMIC", "bf16"), "W8A16")
    changed = [tensor.name for tensor in plan.tensors if tensor.fate != "keep"]
    assert changed == ["lm_head.weight"]


def test_a_head_that_is_packed_already_is_not_rounded_into_another_form():
    plan = packed("qwen3.5-27b", "head", "FP8_DYNAMIC")
    assert of_role(of_finished(plan, "source"), "head").fate == "keep"
    with pytest.raises(RecipeError, match="a weight is rounded once"):
        of_finished(plan, "W4A16")
