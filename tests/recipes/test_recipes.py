"""Recipes: what is refused and how, what a command line can ask for, and that every shipped one
fits its model.
"""

import importlib.util
import json
import sys
import zlib
from pathlib import Path

import pytest
import releases
import yaml
from keepmtp.checkpoints.source import open_source
from keepmtp.quantize.plan.plan import Plan, make_plan
from keepmtp.recipes.errors import RecipeError
from keepmtp.recipes.find import (
    data_free_alternative,
    find_recipe,
    read_recipe,
    shipped_recipes,
)
from keepmtp.recipes.model_file import calibrations
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

CALIBRATED = find_recipe("glm-4.7.nvfp4-fp8")[0]
SHIPPED = [recipe.name for recipe in shipped_recipes()]


def refusal(tmp_path: Path, *, drop: str = "", **changes) -> str:
    """What reading a good recipe with these changes says; without the file's path, which is checked
    to lead.
    """
    raw = CALIBRATED.model_dump(mode="json") | changes
    raw.pop(drop, None)
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(raw))
    with pytest.raises(RecipeError) as caught:
        read_recipe(path)
    return message_of(caught, f"{path}: ")


def message_of(caught: pytest.ExceptionInfo, start: str = "") -> str:
    message = str(caught.value)
    assert message.startswith(start)
    assert "; got " in message and message[-1] in ".?" and "\n" not in message, (
        "the house form of a refusal"
    )
    assert "function-" not in message, "no name of pydantic's"
    return message.removeprefix(start)


CALIBRATION = CALIBRATED.calibration.model_dump()
BACKBONE_OF = CALIBRATED.backbone
AUTO = {
    "mtp": "auto",
    "mtp_auto": {"min_acceptance": 0.97, "candidates": ["bf16", "NVFP4", {"experts": "W4A16"}]},
}
SETTINGS = {
    "mtp": "NVFP4",
    "steps": 100,
    "batch_size": 4,
    "learning_rate": 1e-4,
    "seed": 0,
    "loss": "lk_hybrid",
    "draft_steps": 3,
    "decay": 0.6,
}
TUNED = {"mtp": "tuned", "mtp_tuned": SETTINGS}


def calibrated(**changes: object) -> dict:
    return {"calibration": CALIBRATION | changes}


def auto(**changes: object) -> dict:
    return AUTO | {"mtp_auto": AUTO["mtp_auto"] | changes}


def tuned(**changes: object) -> dict:
    return TUNED | {"mtp_tuned": SETTINGS | changes}


def with_knobs(algorithm: str, **knobs: object) -> dict:
    changes = calibrated(algorithm=algorithm, **knobs)
    return changes | {"backbone": BACKBONE_OF | {"experts": "W4A16"}}


