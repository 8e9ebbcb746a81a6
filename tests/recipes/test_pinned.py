"""A recipe with commits in place of branches: the values alone change."""

import difflib

import pytest
import yaml
from keepmtp.recipes.find import named_file, shipped_recipes
from keepmtp.recipes.model_file import calibrations, flat_recipes
from keepmtp.recipes.pinned import moves, pinned_text

MODEL, DATASET = "a" * 40, "b" * 40
SHIPPED = sorted({recipe.model for recipe in shipped_recipes()})


def commit_of(kind: str, name: str, revision: str) -> str:
    assert name and moves(revision)
    return MODEL if kind == "model" else DATASET


def changed(text: str, pinned: str) -> list[str]:
    lines = difflib.ndiff(text.splitlines(), pinned.splitlines())
    return [line for line in lines if line[:1] in "+-"]


def test_a_model_file_keeps_its_comments():
    text = named_file("glm-4.7")[0].path.read_text()
    pinned = pinned_text("# mine\n" + text, commit_of)
    assert pinned.startswith("# mine\n") and f"revision: {MODEL}" in pinned
    assert len(changed("# mine\n" + text, pinned)) == 10, (
        "the revision, and the lines of the calibrated variants"
    )
    flat = flat_recipes(yaml.safe_load(pinned), "mine")
    assert flat["nvfp4-fp8"]["calibration"] == calibrations()["ultrachat-256x2048"] | {
        "dataset_revision": DATASET
    }
    assert flat["w4a16-fp8"] == flat_recipes(yaml.safe_load(text), "mine")["w4a16-fp8"] | {
        "revision": MODEL
    }


def at_commit(calibration: dict) -> dict:
    """The block with the commit in it, for each dataset of a mix."""
    also = [texts | {"dataset_revision": DATASET} for texts in calibration.get("also", ())]
    return calibration | {"dataset_revision": DATASET} | ({"also": also} if also else {})


@pytest.mark.parametrize("model", SHIPPED)
def test_only_revisions_change_in_every_shipped_file(model):
    text = named_file(model)[0].path.read_text()
    pinned = pinned_text(text, commit_of)
    before, after = (flat_recipes(yaml.safe_load(each), model) for each in (text, pinned))
    for variant, recipe in before.items():
        wanted = recipe | {"revision": MODEL if moves(recipe["revision"]) else recipe["revision"]}
        if recipe["calibration"] and moves(recipe["calibration"]["dataset_revision"]):
            wanted["calibration"] = at_commit(recipe["calibration"])
        if "mtp_source" in recipe:
            wanted["mtp_source"] = recipe["mtp_source"] | {"revision": MODEL}
        assert after[variant] == wanted
    assert pinned_text(pinned, commit_of) == pinned


def test_a_flat_recipe_and_a_block_of_the_file():
    text = (
        "source: org/Model  # ours\nrevision: 'v1'   # a tag\n"
        "calibration:\n  dataset: org/data\n  # the newest\n  dataset_revision: main\n"
        "evaluation: {task: gsm8k, dataset_revision: v2}\n"
    )
    assert pinned_text(text, commit_of) == (
        f"source: org/Model  # ours\nrevision: {MODEL}   # a tag\n"
        f"calibration:\n  dataset: org/data\n  # the newest\n  dataset_revision: {DATASET}\n"
        f"evaluation: {{task: gsm8k, dataset_revision: {DATASET}}}\n"
    )


def test_each_task_of_a_list_gets_its_commit():
    text = (
        "evaluation:\n- {task: gsm8k, dataset_revision: v2}\n- "
        "{task: gsm8k_platinum, dataset_revision: main}\n"
    )
    assert pinned_text(text, commit_of).count(DATASET) == 2


def test_a_commit_of_digits_is_still_a_word():
    pinned = pinned_text("source: org/m\nrevision: main\n", lambda *_: "0" * 39 + "1")
    assert yaml.safe_load(pinned)["revision"] == "0" * 39 + "1"


def test_what_does_not_move_is_left_alone():
    text = f"source: org/m\nrevision: {MODEL}\ncalibration: problems-32x128\n"
    assert pinned_text(text, commit_of) == text
    assert not moves("local") and not moves(None) and moves("main") and moves("v1.0")


def test_each_revision_is_asked_for_once():
    asked = []
    text = named_file("glm-5")[0].path.read_text()
    pinned_text(text, lambda *words: asked.append(words) or MODEL)
    assert len(asked) == len(set(asked))
