"""Recipes: what is refused and how, what a command line can ask for, what a variant of a model file
expands to, and that every shipped one fits its model.
"""

import copy
import importlib.util
import json
import operator
import re
import sys
import zlib
from functools import reduce
from pathlib import Path

import pytest
import releases
import yaml
from commands import ROOT
from data_files import table
from keepmtp.checkpoints.source import open_source
from keepmtp.quantize.plan.plan import Plan, make_plan
from keepmtp.recipes.errors import RecipeError
from keepmtp.recipes.find import (
    find_recipe,
    read_file,
)
from keepmtp.recipes.model_file import BLOCKS, calibrations, model_files
from keepmtp.recipes.schema import (
    DEFAULT_AUTO,
    BackboneAuto,
    Calibration,
    MtpAuto,
    MtpTuned,
    Recipe,
    candidates_for,
)
from keepmtp.recipes.schemes import REWRITES, SCHEMES
from releases import shipped_recipes

HERE = Path(__file__).parent
CALIBRATED = find_recipe("glm-4.7.nvfp4-fp8")[0]
SHIPPED = [recipe.name for recipe in shipped_recipes()]
CASES = table("recipes/cases")
MINE = table("recipes/mine")


def edited(raw: dict, edits: dict) -> dict:
    """A copy with other values at dotted paths; `(dropped)` takes a key out."""
    raw = copy.deepcopy(raw)
    for path, value in edits.items():
        *outer, last = path.split(".")
        holder = reduce(operator.getitem, outer, raw)
        holder[last] = copy.deepcopy(value)
        if value == "(dropped)":
            del holder[last]
    return raw


def good(name: str) -> dict:
    """The recipe that cases.yaml names so: a file, a recipe that ships, or one with that word."""
    if name == "mine.yaml":
        return MINE
    return edited(CALIBRATED.model_dump(mode="json"), CASES["with"].get(name, {}))


def flat(name: str, edits: dict) -> Recipe:
    return Recipe.model_validate(edited(good(name), edits))


def written(folder: Path, raw: dict) -> str:
    path = folder / "mine.yaml"
    path.write_text(yaml.safe_dump(raw, sort_keys=False))
    return str(path)


def assert_says(caught: pytest.ExceptionInfo, rule: str, start: str = "") -> None:
    message = str(caught.value)
    assert message.startswith(start)
    assert re.match(rule, message.removeprefix(start)), message
    assert "; got " in message and message[-1] in ".?" and "\n" not in message, (
        "the house form of a refusal"
    )
    assert "function-" not in message, "no name of pydantic's"


@pytest.mark.parametrize("name", CASES["refused"])
def test_what_is_refused(name, tmp_path):
    """Its form is that of every refusal, and its path leads."""
    for rule, edits in CASES["refused"][name]:
        path = written(tmp_path, edited(good(name), edits))
        with pytest.raises(RecipeError) as caught:
            find_recipe(path)
        assert_says(caught, rule, f"{path}: ")


@pytest.mark.parametrize(
    ("name", "required"),
    [
        ("glm", [key for key, field in Recipe.model_fields.items() if field.is_required()]),
        ("mine.yaml", ["model", "family", "source", "revision", "groups", "default"]),
    ],
)
def test_what_must_be_given(name, required, tmp_path):
    for key in required:
        path = written(tmp_path, edited(good(name), {key: "(dropped)"}))
        with pytest.raises(RecipeError) as caught:
            find_recipe(path)
        assert_says(caught, f"{key} must be given; got nothing", f"{path}: ")


def test_only_what_changes_no_number_has_a_default():
    """What may be left out: exceptions, what only one word of `mtp` reads, the place of an MTP
    block most releases have themselves, what data may lack, consents that start as no. And what was
    no choice before: on whose tokens an expert is calibrated, how attention is computed, and
    AutoRound's knob.

    And how the result is judged, which changes no byte of it: reports and cards print every field
    of that.
    """

    for kind in (Recipe, MtpTuned, Calibration, MtpAuto, BackboneAuto):
        optional = [key for key, field in kind.model_fields.items() if not field.is_required()]
        assert {*optional} == {*CASES["optional"][kind.__name__]}
    assert CALIBRATED.calibration.model_code == "transformers"