GROUPS = "must be one of the module groups attention, linear_attention, dense_mlp"
REFUSED = [
    ({"calibraton": None}, "calibraton is not a key of a recipe; got None. Did you mean calibr"),
    (calibrated(sample=3), "calibration.sample is not a key of a recipe; got 3. Did you mean sam"),
    ({"backbone": BACKBONE_OF | {"expert": "bf16"}}, f"backbone.expert: {GROUPS}"),
    ({"mtp": {"atention": "bf16"}}, "got 'atention'. Did you mean attention?"),
    ({"calibration": None}, "calibration must be given for NVFP4; got null. Name a dataset, or"),
    (
        {"backbone": BACKBONE_OF | {"experts": "NVFP4A16"}},
        "calibration must be null where no scheme needs it; got a dataset",
    ),
    (
        calibrated(algorithm="awq"),
        "calibration.algorithm awq rewrites weights of NVFP4A16, W4A16, W4A16_ASYM, W4A16_G32, "
        "W8A16 only; got FP8_DYNAMIC",
    ),
    (calibrated(backend="modelopt", algorithm="gptq"), "calibration: gptq is llm-compressor's;"),
    (calibrated(algorithm="mse"), "calibration: mse is modelopt's; got backend: llmcompressor."),
    (calibrated(column=""), "calibration.column: "),
    (with_knobs("awq", gptq={}), "gptq must come with algorithm: gptq; got algorithm: awq."),
    (with_knobs("gptq", gptq={"actorder": "group"}), "calibration.gptq.actorder: "),
    (with_knobs("gptq", gptq={"block_size": 0}), "calibration.gptq.block_size: "),
    (with_knobs("gptq", gptq={"dampening": 0.1}), "got 0.1. Did you mean dampening_frac?"),
    (with_knobs("autoround", autoround={"lr": 0}), "calibration.autoround.lr: "),
    (with_knobs("awq", awq={"n_grid": 2}), "n_grid must be at least 3 where duo_scaling is true;"),
    (
        with_knobs("awq", awq={"n_grid": 1, "duo_scaling": False}),
        "at least 2 where duo_scaling is false; got 1. Raise it.",
    ),
    (AUTO | {"mtp_auto": None}, "mtp_auto must be given where mtp is auto; got nothing."),
    (AUTO | {"mtp": "bf16"}, "mtp_auto must be left out where mtp is not auto; got mtp: bf16."),
    (AUTO | {"calibration": None}, "calibration must be given for mtp: auto; got null."),
    (
        AUTO | {"backbone": BACKBONE_OF | {"experts": "auto"}},
        "mtp_auto must be left out where backbone is auto",
    ),
    ({"mtp": {"experts": "auto"}}, "mtp.experts: must be one of source, bf16, "),
    (auto(candidates=["auto"]), "must be one of source, bf16, "),
    (auto(candidates=[]), "mtp_auto.candidates: "),
    (auto(candidates=["bf16", "bf16"]), "candidates must differ; got 'bf16' twice."),
    (auto(min_acceptance=97), "mtp_auto.min_acceptance: "),
    (auto(candidate=[]), "mtp_auto.candidate is not a key of a recipe; got []. Did you mean can"),
    (TUNED | {"mtp_tuned": None}, "mtp_tuned must be given where mtp is tuned; got nothing."),
    (TUNED | {"mtp": "bf16"}, "mtp_tuned must be left out where mtp is not tuned; got mtp: bf16."),
    (tuned(mtp="source"), "a tuned block is written anew; got mtp: source. Use bf16"),
    (tuned(mtp="tuned"), "mtp_tuned.mtp: must be one of source, bf16, "),
    (tuned(draft_steps=4), "mtp_tuned.draft_steps: "),
]


@pytest.mark.parametrize(("changes", "says"), REFUSED)
def test_what_is_refused(tmp_path, changes, says):
    assert says in refusal(tmp_path, **changes)


@pytest.mark.parametrize(
    "key", [key for key, field in Recipe.model_fields.items() if field.is_required()]
)
def test_missing_key(tmp_path, key):
    assert refusal(tmp_path, drop=key).startswith(f"{key} must be given; got nothing.")


def test_only_what_changes_no_number_has_a_default():
    """What may be left out: exceptions, what only one word of `mtp` reads, the place of an MTP
    block most releases have themselves, what data may lack, consents that start as no. And what was
    no choice before: on whose tokens an expert is calibrated, who writes the held-out answers, how
    attention is computed, whose code calibrates, and the algorithms' knobs.

    And how the result is judged, which changes no byte of it: reports and cards print every field
    of that.
    """

    def optional(kind) -> set[str]:
        return {key for key, field in kind.model_fields.items() if not field.is_required()}

    assert optional(Recipe) == {
        "budget",
        "backbone_auto",
        "overrides",
        "keep",
        "mtp_auto",
        "mtp_tuned",
        "mtp_source",
        "format",
        "kv_cache",
        "search",
        "evaluation",
        "gates",
    }
    assert optional(MtpTuned) == {"frozen"}
    assert optional(Calibration) == {
        "subset",
        "prompt_column",
        "chat",
        "also",
        "held_out_by",
        "model_code",
        "backend",
        "gptq",
        "awq",
        "autoround",
    }
    assert not optional(MtpAuto)
    assert optional(BackboneAuto) == {"draft_weight", "min_acceptance", "tokens"}
    assert CALIBRATED.calibration.model_code == "transformers"


