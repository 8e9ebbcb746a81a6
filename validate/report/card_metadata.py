"""A card's front matter: what the Hub reads.

In: a report, the checkpoint's record, the source's card if it is here, and what the command line
says. Out: YAML, through huggingface_hub's own types.

Easy to get wrong: nobody measured any of it. A value that does not have the Hub's form could add a
line of its own.
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
        told = yaml.safe_load(block[2]) if block else {}
        if told is None or isinstance(told, dict):
            return told or {}
        got = f"a {type(told).__name__}"
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
    values = {}
    for key, form in _FORMS.items():
        said = found.get(key)
        if said in (None, ""):
            said = ()
        elif not isinstance(said, (list, tuple)):
            said = (said,)
        # YAML reads `no`, which is Norwegian, as false.
        values[key] = ["no" if each is False else str(each) for each in said]
        strange = [word for word in values[key] if not form.fullmatch(word)]
        if strange:
            place = f"{where}: {key}"
            cure = "Mend the card"
            if key == "license" and license_id is not None:
                place = "--license"
                cure = "Choose one like apache-2.0"
            raise RecipeError(place, "must have the Hub's form", got=repr(strange[0]), cure=cure)
    language = tuple(values.pop("language"))
    return Metadata(
        **{key: next(iter(words), "") for key, words in values.items()}, language=language
    )


def front_matter(told: CardFacts) -> str:
    """The card's YAML for the Hub, without its fences."""
    metadata = told.metadata
    schemes = [name.lower() for name in told.schemes()]
    roots = [re.sub(r"(?<=fp4)a(8|16)$|_(dynamic|block)$", "", name) for name in schemes]
    tags = [told.report.facts.dialect, *roots, *(name.replace("_", "-") for name in schemes)]
    tags = [tag for tag in tags if _WORD.fullmatch(tag)]
    tags += ["mtp", "speculative-decoding", "vllm"]
    if "experts" in [group.modules for group in told.groups]:
        tags.append("moe")
    known = {key: value for key, value in asdict(metadata).items() if value}
    if metadata.base_model:
        known["base_model_relation"] = "quantized"
    if metadata.language:
        known["language"] = list(metadata.language)
    return ModelCardData(**known, library_name="vllm", tags=[*tags, "keepmtp"]).to_yaml()