@pytest.mark.parametrize(
    ("algorithm", "experts", "expected"),
    [
        ("minmax", "NVFP4", ["NVFP4"]),
        ("gptq", "NVFP4", ["NVFP4"]),
        ("gptq", "W4A16", ["W4A16"]),
        ("awq", "W8A16", ["W8A16"]),
        ("smoothquant", "W8A8", ["W8A8"]),
        ("awq", "NVFP4", ["NVFP4"]),
        ("smoothquant", "NVFP4", ["NVFP4"]),
        ("autoround", "W4A16", ["W4A16"]),
    ],
)
def test_schemes_that_depend_on_data(algorithm, experts, expected):
    """FP8_DYNAMIC attention is in none of them: nothing of it is observed or rewritten."""
    recipe = flat("glm", {"backbone.experts": experts, "calibration.algorithm": algorithm})
    assert recipe.calibrated_schemes() == expected


def test_the_knob_of_autoround():
    few = flat("autoround", {"calibration.autoround": {"iters": 64}})
    assert few.calibration.knobs == {"iters": 64, "enable_torch_compile": False}
    assert flat("autoround", {}).calibration.knobs["iters"] == 200, "llm-compressor compiles"
    assert not flat("gptq", {}).calibration.knobs
    written = few.model_dump(mode="json")["calibration"]["autoround"]
    assert written == {"iters": 64}, "the record, the fingerprint and recipe.yaml have it"
    chosen = few.with_choices(scheme="NVFP4", mtp=None).calibration
    assert chosen.algorithm == "minmax" and chosen.autoround is None


def test_every_algorithm_of_a_recipe_has_its_schemes():
    assert set(REWRITES) == set(Calibration.model_fields["algorithm"].annotation.__args__)
    assert set().union(*REWRITES.values()) <= set(SCHEMES)


def test_auto_with_its_candidates():
    recipe = flat("auto", {})
    assert recipe.decisions() >= {"bf16", "NVFP4", "W4A16"} and "auto" not in recipe.decisions()
    chosen = recipe.resolved("FP8_DYNAMIC")
    assert (chosen.mtp, chosen.mtp_auto) == ("FP8_DYNAMIC", None)
    assert chosen.calibration == recipe.calibration


def test_a_choice_drops_what_it_needs_no_more():
    assert find_recipe("glm-4.7.nvfp4-fp8", scheme="W4A16")[0].calibration is None
    recipe = flat("tuned", {})
    assert recipe.mtp_policy == "NVFP4" and "tuned" not in recipe.decisions()
    assert recipe.with_choices(scheme=None, mtp="bf16").mtp_tuned is None


def test_auto_on_the_command_line():
    assert find_recipe("glm-4.7.nvfp4-fp8", mtp="auto")[0].mtp_auto == DEFAULT_AUTO
    own = find_recipe("tiny-glm4-moe.nvfp4-mtp-auto")[0]
    assert find_recipe(own.name, mtp="auto")[0].mtp_auto == own.mtp_auto
    assert find_recipe(own.name, mtp="bf16")[0].mtp_auto is None


def test_candidates_are_narrowed_to_what_a_block_has():
    dense = candidates_for(DEFAULT_AUTO.candidates, {"attention", "dense_mlp"})
    assert dense == ("source", "bf16", "FP8_DYNAMIC", "W4A16", "NVFP4A16", "NVFP4")
    sparse = candidates_for(DEFAULT_AUTO.candidates, {"attention", "experts"})
    assert {"attention": "FP8_DYNAMIC", "experts": "NVFP4"} in sparse and len(sparse) == 8
    assert candidates_for([{"attention": "bf16"}], {"attention", "experts"}) == (
        {"attention": "bf16"},
    ), "not whole"
    assert candidates_for([{"experts": "bf16"}], {"attention"}) == (), (
        "says nothing about this block"
    )


def test_a_recipe_file_of_ones_own(tmp_path):
    path = written(tmp_path, good("glm") | {"model": "mine", "variant": "new"})
    recipe, text = find_recipe(path)
    assert (recipe.name, text) == ("mine.new", Path(path).read_text())
    with pytest.raises(RecipeError, match=r"a recipe file must exist; got nowhere\.yaml"):
        find_recipe("nowhere.yaml")


@pytest.mark.parametrize(("words", "name"), CASES["shipped"])
def test_a_command_line_finds_what_ships(words, name):
    """A model's default recipe, a variant before a scheme, in any case and with any hyphen."""
    recipe, _ = find_recipe(**words)
    assert recipe.name == name and recipe in shipped_recipes()


