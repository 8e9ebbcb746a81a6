"""The questions of an evaluation and their reference answers: a file's, or a dataset's on the Hub.

In: a protocol. Out: `Rows`, each with a question and an answer that ends as GSM8K's do, "... #### 12".

Easy to get wrong: a row that lm-eval cannot read the answer of is never answered right, and looks like a weak model. So
each row is read here first, and one that cannot be used is named.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import datasets
from datasets.exceptions import DatasetsError
from httpx import HTTPError
from huggingface_hub.errors import HfHubHTTPError

from ...recipes.errors import RecipeError
from ...recipes.protocol import Evaluation
from ...recipes.shipped import find_path

FIELDS = ("question", "answer")

_HUB_SUBSET = "main"
_ANSWER = re.compile(r"#### -?\$?[0-9.,]*[0-9]")
_WHOLE_ANSWER = re.compile(_ANSWER.pattern + r"\.?\Z")  # lm-eval compares all that follows "#### "
_UNREADABLE = (DatasetsError, HfHubHTTPError, HTTPError, OSError, ValueError, TypeError, RuntimeError)

Row = Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """What is asked, and what shots are drawn from; the same rows of a file, where no row is its own shot."""

    asked: Sequence[Row]
    shown: Sequence[Row]
    is_shared: bool


def read_rows(protocol: Evaluation, *, asked: str, shown: str) -> Rows:
    """The rows of a protocol.

    Args:
        protocol: says which dataset.
        asked, shown: lm-eval's splits of the task's own dataset, for questions and for shots. A file has none.

    Raises:
        RecipeError: no such dataset, a row without question or readable answer, or too few rows.
    """
    if protocol.dataset is not None:
        rows = _file_rows(protocol.dataset)
        found = Rows(asked=rows, shown=rows, is_shared=True)
    else:
        splits = _hub_splits(protocol, (asked, shown))
        found = Rows(asked=splits[asked], shown=splits[shown], is_shared=asked == shown)
    _refuse_few(protocol, found)
    return found


def _hub_splits(protocol: Evaluation, names: Sequence[str]) -> dict[str, list[Row]]:
    where = protocol.dataset_name
    try:
        found = datasets.load_dataset(where, _HUB_SUBSET, revision=protocol.dataset_revision)
    except _UNREADABLE as error:
        got = " ".join(str(error.__cause__ or error).split()).rstrip(".")[:300] or type(error).__name__
        cure = (
            "Correct evaluation.dataset_revision, or, where the Hub is out of reach, name a .jsonl file with the "
            "fields question and answer (--dataset)"
        )
        raise RecipeError(where, "must be a dataset that can be read", got=got, cure=cure) from error
    splits = {str(name): split.to_list() for name, split in found.items()}
    for name in names:
        if name not in splits:
            rule, got = f"must have the splits {' and '.join(dict.fromkeys(names))}", ", ".join(splits)
            raise RecipeError(where, rule, got=got, cure="Correct evaluation.dataset_revision")
    return {
        name: [_row(row, f"{where} {name} row {number}") for number, row in enumerate(splits[name])] for name in names
    }


def _file_rows(name: str) -> list[Row]:
    path = find_path(name)
    cure = 'Name a .jsonl file of {"question": ..., "answer": "... #### 12"} lines'
    if path is None or not path.is_file():
        raise RecipeError(f"evaluation.dataset {name}", "must be a file", got="no such file", cure=cure)
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(path, "must be a text file", got=str(error), cure=cure) from error
    rows = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise RecipeError(f"{path}: row {number}", "must be a JSON object", got=str(error), cure=cure) from error
        rows.append(_row(row, f"{path}: row {number}", _WHOLE_ANSWER))
    if not rows:
        raise RecipeError(path, "must hold questions", got="none", cure=cure)
    return rows


def _row(row: object, where: str, answer: re.Pattern[str] = _ANSWER) -> Row:
    """The row's question and answer."""
    cure = "Mend the row, or name another dataset"
    if not isinstance(row, Mapping):
        raise RecipeError(where, "must be an object with question and answer", got=_short(row), cure=cure)
    for field in FIELDS:
        if field not in row:
            got = ", ".join(map(str, row)) or "no field"
            raise RecipeError(where, f"must have the field {field}", got=got, cure=cure)
        if not isinstance(row[field], str) or not row[field].strip():
            raise RecipeError(where, f"{field} must be a text", got=_short(row[field]), cure=cure)
    if not answer.search(row["answer"]):
        raise RecipeError(where, 'answer must end with "#### " and a number', got=_short(row["answer"]), cure=cure)
    return {field: row[field] for field in FIELDS}


def _refuse_few(protocol: Evaluation, rows: Rows) -> None:
    where = f"evaluation.dataset {protocol.dataset_name}"
    num_asked, most = len(rows.asked), len(rows.shown) - rows.is_shared  # no question is its own example
    if protocol.shots > most:
        rule = f"must have more rows than evaluation.shots, {protocol.shots}"
        raise RecipeError(where, rule, got=len(rows.shown), cure=f"Use --shots {most} or fewer, or a longer dataset")
    if min(num_asked, protocol.limit or num_asked) < 2:
        raise RecipeError(
            where,
            "must be asked two questions or more, to have a standard error",
            got=1,
            cure="Raise --limit, or name a longer dataset",
        )


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:28]}...{text[-28:]}"
