"""What a search found, as a recipe that a person can read, edit and run again without a search.

In: the choices of a search, and a word for each unit. Out: a recipe without `auto`: for each module
group the word that most of its bytes have, and overrides for the units with another one, a line for
all layers with the same modules.

Easy to get wrong: overrides are tried in their order, and the first match wins. Those of the user
come first: what they name was never searched.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

from ...recipes.errors import RecipeError
from ...recipes.family import INDEX, HFName
from ...recipes.model_file import flat_text, summary_of
from ...recipes.schema import AUTO, Override, Recipe, validated
from ...recipes.schemes import REWRITES
from .choices import Assignment, Choices
from .plan import Plan, make_plan

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


def found_recipe(choices: Choices, assignment: Assignment) -> Recipe:
    """The recipe of an assignment. Its calibration block is that of the search, needed or not."""
    recipe = choices.recipe
    weights: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    for unit in choices.units:
        weights[unit.part, unit.role][assignment[unit.name]] += unit.num_weights
    words = {group: counts.most_common(1)[0][0] for group, counts in weights.items()}
    backbone = dict(recipe.backbone)
    for group, word in recipe.backbone.items():
        if word == AUTO:
            backbone[group] = words.get(("backbone", group), "bf16")
    changed: dict[str, Any] = {"backbone": backbone, "budget": None, "backbone_auto": None}
    if recipe.mtp == AUTO:
        of_block = {group: word for (part, group), word in words.items() if part == "mtp"}
        same = {*of_block.values()}
        changed["mtp"] = same.pop() if len(same) == 1 else of_block or "bf16"
    overrides = (*recipe.overrides, *_overrides(choices, assignment, words))
    made = recipe.model_copy(update=changed | {"overrides": overrides})
    summary = summary_of(made.backbone, made.mtp, is_calibrated=True)
    return made.model_copy(
        update={"summary": f"{summary}, and {len(overrides)} overrides: found for {recipe.budget}"}
    )


def _overrides(
    choices: Choices, assignment: Assignment, words: Mapping[tuple[str, str], str]
) -> Iterator[Override]:
    """One for all layers whose modules differ in the number of the layer alone."""
    layers: dict[tuple[str, tuple[str, ...]], list[int]] = defaultdict(list)
    for unit in choices.units:
        word, modules = assignment[unit.name], [tensor.module for tensor in unit.options[0].tensors]
        if word != words[unit.part, unit.role]:
            number = _NUMBER.search(modules[0])
            layers[word, tuple(sorted({*map(_templated, modules)}))].append(
                int(number[0]) if number else 0
            )
    for (word, templates), numbers in sorted(layers.items()):
        pattern = f"(?:{'|'.join(templates)})".replace(
            "{}", f"(?:{'|'.join(map(str, sorted(numbers)))})"
        )
        yield Override(modules=f"re:{pattern}", scheme=word)


def _templated(module: HFName) -> str:
    """A module's name as a regex, with `{}` for its layer and any number for its expert."""
    literal, *others = map(re.escape, _NUMBER.split(module))
    return literal + "{}" * bool(others) + INDEX.join(others)


def found_plan(choices: Choices, assignment: Assignment, *, shard_bytes: int) -> Plan:
    """The plan of that recipe, which is the assignment, unit by unit.

    Raises:
        RecipeError: a unit has another word: an override matches what it was not made for.
    """
    base, recipe = choices.base, found_recipe(choices, assignment)
    plan = make_plan(
        recipe, base.source, shard_bytes=shard_bytes, trust_remote_code=base.trust_remote_code
    )
    schemes = {tensor.name: (tensor.fate, tensor.scheme) for tensor in plan.tensors}
    for unit in choices.units:
        for tensor in unit.option(assignment[unit.name]).tensors:
            if schemes[tensor.name] != (tensor.fate, tensor.scheme):
                rule = (
                    f"the plan that was found must give {tensor.module} the word "
                    f"{assignment[unit.name]}"
                )
                got, cure = schemes[tensor.name][1] or "plain", "Please report this recipe"
                raise RecipeError(recipe.name, rule, got=got, cure=cure)
    return plan


def found_text(recipe: Recipe) -> str:
    """The recipe as a file. A calibration block that nothing needs any more is left out, for it
    would be refused.
    """
    calibration = recipe.calibration
    assert calibration is not None, f"{recipe.name}: a search has batches"
    raw = recipe.model_dump(mode="json", exclude_defaults=True)
    if (
        calibration.algorithm != "minmax"
        and not REWRITES[calibration.algorithm] & recipe.decisions()
    ):
        calibration = calibration.model_copy(update={"algorithm": "minmax"})
    raw["calibration"] = None
    if recipe.uses_batches():
        raw["calibration"] = calibration.model_dump(mode="json", exclude_defaults=True)
    validated(raw, "the recipe that was found")
    return flat_text(raw)
