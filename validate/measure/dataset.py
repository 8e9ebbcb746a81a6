"""The questions of a task and their reference answers: a file's rows, or those of a dataset on the
Hub.

In: a protocol. Out: `Rows`, each with the fields that the task's own dataset has (`_FORMS`).

Easy to get wrong: a row that lm-eval cannot read the answer of is never answered right, and looks
like a weak model. So each row is read here first, and one that cannot be used is named.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow.parquet
from datasets.exceptions import DatasetsError
from httpx import HTTPError
from huggingface_hub.errors import HfHubHTTPError

from ...checkpoints.json_file import parsed, read_lines, read_text
from ...recipes.errors import RecipeError
from ...recipes.model_file import find_path
from ...recipes.protocol import Evaluation
from ...recipes.tasks import TASKS

_UNREADABLE = (
    *(DatasetsError, HfHubHTTPError, HTTPError),
    *(OSError, ValueError, TypeError, RuntimeError),
)

Row = Mapping[str, Any]

Pattern = str | tuple[str] | None
"""What a text matches, or each of a list of texts; None leaves the field to lm-eval."""

_ANY, _TEXT, _NUMBER, _TEXT_OR_NUMBER = "", r"\S", r"^-?\d+\Z", r"\S+"
_SOLUTION, _LETTER, _BOXED = r"#### -?\$?[0-9.,]*[0-9]", r"^[A-J]\Z", r"\\boxed[ {]"
# lm-eval compares all that follows "#### ": of a file nothing else may.
_WHOLE_SOLUTION = _SOLUTION + r"\.?\Z"
_WORDS: Mapping[Pattern, str] = {
    _ANY: "be a text, or empty",
    _TEXT: "be a text",
    _NUMBER: "be a whole number",
    _TEXT_OR_NUMBER: "be a text or a whole number",
    (_TEXT,): "be a list of texts",
    **dict.fromkeys((_SOLUTION, _WHOLE_SOLUTION), 'end with "#### " and a number'),
    _LETTER: "be a letter from A to J",
    _BOXED: r"have its answer in \boxed{...}",
}
_GSM8K: Mapping[str, Pattern] = {"question": _TEXT, "answer": _SOLUTION}
_FORMS: Mapping[str, Mapping[str, Pattern]] = {
    "gsm8k": _GSM8K,
    "gsm8k_platinum": _GSM8K,
    "mmlu_pro": {
        "question": _TEXT,
        "options": (_TEXT,),
        "answer": _LETTER,
        "category": _TEXT,
        "cot_content": _ANY,
    },
    "ifeval": {"key": _NUMBER, "prompt": _TEXT, "instruction_id_list": (_TEXT,), "kwargs": None},
    "humaneval": {"prompt": _TEXT, "test": _TEXT, "entry_point": _TEXT},
    "gpqa_diamond": {
        "Question": _TEXT,
        "Correct Answer": _TEXT,
        **{f"Incorrect Answer {number}": _TEXT for number in (1, 2, 3)},
    },
    "math500": {"problem": _TEXT, "solution": _BOXED},
    "aime24": {"Problem": _TEXT, "Answer": _TEXT_OR_NUMBER},
    "aime25": {"problem": _TEXT, "answer": _TEXT_OR_NUMBER},
    "ruler": {
        "task": _TEXT,
        "input": _TEXT,
        "outputs": (_TEXT,),
        "gen_prefix": _TEXT,
        "max_length": _NUMBER,
    },
}
"""What each field of a row must be."""


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
    shown_by = TASKS[protocol.task].shown_by
    if protocol.dataset is None:
        splits = _hub_splits(protocol, (asked, shown))
        found = Rows(asked=splits[asked], shown=splits[shown], is_shared=asked == shown)
    elif shown_by:
        by_kind: dict[bool, list[Row]] = {True: [], False: []}
        for row in _file_rows(protocol):
            by_kind[bool(row[shown_by].strip())].append(row)
        found = Rows(asked=by_kind[False], shown=by_kind[True], is_shared=False)
    else:
        rows = _file_rows(protocol)
        found = Rows(asked=rows, shown=rows, is_shared=True)
    _refuse_few(protocol, found)
    return found


def _hub_splits(protocol: Evaluation, names: Sequence[str]) -> dict[str, list[Row]]:
    where, subset = protocol.dataset_name, TASKS[protocol.task].subset
    cure = f"Correct evaluation.dataset_revision, or name {_a_file(protocol.task)} (--dataset)"
    try:
        found: Any = datasets.load_dataset(where, subset, revision=protocol.dataset_revision)
    except _UNREADABLE as error:
        got = " ".join(str(error.__cause__ or error).split()).rstrip(".")[:300]
        if "gated" in f"{error!r} {error.__cause__!r} {error.__context__!r}".lower():
            cure = f"Accept its terms on the Hub and set HF_TOKEN. {cure}"
        rule, got = "must be a dataset that can be read", got or type(error).__name__
        raise RecipeError(where, rule, got=got, cure=cure) from error
    splits = {}
    for name in names:
        if name not in found:
            rule = f"must have the splits {' and '.join(dict.fromkeys(names))}"
            raise RecipeError(where, rule, got=", ".join(map(str, found)), cure=cure)
        rows = enumerate(found[name].to_list())
        splits[name] = [_row(row, f"{where} {name} row {at}", protocol) for at, row in rows]
    return splits


def _a_file(task: str) -> str:
    *most, last = fields_of(task)
    return f"a file with the fields {', '.join(most)} and {last}"


def _file_rows(protocol: Evaluation) -> list[Row]:
    path, cure = find_path(str(protocol.dataset)), f"Name {_a_file(protocol.task)} in each row"
    if path is None or not path.is_file():
        where = f"evaluation.dataset {protocol.dataset}"
        raise RecipeError(where, "must be a file", got="no such file", cure=cure)
    rows = [_row(row, where, protocol) for where, row in _values(path, cure)]
    if not rows:
        raise RecipeError(path, "must hold questions", got="none", cure=cure)
    return rows


def _values(path: Path, cure: str) -> list[tuple[str, object]]:
    """Place and value of each row."""
    if path.suffix == ".jsonl":
        return list(read_lines(path, cure=cure))
    if path.suffix == ".json":
        rows = parsed(read_text(path, cure=cure), path, cure=cure)
        if not isinstance(rows, list):
            rule = "must be a JSON list of objects"
            raise RecipeError(path, rule, got=_short(rows), cure=cure)
    else:
        try:
            rows = pyarrow.parquet.read_table(path).to_pylist()
        except (pyarrow.ArrowException, OSError) as error:
            rule = "must be a Parquet file"
            raise RecipeError(path, rule, got=str(error), cure=cure) from error
    return [(f"{path}: row {number}", row) for number, row in enumerate(rows, 1)]


def _row(row: object, where: str, protocol: Evaluation) -> Row:
    """The row's fields that the task reads, each as it must be."""
    cure, form = "Mend the row, or name another dataset", dict(_FORMS[protocol.task])
    if form == _GSM8K and protocol.dataset is not None:
        form["answer"] = _WHOLE_SOLUTION
    if not isinstance(row, Mapping):
        rule = f"must be an object with {' and '.join(form)}"
        raise RecipeError(where, rule, got=_short(row), cure=cure)
    for field, pattern in form.items():
        if field not in row:
            got = ", ".join(map(str, row)) or "no field"
            raise RecipeError(where, f"must have the field {field}", got=got, cure=cure)
        if not _matches(row[field], pattern):
            rule = f"{field} must {_WORDS[pattern]}"
            raise RecipeError(where, rule, got=_short(row[field]), cure=cure)
    return {field: row[field] for field in form}


