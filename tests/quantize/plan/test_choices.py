"""`backbone: auto` before anything is measured: the recipe's keys, the units, their sizes, and the
refusals.
"""

import re
from itertools import product

import pytest
from commands import GLM
from data_files import put_json
from keepmtp.checkpoints.source import open_source
from keepmtp.cli.main import app
from keepmtp.pipeline import plan_before_measuring
from keepmtp.quantize.plan.choices import choices_of, refuse_budget
from keepmtp.quantize.plan.plan import make_plan
from keepmtp.recipes.budget import read_budget
from keepmtp.recipes.errors import RecipeError
from keepmtp.recipes.find import find_recipe
from keepmtp.recipes.schema import Recipe, validated
from passes import ROOT
from releases import source_layout, write_checkpoint
from typer.testing import CliRunner

WORDS = ["NVFP4", "FP8_DYNAMIC", "bf16"]


def searched(
    budget: str = "3.13MB", *, of: str = "tiny-glm4-moe.nvfp4", words=WORDS, **changes
) -> Recipe:
    """A recipe that leaves everything to a search."""
    auto = {
        "backbone": "auto",
        "mtp": "auto",
        "budget": budget,
        "backbone_auto": {"candidates": words},
    }
    return validated(find_recipe(of)[0].model_dump() | auto | changes, "recipe.yaml")


def test_a_budget_is_bytes():
    sizes = {"96GiB": 96 * 2**30, "96 GB": 96 * 10**9, "1.5MiB": 3 * 2**19, "700B": 700}
    assert {word: read_budget(word) for word in sizes} == sizes


@pytest.mark.parametrize("written", ["96", "0GiB", "96 gigs", "-1GiB", "4.75 bits", "1e9B"])
def test_a_budget_without_a_unit_is_refused(written):
    with pytest.raises(RecipeError, match=re.escape(f"got '{written}'")) as caught:
        searched(written)
    assert "recipe.yaml: budget" in str(caught.value) and "such as 96GiB" in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"budget": None}, "budget must be given where backbone is auto"),
        ({"backbone_auto": None}, "backbone_auto must be given where backbone is auto"),
        ({"calibration": None}, "calibration must be given for"),
        (
            {"backbone": {"experts": "NVFP4"}, "mtp": "bf16"},
            "budget must be left out where backbone is not auto",
        ),
        (
            {"mtp_auto": {"min_acceptance": 0.9, "candidates": ["bf16"]}},
            "mtp_auto must be left out where backbone",
        ),
        (
            {"backbone_auto": {"candidates": ["NVFP4", "NVFP4"]}},
            "candidates must differ; got 'NVFP4' twice",
        ),
        ({"backbone_auto": {"candidates": ["NVFP5"]}}, "Did you mean NVFP4?"),
        ({"backbone_auto": {"candidates": ["NVFP4"], "tokns": 1}}, "Did you mean tokens?"),
        (
            {"backbone_auto": {"candidates": ["NVFP4"], "min_acceptance": 0.9}},
            "Set gates.min_acceptance",
        ),
    ],
)
def test_keys_that_do_not_go_together_are_refused(changes, says):
    with pytest.raises(RecipeError, match=re.escape(says)):
        searched(**changes)


def test_a_unit_is_what_vllm_gives_one_scheme():
    choices = choices_of(searched(), open_source(GLM))
    # Groups that the model lacks are not searched.
    assert "linear_attention" not in choices.recipe.backbone
    units = {unit.name: unit for unit in choices.units}
    qkv = units["backbone:model.layers.1.self_attn.qkv_proj"]
    assert [t.module[-6:] for t in qkv.options[0].tensors] == ["k_proj", "q_proj", "v_proj"]
    assert {len(unit.options) for unit in units.values()} == {3}
    # All experts of a layer are one unit, and so are those of the MTP block.
    experts = [(unit.part, unit.layer) for unit in units.values() if unit.role == "experts"]
    assert experts == [("backbone", 1), ("backbone", 2), ("mtp", 3)]
    # Every word is a plan that make_plan would make of it alone, to the byte.
    for word in WORDS:
        whole = make_plan(choices.recipe.with_words(word), choices.base.source)
        assert choices.plan(choices.uniform(word)).num_bytes_after == whole.num_bytes_after


