"""What `keepmtp ls` reads of the shipped recipes, without validating them."""

from keepmtp.recipes import model_file
from keepmtp.recipes.find import shipped_recipes
from keepmtp.recipes.model_file import listed, model_files


def test_every_shipped_recipe_is_listed_as_it_is_read():
    rows = {row.name: row for row in listed()}
    recipes = {recipe.name: recipe for recipe in shipped_recipes()}
    assert rows.keys() == recipes.keys()
    assert {recipe.model for recipe in recipes.values()} == {path.stem for path in model_files()}
    for name, recipe in recipes.items():
        row = rows[name]
        assert (row.model, row.variant, row.is_default) == (
            recipe.model,
            recipe.variant,
            recipe.default,
        )
        assert (row.summary, row.family, row.source) == (
            recipe.summary,
            recipe.family,
            recipe.source,
        )
        assert row.needs_batches == (recipe.calibration is not None)


def test_a_model_has_one_default_which_comes_first_and_one_origin():
    """`keepmtp ls MODEL` names family and source once, and the bare name in one command."""
    by_model = {}
    for row in listed():
        by_model.setdefault(row.model, []).append(row)
    assert list(by_model) == sorted(by_model)
    for rows in by_model.values():
        assert [row.is_default for row in rows] == [True, *[False] * (len(rows) - 1)]
        assert len({(row.family, row.source) for row in rows}) == 1


def test_what_cannot_be_run_is_not_listed(tmp_path, monkeypatch):
    """Recipes of small models whose folders, or whose texts, are missing."""
    every = [row for row in listed() if row.name.startswith("tiny-")]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(model_file, "_HOME", tmp_path)
    assert {row.name for row in listed()}.isdisjoint(row.name for row in every)
    for row in every:
        (tmp_path / row.source).mkdir(parents=True, exist_ok=True)
    there = [row for row in listed() if row.name.startswith("tiny-")]
    assert there == [row for row in every if not row.needs_batches]
