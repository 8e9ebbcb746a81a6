"""The questions of a task and their reference answers: a file's rows, or those of a dataset on the Hub.

In: a protocol. Out: `Rows`, each with the fields that the task's own dataset has (`_FORMS`).

Easy to get wrong: a row that lm-eval cannot read the answer of is never answered right, and looks like a weak model. So
each row is read here first, and one that cannot be used is named.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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

_ANSWER = re.compile(r"#### -?\$?[0-9.,]*[0-9]")
_WHOLE_ANSWER = re.compile(_ANSWER.pattern + r"\.?\Z")  # lm-eval compares all that follows "#### "
_UNREADABLE = (DatasetsError, HfHubHTTPError, HTTPError, OSError, ValueError, TypeError, RuntimeError)

Row = Mapping[str, Any]
Must = Callable[[object], str]
"""What a value must be, if it is not; else ""."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """What is asked, and what shots are drawn from; the same rows of a file, where no row is its own shot."""

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
        asked, shown: lm-eval's splits of the task's own dataset, for questions and for shots. A file has none.

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
            rule, got = f"must have the splits {' and '.join(dict.fromkeys(names))}", ", ".join(splits)
            raise RecipeError(where, rule, got=got, cure="Correct evaluation.dataset_revision")
    form = _FORMS[protocol.task]
    return {
        name: [_row(row, f"{where} {name} row {number}", form) for number, row in enumerate(splits[name])]
        for name in names
    }


def _unreadable(protocol: Evaluation, error: BaseException) -> RecipeError:
    """A gated dataset has a cure of its own; `datasets` says so in words, the Hub's client by its type."""
    where, fields = protocol.dataset_name, f"a file with the fields {_listed(protocol.task)} (--dataset)"
    got = " ".join(str(error.__cause__ or error).split()).rstrip(".")[:300] or type(error).__name__
    causes = (error, error.__cause__, error.__context__)
    if "gated dataset" in str(error) or any(isinstance(cause, GatedRepoError) for cause in causes):
        rule = "must be open to you, and its owner gives access only to those who accept its terms"
        cure = f"Accept them on the dataset's page on the Hub and set HF_TOKEN, or name {fields}"
        return RecipeError(where, rule, got=got, cure=cure)
    cure = f"Correct evaluation.dataset_revision, or, where the Hub is out of reach, name {fields}"
    return RecipeError(where, "must be a dataset that can be read", got=got, cure=cure)


# --- files ------------------------------------------------------------------------------------------------------------


def _file_rows(protocol: Evaluation) -> list[Row]:
    name, task = str(protocol.dataset), protocol.task
    path, cure = find_path(name), f"Name a file of rows with the fields {_listed(task)}"
    if path is None or not path.is_file():
        raise RecipeError(f"evaluation.dataset {name}", "must be a file", got="no such file", cure=cure)
    read = {".jsonl": read_lines, ".json": _json_list, ".parquet": _parquet}[path.suffix]
    form = _FORMS[task] | ({"answer": _ends_with_a_number} if "####" in _listed(task) else {})
    rows = [_row(row, where, form) for where, row in read(path, cure=cure)]
    if not rows:
        raise RecipeError(path, "must hold questions", got="none", cure=cure)
    return rows


def _json_list(path: Path, *, cure: str) -> list[tuple[str, object]]:
    rows = parsed(read_text(path, cure=cure), path, cure=cure)
    if not isinstance(rows, list):
        raise RecipeError(path, "must be a JSON list of objects", got=_short(rows), cure=cure)
    return _numbered(path, rows)


def _parquet(path: Path, *, cure: str) -> list[tuple[str, object]]:
    try:
        return _numbered(path, pyarrow.parquet.read_table(path).to_pylist())
    except (pyarrow.ArrowException, OSError) as error:
        raise RecipeError(path, "must be a Parquet file", got=str(error), cure=cure) from error


def _numbered(path: Path, rows: list[object]) -> list[tuple[str, object]]:
    return [(f"{path}: row {number}", row) for number, row in enumerate(rows, 1)]


# --- rows -------------------------------------------------------------------------------------------------------------


def _row(row: object, where: str, form: Mapping[str, Must]) -> Row:
    """The row's fields that the task reads, each as it must be."""
    cure = "Mend the row, or name another dataset"
    if not isinstance(row, Mapping):
        raise RecipeError(where, f"must be an object with {' and '.join(form)}", got=_short(row), cure=cure)
    for field, rule in form.items():
        if field not in row:
            got = ", ".join(map(str, row)) or "no field"
            raise RecipeError(where, f"must have the field {field}", got=got, cure=cure)
        if lack := rule(row[field]):
            raise RecipeError(where, f"{field} must {lack}", got=_short(row[field]), cure=cure)
    return {field: row[field] for field in form}