@pytest.mark.parametrize(("words", "name", "summary", "calibration"), CASES["chosen"])
def test_what_a_command_line_chooses(words, name, summary, calibration):
    """A scheme for every quantized group and no other, and which batches come with it."""
    recipe, _ = find_recipe(**words)
    assert (recipe.name, recipe.summary) == (name, summary)
    if calibration is None:
        assert recipe.calibration is None
    else:
        assert recipe.calibration == Calibration.model_validate(calibrations()[calibration])


@pytest.mark.parametrize("model", ["tiny-glm4-moe", "glm-4.7", "mimo-7b", "dsv4-flash"])
def test_every_scheme_works_on_the_command_line_also_those_that_need_batches(model):
    for name, scheme in SCHEMES.items():
        recipe, _ = find_recipe(model, scheme=name, mtp=name)
        assert {recipe.mtp, *recipe.backbone.values()} <= {name, "bf16", "source"}
        assert scheme.needs_calibration <= (recipe.calibration is not None)


@pytest.mark.parametrize(("rule", "words"), CASES["command_lines"])
def test_command_lines_that_are_refused(rule, words):
    with pytest.raises(RecipeError) as caught:
        find_recipe(**words)
    assert_says(caught, rule)


@pytest.mark.parametrize("option", ["scheme", "mtp"])
@pytest.mark.parametrize("typo", ["fp8-dynamc", "w4a61", "NVFP-4", "FP8_BLOK", "sorce", "aut"])
def test_every_suggestion_works(option, typo):
    """The word after "Did you mean" is taken in the same place of the same command."""
    with pytest.raises(RecipeError) as caught:
        find_recipe("glm-4.7", **{option: typo})
    if suggested := str(caught.value).partition("Did you mean ")[2].rstrip("?"):
        find_recipe("glm-4.7", **{option: suggested})


def test_summaries_are_short_and_every_model_has_a_data_free_recipe():
    data_free = {recipe.model for recipe in shipped_recipes() if recipe.calibration is None}
    for recipe in shipped_recipes():
        assert len(recipe.summary) <= 120 and not recipe.summary.endswith(".")
        assert ("no calibration" in recipe.summary) <= (recipe.calibration is None)
        assert recipe.model in data_free


@pytest.mark.parametrize("name", [name for name in SHIPPED if not name.startswith("tiny-")])
def test_shipped_recipe_fits_its_model(name, tmp_path):
    """At the model's true widths: every group is decided, every scheme fits, every fused module
    agrees.
    """
    recipe, _ = find_recipe(name)
    source = open_source(releases.write_checkpoint(tmp_path, *releases.thin_layout(recipe.model)))
    assert_takes_effect(make_plan(recipe.before_measuring, source))


@pytest.mark.parametrize("name", [name for name in SHIPPED if name.startswith("tiny-")])
def test_shipped_recipe_fits_the_model_that_ships_with_it(name):
    recipe, _ = find_recipe(name)
    folder = ROOT / recipe.source
    if not (folder / "config.json").is_file():
        pytest.skip(f"{recipe.source} is not in this checkout")
    source = open_source(folder)
    policies = (recipe.mtp,)
    if recipe.mtp_auto is not None:
        policies = recipe.mtp_auto.candidates
    for policy in policies:
        assert_takes_effect(make_plan(recipe.resolved(policy), source))


def test_the_rows_of_the_small_models_are_what_their_generator_writes(tmp_path, monkeypatch):
    """And what they are evaluated on is nothing that they were trained or calibrated on."""
    models = ROOT / "models"
    if not (models / "train" / "problems.py").is_file():
        pytest.skip("models/train is not in this checkout")
    monkeypatch.syspath_prepend(str(models / "train"))
    spec = importlib.util.spec_from_file_location("problems", models / "train" / "problems.py")
    problems = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "problems", problems)
    spec.loader.exec_module(problems)
    files = [
        "--out",
        str(tmp_path / "problems.jsonl"),
        "--held-out",
        str(tmp_path / "held_out.jsonl"),
    ]
    monkeypatch.setattr(sys, "argv", ["problems.py", *files])
    problems.write_files(problems.rows)
    for name in ("problems.jsonl", "held_out.jsonl"):
        assert (tmp_path / name).read_bytes() == (models / name).read_bytes()
    rows = [json.loads(line) for line in (models / "held_out.jsonl").read_text().splitlines()]
    assert len({row["question"] for row in rows}) == len(rows) == 400
    assert all(zlib.crc32(row["question"].encode()) % 10 == 0 for row in rows), "the held-out side"
    calibrated = (models / "problems.jsonl").read_text()
    assert not any(row["question"] in calibrated for row in rows)


