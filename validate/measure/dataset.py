"""The questions of a task and their reference answers: a file's rows, or those of a dataset on the
Hub.

In: a protocol. Out: `Rows`, each with the fields that the task's own dataset has
(recipes/tasks.yaml).

Easy to get wrong: each row is read here first, and one that cannot be used is named.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import datasets
import pyarrow
import pyarrow.parquet
from datasets.exceptions import DatasetsError
from httpx import HTTPError
from huggingface_hub.errors import HfHubHTTPError

from ...checkpoints.json_file import read_lines
from ...recipes.errors import RecipeError
from ...recipes.frozen import Raw, frozen
from ...recipes.model_file import find_path
from ...recipes.protocol import Evaluation
from ...recipes.tasks import TASKS

_UNREADABLE = (
    *(DatasetsError, HfHubHTTPError, HTTPError),
    *(OSError, ValueError, TypeError, RuntimeError, KeyError),
)

Row = Raw

# What a field may be: a pattern of its text, and words; `raw` is left to lm-eval.
_KINDS: Mapping[str, tuple[str, str]] = {
    "any": ("", "be a text, or empty"),
    "text": (r"\S", "be a text"),
    "texts": (r"\S", "be a list of texts"),
    "number": (r"^-?\d+\Z", "be a whole number"),
    "text or number": (r"\S", "be a text or a whole number"),
    "letter": (r"^[A-J]\Z", "be a letter from A to J"),
    "boxed": (r"\\boxed[ {]", r"have its answer in \boxed{...}"),
    "solution": (r"#### -?\$?[0-9.,]*[0-9]", 'end with "#### " and a number'),
    # lm-eval compares all that follows "#### ": of a file nothing else may.
    "whole solution": (r"#### -?\$?[0-9.,]*[0-9]\.?\Z", 'end with "#### " and a number'),
}


@frozen
class Rows:
    """What is asked, and what shots are drawn from; the same rows of a file, where no row is its
    own shot.
    """

    asked: Sequence[Row]
    shown: Sequence[Row]
    is_shared: bool


def read_rows(protocol: Evaluation, *, asked: str, shown: str) -> Rows:
    """The rows of a protocol.

    Args:
        protocol: says which dataset.
        asked, shown: lm-eval's splits of the task's own dataset, for questions and for shots. A
            file has none.

    Raises:
        RecipeError: no such dataset, a row without one of the task's fields, or too few rows.
    """
    shown_by = TASKS[protocol.task].shown_by
    if protocol.dataset is None:
        splits = _hub_splits(protocol, (asked, shown))
        found = Rows(asked=splits[asked], shown=splits[shown], is_shared=asked == shown)
    else:
        rows = shots = [row for _, row in file_rows(protocol)]
        if shown_by:
            shots = [row for row in rows if row[shown_by].strip()]
            rows = [row for row in rows if not row[shown_by].strip()]
        found = Rows(asked=rows, shown=shots, is_shared=not shown_by)
    _refuse_few(protocol, found)
    return found


def _hub_splits(protocol: Evaluation, names: Sequence[str]) -> dict[str, list[Row]]:
    where = protocol.dataset_name
    subset = TASKS[protocol.task].subset
    cure = f"Correct evaluation.dataset_revision, or name {_a_file(protocol.task)} (--dataset)"
    try:
        found: Any = datasets.load_dataset(where, subset, revision=protocol.dataset_revision)
        splits = {name: found[name].to_list() for name in names}
    except _UNREADABLE as error:
        got = " ".join(str(error.__cause__ or error).split()).rstrip(".")
        if "gated" in f"{error!r} {error.__cause__!r} {error.__context__!r}".lower():
            cure = f"Accept its terms on the Hub and set HF_TOKEN. {cure}"
        elif isinstance(error, ConnectionError):
            cure = f"Check the network, or name {_a_file(protocol.task)} (--dataset)"
        rule = "must be a dataset that can be read"
        raise RecipeError(where, rule, got=got or type(error).__name__, cure=cure) from error
    checked = {}
    for name, rows in splits.items():
        numbered = enumerate(rows)
        checked[name] = [_row(row, f"{where} {name} row {at}", protocol) for at, row in numbered]
    return checked


def _a_file(task: str) -> str:
    *most, last = TASKS[task].fields
    return f"a file with the fields {', '.join(most)} and {last}"


def file_rows(protocol: Evaluation) -> list[tuple[str, Row]]:
    """The rows of a protocol's file, and where each is.

    Raises:
        RecipeError: no such file, no row, or one without a field of the task's.
    """
    path = find_path(str(protocol.dataset))
    cure = f"Name {_a_file(protocol.task)} in each row"
    if path is None or not path.is_file():
        where = f"evaluation.dataset {protocol.dataset}"
        raise RecipeError(where, "must be a file", got="no such file", cure=cure)
    if path.suffix == ".jsonl":
        values = read_lines(path, cure=cure)
    else:
        try:
            table = pyarrow.parquet.read_table(path).to_pylist()
        except (pyarrow.ArrowException, OSError) as error:
            raise RecipeError(path, "must be a Parquet file", got=str(error), cure=cure) from error
        values = [(f"{path}: row {number}", row) for number, row in enumerate(table, 1)]
    rows = [(where, _row(row, where, protocol)) for where, row in values]
    if not rows:
        raise RecipeError(path, "must hold questions", got="none", cure=cure)
    return rows


def _row(row: object, where: str, protocol: Evaluation) -> Row:
    """The row's fields that the task reads, each as it must be."""
    # A row that lm-eval cannot read the answer of is never answered right, and looks like a weak
    # model.
    cure = "Mend the row, or name another dataset"
    form = TASKS[protocol.task].fields
    if not isinstance(row, Mapping):
        rule = f"must be an object with {' and '.join(form)}"
        raise RecipeError(where, rule, got=repr(row), cure=cure)
    for field, rule in TASKS[protocol.task].refused.items():
        if field in row:
            raise RecipeError(where, rule, got=f"{field} {row[field]}", cure="Name another dataset")
    for field, kind in form.items():
        if field not in row:
            got = ", ".join(map(str, row)) or "no field"
            raise RecipeError(where, f"must have the field {field}", got=got, cure=cure)
        if kind == "solution" and protocol.dataset is not None:
            kind = "whole solution"
        if not _matches(row[field], kind):
            rule = f"{field} must {_KINDS[kind][1]}"
            raise RecipeError(where, rule, got=repr(row[field]), cure=cure)
    return {field: row[field] for field in form}


