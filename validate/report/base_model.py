"""The base model that a card may name: what was read from the Hub, or what the author states.

In: a checkpoint's record, and `--base-model`. Out: a `BaseModel`: the Hub id and a sentence that
says how it is known.

Easy to get wrong: of a local folder nothing is known but what its user states.
"""

import re
from collections.abc import Mapping

from ...checkpoints.record import Record
from ...checkpoints.source import file_sizes, is_repo_id, open_source
from ...recipes.errors import CheckpointError, RecipeError
from ...recipes.frozen import frozen
from ...recipes.model_file import shipped_path

NONE = "none"
_COMMIT = re.compile(r"[0-9a-f]{40}")


@frozen
class BaseModel:
    """What a card says of its base model.

    Attributes:
        name: Hub id; "" where there is none.
        is_proven: that repository was read.
        says: how it is known, in a sentence.
    """

    name: str
    is_proven: bool
    says: str


NO_BASE_MODEL = BaseModel(
    name="", is_proven=False, says="The author names no base model on the Hub."
)


def base_model_of(record: Record, named: str | None) -> BaseModel | None:
    """What is known; None where nothing is.

    Args:
        record: of the checkpoint.
        named: by the author; `none`: there is no base model on the Hub.
    """
    name = record.source.name
    commit = record.source.revision
    was_read = bool(_COMMIT.fullmatch(commit)) and is_repo_id(name)
    if was_read and named in (None, name):
        return BaseModel(name=name, is_proven=True, says=f"Read from the Hub at commit `{commit}`.")
    if named in (None, NONE) and commit == "local" and _is_shipped(name, record.source.files):
        says = (
            f"`{name}` is a small model that comes with keepmtp; it has no repository on the Hub."
        )
        return BaseModel(name="", is_proven=False, says=says)
    if named == NONE:
        return NO_BASE_MODEL
    if named is None:
        # A recipe names a release, and its user quantizes a fine-tune of it. Configuration and
        # headers of both are equal.
        return None
    source = f"the local folder `{name}`"
    if was_read:
        source = f"the repository `{name}`"
    says = (
        f"Stated by the author. What was read is {source}; keepmtp did not compare it with "
        f"`{named}`."
    )
    return BaseModel(name=named, is_proven=False, says=says)


def unknown(where: object, got: str) -> CheckpointError:
    """The refusal that asks for the base model."""
    return CheckpointError(
        where,
        "a card names a base model that was read or is stated",
        got=got,
        cure="Name it with --base-model ORG/NAME, or say --base-model none",
    )


def refuse_no_id(named: str | None) -> None:
    """Refuse a base model that the Hub cannot have.

    Raises:
        RecipeError: neither an id nor `none`.
    """
    if named is not None and named != NONE and not is_repo_id(named):
        raise RecipeError(
            "--base-model",
            "must have the Hub's form",
            got=repr(named),
            cure="Choose with --base-model ORG/NAME",
        )


def _is_shipped(name: str, files: Mapping[str, int]) -> bool:
    """Whether a folder is one of keepmtp's own models, by the sizes of its files."""
    own = shipped_path(name)
    return own is not None and file_sizes(open_source(own)) == files