@pytest.mark.parametrize(
    ("written", "meant"),
    [("FP8_BLOK", "FP8_BLOCK"), ("nvfp4", "NVFP4"), ("BF16", "bf16"), ("W4A15", "W4A16")],
)
def test_unknown_scheme(tmp_path, written, meant):
    backbone = CALIBRATED.backbone | {"attention": written}
    for where, message in (
        ("backbone.attention", refusal(tmp_path, backbone=backbone)),
        ("mtp", refusal(tmp_path, mtp=written)),
        ("mtp.attention", refusal(tmp_path, mtp={"attention": written})),
        ("overrides.0.scheme", refusal(tmp_path, overrides=[{"modules": "x", "scheme": written}])),
    ):
        assert message.startswith(f"{where}: must be one of source, bf16, NVFP4, ")
        assert message.endswith(f"got {written!r}. Did you mean {meant}?")


@pytest.mark.parametrize(
    ("algorithm", "experts", "expected"),
    [
        ("minmax", "NVFP4", ["NVFP4"]),
        ("gptq", "NVFP4", ["NVFP4"]),
        ("gptq", "W4A16", ["W4A16"]),
        ("awq", "W8A16", ["W8A16"]),
        ("smoothquant", "W8A8", ["W8A8"]),
        ("autoround", "W4A16", ["W4A16"]),
    ],
)
def test_schemes_that_depend_on_data(algorithm, experts, expected):
    """FP8_DYNAMIC attention is in none of them: nothing of it is observed or rewritten."""
    raw = CALIBRATED.model_dump()
    raw["backbone"]["experts"], raw["calibration"]["algorithm"] = experts, algorithm
    assert Recipe.model_validate(raw).calibrated_schemes() == expected


def knobs_recipe(algorithm: str, **knobs: object) -> Recipe:
    return Recipe.model_validate(CALIBRATED.model_dump() | with_knobs(algorithm, **knobs))


def test_knobs_of_an_algorithm():
    gptq = knobs_recipe("gptq", gptq={"actorder": None, "block_size": 64})
    knobs = gptq.calibration.knobs
    assert knobs == {"actorder": None, "dampening_frac": 0.01, "block_size": 64}
    awq = knobs_recipe("awq", awq={"duo_scaling": "both"}).calibration
    assert awq.knobs == {"n_grid": 20, "duo_scaling": "both"}
    assert knobs_recipe("autoround").calibration.knobs["iters"] == 200, "llm-compressor compiles"
    plain = knobs_recipe("gptq").calibration
    assert not plain.knobs and not {"gptq", "awq"} & {*plain.model_dump()}
    written = gptq.model_dump(mode="json")["calibration"]["gptq"]
    assert written == knobs, "the record, the fingerprint and recipe.yaml have them"
    chosen = gptq.with_choices(scheme="NVFP4", mtp=None).calibration
    assert chosen.algorithm == "minmax" and chosen.gptq is None


def test_every_algorithm_of_a_recipe_has_its_schemes():
    algorithms = Calibration.model_fields["algorithm"].annotation.__args__
    assert set(REWRITES) == set(algorithms)
    assert set().union(*REWRITES.values()) <= set(SCHEMES)


def test_auto_with_its_candidates():
    recipe = Recipe.model_validate(CALIBRATED.model_dump() | AUTO)
    assert recipe.decisions() >= {"bf16", "NVFP4", "W4A16"} and "auto" not in recipe.decisions()
    chosen = recipe.resolved("FP8_DYNAMIC")
    assert (chosen.mtp, chosen.mtp_auto, chosen.calibration) == (
        "FP8_DYNAMIC",
        None,
        recipe.calibration,
    )


