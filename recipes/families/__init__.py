"""One file a family, named after its HF `model_type`; a new file is found by itself.

A family file defines `FAMILY`. Files whose name starts with an underscore are shared pieces.
"""

import difflib
import importlib
import pkgutil
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from ..errors import RecipeError, refuse
from ..family import Family


@cache
def families() -> Mapping[str, Family]:
    """Every family by each model_type it serves."""
    found: dict[str, Family] = {}
    for module in sorted(pkgutil.iter_modules([str(Path(__file__).parent)]), key=lambda module: module.name):
        if module.name.startswith("_"):
            continue
        family: Family = importlib.import_module(f".{module.name}", __package__).FAMILY
        for model_type in (family.model_type, *family.also):
            found[model_type] = family
    return found


def find_family(config: Mapping[str, Any], where: object) -> Family:
    """The family of a checkpoint, by its config.json.

    Raises:
        RecipeError: no table for this model_type; the message names the nearest one and how to add a family.
    """
    model_type = config.get("model_type", "")
    if family := families().get(model_type):
        return family
    nearest = difflib.get_close_matches(str(model_type), families(), n=1, cutoff=0.0)[0]
    raise RecipeError(
        refuse(
            f"{where}/config.json",
            f"model_type must be a supported family ({', '.join(families())})",
            f"{model_type!r} (architectures {config.get('architectures')})",
            f"The nearest family is {nearest}: copy recipes/families/{families()[nearest].model_type}.py to "
            f"recipes/families/{model_type or '<model_type>'}.py and edit its rows (CONTRIBUTING.md, 'A new family')",
        )
    )
