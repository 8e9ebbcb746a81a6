"""A recipe's word for embedding and head: what stays without one, what is packed with one, and what
vLLM's classes do not take. tests/vllm/test_heads.py asks vLLM itself.
"""

from pathlib import Path

import pytest
import torch
from checkpoint_files import as_source
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from data_files import table
from good import outputs_of, packed, planned
from keepmtp.checkpoints.source import open_source
from keepmtp.pipeline import plan_for
from keepmtp.quantize.plan.configs import config_of, files_of
from keepmtp.quantize.plan.plan import make_plan
from keepmtp.recipes.errors import RecipeError
from keepmtp.recipes.schema import Recipe
from pydantic import ValidationError
from real_releases import TABLE
from writing import tiny, weights_of, written

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


@pytest.mark.parametrize("format", ["compressed-tensors", "modelopt"])
@pytest.mark.parametrize("word, told", [("NVFP4A16", "nvfp4"), ("FP8", "float8_e4m3fn")])
def test_a_packed_table_of_ngrams_is_said_by_its_own_key(word, told, format):
    """In modelopt's names, one scale for all parts, and no batch is needed; the draft has none."""
    plan = packed("qwen3.8-flash-next", "table", word, format)
    files = files_of(plan)["config.json"]
    assert files["text_config"]["ple_embedding_dtype"] == told
    assert "ngram" not in str(files["quantization_config"].get("config_groups"))
    assert plan.needs_calibration == []
    (unit,) = [unit for unit in plan.units if unit[0].role == "table"]
    common = [output.name for tensor in unit for output in tensor.outputs if output.shape == (1,)]
    assert common == [f"{TABLE}.weight_scale{'_2' * (told == 'nvfp4')}"]
    alone = plan.recipe.model_copy(update={"backbone": {}})
    assert not any("ngram" in each.name for each in make_plan(alone, plan.source).tensors)


def test_a_packed_table_of_ngrams_stays():
    packed_once = packed("qwen3.8-flash-next", "table", "NVFP4A16")
    source = as_source(outputs_of(packed_once), Path("/nonexistent"))
    words = dict.fromkeys(packed_once.recipe.backbone, "source")
    again = packed_once.recipe.model_dump() | {"mtp": "source", "backbone": words}
    plan = make_plan(Recipe.model_validate(again), source)
    assert all(map(plan.stays, plan.tensors))
    assert files_of(plan)["config.json"]["text_config"]["ple_embedding_dtype"] == "nvfp4"
    assert "no n-gram table in NVFP4" in config_of(plan).line
    again["backbone"]["table"] = "FP8"
    with pytest.raises(RecipeError, match="a table that is packed stays as it is; got FP8 for U8"):
        make_plan(Recipe.model_validate(again), source)


def test_a_table_of_another_build_comes_with_its_scale_and_its_key(tmp_path):
    release = tiny(tmp_path / "release", "qwen3.8-flash-next")
    recipe = packed("qwen3.8-flash-next", "table", "NVFP4A16").recipe
    written(make_plan(recipe, open_source(release)), tmp_path / "packed")
    for own, donor, told in (("release", "packed", "nvfp4"), ("packed", "release", None)):
        plan, _ = plan_for(str(tmp_path / own), changes=[f"table=from:{tmp_path / donor}"])
        names = {output.name for tensor in plan.tensors for output in tensor.outputs}
        assert (f"{TABLE}.weight_scale_2" in names) == (told is not None)
        assert files_of(plan)["config.json"]["text_config"].get("ple_embedding_dtype") == told


@pytest.mark.parametrize("word", ["NVFP4A16", "FP8"])
def test_rows_of_ngrams_are_those_of_the_release(word, tmp_path):
    """The values by compressed-tensors' codes, or PyTorch's, against the release's.

    A step of E2M1 is at most 2 at 6, so half of one is a sixth of the group's largest value, and
    1/16 more where E4M3 rounded its scale. E4M3 has 3 bits: 1/16 of a value, and of its smallest
    2**-10 times the scale.
    """
    recipe = packed("qwen3.8-flash-next", "table", word).recipe
    release = tiny(tmp_path / "release", "qwen3.8-flash-next")
    made = written(make_plan(recipe, open_source(release)), tmp_path / "out")
    parts = [weights_of(release)[f"{TABLE}.shard_{part}.weight"].float() for part in (0, 1)]
    largest = max(part.abs().max() for part in parts)
    for number, rows in enumerate(parts):
        codes = made[f"{TABLE}.shard_{number}.weight"]
        if word == "FP8":
            common = made[f"{TABLE}.weight_scale"]
            error = (codes.float() * common - rows).abs()
            assert torch.all(error <= rows.abs() / 16 * 1.01 + common * 2**-10)
            assert common.item() == pytest.approx(largest.item() / 448, rel=2**-8)
            continue
        common = made[f"{TABLE}.weight_scale_2"]
        scales = made[f"{TABLE}.shard_{number}.weight_scale"].float() * common
        values = unpack_fp4_from_uint8(codes, *rows.shape, dtype=torch.float32)
        groups = rows.unflatten(1, (-1, 16))
        error = (values.unflatten(1, (-1, 16)) * scales.unsqueeze(-1) - groups).abs()
        assert torch.all(error <= groups.abs().amax(-1, keepdim=True) / 6 * 17 / 16)
        assert common.item() == pytest.approx(largest.item() / 448 / 6, rel=2**-7)


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
        ("qwen3.8-flash-next", "table", "FP8_BLOCK", "modelopt", "ngram_embedding.py"),
        ("qwen3.8-flash-next", "table", "NVFP4", "compressed-tensors", "ngram_embedding.py"),
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