def _matches(value: Any, pattern: Pattern) -> bool:
    if pattern is None:
        return True
    if isinstance(pattern, tuple):
        is_list = isinstance(value, list) and value != []
        return is_list and all(_matches(each, *pattern) for each in value)
    is_number = type(value) is int and pattern in (_NUMBER, _TEXT_OR_NUMBER)
    is_text = isinstance(value, str) and pattern != _NUMBER
    return (is_number or is_text) and re.search(pattern, str(value)) is not None


def _refuse_few(protocol: Evaluation, rows: Rows) -> None:
    row, num_asked = TASKS[protocol.task], len(rows.asked)
    most, of = len(rows.shown) - rows.is_shared, ""  # no question is its own example
    if row.max_shots is not None:
        most = row.max_shots
    elif row.group:
        shown = Counter(each[row.group] for each in rows.shown)
        for group in sorted({each[row.group] for each in rows.asked}, reverse=True):
            if shown[group] <= most:
                most, of = shown[group], f" of {group}"
    if protocol.shots > most:
        rule = f"{protocol.task} has {most} examples{of} at most"
        cure = f"Use --shots {most}, or a longer dataset"
        raise RecipeError("evaluation.shots", rule, got=protocol.shots, cure=cure)
    if min(num_asked, protocol.limit or num_asked) < 2:
        where = f"evaluation.dataset {protocol.dataset_name}"
        rule = "must be asked two questions or more, to have a standard error"
        cure = "Raise --limit, or name a longer dataset"
        raise RecipeError(where, rule, got=min(num_asked, 1), cure=cure)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:28]}...{text[-28:]}"