def assert_takes_effect(plan: Plan) -> None:
    schemes = {tensor.scheme for tensor in plan.tensors} - {""}
    assert schemes >= plan.recipe.decisions() & SCHEMES.keys(), (
        "a scheme of the recipe is used nowhere"
    )
    needed = plan.recipe.calibrated_schemes()
    if plan.recipe.kv_cache is not None:
        needed.append("kv_cache: FP8")
    assert plan.needs_calibration == needed
    matrices = [tensor for tensor in plan.mtp if len(tensor.shape) == 2]
    forms = {tensor.scheme for tensor in matrices}
    if plan.recipe.mtp == "bf16":
        assert forms == {""}
    assert {"glue", "attention"} <= {tensor.role for tensor in matrices}


# --- Model files ----------------------------------------------------------------------------------


def test_a_variant_is_expanded_to_the_whole_recipe():
    recipe, text = find_recipe(str(HERE / "mine.yaml"))
    backbone = {"attention": "FP8_BLOCK", "dense_mlp": "FP8_BLOCK", "experts": "W4A16"}
    own = {key: MINE[key] for key in ("model", "family", "source", "revision", "gates")}
    said = {key: MINE["variants"]["plain"][key] for key in ("mtp", "calibration", "summary")}
    assert recipe == Recipe.model_validate(
        {"variant": "plain", "default": True, "backbone": backbone} | own | said
    )
    assert "rest" not in text and "variants" not in text


def test_a_variant_is_a_name_alone(tmp_path):
    raw = edited(MINE, {"usual": {"rest": "FP8_BLOCK", "mtp": "bf16"}, "variants.nvfp4-fp8": None})
    recipe = find_recipe(written(tmp_path, raw), scheme="nvfp4-fp8")[0]
    assert recipe.backbone == {
        "attention": "FP8_BLOCK",
        "dense_mlp": "FP8_BLOCK",
        "experts": "NVFP4",
    }
    assert recipe.calibration == Calibration.model_validate(calibrations()["mix-256x2048"])


def test_a_calibration_is_named_or_written_out(tmp_path):
    named = find_recipe(str(HERE / "mine.yaml"), scheme="auto")[0].calibration
    assert named == Calibration.model_validate(calibrations()["mix-256x2048"])
    own = edited(MINE, {"variants.auto.calibration": named.model_dump() | {"samples": 7}})
    assert find_recipe(written(tmp_path, own), scheme="auto")[0].calibration.samples == 7


def test_training_of_the_file_is_for_the_variants_that_train(tmp_path):
    settings = CASES["with"]["tuned"]["mtp_tuned"]
    edits = {"mtp_tuned": settings, "variants.tuned": MINE["variants"]["auto"] | {"mtp": "tuned"}}
    path = written(tmp_path, edited(MINE, edits))
    assert find_recipe(path)[0].mtp_tuned is None
    assert find_recipe(path, scheme="tuned")[0].mtp_tuned.steps == 100
    edits["variants.tuned.mtp_tuned"] = settings | {"steps": 5}
    own = written(tmp_path, edited(MINE, edits))
    assert find_recipe(own, scheme="tuned")[0].mtp_tuned.steps == 5
    with pytest.raises(RecipeError, match="mtp_tuned must be left out where mtp is not tuned"):
        find_recipe(written(tmp_path, MINE | {"mtp_tuned": settings}))


def test_the_block_of_a_variant_replaces_that_of_the_file(tmp_path):
    assert CASES["blocks"].keys() == {*BLOCKS} - {"mtp_tuned"}
    for key, (of_the_file, of_the_variant) in CASES["blocks"].items():
        raw = MINE | {key: of_the_file}
        recipe = find_recipe(written(tmp_path, raw), scheme="auto")[0]
        assert recipe == Recipe.model_validate(recipe.model_dump() | {key: of_the_file})
        raw = edited(raw, {f"variants.auto.{key}": of_the_variant})
        other = find_recipe(written(tmp_path, raw), scheme="auto")[0]
        whole = Recipe.model_validate(recipe.model_dump() | {key: of_the_variant})
        assert recipe != other == whole, "not merged"