def test_a_choice_drops_what_it_needs_no_more():
    assert find_recipe("glm-4.7.nvfp4-fp8", scheme="W4A16")[0].calibration is None
    recipe = Recipe.model_validate(CALIBRATED.model_dump() | TUNED)
    assert recipe.mtp_policy == "NVFP4" and "tuned" not in recipe.decisions()
    assert recipe.with_choices(scheme=None, mtp="bf16").mtp_tuned is None


def test_auto_on_the_command_line():
    recipe, _ = find_recipe("glm-4.7.nvfp4-fp8", mtp="auto")
    assert (recipe.mtp, recipe.mtp_auto, recipe.name) == (
        "auto",
        DEFAULT_AUTO,
        "glm-4.7.nvfp4-fp8-mtp-auto",
    )
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


def test_a_model_name_means_its_default_recipe():
    recipe, text = find_recipe("dsv4-flash")
    assert (recipe.name, recipe.default) == ("dsv4-flash.nvfp4-fp8", True)
    assert yaml.safe_load(text)["variant"] == "nvfp4-fp8"


@pytest.mark.parametrize(
    ("model", "scheme"),
    [("glm-4.7", "w4a16-fp8"), ("glm-4.7.w4a16-fp8", None), ("glm-4.7.nvfp4-fp8", "w4a16-fp8")],
)
def test_ways_to_ask_for_a_variant(model, scheme):
    assert find_recipe(model, scheme=scheme)[0].name == "glm-4.7.w4a16-fp8"


