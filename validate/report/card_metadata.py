"""A card's front matter: what the Hub reads.

In: a report, the checkpoint's record, the source's card if it is here, and what the command line
says. Out: YAML, through huggingface_hub's own types.

Easy to get wrong: nobody measured any of it.
"""

import re
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import yaml
from huggingface_hub import ModelCardData
from huggingface_hub.repocard import REGEX_YAML_BLOCK

from ...checkpoints.source import Source
from ...recipes.errors import CheckpointError, RecipeError
from ...recipes.frozen import Json, Raw
from .card_page import CardFacts, Metadata

README = "README.md"
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}", re.ASCII)
# The Hub's own forms; https://huggingface.co/docs/hub/model-cards#model-card-metadata.
_WORD = re.compile(r"[\w.+-]{1,64}", re.ASCII)
_TEXT = re.compile(r"[^\x00-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2066-\u2069]{1,256}")
_LINK = re.compile(r"(https?://)?[\w./#%&=?~+-]{1,256}", re.ASCII)
_FORMS: Mapping[str, re.Pattern[str]] = {
    "base_model": HUB_ID,
    "license": _WORD,
    "license_name": _TEXT,
    "license_link": _LINK,
    "pipeline_tag": _WORD,
    "language": _WORD,
}


def read_front_matter(folder: Path) -> Json:
    """The front matter of a folder's README.md; {} where there is none.

    Raises:
        CheckpointError: it is not a YAML mapping.
    """
    path = folder / README
    if not path.is_file():
        return {}
    try:
        block = REGEX_YAML_BLOCK.search(path.read_text(encoding="utf-8"))
        if block is None:
            return {}
        matter = yaml.safe_load(block[2])
        if matter is None:
            return {}
        if isinstance(matter, dict):
            return matter
        got = f"a {type(matter).__name__}"
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        got = " ".join(str(error).split())
    raise CheckpointError(
        path, "front matter must be a YAML mapping", got=got, cure="Mend or remove it"
    )


def metadata_of(
    opened: Source,
    front: Raw,
    *,
    license_id: str | None = None,
    base_model: str = "",
    where: object,
) -> Metadata:
    """What the command line says, else a card's front matter, else config.json.

    Args:
        opened: the checkpoint.
        front: of its card, or of its source's, whose base model is not the checkpoint's.
        license_id: as the command line has it.
        base_model: what is known of it.
        where: the front matter, in messages.

    Raises:
        RecipeError: a value that does not have the Hub's form.
    """
    found = dict(front) | {"base_model": base_model}
    if license_id is not None:
        found |= {"license": license_id, "license_name": None, "license_link": None}
    if not found.get("pipeline_tag"):
        found["pipeline_tag"] = "text-generation"
        if "vision_config" in opened.config:
            found["pipeline_tag"] = "image-text-to-text"
    values: dict[str, str] = {}
    languages = []
    for key, form in _FORMS.items():
        said = found.get(key)
        if said in (None, ""):
            said = ()
        elif not isinstance(said, (list, tuple)):
            said = (said,)
        for value in said:
            word = str(value)
            if value is False:  # YAML reads `no`, which is Norwegian, as false
                word = "no"
            # What does not have the Hub's form could add a line of its own to the YAML.
            if not form.fullmatch(word):
                place = f"{where}: {key}"
                cure = "Mend the card"
                if key == "license" and license_id is not None:
                    place = "--license"
                    cure = "Choose one like apache-2.0"
                raise RecipeError(place, "must have the Hub's form", got=repr(word), cure=cure)
            if key == "language":
                languages.append(word)
            else:
                values.setdefault(key, word)  # of several, the first
    return Metadata(**values, language=tuple(languages))


def front_matter(facts: CardFacts) -> str:
    """The card's YAML for the Hub, without its fences."""
    metadata = facts.metadata
    roots = []
    names = []
    for scheme in facts.schemes():
        name = scheme.lower()
        # What people look for: `nvfp4` also where activations are not quantized.
        roots.append(re.sub(r"(?<=fp4)a(8|16)$|_(dynamic|block)$", "", name))
        names.append(name.replace("_", "-"))
    tags = []
    for tag in (facts.report.facts.dialect, *roots, *names):
        if _WORD.fullmatch(tag):
            tags.append(tag)
    tags += ["mtp", "speculative-decoding", "vllm"]
    if any(group.modules == "experts" for group in facts.groups):
        tags.append("moe")
    known: Json = {"tags": [*tags, "keepmtp"]}
    for key, value in asdict(metadata).items():
        if value:
            known[key] = value
    if metadata.base_model and (facts.schemes() or not facts.report.target):
        known["base_model_relation"] = "quantized"
    if metadata.language:
        known["language"] = list(metadata.language)
    return ModelCardData(**known, library_name="vllm").to_yaml()