def _is_text(value: object) -> str:
    return "" if isinstance(value, str) and value.strip() else "be a text"


def _may_be_empty(value: object) -> str:
    return "" if isinstance(value, str) else "be a text, or empty"


def _is_number(value: object) -> str:
    return "" if isinstance(value, int) and not isinstance(value, bool) else "be a whole number"


def _is_text_or_number(value: object) -> str:
    return "" if not _is_text(value) or not _is_number(value) else "be a text or a whole number"


def _are_texts(value: object) -> str:
    is_good = isinstance(value, list) and value and not any(map(_is_text, value))
    return "" if is_good else "be a list of texts"


def _are_objects(value: object) -> str:
    is_good = isinstance(value, list) and all(isinstance(each, Mapping) for each in value)
    return "" if is_good else "be a list of objects"


def _has_a_number(value: object) -> str:
    return _is_text(value) or ("" if _ANSWER.search(str(value)) else _NUMBER_LAST)


def _ends_with_a_number(value: object) -> str:
    return _is_text(value) or ("" if _WHOLE_ANSWER.search(str(value)) else _NUMBER_LAST)


def _is_boxed(value: object) -> str:
    is_good = isinstance(value, str) and re.search(r"\\boxed[ {]", value)
    return "" if is_good else r"have its answer in \boxed{...}"


def _is_letter(value: object) -> str:
    return "" if isinstance(value, str) and re.fullmatch("[A-J]", value) else "be a letter from A to J"


_NUMBER_LAST = 'end with "#### " and a number'
_CHOICES = ("Correct Answer", *(f"Incorrect Answer {number}" for number in (1, 2, 3)))
_FORMS: Mapping[str, dict[str, Must]] = {
    "gsm8k": {"question": _is_text, "answer": _has_a_number},
    "gsm8k_platinum": {"question": _is_text, "answer": _has_a_number},
    "mmlu_pro": {
        "question": _is_text,
        "options": _are_texts,
        "answer": _is_letter,
        "category": _is_text,
        "cot_content": _may_be_empty,
    },
    "ifeval": {"key": _is_number, "prompt": _is_text, "instruction_id_list": _are_texts, "kwargs": _are_objects},
    "humaneval": {"prompt": _is_text, "test": _is_text, "entry_point": _is_text},
    "gpqa_diamond": {"Question": _is_text, **dict.fromkeys(_CHOICES, _is_text)},
    "math500": {"problem": _is_text, "solution": _is_boxed},
    "aime24": {"Problem": _is_text, "Answer": _is_text_or_number},
    "aime25": {"problem": _is_text, "answer": _is_text_or_number},
    "ruler": {
        "task": _is_text,
        "input": _is_text,
        "outputs": _are_texts,
        "gen_prefix": _is_text,
        "max_length": _is_number,
    },
}


def _listed(task: str) -> str:
    fields = fields_of(task)
    told = ', "answer" as "... #### 12"' if task.startswith("gsm8k") else ""
    return ", ".join(fields[:-1]) + f" and {fields[-1]}" + told


def _refuse_few(protocol: Evaluation, rows: Rows) -> None:
    where, row = f"evaluation.dataset {protocol.dataset_name}", TASKS[protocol.task]
    num_asked, most = len(rows.asked), len(rows.shown) - rows.is_shared  # no question is its own example
    if row.max_shots is not None:
        most = row.max_shots
        if protocol.shots > most:
            cure = f"Use --shots {most}" + (" or fewer" if most else "")
            raise RecipeError("evaluation.shots", f"{protocol.task} has {most} at most", got=protocol.shots, cure=cure)
    elif row.group:
        _refuse_few_of_a_group(protocol, rows)
    elif protocol.shots > most:
        rule = f"must have more rows than evaluation.shots, {protocol.shots}"
        raise RecipeError(where, rule, got=len(rows.shown), cure=f"Use --shots {most} or fewer, or a longer dataset")
    if min(num_asked, protocol.limit or num_asked) < 2:
        raise RecipeError(
            where,
            "must be asked two questions or more, to have a standard error",
            got=min(num_asked, 1),
            cure="Raise --limit, or name a longer dataset",
        )


def _refuse_few_of_a_group(protocol: Evaluation, rows: Rows) -> None:
    row = TASKS[protocol.task]
    for group in dict.fromkeys(each[row.group] for each in rows.asked):
        num = sum(each[row.group] == group for each in rows.shown)
        if num < protocol.shots:
            where = f"evaluation.dataset {protocol.dataset_name}"
            rule = f"must have {protocol.shots} rows of {group} with {row.shown_by} for the shots"
            raise RecipeError(where, rule, got=num, cure=f"Use --shots {num}, or add rows of its validation split")


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:28]}...{text[-28:]}"
