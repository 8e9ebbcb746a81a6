"""What a search found, as a recipe that a person can read, edit and run again without a search.

In: the choices of a search, and a word for each unit. Out: a recipe without `auto`: for each module
group the word that most of its bytes have, and overrides for the units with another one, a line for
all layers with the same modules.

Easy to get wrong: overrides are tried in their order, and the first match wins. Those of the user
come first: what they name was never searched.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence
from itertools import groupby
from typing import Any

from ...recipes.errors import RecipeError
from ...recipes.family import INDEX, HFName
from ...recipes.model_file import flat_text, summary_of
from ...recipes.schema import AUTO, Override, Recipe, validated
from ...recipes.schemes import REWRITES
from .choices import Assignment, Choices, ChoiceUnit
from .plan import Plan, make_plan

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


def found_recipe(choices: Choices, assignment: Assignment) -> Recipe:
    """The recipe of an assignment. Its calibration block is that of the search, needed or not."""
    recipe = choices.recipe
    words = _words_of_groups(choices.units, assignment)
    changed: dict[str, Any] = {
        "backbone": {
            g: words.get(("backbone", g), "bf16") if w == AUTO else w
            for g, w in recipe.backbone.items()
        },
        "budget": None,
        "backbone_auto": None,
    }
    if recipe.mtp == AUTO:
        of_block = {group: word for (part, group), word in words.items() if part == "mtp"}
        same = {*of_block.values()}
        changed["mtp"] = same.pop() if len(same) == 1 else of_block or "bf16"
    exceptions = [
        unit for unit in choices.units if assignment[unit.name] != words[unit.part, unit.role]
    ]
    overrides = (*recipe.overrides, *_overrides(exceptions, assignment))
    made = recipe.model_copy(update=changed | {"overrides": overrides})
    summary = summary_of(made.backbone, made.mtp, is_calibrated=True)
    return made.model_copy(
        update={"summary": f"{summary}, and {len(overrides)} overrides: found for {recipe.budget}"}
    )


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
                cure = "Please report this recipe"
                raise RecipeError(
                    recipe.name, rule, got=schemes[tensor.name][1] or "plain", cure=cure
                )
    return plan


def found_text(recipe: Recipe) -> str:
    """The recipe as a file. A calibration block that nothing needs any more is left out, for it
    would be refused.
    """
    calibration = recipe.calibration
    assert calibration is not None, f"{recipe.name}: a search has batches"
    if not recipe.uses_batches():
        calibration = None
    elif (
        calibration.algorithm != "minmax"
        and not REWRITES[calibration.algorithm] & recipe.decisions()
    ):
        calibration = calibration.model_copy(update={"algorithm": "minmax"})
    raw = recipe.model_dump(mode="json", exclude_defaults=True)
    raw["calibration"] = calibration and calibration.model_dump(mode="json", exclude_defaults=True)
    validated(raw, "the recipe that was found")
    return flat_text(raw)


def _words_of_groups(
    units: Iterable[ChoiceUnit], assignment: Assignment
) -> dict[tuple[str, str], str]:
    """(part, group) -> the word of most of its weights."""
    weights: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    for unit in units:
        weights[unit.part, unit.role][assignment[unit.name]] += unit.num_weights
    return {group: counts.most_common(1)[0][0] for group, counts in weights.items()}


# --- overrides
# --------------------------------------------------------------------------------------------------


def _overrides(units: Sequence[ChoiceUnit], assignment: Assignment) -> list[Override]:
    """One for all layers whose modules differ in the number of the layer alone."""
    layers: dict[tuple[str, tuple[str, ...]], list[int]] = defaultdict(list)
    for unit in units:
        modules = tuple(sorted({_templated(tensor.module) for tensor in unit.options[0].tensors}))
        layers[assignment[unit.name], modules].append(
            -1 if unit.layer is None else _layer_on_disk(unit)
        )
    return [
        Override(modules=f"re:{_pattern(modules, numbers)}", scheme=word)
        for (word, modules), numbers in sorted(layers.items())
    ]


def _layer_on_disk(unit: ChoiceUnit) -> int:
    found = _NUMBER.search(unit.options[0].tensors[0].module)
    return int(found[0]) if found else -1


def _templated(module: HFName) -> str:
    """A module's name as a regex, with `{}` for its layer and any number for its expert."""
    literal, *others = _NUMBER.split(module)
    return re.escape(literal) + "".join(
        ("{}" if place == 0 else INDEX) + re.escape(part) for place, part in enumerate(others)
    )


def _pattern(templates: Sequence[str], layers: Collection[int]) -> str:
    """One regex for these modules in these layers."""
    numbers = _numbers(sorted(layers))
    written = [template.replace("{}", numbers) for template in templates]
    if len(written) == 1:
        return written[0]
    stem = _common_stem(written)
    return stem + "(?:" + "|".join(each[len(stem) :] for each in written) + ")"


def _common_stem(texts: Sequence[str]) -> str:
    """What all begin with, up to the last dot."""
    length = 0
    while all(len(text) > length and text[length] == texts[0][length] for text in texts):
        length += 1
    return texts[0][: texts[0][:length].rfind(r"\.") + 2] if r"\." in texts[0][:length] else ""


def _numbers(numbers: Sequence[int]) -> str:
    """Numbers as a regex, ten at a time where all ten are there: 3|1[0-9]|2[0-4]."""
    if len(numbers) == 1:
        return str(numbers[0])
    parts = []
    for ten, group in groupby(numbers, key=lambda number: number // 10):
        digits = [number % 10 for number in group]
        parts.append(f"{ten or ''}{_digits(digits)}")
    return parts[0] if len(parts) == 1 else f"(?:{'|'.join(parts)})"


def _digits(digits: Sequence[int]) -> str:
    """Last digits in order: a digit, a range, or a set."""
    if len(digits) == 1:
        return str(digits[0])
    if digits == [*range(digits[0], digits[-1] + 1)]:
        return f"[{digits[0]}-{digits[-1]}]"
    return f"[{''.join(map(str, digits))}]"
