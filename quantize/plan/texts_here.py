"""Whether the text of a recipe can be used, as far as headers and files of this machine tell: what
a run would find out after its libraries are there.

In: a plan. Out: nothing, or a refusal. A dataset of the Hub is not read, and a folder is not looked
into.

Easy to get wrong: what is not sure is not refused. Whether the text is long enough only its tokens
say.
"""

import json
from pathlib import Path

from ...checkpoints.safetensors_file import open_regular
from ...recipes.blocks import Texts
from ...recipes.errors import RecipeError, did_you_mean
from ...recipes.frozen import Raw
from ...recipes.model_file import find_path
from .plan import Plan

READERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}
"""Suffix of a file -> the reader of `datasets`."""
SHORTER = (
    "Lower samples, held_out, the dataset's share or sequence_length, or name a longer dataset"
)


def refuse_texts(plan: Plan) -> None:
    """Refuse text that is not here or has other columns, and sequences longer than the model takes.

    Raises:
        RecipeError: names the dataset, or the key.
    """
    calibration = plan.recipe.calibration
    if calibration is None or not plan.needs_batches:
        return
    longest = plan.source.text_config.get("max_position_embeddings")
    if longest is not None and calibration.sequence_length > longest:
        raise RecipeError(
            "calibration.sequence_length",
            f"must be at most the model's max_position_embeddings, {longest}",
            got=calibration.sequence_length,
            cure="Lower it",
        )
    for texts in calibration.mix:
        _refuse(texts, f"calibration.dataset {texts.dataset}")


def file_of(texts: Texts, where: str) -> Path | None:
    """The file or folder of a dataset that is here; None for one of the Hub.

    Raises:
        RecipeError: it is to be here and is not, or is a file of another kind.
    """
    name = texts.dataset
    path = find_path(name)
    is_local = Path(name).suffix in READERS or texts.dataset_revision == "local"
    got = ""
    if path is None and (is_local or name.count("/") > 1):
        got = "no such file or folder"
    elif path is not None and path.is_file() and path.suffix not in READERS:
        got = f"a file of another kind, {path.suffix}"
    if got:
        raise RecipeError(
            where,
            f"must be a Hub id with its dataset_revision, or a folder or {', '.join(READERS)} file",
            got=got,
            cure="Check the path, which is relative to the current folder, or convert the file",
        )
    return path


def refuse_columns(texts: Texts, there: Raw, where: str) -> None:
    """Refuse columns that a dataset does not have.

    Raises:
        RecipeError: names the first.
    """
    for name in (texts.column, texts.prompt_column):
        if name is not None and name not in there:
            raise RecipeError(
                where,
                f"a column must be one of {', '.join(there)}",
                got=repr(name),
                cure=did_you_mean(name, there, otherwise="Name one of them"),
            )


def _refuse(texts: Texts, where: str) -> None:
    """Read the first line of a file that is here."""
    path = file_of(texts, where)
    if path is None or path.suffix != ".jsonl":
        return
    with open_regular(path, where) as file:
        line = file.readline()
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):  # whoever reads all of it says on which line
        return
    if isinstance(row, dict):
        refuse_columns(texts, row, where)