def test_a_recipe_file_of_ones_own(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(
        yaml.safe_dump(CALIBRATED.model_dump(mode="json") | {"model": "mine", "variant": "new"})
    )
    recipe, text = find_recipe(str(path))
    assert (recipe.name, text) == ("mine.new", path.read_text())
    with pytest.raises(RecipeError, match=r"a recipe file must exist; got nowhere\.yaml"):
        find_recipe("nowhere.yaml")


def test_scheme_on_the_command_line_replaces_every_quantized_group_and_no_other():
    kept, changed = find_recipe("qwen3.5-397b")[0], find_recipe("qwen3.5-397b", scheme="W8A16")[0]
    assert kept.backbone["linear_attention"] == changed.backbone["linear_attention"] == "bf16"
    assert {word for group, word in changed.backbone.items() if group != "linear_attention"} == {
        "W8A16"
    }
    assert (changed.mtp, changed.name) == (kept.mtp, "qwen3.5-397b.w8a16")


def test_mtp_on_the_command_line():
    recipe, _ = find_recipe("glm-4.7", mtp="FP8_DYNAMIC")
    assert (recipe.mtp, recipe.name) == ("FP8_DYNAMIC", "glm-4.7.nvfp4a16-fp8-mtp-fp8-dynamic")
    assert recipe.summary == (
        "FP8_DYNAMIC attention/dense_mlp/shared_experts, NVFP4A16 experts, MTP block "
        "FP8_DYNAMIC; no calibration"
    )
    with pytest.raises(RecipeError) as caught:
        find_recipe("glm-4.7", mtp="fp8_dynamo")
    assert message_of(caught).endswith("Did you mean FP8_DYNAMIC?")


@pytest.mark.parametrize(
    ("scheme", "meant"),
    [
        ("NVFP4A16_FP8", "glm-4.7.nvfp4a16-fp8"),
        ("Fp8-Dynamic", "glm-4.7.fp8-dynamic"),  # a variant before a scheme
        ("w8a16", "glm-4.7.w8a16"),
        ("fp8-block", "glm-4.7.fp8-block"),
    ],
)
def test_case_and_hyphens_do_not_count_on_the_command_line(scheme, meant):
    assert find_recipe("glm-4.7", scheme=scheme)[0].name == meant


@pytest.mark.parametrize("model", ["tiny-glm4-moe", "glm-4.7", "mimo-7b", "dsv4-flash"])
def test_every_scheme_works_on_the_command_line_also_those_that_need_batches(model):
    for name, scheme in SCHEMES.items():
        recipe, _ = find_recipe(model, scheme=name, mtp=name)
        assert {recipe.mtp, *recipe.backbone.values()} <= {name, "bf16", "source"}
        assert scheme.needs_calibration <= (recipe.calibration is not None)


@pytest.mark.parametrize(
    ("model", "choices", "block"),
    [
        ("mimo-7b", {"scheme": "NVFP4"}, "ultrachat-256x2048"),  # the default
        ("glm-4.7.w4a16-fp8", {"scheme": "FP8"}, "ultrachat-256x2048"),
        (
            "dsv4-pro.w4a16-fp8",
            {"scheme": "FP8"},
            "ultrachat-128x512-own-encoder",
        ),  # that of another variant
        ("tiny-glm4-moe", {"mtp": "auto"}, "problems-32x128"),
        ("mimo-7b", {"scheme": "NVFP4", "calibration": "Problems_32x128"}, "problems-32x128"),
        ("glm-4.7", {"scheme": "nvfp4-fp8", "calibration": "problems-32x128"}, "problems-32x128"),
    ],
)
def test_which_calibration_a_choice_takes(model, choices, block):
    calibration = find_recipe(model, **choices)[0].calibration
    assert calibration == Calibration.model_validate(calibrations()[block])


@pytest.mark.parametrize(
    ("model", "choices", "says"),
    [
        ("dsv4-flsh", {}, "or a recipe file; got 'dsv4-flsh'. Did you mean dsv4-flash?"),
        ("something-else", {}, "got 'something-else'. See `keepmtp ls`."),
        (
            "glm-4.7",
            {"scheme": "nvfp5"},
            "a variant of glm-4.7 (fp8-dynamic, nvfp4-fp8, nvfp4a16-fp8, w4a16-fp8, fp8-static, "
            "nvfp4-mtp-auto, "
            "w4a16-gptq) or a scheme",
        ),
        ("glm-4.7", {"mtp": "nothing"}, "got 'nothing'. See `keepmtp ls schemes`."),
        (
            "glm-4.7",
            {"scheme": "NVFP4", "calibration": "ultrachat"},
            "--calibration: must be one of ultrachat-256x2048",
        ),
        (
            "glm-4.7",
            {"calibration": "problems-32x128"},
            "--calibration: must be left out where no scheme needs batches; got problems-32x128 "
            "for "
            "glm-4.7.nvfp4a16-fp8. Remove it.",
        ),
    ],
)
def test_command_lines_that_are_refused(model, choices, says):
    with pytest.raises(RecipeError) as caught:
        find_recipe(model, **choices)
    assert says in message_of(caught)


@pytest.mark.parametrize("option", ["scheme", "mtp"])
@pytest.mark.parametrize("typo", ["fp8-dynamc", "w4a61", "NVFP-4", "FP8_BLOK", "sorce", "aut"])
def test_every_suggestion_works(option, typo):
    """The word after "Did you mean" is taken in the same place of the same command."""
    suggested = suggestion(model="glm-4.7", **{option: typo})
    if suggested:
        find_recipe("glm-4.7", **{option: suggested})


def suggestion(**words: str) -> str:
    with pytest.raises(RecipeError) as caught:
        find_recipe(**words)
    return message_of(caught).partition("Did you mean ")[2].rstrip("?")


def test_a_hub_id_names_the_recipe_of_that_release():
    assert find_recipe("zai-org/GLM-4.7")[0].name == "glm-4.7.nvfp4a16-fp8"
    with pytest.raises(RecipeError, match="got 'models/tiny-glm4-moe'"):
        find_recipe("models/tiny-glm4-moe")  # a folder, not a release


def test_summaries_are_short_and_every_model_has_a_data_free_recipe():
    data_free = {recipe.model for recipe in shipped_recipes() if recipe.calibration is None}
    for recipe in shipped_recipes():
        assert len(recipe.summary) <= 110 and not recipe.summary.endswith(".")
        assert ("no calibration" in recipe.summary) <= (recipe.calibration is None)
        assert recipe.model in data_free


@pytest.mark.parametrize("name", [name for name in SHIPPED if "nvfp4-fp8" in name])
def test_the_data_free_alternative_exists_and_is_the_nearest(name):
    recipe, _ = find_recipe(name)
    other, _ = find_recipe(recipe.model, scheme=data_free_alternative(recipe))
    assert other.calibration is None
    assert other.backbone == {
        group: SCHEMES[w].data_free or w if w in SCHEMES else w
        for group, w in recipe.backbone.items()
    }
    assert other.mtp == recipe.mtp


def test_the_data_free_alternative_where_no_recipe_is_one():
    recipe = CALIBRATED.model_copy(update={"model": "of-my-own"})
    assert data_free_alternative(recipe) == "NVFP4A16"


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
    folder = Path(__file__).parent.parent.parent / recipe.source
    if not (folder / "config.json").is_file():
        pytest.skip(f"{recipe.source} is not in this checkout")
    source = open_source(folder)
    for policy in recipe.mtp_auto.candidates if recipe.mtp_auto else (recipe.mtp,):
        assert_takes_effect(make_plan(recipe.resolved(policy), source))


def test_the_rows_of_the_small_models_are_what_their_generator_writes(tmp_path, monkeypatch):
    """And what they are evaluated on is nothing that they were trained or calibrated on."""
    models = Path(__file__).parent.parent.parent / "models"
    if not (models / "train" / "problems.py").is_file():
        pytest.skip("models/train is not in this checkout")
    monkeypatch.syspath_prepend(str(models / "train"))
    spec = importlib.util.spec_from_file_location("problems", models / "train" / "problems.py")
    problems = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "problems", problems)
    spec.loader.exec_module(problems)
    problems.write_calibration_rows(tmp_path / "problems.jsonl")
    assert (tmp_path / "problems.jsonl").read_bytes() == (models / "problems.jsonl").read_bytes()
    problems.write_held_out_rows(tmp_path / "held_out.jsonl")
    assert (tmp_path / "held_out.jsonl").read_bytes() == (models / "held_out.jsonl").read_bytes()
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
    cache = ["kv_cache: FP8"] * bool(plan.recipe.kv_cache)
    assert plan.needs_calibration == plan.recipe.calibrated_schemes() + cache
    matrices = [
        tensor for tensor in plan.tensors if tensor.part == "mtp" and len(tensor.shape) == 2
    ]
    forms = {tensor.scheme for tensor in matrices}
    if plan.recipe.mtp == "bf16":
        assert forms == {""}
    assert {"glue", "attention"} <= {tensor.role for tensor in matrices}