def test_the_text_of_a_variant_is_a_flat_recipe_that_says_the_same(tmp_path):
    """What the checkpoint carries: every shipped recipe in full, readable again, with nothing left
    to look up.
    """
    for recipe in shipped_recipes():
        found, text = find_recipe(recipe.name)
        path = tmp_path / f"{recipe.name}.yaml"
        path.write_text(text)
        again = read_file(path)
        assert found == recipe == again.recipe(recipe.variant)
        assert (again.text, again.default, list(again.flat)) == (
            text,
            recipe.variant,
            [recipe.variant],
        )
        assert {"calibration", "mtp", "backbone"} <= again.flat[recipe.variant].keys()


def test_the_flat_text_reads_like_a_file_that_a_person_wrote():
    text = read_file(HERE / "mine.yaml").recipe_text("auto")
    assert text.startswith("model: mine\nvariant: auto\ndefault: false\nsummary: with data\n")
    assert "\n  candidates:\n    - bf16\n    - {experts: NVFP4}\ncalibration:\n" in text


def test_shipped_files_are_named_like_their_models_and_name_every_calibration():
    raws = {path.stem: yaml.safe_load(path.read_text()) for path in model_files()}
    assert all(raw["model"] == stem for stem, raw in raws.items())
    usual = yaml.safe_load((model_files()[0].parents[1] / "variants.yaml").read_text())
    named = set()
    for raw in raws.values():
        for name, words in raw["variants"].items():
            named.add((raw.get("usual", {}) | (words or usual[name]))["calibration"])
    assert named == {None, *calibrations()}, "each block is used"
    for name, block in calibrations().items():
        mix = Calibration.model_validate(block).mix
        assert all(re.fullmatch(r"local|[0-9a-f]{40}", texts.dataset_revision) for texts in mix)
        assert mix[0].share == (0.75 if name.startswith("mix") else 1), "mostly chat"


# --- Recipes that do not fit the model they are for -----------------------------------------------


def planned(tmp_path: Path, edits: dict) -> Plan:
    source = tmp_path / "source"
    if not source.exists():
        releases.write_checkpoint(source, *releases.source_layout("glm-4.7"))
    raw = edited(find_recipe("glm-4.7")[0].model_dump(mode="json"), edits)
    return make_plan(Recipe.model_validate(raw), open_source(source))


@pytest.mark.parametrize(("rule", "edits"), CASES["unfit"])
def test_a_recipe_that_does_not_fit_its_model(rule, edits, tmp_path):
    with pytest.raises(RecipeError) as caught:
        planned(tmp_path, edits)
    assert_says(caught, rule, "glm-4.7.nvfp4a16-fp8: ")


def test_override_takes_effect_on_what_it_names(tmp_path):
    override = {"modules": r"re:model\.layers\.1\.mlp\.experts\..*", "scheme": "W8A16"}
    plan = planned(tmp_path, {"overrides": [override]})
    by_layer = {tensor.layer: tensor.scheme for tensor in plan.tensors if tensor.role == "experts"}
    assert by_layer == {1: "W8A16", 2: "NVFP4A16", 3: ""}


def test_mtp_by_groups(tmp_path):
    policy = {"attention": "FP8_DYNAMIC", "shared_experts": "bf16", "experts": "NVFP4A16"}
    plan = planned(tmp_path, {"mtp": policy})
    schemes = {tensor.role: tensor.scheme for tensor in plan.mtp if len(tensor.shape) == 2}
    kept = dict.fromkeys(("shared_experts", "router", "glue", "embedding", "head"), "")
    assert schemes == policy | kept


def test_the_narrow_last_shard_may_end_in_a_part_block(tmp_path):
    """kv_a_proj_with_mqa is 576 wide and the last of its fused module, which vLLM's block check
    allows.
    """
    recipe = find_recipe("glm-5", scheme="fp8-block")[0]
    source = open_source(releases.write_checkpoint(tmp_path, *releases.thin_layout("glm-5")))
    shapes = set()
    for tensor in make_plan(recipe, source).tensors:
        if "kv_a_proj_with_mqa" in tensor.name and tensor.scheme:
            shapes.add(tensor.outputs[1].shape)
    assert shapes == {(5, 48)}