def test_a_word_is_left_out_where_it_does_not_suit(tmp_path):
    config, tensors = source_layout("glm-4.7")
    config["moe_intermediate_size"] = 24
    narrow = {128: 24}
    for name, (dtype, shape) in tensors.items():
        if "mlp.experts" in name:
            tensors[name] = dtype, tuple(narrow.get(size, size) for size in shape)
    source = open_source(write_checkpoint(tmp_path, config, tensors))
    choices = choices_of(searched("1TB", of="glm-4.7.nvfp4-fp8"), source)
    words = {unit.role: [option.word for option in unit.options] for unit in choices.units}
    assert words["attention"] == WORDS
    assert words["experts"] == ["FP8_DYNAMIC", "bf16"]
    rule = r"a candidate must suit model\.layers\.1\.mlp\.experts.*K divisible by 16"
    with pytest.raises(RecipeError, match=rule):
        choices_of(searched(of="glm-4.7.nvfp4-fp8", words=["NVFP4"]), source)


def test_an_override_fixes_modules_and_a_group_may_have_a_word_of_its_own():
    override = {"modules": r"re:model\.layers\.0\..*", "scheme": "bf16"}
    groups = ("dense_mlp", "shared_experts", "experts")
    backbone = {"attention": "FP8_DYNAMIC", **dict.fromkeys(groups, "auto")}
    recipe = searched(backbone=backbone, overrides=[override], mtp="bf16")
    choices = choices_of(recipe, open_source(GLM))
    places = {(unit.part, unit.role, unit.layer) for unit in choices.units}
    assert places == {*product(["backbone"], ["shared_experts", "experts"], [1, 2])}


def test_a_budget_that_nothing_fits_is_refused_with_the_smallest_that_does():
    source = open_source(GLM)
    with pytest.raises(RecipeError) as caught:
        plan_before_measuring(searched("1MiB"), source)
    choices = choices_of(searched("1MiB"), source)
    size = choices.num_bytes(choices.smallest)
    assert f"{size:,} bytes" in caught.value.rule
    assert f"NVFP4 {choices.num_bytes(choices.uniform('NVFP4')):,}" in str(caught.value.got)
    refuse_budget(choices_of(searched(f"{size}B"), source))


def test_plan_says_that_a_search_is_to_come(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    path = tmp_path / "recipe.yaml"
    put_json(path, searched("3.45MB").model_dump(mode="json"))
    said = CliRunner().invoke(app, ["plan", str(path)]).stdout
    assert "\nsearched under 3.45MB, from BF16\n" in said


MINE = """
model: mine
family: glm4_moe
revision: local
groups: [attention, dense_mlp, shared_experts, experts]
default: small
variants:
  small: {backbone: auto, mtp: auto, calibration: problems-32x128, summary: as good as can be}
  plain: {rest: bf16, mtp: bf16, calibration: null, summary: none}
budget: 3.45MB
backbone_auto: {candidates: [NVFP4, FP8_DYNAMIC, bf16]}
"""


def test_a_model_file_has_a_variant_that_searches(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(f"{MINE}source: {GLM}\n")
    recipe = find_recipe(str(path))[0]
    assert recipe.is_searched and recipe.budget == "3.45MB" and recipe.mtp_auto is None
    assert find_recipe(str(path), scheme="plain")[0].budget is None
    # A scheme on the command line leaves nothing to search, but the block is chosen as in any
    # recipe.
    plain = find_recipe(str(path), scheme="W4A16")[0]
    assert not plain.is_searched and plain.budget is None and plain.mtp_auto is not None