# --- Recipes that do not fit the model they are for -----------------------------------------------


def planned(tmp_path: Path, **changes) -> Plan:
    raw = find_recipe("glm-4.7")[0].model_dump() | changes
    source = tmp_path / "source"
    if not source.exists():
        releases.write_checkpoint(source, *releases.source_layout("glm-4.7", size="tiny"))
    return make_plan(Recipe.model_validate(raw), open_source(source))


BACKBONE = {"attention": "bf16", "dense_mlp": "bf16", "shared_experts": "bf16", "experts": "W4A16"}
NOWHERE = r"re:model\.layers\.77\..*"
UNFIT = [
    (
        {"backbone": {group: BACKBONE[group] for group in BACKBONE if group != "shared_experts"}},
        "backbone must say what happens to shared_experts; got nothing",
    ),
    ({"mtp": {"experts": "bf16"}}, "mtp must say what happens to attention; got nothing"),
    (
        {"backbone": BACKBONE | {"linear_attention": "bf16"}},
        "backbone group linear_attention must match a module of the model; got no match",
    ),
    ({"mtp": BACKBONE | {"experts": "bf16"}}, "mtp group dense_mlp must match a module"),
    (
        {"overrides": ({"modules": NOWHERE, "scheme": "bf16"},)},
        f"pattern {NOWHERE!r} must match a module of the model; got no match",
    ),
    ({"keep": (NOWHERE,)}, f"pattern {NOWHERE!r} must match a module of the model; got no match"),
    # As a prefix it is how other tools hit layers 10 to 19.
    ({"overrides": ({"modules": "model.layers.1.self_attn", "scheme": "bf16"},)}, "got no match"),
    (
        {"overrides": ({"modules": "model.layers.1.self_attn.q_proj", "scheme": "bf16"},)},
        "model.layers.1.self_attn.qkv_proj, so they need one scheme; got ",
    ),
    ({"family": "deepseek_v3"}, "family must be that of"),
]


