"""The questions of a task and their reference answers: a file's rows, or those of a dataset on the
Hub.

In: a protocol. Out: `Rows`, each with the fields that the task's own dataset has (`_FORMS`).

Easy to get wrong: a row that lm-eval cannot read the answer of is never answered right, and looks
like a weak model. So each row is read here first, and one that cannot be used is named.
"""

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import pyarrow
import pyarrow.parquet
from datasets.exceptions import DatasetsError
from httpx import HTTPError
from huggingface_hub.errors import GatedRepoError, HfHubHTTPError

from ...checkpoints.json_file import parsed, read_lines, read_text
from ...recipes.errors import RecipeError
from ...recipes.model_file import find_path
from ...recipes.protocol import Evaluation
from ...recipes.tasks import TASKS

_UNREADABLE = (
    DatasetsError,
    HfHubHTTPError,
    HTTPError,
    OSError,
    ValueError,
    TypeError,
    RuntimeError,
)

Row = Mapping[str, Any]


class Must(NamedTuple):
    """What a field must be, in words and as a test."""

    words: str
    is_met: Callable[[Any], object]


def _matching(words: str, pattern: str) -> Must:
    return Must(words, lambda value: isinstance(value, str) and re.search(pattern, value))


_TEXT = _matching("be a text", r"\S")
_NUMBER = Must("be a whole number", lambda value: type(value) is int)
_TEXT_OR_NUMBER = Must(
    "be a text or a whole number", lambda value: _TEXT.is_met(value) or _NUMBER.is_met(value)
)
_TEXTS = Must(
    "be a list of texts",
    lambda value: isinstance(value, list) and value and all(map(_TEXT.is_met, value)),
)
_OBJECTS = Must(
    "be a list of objects",
    lambda value: isinstance(value, list) and all(isinstance(each, Mapping) for each in value),
)
_NUMBER_LAST = 'end with "#### " and a number'
_SOLUTION = r"#### -?\$?[0-9.,]*[0-9]"
# lm-eval compares all that follows "#### ": of a file nothing else may.
_WHOLE_SOLUTION = _matching(_NUMBER_LAST, _SOLUTION + r"\.?\Z")
_GSM8K = {"question": _TEXT, "answer": _matching(_NUMBER_LAST, _SOLUTION)}
_CHOICES = ("Correct Answer", *(f"Incorrect Answer {number}" for number in (1, 2, 3)))
_FORMS: Mapping[str, Mapping[str, Must]] = {
    "gsm8k": _GSM8K,
    "gsm8k_platinum": _GSM8K,
    "mmlu_pro": {
        "question": _TEXT,
        "options": _TEXTS,
        "answer": _matching("be a letter from A to J", r"^[A-J]\Z"),
        "category": _TEXT,
        "cot_content": _matching("be a text, or empty", ""),
    },
    "ifeval": {"key": _NUMBER, "prompt": _TEXT, "instruction_id_list": _TEXTS, "kwargs": _OBJECTS},
    "humaneval": {"prompt": _TEXT, "test": _TEXT, "entry_point": _TEXT},
    "gpqa_diamond": {"Question": _TEXT, **dict.fromkeys(_CHOICES, _TEXT)},
    "math500": {
        "problem": _TEXT,
        "solution": _matching(r"have its answer in \boxed{...}", r"\\boxed[ {]"),
    },
    "aime24": {"Problem": _TEXT, "Answer": _TEXT_OR_NUMBER},
    "aime25": {"problem": _TEXT, "answer": _TEXT_OR_NUMBER},
    "ruler": {
        "task": _TEXT,
        "input": _TEXT,
        "outputs": _TEXTS,
        "gen_prefix": _TEXT,
        "max_length": _NUMBER,
    },
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """What is asked, and what shots are drawn from; the same rows of a file, where no row is its
    own shot.
    """

    asked: Sequence[Row]
    shown: Sequence[Row]
    is_shared: bool


def fields_of(task: str) -> tuple[str, ...]:
    """The fields that a row of a task has."""
    return tuple(_FORMS[task])


def read_rows(protocol: Evaluation, *, asked: str, shown: str) -> Rows:
    """The rows of a protocol.

    Args:
        protocol: says which dataset.
        asked, shown: lm-eval's splits of the task's own dataset, for questions and for shots. A
            file has none.

    Raises:
        RecipeError: no such dataset, a row without one of the task's fields, or too few rows.
    """
    if protocol.dataset is not None:
        rows = _file_rows(protocol)
        shown_by = TASKS[protocol.task].shown_by
        shots = [row for row in rows if shown_by and row[shown_by].strip()]
        others = [row for row in rows if not shown_by or not row[shown_by].strip()]
        found = Rows(asked=others, shown=shots if shown_by else rows, is_shared=not shown_by)
    else:
        splits = _hub_splits(protocol, (asked, shown))
        found = Rows(asked=splits[asked], shown=splits[shown], is_shared=asked == shown)
    _refuse_few(protocol, found)
    return found


def _hub_splits(protocol: Evaluation, names: Sequence[str]) -> dict[str, list[Row]]:
    where, row = protocol.dataset_name, TASKS[protocol.task]
    try:
        found = datasets.load_dataset(where, row.subset, revision=protocol.dataset_revision)
    except _UNREADABLE as error:
        raise _unreadable(protocol, error) from error
    splits = {str(name): split.to_list() for name, split in found.items()}
    for name in names:
        if name not in splits:
            rule, got = (
                f"must have the splits {' and '.join(dict.fromkeys(names))}",
                ", ".join(splits),
            )
            raise RecipeError(where, rule, got=got, cure="Correct evaluation.dataset_revision")
    form = _FORMS[protocol.task]
    return {
        name: [
            _row(row, f"{where} {name} row {number}", form)
            for number, row in enumerate(splits[name])
        ]
        for name in names
    }


def _unreadable(protocol: Evaluation, error: BaseException) -> RecipeError:
    """A gated dataset has a cure of its own; `datasets` says so in words, the Hub's client by its
    type.
    """
    got = " ".join(str(error.__cause__ or error).split()).rstrip(".")[:300] or type(error).__name__
    rule, cure = "must be a dataset that can be read", "Correct evaluation.dataset_revision, or"
    causes = (error, error.__cause__, error.__context__)
    if "gated dataset" in str(error) or any(isinstance(cause, GatedRepoError) for cause in causes):
        rule = "must be open to you, and its owner gives access only to those who accept its terms"
        cure = "Accept them on the dataset's page on the Hub and set HF_TOKEN, or"
    cure = f"{cure} name {_a_file(protocol.task)} (--dataset)"
    return RecipeError(protocol.dataset_name, rule, got=got, cure=cure)


def _a_file(task: str) -> str:
    *most, last = fields_of(task)
    form = ', "answer" as "... #### 12"' if task.startswith("gsm8k") else ""
    return f"a file with the fields {', '.join(most)} and {last}{form}"


# --- files
# --------------------------------------------------------------------------------------------------


def _file_rows(protocol: Evaluation) -> list[Row]:
    name, task = str(protocol.dataset), protocol.task
    path, cure = find_path(name), f"Name {_a_file(task)} in each row"
    if path is None or not path.is_file():
        raise RecipeError(
            f"evaluation.dataset {name}", "must be a file", got="no such file", cure=cure
        )
    read = {".jsonl": read_lines, ".json": _json_list, ".parquet": _parquet}[path.suffix]
    form = _FORMS[task]
    if form is _GSM8K:
        form = {**form, "answer": _WHOLE_SOLUTION}
    rows = [_row(row, where, form) for where, row in read(path, cure=cure)]
    if not rows:
        raise RecipeError(path, "must hold questions", got="none", cure=cure)
    return rows


def _json_list(path: Path, *, cure: str) -> list[tuple[str, object]]:
    rows = parsed(read_text(path, cure=cure), path, cure=cure)
    if not isinstance(rows, list):
        raise RecipeError(path, "must be a JSON list of objects", got=_short(rows), cure=cure)
    return [(f"{path}: row {number}", row) for number, row in enumerate(rows, 1)]


def _parquet(path: Path, *, cure: str) -> list[tuple[str, object]]:
    try:
        rows = pyarrow.parquet.read_table(path).to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        raise RecipeError(path, "must be a Parquet file", got=str(error), cure=cure) from error
    return [(f"{path}: row {number}", row) for number, row in enumerate(rows, 1)]


# --- rows
# --------------------------------------------------------------------------------------------------


def _row(row: object, where: str, form: Mapping[str, Must]) -> Row:
    """The row's fields that the task reads, each as it must be."""
    cure = "Mend the row, or name another dataset"
    if not isinstance(row, Mapping):
        raise RecipeError(
            where, f"must be an object with {' and '.join(form)}", got=_short(row), cure=cure
        )
    for field, must in form.items():
        if field not in row:
            got = ", ".join(map(str, row)) or "no field"
            raise RecipeError(where, f"must have the field {field}", got=got, cure=cure)
        if not must.is_met(row[field]):
            raise RecipeError(
                where, f"{field} must {must.words}", got=_short(row[field]), cure=cure
            )
    return {field: row[field] for field in form}


def _refuse_few(protocol: Evaluation, rows: Rows) -> None:
    row, num_asked = TASKS[protocol.task], len(rows.asked)
    most, of = len(rows.shown) - rows.is_shared, ""  # no question is its own example
    if row.max_shots is not None:
        most = row.max_shots
    elif row.group:
        shown = Counter(each[row.group] for each in rows.shown)
        most, of = min(
            (shown[group], f" of {group}")
            for group in {each[row.group] for each in rows.asked} or {""}
        )
    if protocol.shots > most:
        rule = f"{protocol.task} has {most} examples{of} at most"
        raise RecipeError(
            "evaluation.shots",
            rule,
            got=protocol.shots,
            cure=f"Use --shots {most}, or a longer dataset",
        )
    if min(num_asked, protocol.limit or num_asked) < 2:
        raise RecipeError(
            f"evaluation.dataset {protocol.dataset_name}",
            "must be asked two questions or more, to have a standard error",
            got=min(num_asked, 1),
            cure="Raise --limit, or name a longer dataset",
        )


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:28]}...{text[-28:]}"
