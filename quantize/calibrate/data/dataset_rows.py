"""The rows of a dataset: opened on the Hub or here, read one at a time, in an order that can be
repeated.

In: where texts are from, as a recipe says. Out: row numbers with a text, a prompt with its answer,
or a conversation.

Easy to get wrong: what looks shuffled need not be repeatable. The order drawn here depends on the
seed and the rows' numbers alone, not on how a dataset is cut into files, nor on a library's
version.
"""

import random
from codecs import BOM_UTF8
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from datasets import IterableDataset, load_dataset
from datasets.exceptions import DatasetsError
from httpx import HTTPError
from huggingface_hub.errors import HfHubHTTPError
from pyarrow import ArrowException

from ....checkpoints.hub import dataset_commit
from ....checkpoints.safetensors_file import open_regular
from ....recipes.errors import RecipeError
from ....recipes.model_file import find_path
from ....recipes.schema import Texts
from .tokenize import Answered, DataRow

SHUFFLED_ROWS = 10_000
"""Rows are drawn in a seeded order from this many first ones of the split, then from as many next
ones, and so on, so that a Hub dataset is read only as far as needed. One that is sorted by topic
should be shuffled beforehand."""
_START_BYTES = 4096
_READERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}
_UNREADABLE = (
    DatasetsError,
    ArrowException,
    HfHubHTTPError,
    HTTPError,
    OSError,
    ValueError,
    TypeError,
    RuntimeError,
)


def open_split(texts: Texts, where: str) -> tuple[IterableDataset, str]:
    """The split as a stream, and the revision it is of: a Hub commit, or "local"."""
    name, path = texts.dataset, find_path(texts.dataset)
    suffix = Path(name).suffix
    is_file = path.is_file() if path is not None else suffix in _READERS
    is_of_the_hub = (
        path is None and not is_file and texts.dataset_revision != "local" and name.count("/") < 2
    )
    if (path is None and not is_of_the_hub) or (is_file and suffix not in _READERS):
        raise RecipeError(
            where,
            f"must be a Hub id with its dataset_revision, or a folder or {', '.join(_READERS)} "
            "file",
            got="no such file or folder"
            if path is None
            else f"a file of another kind, {suffix or 'without a suffix'}",
            cure="Check the path, which is relative to the current folder, or convert the file",
        )
    if path is not None and is_file and _READERS[suffix] == "json":
        with open_regular(path, where) as file:
            start = file.read(_START_BYTES).removeprefix(BOM_UTF8).lstrip()[:4]
        if start and start[:1] not in b"{[":  # pyarrow 26 crashes on rows that are null
            got = start.decode(errors="replace")
            raise RecipeError(
                where, "must begin with an object, or a list of them", got=got, cure="Mend the file"
            )
    revision = "local" if path is not None else dataset_commit(name, texts.dataset_revision, where)
    try:
        if path is None:
            splits = load_dataset(name, texts.subset, revision=revision, streaming=True)
        elif is_file:
            splits = load_dataset(_READERS[suffix], data_files=str(path), streaming=True)
        else:
            splits = load_dataset(str(path), texts.subset, streaming=True)
    except (
        StopIteration,
        *_UNREADABLE,
    ) as error:  # the first where datasets 5.2 looks for a JSON file's first row
        cure = (
            "Give calibration.subset if it names several here, or else Parquet or JSON files "
            "with rows"
        )
        got = "no rows" if isinstance(error, StopIteration) else one_line(error)
        raise RecipeError(
            where, "must be a dataset that can be read", got=got, cure=cure
        ) from error
    if texts.split not in splits:
        rule = f"split must be one of {', '.join(map(str, splits))}"
        raise RecipeError(where, rule, got=repr(texts.split), cure="Correct calibration.split")
    return splits[texts.split], revision


def rows_of(dataset: IterableDataset, texts: Texts, where: str) -> Iterator[tuple[int, DataRow]]:
    """Row numbers and the values of the column: a text or a conversation, maybe empty."""
    columns = {"column": texts.column}
    if texts.prompt_column:
        columns["prompt_column"] = texts.prompt_column
    if {*columns.values()} <= {*(dataset.column_names or ())}:
        dataset = dataset.select_columns(
            [*columns.values()]
        )  # Parquet is stored by column: others are not even read
    for number, row in enumerate(_readable(dataset, where)):
        for key, name in columns.items():
            if name not in row:
                rule = f"{key} must be one of {', '.join(row)}"
                raise RecipeError(where, rule, got=repr(name), cure=f"Correct calibration.{key}")
        yield number, _value(row, texts, f"{where}: row {number}")


def _readable(dataset: IterableDataset, where: str) -> Iterator[Mapping[str, Any]]:
    """The rows; what the libraries raise while they read one becomes a refusal."""
    rows, number = iter(dataset), 0
    while True:
        try:
            row = next(rows, None)
        except _UNREADABLE as error:
            cure = "Mend the file, or download it again"
            raise RecipeError(
                where, f"row {number} must be readable", got=one_line(error), cure=cure
            ) from error
        if row is None:
            return
        yield row
        number += 1


def _value(row: Mapping[str, Any], texts: Texts, where: str) -> DataRow:
    value, prompt = row[texts.column], row.get(texts.prompt_column or "")
    is_conversation = isinstance(value, list) and all(_is_turn(turn) for turn in value)
    if texts.prompt_column is None and (isinstance(value, str) or is_conversation):
        return value
    if texts.prompt_column is not None and isinstance(value, str) and isinstance(prompt, str):
        if texts.chat:
            return [{"role": "user", "content": prompt}, {"role": "assistant", "content": value}]
        return Answered(prompt, value)
    rule, got = f"column {texts.column} must hold a text or a list of {{role, content}}", value
    if texts.prompt_column is not None:
        rule = f"columns {texts.prompt_column} and {texts.column} must hold texts"
        got = prompt if isinstance(value, str) else value
    text = repr(got)
    short = text if len(text) <= 60 else f"{text[:57]}..."
    raise RecipeError(where, rule, got=short, cure="Name another column, or mend the row")


def _is_turn(turn: Any) -> bool:
    return (
        isinstance(turn, Mapping)
        and isinstance(turn.get("role"), str)
        and isinstance(turn.get("content"), str)
    )


def shuffled(rows: Iterator[tuple[int, DataRow]], seed: int) -> Iterator[tuple[int, DataRow]]:
    """The rows in an order that depends on the seed and their numbers alone."""
    # A fixed algorithm in Python's standard library; numpy and torch keep theirs the same only
    # within a version.
    order = random.Random(seed)  # noqa: S311
    while window := list(islice(rows, SHUFFLED_ROWS)):
        order.shuffle(window)
        yield from window


def one_line(error: BaseException) -> str:
    """What an error says, short enough for a sentence."""
    return (" ".join(str(error).split()) or type(error).__name__).rstrip(".")[:300]
