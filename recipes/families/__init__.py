"""The families: a table for each, in a file with the name of its HF `model_type`.

In: a config.json. Out: the family, or its names for that checkpoint; and whether its backbone and
its MTP block can be calibrated. keepmtp finds a new file by itself; how a file is written:
recipes/family_file.py.

The answers for backbones are in calibrated_families.json, which tests/helpers/support.py writes: it
binds transformers' class to the names of every release that has a recipe. `keepmtp ls` and `keepmtp
plan` read it, so neither torch nor a download is needed.

Easy to get wrong: vLLM compares some models by model_type and some by their first architecture. And
an MTP block is calibrated on its backbone's states: where the backbone cannot be built, a `Draft` in
the family's table is of no use.
"""

import json
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from ..errors import RecipeError
from ..family import Family
from ..family_file import FOLDER, read_family
from ..family_view import FamilyView
from ..frozen import Raw
from ..runtimes.vllm import KNOWN, NEWEST, asked, minor
from ..yaml_file import load_shipped

SUPPORT_FILE = Path(__file__).parents[1] / "calibrated_families.json"


@cache
def families(vllm: str = NEWEST) -> Mapping[str, Family]:
    """Every family as a version of vLLM has it, by its model_types, or by its architectures if
    another has its model_type.
    """
    found: dict[str, Family] = {}
    for path in sorted(FOLDER.glob("[!_]*.yaml")):
        family = read_family(path, vllm)
        for key in family.architectures or (family.model_type, *family.also):
            found[key] = family
    return found


@cache
def without_table() -> Mapping[str, str]:
    """Why keepmtp has no table for a model that vLLM drafts for, by model_type or architecture."""
    return load_shipped(FOLDER / "_without_table.yaml")


def family_of(config: Raw, vllm: str = NEWEST) -> Family | None:
    """The table of this config.json's model, by its first architecture or its model_type; None
    where keepmtp has none.
    """
    known = families(vllm)
    for name in (_architecture(config), config.get("model_type")):
        if str(name) in known:
            return known[str(name)]
    return None


def find_family(
    config: Raw, where: object, names: Iterable[str] = (), vllm: str = NEWEST
) -> Family:
    """The family of the checkpoint that `config` (its config.json) describes.

    Args:
        names: of its tensors, where they are known; see `has_dspark`.
        vllm: the version that is to load it.

    Raises:
        RecipeError: vLLM has no MTP draft for this model_type, or keepmtp has no table for it. Then
            the message says what would have to be written, or which tool serves a model without an
            MTP block.
    """
    model_type, architecture = config.get("model_type", ""), _architecture(config)
    file, rule = f"{where}/config.json", "vLLM must have an MTP draft for the model"
    family = family_of(config, vllm)
    is_dspark = has_dspark(config, names)
    drafts_only_so = bool(family) and family.method == "dspark"
    elsewhere = drafted_elsewhere(config, vllm)
    if family and drafts_only_so and not elsewhere:
        return family
    if family and is_dspark and family.dspark:
        return family.dspark
    says = asked(vllm).refused.get(model_type, "")
    if (says or is_dspark) and not drafts_only_so:
        words = {"method": "dspark", "num_speculative_tokens": config.get("dspark_block_size", 5)}
        got = f"{model_type!r}, which drafts by DSpark. {says}".strip(". ")
        cure = f"Serve it with --speculative-config '{json.dumps(words)}'"
        raise RecipeError(file, rule, got=got, cure=cure)
    if elsewhere:
        got = f"{model_type!r}, for which {vllm} has none"
        raise RecipeError(file, rule, got=got, cure=elsewhere)
    if family:
        return family
    rule = "model_type must be a family of keepmtp (`keepmtp ls families`)"
    if why := without_table().get(model_type) or without_table().get(architecture):
        rule += f"; {why}"
    elif _is_any_model(config, vllm):
        rule += "; vLLM drafts for it by transformers' own classes (--model-impl transformers)"
    if is_drafted(config, vllm):
        cure = "Write its table: CONTRIBUTING.md, 'A new family'"
    else:
        rule += f", and vLLM {minor(vllm)} has no MTP draft for this model"
        cure = (
            "Serve it without method=mtp; llm-compressor quantizes models without an MTP block. "
            "The architectures must be those of the original release"
        )
    got = f"{model_type!r} (architectures {config.get('architectures')})"
    raise RecipeError(file, rule, got=got, cure=cure)


def is_drafted(config: Raw, vllm: str = NEWEST) -> bool:
    """Whether a vLLM has a draft class for the model of this config.json: with method=mtp, or with
    the method that it names where it refuses that.
    """
    drafts = asked(vllm)
    named = config.get("model_type") in (*drafts.model_types, *drafts.refused)
    return named or _architecture(config) in drafts.architectures or _is_any_model(config, vllm)


def drafted_elsewhere(config: Raw, vllm: str) -> str:
    """Which versions have a draft class for a model where this one has none; "" where it has one,
    or nobody.
    """
    drafting = [version for version in KNOWN if is_drafted(config, version)]
    if not drafting or is_drafted(config, vllm):
        return ""
    return f"Serve it with one of these versions: {', '.join(drafting)}"


def _is_any_model(config: Raw, vllm: str) -> bool:
    """Whether vLLM drafts for a model that it has no class for, through transformers 5.20's MTP."""
    counts = load_shipped(FOLDER / "_any_model.yaml")
    key = counts.get(config.get("model_type"), "num_mtp_layers")
    return bool(config.get(key)) and "text_config" not in config and asked(vllm).any_model


def _architecture(config: Raw) -> Any:
    """The first architecture of config.json; "" where it has no list of them."""
    architectures = config.get("architectures")
    if isinstance(architectures, list) and architectures:
        return architectures[0]
    return ""


def has_dspark(config: Raw, names: Iterable[str] = ()) -> bool:
    """Whether the model drafts by DSpark, whose stages have the names of an MTP block.

    Where the names are known, they decide: only a classic block has the norm `enorm`, and only
    DSpark has `main_proj`. Source: vLLM 0.32.0 models/deepseek_v4.
    """
    for name in names:
        if name.endswith(".enorm.weight"):
            return False
        if name.startswith("mtp.") and name.endswith(".main_proj.weight"):
            return True
    return bool(config.get("dspark_target_layer_ids"))


def promises_mtp(config: Raw) -> bool:
    """Whether config.json has a key that counts MTP layers, by any name for them."""
    keys = {**config, **(config.get("text_config") or {})}
    return any(value and ("mtp" in key or "nextn" in key) for key, value in keys.items())


def find_view(
    config: Raw, where: object, names: Iterable[str] = (), vllm: str = NEWEST
) -> FamilyView:
    """The names of the checkpoint that `config` describes; arguments and errors as `find_family`."""
    return FamilyView(find_family(config, where, names, vllm), config, names)


# --- what can be calibrated -----------------------------------------------------------------------


def why_not_calibrated(family: Family, model: str = "") -> str:
    """Why the backbone of a recipe's model cannot be calibrated; "" if it can, or if it was not
    tried. The answer for a family's first release counts for others.
    """
    reasons = _reasons().get(family.model_type, {})
    return reasons.get(model, next(iter(reasons.values()), ""))


@cache
def _reasons() -> Mapping[str, Mapping[str, str]]:
    """Family -> model -> why its backbone cannot be calibrated, or ""."""
    return json.loads(SUPPORT_FILE.read_text(encoding="utf-8"))