def _matches(value: Any, kind: str) -> bool:
    if kind == "raw":
        return True
    if kind == "texts":
        texts = value if isinstance(value, list) else []
        return len(texts) > 0 and all(_matches(text, "text") for text in texts)
    is_one = isinstance(value, str) and kind != "number"
    if type(value) is int:  # a truth is an int to Python, and no number of a dataset
        is_one = "number" in kind
    return is_one and re.search(_KINDS[kind][0], str(value)) is not None


def _refuse_few(protocol: Evaluation, rows: Rows) -> None:
    num_asked = min(len(rows.asked), protocol.limit or len(rows.asked))
    if num_asked < 2:
        raise RecipeError(
            f"evaluation.dataset {protocol.dataset_name}",
            "must be asked two questions or more, to have a standard error",
            got=min(num_asked, 1),
            cure="Raise --limit, or name a longer dataset",
        )
    row = TASKS[protocol.task]
    of = ""
    most = row.max_shots
    if most is None:
        most = len(rows.shown) - rows.is_shared  # no question is its own example
        if row.group:
            shown = Counter([example[row.group] for example in rows.shown])
            groups = sorted({question[row.group] for question in rows.asked})
            most, group = min([(shown[group], group) for group in groups])
            of = f" of {group}"
    if protocol.shots > most:
        raise RecipeError(
            "evaluation.shots",
            f"{protocol.task} has {most} examples{of} at most",
            got=protocol.shots,
            cure=f"Use --shots {most}, or a longer dataset",
        )
