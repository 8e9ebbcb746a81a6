"""What `keepmtp ls` reads of the shipped recipes, without validating them."""

from keepmtp.recipes.find import shipped_recipes
from keepmtp.recipes.listing import listed, model_files


def test_every_shipped_recipe_is_listed_as_it_is_read():
    rows = {row.name: row for row in listed()}
    recipes = {recipe.name: recipe for recipe in shipped_recipes()}
    assert rows.keys() == recipes.keys()
    assert {recipe.model for recipe in recipes.values()} == {path.stem for path in model_files()}
    for name, recipe in recipes.items():
        row = rows[name]
        assert (row.model, row.variant, row.is_default) == (recipe.model, recipe.variant, recipe.default)
        assert (row.summary, row.family, row.source) == (recipe.summary, recipe.family, recipe.source)
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