@pytest.mark.parametrize(("changes", "says"), UNFIT)
def test_a_recipe_that_does_not_fit_its_model(tmp_path, changes, says):
    with pytest.raises(RecipeError) as caught:
        planned(tmp_path, **changes)
    assert says in message_of(caught, "glm-4.7.nvfp4a16-fp8")


def test_override_takes_effect_on_what_it_names(tmp_path):
    overrides = ({"modules": r"re:model\.layers\.1\.mlp\.experts\..*", "scheme": "W8A16"},)
    plan = planned(tmp_path, overrides=overrides)
    by_layer = {tensor.layer: tensor.scheme for tensor in plan.tensors if tensor.role == "experts"}
    assert by_layer == {1: "W8A16", 2: "NVFP4A16", 3: ""}


def test_mtp_by_groups(tmp_path):
    plan = planned(
        tmp_path, mtp={"attention": "FP8_DYNAMIC", "shared_experts": "bf16", "experts": "NVFP4A16"}
    )
    schemes = {t.role: t.scheme for t in plan.tensors if t.part == "mtp" and len(t.shape) == 2}
    assert schemes == {
        "attention": "FP8_DYNAMIC",
        "shared_experts": "",
        "experts": "NVFP4A16",
        "router": "",
        "glue": "",
        "embedding": "",
        "head": "",
    }


@pytest.mark.parametrize(
    ("model", "backbone", "says"),
    [
        (
            "glm-4.5-air",
            {"dense_mlp": "W4A16"},
            "W4A16 needs K divisible by 128; got K=10944 in model.layers.0",
        ),
        (
            "glm-4.5-air",
            {"dense_mlp": "FP8_BLOCK"},
            "needs N divisible by 128 where modules are fused; got N=10944",
        ),
    ],
)
def test_widths_a_scheme_cannot_take(model, backbone, says, tmp_path):
    """GLM-4.5-Air's dense layer is 10944 wide: 85.5 blocks of 128."""
    recipe = find_recipe(model)[0]
    recipe = recipe.model_copy(update={"backbone": recipe.backbone | backbone})
    source = open_source(releases.write_checkpoint(tmp_path, *releases.thin_layout(model)))
    with pytest.raises(RecipeError) as caught:
        make_plan(recipe, source)
    assert says in message_of(caught)


def test_the_narrow_last_shard_may_end_in_a_part_block(tmp_path):
    """kv_a_proj_with_mqa is 576 wide and the last of its fused module, which vLLM's block check
    allows.
    """
    recipe = find_recipe("glm-5", scheme="fp8-block")[0]
    plan = make_plan(
        recipe, open_source(releases.write_checkpoint(tmp_path, *releases.thin_layout("glm-5")))
    )
    shapes = {
        t.name: t.outputs[1].shape
        for t in plan.tensors
        if "kv_a_proj_with_mqa" in t.name and t.scheme
    }
    assert set(shapes.values()) == {(5, 48)}
