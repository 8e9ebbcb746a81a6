"""The families: one file for each, with the name of its HF `model_type`.

In: a config.json. Out: the family, or its names for that checkpoint. A family file defines
`FAMILY`, and keepmtp finds a new file by itself.

Easy to get wrong: a file whose name starts with an underscore is not a family.
"""

import difflib
import importlib
import pkgutil
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from ..errors import RecipeError
from ..family import Family
from ..family_view import FamilyView
from ._drafted import is_drafted

# For each model_type without an MTP draft: vLLM 0.32.0's answer to method=mtp
# (config/speculative.py).
REFUSED: Mapping[str, str] = {
    "deepseek_v41": (
        "DeepSeek V4.1 has no classic-MTP draft: its checkpoints ship DSpark stages under mtp.* "
        "(main_proj/markov_head/confidence_head) and carry no e_proj/h_proj/enorm/hnorm/hc_head "
        "weights. Use speculative method 'dspark' instead of 'mtp'."
    ),
}

# Models that vLLM 0.32.0 drafts for and keepmtp has no table for, by model_type: why not.
WITHOUT_TABLE: Mapping[str, str] = {
    "interns2_mobius": "its routed experts are in banks that decoder layers share, outside of every layer",
    "minimax_m3_mtp": "it is an MTP block alone, which vLLM builds by the quantization config of its target",
    "nemotron_h_puzzle": "each layer has sizes of its own, which only the release's config class computes",
}


@cache
def families() -> Mapping[str, Family]:
    """Every family by each of its model_types, or by its architectures if another family has its
    model_type.
    """
    found: dict[str, Family] = {}
    for module in sorted(
        pkgutil.iter_modules([str(Path(__file__).parent)]), key=lambda module: module.name
    ):
        if module.name.startswith("_"):
            continue
        family: Family = importlib.import_module(f".{module.name}", __package__).FAMILY
        for key in family.architectures or (family.model_type, *family.also):
            found[key] = family
    return found


def find_family(config: Mapping[str, Any], where: object, names: Iterable[str] = ()) -> Family:
    """The family of the checkpoint that `config` (its config.json) describes.

    Args:
        names: of its tensors, where they are known; see `has_dspark`.

    Raises:
        RecipeError: vLLM has no MTP draft for this model_type, or keepmtp has no table for it. Then
            the message says what would have to be written, or which tool serves a model without an
            MTP block.
    """
    model_type = config.get("model_type", "")
    architecture = (config.get("architectures") or [""])[0]
    words = REFUSED.get(model_type)
    if has_dspark(config, names):
        words = (
            words
            or "whose mtp.* tensors are stages of DSpark (dspark_target_layer_ids), no MTP block"
        )
    elif family := families().get(architecture) or families().get(model_type):
        return family
    if words:
        says = "of which vLLM 0.32.0 says: " if model_type in REFUSED else ""
        got = f"{model_type!r}, {says}{words.removesuffix('.')}"
        size = config.get("dspark_block_size", 5)
        cure = f"""Serve it with --speculative-config '{{"method": "dspark", "num_speculative_tokens": {size}}}'"""
        raise RecipeError(
            f"{where}/config.json", "vLLM must have an MTP draft for the model", got=got, cure=cure
        )
    got = f"{model_type!r} (architectures {config.get('architectures')})"
    if why := WITHOUT_TABLE.get(model_type):
        rule = f"keepmtp has no table for this model, though vLLM 0.32 has a draft for it: {why}"
        cure = (
            "Serve the original release with method=mtp; `keepmtp ls families` shows what can be "
            "quantized and checked"
        )
        raise RecipeError(f"{where}/config.json", rule, got=got, cure=cure)
    if promises_mtp(config) and not is_drafted(config):
        rule = "vLLM 0.32 has no MTP draft for this model, whatever its files hold"
        cure = (
            "Serve it without method=mtp; the architectures must be those of the original release"
        )
        raise RecipeError(f"{where}/config.json", rule, got=got, cure=cure)
    raise RecipeError(
        f"{where}/config.json",
        "model_type must be a family of keepmtp (`keepmtp ls families`)",
        got=got,
        cure=_way_to(str(model_type), config),
    )


def has_dspark(config: Mapping[str, Any], names: Iterable[str] = ()) -> bool:
    """Whether the model drafts by DSpark, whose stages have the names of an MTP block (vLLM 0.32.0
    deepseek_v4).

    A classic block has the norm `enorm`, which no stage has: then the key of config.json is wrong.
    """
    return bool(config.get("dspark_target_layer_ids")) and not any(
        name.endswith(".enorm.weight") for name in names
    )


def _way_to(model_type: str, config: Mapping[str, Any]) -> str:
    """What a person can do with a model that has no table."""
    if not promises_mtp(config):
        return (
            "config.json promises no MTP block, which is what keepmtp is for: llm-compressor "
            "quantizes such models"
        )
    near = difflib.get_close_matches(model_type, families(), n=1)
    nearest = f" (the nearest family is {families()[near[0]].model_type})" if near else ""
    file = f"recipes/families/{model_type or '<model_type>'}.py"
    return f"Write {file}{nearest}, a recipe and a fixture: CONTRIBUTING.md, 'A new family'"


def promises_mtp(config: Mapping[str, Any]) -> bool:
    """Whether config.json has a key that counts MTP layers, by any name for them."""
    holders = [config, config.get("text_config")]
    keys = {
        key: value
        for holder in holders
        if isinstance(holder, Mapping)
        for key, value in holder.items()
    }
    return any(bool(value) and ("mtp" in key or "nextn" in key) for key, value in keys.items())


def find_view(config: Mapping[str, Any], where: object, names: Iterable[str] = ()) -> FamilyView:
    """The names of the checkpoint that `config` (its config.json) describes; arguments and errors
    as `find_family`.
    """
    return FamilyView(family=find_family(config, where, names), config=config)
