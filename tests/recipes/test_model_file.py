"""Model files: what a variant expands to, what wins, and what is refused and how."""

import copy
from pathlib import Path

import pytest
import yaml
from keepmtp.recipes.errors import RecipeError
from keepmtp.recipes.find import find_recipe, read_file, shipped_recipes
from keepmtp.recipes.model_file import BLOCKS, calibrations, flat_recipes, flat_text, model_files
from keepmtp.recipes.schema import Calibration, Recipe

MINE = {
    "model": "mine",
    "family": "glm4_moe",
    "source": "org/Mine",
    "revision": "main",
    "groups": ["attention", "dense_mlp", "experts"],
    "default": "plain",
    "variants": {
        "plain": {
            "experts": "W4A16",
            "rest": "FP8_BLOCK",
            "mtp": "bf16",
            "calibration": None,
            "summary": "no data",
        },
        "auto": {
            "rest": "NVFP4",
            "mtp": "auto",
            "calibration": "ultrachat-256x2048",
            "summary": "with data",
        },
    },
    "mtp_auto": {"min_acceptance": 0.9, "candidates": ["bf16", {"experts": "NVFP4"}]},
    "gates": {"max_drop": 0.05},
}


def write(path: Path, raw: object) -> str:
    path.write_text(yaml.safe_dump(raw, sort_keys=False))
    return str(path)


@pytest.fixture
def mine(tmp_path) -> str:
    return write(tmp_path / "mine.yaml", MINE)


def test_a_variant_is_expanded_to_the_whole_recipe(mine):
    recipe, text = find_recipe(mine)
    assert recipe == Recipe.model_validate(
        {
            "model": "mine",
            "variant": "plain",
            "default": True,
            "summary": "no data",
            "family": "glm4_moe",
            "source": "org/Mine",
            "revision": "main",
            "backbone": {"attention": "FP8_BLOCK", "dense_mlp": "FP8_BLOCK", "experts": "W4A16"},
            "mtp": "bf16",
            "calibration": None,
            "gates": {"max_drop": 0.05},
        }
    )
    assert "rest" not in text and "variants" not in text


def test_a_calibration_is_named_or_written_out(tmp_path, mine):
    named = find_recipe(mine, scheme="auto")[0].calibration
    assert named == Calibration.model_validate(calibrations()["ultrachat-256x2048"])
    raw = copy.deepcopy(MINE)
    raw["variants"]["auto"]["calibration"] = named.model_dump() | {"samples": 7}
    assert find_recipe(write(tmp_path / "own.yaml", raw), scheme="auto")[0].calibration.samples == 7


def test_training_of_the_file_is_for_the_variants_that_train(tmp_path):
    settings = {
        "mtp": "bf16",
        "steps": 9,
        "batch_size": 1,
        "learning_rate": 0.1,
        "seed": 0,
        "loss": "tv",
    }
    settings |= {"draft_steps": 1, "decay": 1.0}
    raw = copy.deepcopy(MINE) | {"mtp_tuned": settings}
    raw["variants"]["tuned"] = {**MINE["variants"]["auto"], "mtp": "tuned"}
    path = write(tmp_path / "mine.yaml", raw)
    assert (
        find_recipe(path)[0].mtp_tuned is None
        and find_recipe(path, scheme="tuned")[0].mtp_tuned.steps == 9
    )
    raw["variants"]["tuned"]["mtp_tuned"] = settings | {"steps": 5}
    assert find_recipe(write(tmp_path / "own.yaml", raw), scheme="tuned")[0].mtp_tuned.steps == 5
    del raw["variants"]["tuned"]
    with pytest.raises(RecipeError, match="mtp_tuned must be left out where mtp is not tuned"):
        find_recipe(write(tmp_path / "none.yaml", raw))


@pytest.mark.parametrize("key", [key for key in BLOCKS if key != "mtp_tuned"])
def test_the_block_of_a_variant_replaces_that_of_the_file(tmp_path, key):
    of_the_file = {
        "mtp_auto": {"min_acceptance": 0.9, "candidates": ["bf16"]},
        "overrides": [{"modules": "a", "scheme": "bf16"}],
        "keep": ["a"],
        "mtp_source": {"source": "org/block", "revision": "main"},
        "format": "modelopt",
        "kv_cache": "FP8",
        "search": "mse",
        "evaluation": {"shots": 0, "k": 2},
        "gates": {"max_drop": 0.05, "min_acceptance": 0.9},
    }[key]
    of_the_variant = {
        "mtp_auto": {"min_acceptance": 0.8, "candidates": ["FP8_DYNAMIC"]},
        "overrides": [{"modules": "b", "scheme": "bf16"}],
        "keep": [],
        "mtp_source": {"source": "org/other", "revision": "main"},
        "format": "compressed-tensors",
        "kv_cache": None,
        "search": None,
        "evaluation": {"shots": 4},
        "gates": {"max_drop": 0.01},
    }[key]
    raw = copy.deepcopy(MINE) | {key: of_the_file}
    recipe = find_recipe(write(tmp_path / "mine.yaml", raw), scheme="auto")[0]
    assert recipe == Recipe.model_validate(recipe.model_dump() | {key: of_the_file})
    raw["variants"]["auto"][key] = of_the_variant
    other = find_recipe(write(tmp_path / "mine.yaml", raw), scheme="auto")[0]
    assert recipe != other == Recipe.model_validate(recipe.model_dump() | {key: of_the_variant}), (
        "not merged"
    )


