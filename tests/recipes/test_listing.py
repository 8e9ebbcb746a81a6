"""What `keepmtp ls` reads of the shipped recipes, without validating them."""

import json
import os
import shutil
import sys
from pathlib import Path

from commands import ROOT, captured
from keepmtp.recipes.model_file import listed, model_files
from releases import shipped_recipes


def test_every_shipped_recipe_is_listed_as_it_is_read():
    rows = {row["recipe"]: row for row in listed()}
    recipes = {recipe.name: recipe for recipe in shipped_recipes()}
    assert rows.keys() == recipes.keys()
    assert {recipe.model for recipe in recipes.values()} == {path.stem for path in model_files()}
    for name, recipe in recipes.items():
        row = rows[name]
        for key in ("model", "variant", "default", "family", "source"):
            assert row[key] == getattr(recipe, key)
        assert row["what"] == recipe.summary
        assert (row["batches"] == "needed") == (recipe.calibration is not None)


def test_a_model_has_one_default_which_comes_first_and_one_origin():
    """`keepmtp ls MODEL` names family and source once, and the bare name in one command."""
    by_model = {}
    for row in listed():
        by_model.setdefault(row["model"], []).append(row)
    assert list(by_model) == sorted(by_model)
    for rows in by_model.values():
        assert [row["default"] for row in rows] == [True, *[False] * (len(rows) - 1)]
        assert len({(row["family"], row["source"]) for row in rows}) == 1


def listed_without(files: tuple[str, ...], folder: Path) -> set[str]:
    """The recipes of small models that a copy of the package lists where these files of models/ are
    missing.
    """
    package = folder / "keepmtp"
    for part in ("recipes", "cli", "models"):
        shutil.copytree(
            ROOT / part, package / part, ignore=shutil.ignore_patterns("train", "__pycache__")
        )
    for file in ("__init__.py", "__main__.py"):
        shutil.copy(ROOT / file, package / file)
    for name in files:
        path = package / "models" / name
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
    words = [sys.executable, "-m", "keepmtp", "ls", "models", "--json"]
    done = captured(
        words,
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(folder)},
        check=True,
    )
    rows = json.loads(done.stdout)["models"]
    assert len(rows) > 50
    return {row["recipe"] for row in rows if row["recipe"].startswith("tiny-")}


def test_what_cannot_be_run_is_not_listed(tmp_path):
    tiny = [row for row in listed() if row["recipe"].startswith("tiny-")]
    assert listed_without((), tmp_path / "whole") == {row["recipe"] for row in tiny}
    no_rows = listed_without(("problems.jsonl", "docs.jsonl"), tmp_path / "rows")
    assert no_rows == {row["recipe"] for row in tiny if row["batches"] == "-"}
    models = ("tiny-docs", "tiny-glm4-moe", "tiny-qwen3_5")
    assert listed_without(models, tmp_path / "none") == set()
