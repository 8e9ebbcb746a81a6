"""A card's front matter: what the Hub reads.

In: a report, the checkpoint's record, the source's card if it is here, and what the command line
says. Out: YAML, through huggingface_hub's own types.

Easy to get wrong: nobody measured any of it.
"""

import re
from pathlib import Path

import yaml
from huggingface_hub import ModelCardData
from huggingface_hub.repocard import metadata_load

from ...checkpoints.source import Source
from ...recipes.errors import CheckpointError
from ...recipes.frozen import Json, Raw
from .card_page import CardFacts

README = "README.md"
# What a card takes over of another card, or the command line says.
_KEYS = ("base_model", "license", "license_name", "license_link", "pipeline_tag", "language")


def read_front_matter(folder: Path) -> Json:
    """The front matter of a folder's README.md; {} where there is none.

    Raises:
        CheckpointError: it is not a YAML mapping.
    """
    path = folder / README
    if not path.is_file():
        return {}
    try:
        return metadata_load(path) or {}
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        got = " ".join(str(error).split())
        raise CheckpointError(
            path, "front matter must be a YAML mapping", got=got, cure="Mend or remove it"
        ) from error


def metadata_of(
    opened: Source, front: Raw, *, license_id: str | None = None, base_model: str = ""
) -> Json:
    """What the command line says, else a card's front matter, else config.json. What the Hub does
    not take it refuses by itself, before a file is sent.

    Args:
        opened: the checkpoint.
        front: of its card, or of its source's, whose base model is not the checkpoint's.
        license_id: as the command line has it.
        base_model: what is known of it.
    """
    languages = front.get("language")
    if not isinstance(languages, list):
        languages = [languages]
    # YAML reads `no`, which is Norwegian, as false.
    spoken = ["no" if word is False else word for word in languages if word is not None]
    found = {**front, "base_model": base_model, "language": spoken}
    if license_id is not None:
        found |= {"license": license_id, "license_name": None, "license_link": None}
    if not found.get("pipeline_tag"):
        found["pipeline_tag"] = "text-generation"
        if "vision_config" in opened.config:
            found["pipeline_tag"] = "image-text-to-text"
    return {key: found[key] for key in _KEYS if found.get(key)}


def front_matter(facts: CardFacts) -> str:
    """The card's YAML for the Hub, without its fences."""
    roots = []
    names = []
    for scheme in facts.schemes():
        name = scheme.lower()
        # What people look for: `nvfp4` also where activations are not quantized.
        roots.append(re.sub(r"(?<=fp4)a(8|16)$|_(dynamic|block)$", "", name))
        names.append(name.replace("_", "-"))
    tags = [facts.report.facts.dialect, *roots, *names, "mtp", "speculative-decoding", "vllm"]
    if any(group.modules == "experts" for group in facts.groups):
        tags.append("moe")
    known: Json = {**facts.metadata, "tags": [*tags, "keepmtp"]}
    if "base_model" in known and (facts.schemes() or not facts.report.target):
        known["base_model_relation"] = "quantized"
    return ModelCardData(**known, library_name="vllm").to_yaml()