def without(*path: str) -> dict:
    raw = copy.deepcopy(MINE)
    *parents, last = path
    holder = raw
    for key in parents:
        holder = holder[key]
    del holder[last]
    return raw


def plain(**changes: object) -> dict:
    raw = copy.deepcopy(MINE)
    raw["variants"]["plain"] |= changes
    return raw


AT = "variants.plain"
NO_DEFAULT = "Add it: nothing that changes numbers has a default"


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (
            MINE | {"familly": "x"},
            "familly is not a key of a model file; got 'x'. Did you mean family?",
        ),
        (MINE | {"default": "plan"}, "default: must be a variant; got 'plan'. Did you mean plain?"),
        (
            MINE | {"default": ["plain"]},
            "default: must be a variant; got ['plain']. Name one of them.",
        ),
        (
            MINE | {"variants": {}},
            "variants: must be a mapping of names; got {}. Name one variant or more.",
        ),
        (
            MINE | {"variants": ["plain"]},
            "variants: must be a mapping of names; got ['plain']. Name one variant or more.",
        ),
        (
            MINE | {"groups": "attention"},
            "groups: must be a list; got 'attention'. Name the model's groups among attention, ",
        ),
        (
            MINE | {"groups": ["expert"]},
            "groups: must be one of the module groups attention, linear_attention, dense_mlp, "
            "shared_experts, experts; got 'expert'. Did you mean experts?",
        ),
        (
            without("variants", "auto"),
            "mtp_auto must be left out where mtp is not auto; got no variant with mtp: auto.",
        ),
        (
            plain(expets="bf16"),
            f"{AT}: expets is not a key of a variant; got 'bf16'. Did you mean experts?",
        ),
        (
            plain(shared_experts="bf16"),
            f"{AT}: shared_experts is not a key of a variant; got 'bf16'. The keys are ",
        ),
        (
            plain(attention="bf16", dense_mlp="bf16"),
            (
                f"{AT}: rest must be left out where every group is named; got rest: FP8_BLOCK. "
                "Remove it."
            ),
        ),
        (
            without("variants", "plain", "rest"),
            f"{AT}: must say what happens to attention; got nothing. Give it a word, or give rest.",
        ),
        (plain(rest="FP8_BLOK"), f"{AT}: backbone.attention: must be one of source, bf16, "),
        (
            plain(calibration="ultrachat"),
            f"{AT}: calibration: must be null, a block, or one of {', '.join(calibrations())}; "
            "got 'ultrachat'. Did you mean ultrachat-",
        ),
        (
            plain(calibration={"sample": 3}),
            f"{AT}: calibration.sample is not a key of a recipe; got 3. Did you mean samples?",
        ),
        (
            plain(calibration="ultrachat-256x2048"),
            (
                f"{AT}: recipe: calibration must be null where no scheme needs it; got a dataset. "
                "Remove it."
            ),
        ),
        (
            MINE | {"variants": {"plain": "W4A16", "auto": MINE["variants"]["auto"]}},
            f"{AT}: a variant is a mapping; got 'W4A16'. Write {{group: scheme, mtp: ...}}.",
        ),
    ],
)
def test_what_is_refused(tmp_path, raw, says):
    path = tmp_path / "mine.yaml"
    write(path, raw)
    with pytest.raises(RecipeError) as caught:
        find_recipe(str(path))
    assert str(caught.value).startswith(f"{path}: {says}")


@pytest.mark.parametrize("key", ["model", "family", "source", "revision", "groups", "default"])
def test_missing_key_of_the_file(tmp_path, key):
    with pytest.raises(RecipeError) as caught:
        find_recipe(write(tmp_path / "mine.yaml", without(key)))
    assert f"mine.yaml: {key} must be given; got nothing. {NO_DEFAULT}." in str(caught.value)


@pytest.mark.parametrize("key", ["summary", "mtp", "calibration"])
def test_missing_key_of_a_variant(tmp_path, key):
    with pytest.raises(RecipeError) as caught:
        find_recipe(write(tmp_path / "mine.yaml", without("variants", "plain", key)))
    assert f"{AT}: {key} must be given; got nothing. {NO_DEFAULT}." in str(caught.value)


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
    recipe = flat_recipes(MINE, "mine")["auto"]
    assert flat_text(recipe).startswith(
        "model: mine\nvariant: auto\ndefault: false\nsummary: with data\nfamily: "
        "glm4_moe\nsource: org/Mine\n"
        "revision: main\nbackbone:\n  attention: NVFP4\n  dense_mlp: NVFP4\n  experts: "
        "NVFP4\nmtp: auto\nmtp_auto:\n"
        "  min_acceptance: 0.9\n  candidates:\n    - bf16\n    - "
        "{experts: NVFP4}\ncalibration:\n  algorithm: minmax\n"
    )
    assert flat_text(recipe).endswith("gates:\n  max_drop: 0.05\n")


def test_shipped_files_are_named_like_their_models_and_name_every_calibration():
    raws = {path.stem: yaml.safe_load(path.read_text()) for path in model_files()}
    assert all(raw["model"] == stem for stem, raw in raws.items())
    named = {
        variant["calibration"] for raw in raws.values() for variant in raw["variants"].values()
    }
    assert named == {None, *calibrations()}, "each block is used"
    for block in calibrations().values():
        Calibration.model_validate(block)
