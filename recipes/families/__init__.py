"""The families: one file for each, with the name of its HF `model_type`.

In: a config.json. Out: the family, or its names for that checkpoint. A family file defines `FAMILY`, and keepmtp finds
a new file by itself.

Easy to get wrong: a file whose name starts with an underscore is not a family.
"""

import difflib
import importlib
import pkgutil
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from ..errors import RecipeError
from ..family import Family
from ..family_view import FamilyView

# For each model_type without an MTP draft: vLLM 0.32.0's answer to method=mtp (config/speculative.py).
REFUSED: Mapping[str, str] = {
    "deepseek_v41": (
        "DeepSeek V4.1 has no classic-MTP draft: its checkpoints ship DSpark stages under mtp.* "
        "(main_proj/markov_head/confidence_head) and carry no e_proj/h_proj/enorm/hnorm/hc_head weights. Use "
        "speculative method 'dspark' instead of 'mtp'."
    ),
}


@cache
def families() -> Mapping[str, Family]:
    """Every family by each of its model_types, or by its architectures if another family has its model_type."""
    found: dict[str, Family] = {}
    for module in sorted(pkgutil.iter_modules([str(Path(__file__).parent)]), key=lambda module: module.name):
        if module.name.startswith("_"):
            continue
        family: Family = importlib.import_module(f".{module.name}", __package__).FAMILY
        for key in family.architectures or (family.model_type, *family.also):
            found[key] = family
    return found


def find_family(config: Mapping[str, Any], where: object) -> Family:
    """The family of the checkpoint that `config` (its config.json) describes.

    Raises:
        RecipeError: vLLM has no MTP draft for this model_type, or keepmtp has no table for it. Then the message names
            the nearest one and says how to add a family.
    """
    model_type = config.get("model_type", "")
    architecture = (config.get("architectures") or [""])[0]
    if family := families().get(architecture) or families().get(model_type):
        return family
    if words := REFUSED.get(model_type):
        got = f"{model_type!r}, of which vLLM 0.32.0 says: {words.removesuffix('.')}"
        cure = "Serve the original release without method=mtp"
        raise RecipeError(f"{where}/config.json", "vLLM must have an MTP draft for the model", got=got, cure=cure)
    nearest = difflib.get_close_matches(str(model_type), families(), n=1, cutoff=0.0)[0]
    raise RecipeError(
        f"{where}/config.json",
        f"model_type must be a supported family ({', '.join(families())})",
        got=f"{model_type!r} (architectures {config.get('architectures')})",
        cure=f"The nearest family is {nearest}: copy recipes/families/{families()[nearest].model_type}.py to "
        f"recipes/families/{model_type or '<model_type>'}.py and edit its rows (CONTRIBUTING.md, 'A new family')",
    )


def find_view(config: Mapping[str, Any], where: object) -> FamilyView:
    """The names of the checkpoint that `config` (its config.json) describes.

    Raises:
        RecipeError: as `find_family`.
    """
    return FamilyView(family=find_family(config, where), config=config)
