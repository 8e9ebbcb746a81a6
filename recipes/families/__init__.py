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

from ..errors import RecipeError
from ..family import Family
from ..family_view import FamilyView

# What vLLM 0.32.0 answers to method=mtp (config/speculative.py), by model_type: there is no MTP draft to keep.
REFUSED: Mapping[str, str] = {
    "deepseek_v41": (
        "DeepSeek V4.1 has no classic-MTP draft: its checkpoints ship DSpark stages under mtp.* "
        "(main_proj/markov_head/confidence_head) and carry no e_proj/h_proj/enorm/hnorm/hc_head weights. Use "
        "speculative method 'dspark' instead of 'mtp'."
    ),
}


@cache
def families() -> Mapping[str, Family]:
    """Every family by each model_type it serves, or by its architectures where the model_type is another's."""
    found: dict[str, Family] = {}
    for module in sorted(pkgutil.iter_modules([str(Path(__file__).parent)]), key=lambda module: module.name):
        if module.name.startswith("_"):
            continue
        family: Family = importlib.import_module(f".{module.name}", __package__).FAMILY
        for key in family.architectures or (family.model_type, *family.also):
            found[key] = family
    return found


def find_family(config: Mapping[str, Any], where: object) -> Family:
    """The family of a checkpoint, by its config.json.

    Raises:
        RecipeError: vLLM has no MTP draft for this model_type, or there is no table for it; then the message names the
            nearest one and how to add a family.
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
