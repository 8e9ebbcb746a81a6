"""keepmtp.json: what made a checkpoint, with which versions. One model, one writer, one reader.

In: the parts of a `Record`, or a file. Out: the file's text, or a `Record`.

Easy to get wrong: the recipe that was run is the one in this file. recipe.yaml is the file it came
from, before `--scheme`, `--mtp` and what `mtp: auto` chose.
"""

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError, model_serializer, model_validator

from ..recipes.errors import CheckpointError, first_fault
from ..recipes.frozen import Json, Raw, without_none
from ..recipes.schema import Name
from .fact import Count
from .json_file import read_object

RECORD = "keepmtp.json"
RECIPE = "recipe.yaml"
CURE = "Quantize with `keepmtp quantize`, which writes it"


class _Part(BaseModel):
    """A part of the file. Further keys are ignored: a later keepmtp may have written them."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class RecordedSource(_Part):
    """What a checkpoint was made from: a Hub id and its commit, or a folder's name and "local".

    `files` has the size of every safetensors file.
    """

    name: str
    revision: str
    files: Mapping[str, Count]


class RecordedRecipe(_Part):
    """The recipe as it was run. `whole` is all of it, in the order in which it is written."""

    model: Name
    variant: Name
    summary: str
    source: str
    revision: str
    backbone: Mapping[str, str]
    mtp: str | Mapping[str, str]
    whole: Raw

    @property
    def name(self) -> str:
        """`<model>.<variant>`."""
        return f"{self.model}.{self.variant}"

    @model_validator(mode="before")
    @classmethod
    def _keep_all(cls, found: Any) -> Any:
        if isinstance(found, dict):
            return {**found, "whole": found}
        return found

    @model_serializer
    def _as_it_was_run(self) -> Json:
        return dict(self.whole)


class RecordedBytes(_Part):
    """Of all tensors."""

    before: Count
    after: Count


class Record(_Part):
    """The file.

    Attributes:
        donors: group -> what its tensors were read from, by the recipe's `from` or `mtp_source`;
            `files` has those with its tensors.
        calibration: the run's own summary, and None where no batches were needed.
    """

    keepmtp: str
    recipe: RecordedRecipe
    source: RecordedSource
    donors: Mapping[str, RecordedSource] | None = None
    calibration: Raw | None = None
    tensors: Mapping[str, Count]
    bytes: RecordedBytes
    versions: Mapping[str, str]

    def text(self) -> str:
        """The file's text. Equal values give equal bytes."""
        return json.dumps(without_none(self.model_dump()), indent=2) + "\n"


def is_draft_alone(path: Path | None) -> bool:
    """Whether a checkpoint's keepmtp.json says that it was made as a draft of its own."""
    with suppress(CheckpointError):
        return path is not None and not read_record(path).recipe.backbone
    return False


def read_record(path: Path, *, where: object = None, cure: str = CURE) -> Record:
    """Read a checkpoint's keepmtp.json.

    Args:
        path: the file.
        where: its name in messages; default `path`.
        cure: what to do where it cannot be read.

    Raises:
        CheckpointError: there is no such file, or not one that keepmtp wrote.
    """
    try:
        return Record.model_validate(read_object(path, where or path, cure=cure))
    except (CheckpointError, ValidationError) as error:
        got = first_fault(error) if isinstance(error, ValidationError) else error.got
        raise CheckpointError(
            where or path, "must be keepmtp's own record", got=got, cure=cure
        ) from error
