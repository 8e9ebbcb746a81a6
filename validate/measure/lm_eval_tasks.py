"""lm-evaluation-harness's own tasks, with rows that are given in place of those it would download.

In: a protocol and rows. Out: lm-eval's `ConfigurableTask`s, by name: one, or one for each sub-task
that has rows.

Easy to get wrong: files of tasks name Python functions, and to import those may download something.
Each such module is listed here: IFEval's wants NLTK's data, HumanEval's a program from the Hub that
runs code (`model_code.py` is in its place), RULER's all that its generators need. `langdetect`
guesses otherwise each time unless it is given a seed.
"""

import io
import logging
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from importlib.metadata import PackageNotFoundError, version
from itertools import zip_longest
from pathlib import Path
from typing import Any
from unittest import mock

import evaluate
import lm_eval.tasks
import pyarrow
from datasets import Dataset
from lm_eval.api.task import ConfigurableTask
from lm_eval.tasks._yaml_loader import _import_fun_from_str, load_yaml

from ...recipes.errors import RecipeError
from ...recipes.extras import install_command
from ...recipes.protocol import Evaluation
from ...recipes.tasks import TASKS, TaskRow
from . import model_code
from .dataset import Row, Rows, read_rows

Tasks = Mapping[str, ConfigurableTask]

_PUNKT = "tokenizers/punkt_tab"
_ANTLR = ("antlr4-python3-runtime", "4.11")  # minerva_math/utils.py has no other


def refuse_task(protocol: Evaluation, *, runs_code: bool) -> None:
    """Refuse a task that cannot be scored here, before anything is read or started.

    Args:
        protocol: names the task.
        runs_code: whether the user lets programs run that a model wrote.

    Raises:
        RecipeError: a package or its data is missing, no rows can be had without a file, or code
            may not be run.
    """
    name, row = protocol.task, TASKS[protocol.task]
    if row.runs_code and not runs_code:
        rule = "runs the programs that the model writes, so it must be allowed on the command line"
        cure = (
            "Add --run-model-code: only bubblewrap keeps them from your files and network "
            "(docs/tasks.md)"
        )
        raise RecipeError(f"evaluation.task {name}", rule, got="no --run-model-code", cure=cure)
    lacks = [package for package in row.packages if not _is_installed(package)]
    if lacks:
        rule, got = "needs all of keepmtp's `evaluate` extra", f"no {' and no '.join(lacks)}"
        raise RecipeError(
            f"evaluation.task {name}", rule, got=got, cure=f"Run {install_command('evaluate')}"
        )
    if "nltk" in row.packages:
        _refuse_without_punkt(name)
    if not row.hub and protocol.dataset is None:
        rule, cure = (
            "has no dataset on the Hub",
            "Name a file with --dataset (docs/usage.md says how one is made)",
        )
        raise RecipeError(f"evaluation.task {name}", rule, got="no file", cure=cure)


def open_tasks(protocol: Evaluation) -> tuple[Tasks, list[Row]]:
    """lm-eval's tasks with the protocol's rows, and the rows that are asked, in the order of the
    questions.

    Raises:
        RecipeError: rows that cannot be read, are of no known sub-task, or are too few.
    """
    row = TASKS[protocol.task]
    if not row.group:
        config = _config(row, _path(row, protocol.api))
        split = config.get("test_split") or config["validation_split"]
        rows = read_rows(protocol, asked=split, shown=config.get("fewshot_split") or split)
        tasks = {protocol.task: _task(protocol, config, rows)}
        return tasks, list(rows.asked[: protocol.limit])
    rows = read_rows(
        protocol, asked="test", shown="validation" if row.max_shots is None else "test"
    )
    groups = _groups(protocol, rows.asked)
    tasks = {}
    for group, asked in groups.items():
        of_group = Rows(
            asked=asked,
            shown=[each for each in rows.shown if each[row.group] == group],
            is_shared=False,
        )
        tasks[group] = _task(protocol, _sub_config(protocol, group), of_group)
    return tasks, [each for asked in groups.values() for each in asked]


@contextmanager
def quiet() -> Iterator[None]:
    """Without lm-eval's bars, and without its warnings about settings that are deliberate here."""
    logger = logging.getLogger("lm_eval")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            yield
    finally:
        logger.setLevel(level)


# --- what a task needs
# ------------------------------------------------------------------------------------------------


def _is_installed(package: str) -> bool:
    try:
        found = version(package)
    except PackageNotFoundError:
        return False
    return package != _ANTLR[0] or found.startswith(_ANTLR[1])


def _refuse_without_punkt(name: str) -> None:
    """lm-eval would download it while it imports, or fail on an answer hours later."""
    import nltk

    try:
        nltk.data.find(_PUNKT)
    except LookupError as error:
        rule, cure = (
            "needs NLTK's punkt_tab, which tells sentences apart",
            "Run python -m nltk.downloader punkt_tab",
        )
        raise RecipeError(f"evaluation.task {name}", rule, got="no punkt_tab", cure=cure) from error


# --- lm-eval's files
# --------------------------------------------------------------------------------------------------


def _config(row: TaskRow, path: Path) -> dict[str, Any]:
    """A task's file, with the functions that it names."""
    if row.has_own_lengths:
        # RULER's: the functions that score, without the one that makes rows and imports what that
        # needs.
        config = load_yaml(path, resolve_func=False)
        for metric in config["metric_list"]:
            metric["aggregation"] = _import_fun_from_str(metric["aggregation"])
        return config | {"process_results": _import_fun_from_str(config["process_results"])}
    if row.runs_code:
        with mock.patch.object(
            evaluate, "load", model_code.load
        ):  # which its module does as it is imported
            return load_yaml(path)
    if "langdetect" in row.packages:
        from langdetect import DetectorFactory

        DetectorFactory.seed = 0
    return load_yaml(path)


def _path(row: TaskRow, api: str, group: str = "") -> Path:
    return Path(lm_eval.tasks.__path__[0]) / f"{row.lm_eval_file(api, group)}.yaml"


def _sub_config(protocol: Evaluation, group: str) -> dict[str, Any]:
    """A sub-task's file: mmlu_pro's "computer science" is in ..._computer_science.yaml, RULER's
    ruler_vt in vt.yaml.
    """
    row, name = TASKS[protocol.task], group.replace(" ", "_").removeprefix("ruler_")
    path = _path(row, protocol.api, name)
    if not name.isidentifier() or not path.is_file():
        where = f"evaluation.dataset {protocol.dataset_name}"
        rule = f"{row.group} must be a sub-task of lm-eval's {protocol.task}"
        raise RecipeError(
            where, rule, got=repr(group), cure="Mend the row, or name another dataset"
        )
    return _config(row, path)


# --- rows into tasks
# --------------------------------------------------------------------------------------------------


def _groups(protocol: Evaluation, rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Rows by sub-task; with a limit so many in all, in turn from each, because a dataset has one
    after another.
    """
    turns = zip_longest(*_by_group(protocol, rows).values())
    asked = [row for turn in turns for row in turn if row is not None]
    return _by_group(protocol, asked[: protocol.limit])


def _by_group(protocol: Evaluation, rows: Sequence[Row]) -> dict[str, list[Row]]:
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(str(row[TASKS[protocol.task].group]), []).append(row)
    return groups


def _task(protocol: Evaluation, config: dict[str, Any], rows: Rows) -> ConfigurableTask:
    """lm-eval's own task with nothing replaced but where its rows come from, and the number of
    shots.
    """
    process = config.get("process_docs")
    asked = _dataset(protocol, rows.asked, process)
    # It leaves a question out of its own shots only where both are of one split.
    is_one = rows.is_shared or not rows.shown
    splits = {"asked": asked, "shown": asked if is_one else _dataset(protocol, rows.shown, process)}
    has_rows_for_shots = TASKS[protocol.task].max_shots is None
    config = {key: value for key, value in config.items() if key not in ("tag", "group")}
    task = ConfigurableTask(
        config=config
        | {
            "custom_dataset": lambda **_: splits,
            "test_split": "asked",
            "validation_split": None,
            "training_split": None,
            "fewshot_split": ("asked" if rows.is_shared else "shown")
            if has_rows_for_shots
            else None,
            "num_fewshot": protocol.shots,
            "repeats": 1,
            "process_docs": None,
        }
    )
    task.set_fewshot_seed(protocol.seed)
    return task


def _dataset(
    protocol: Evaluation, rows: Sequence[Row], process: Callable[[Dataset], Dataset] | None
) -> Dataset:
    """Rows as the task makes them. lm-eval would do so each time that it reads them, and GPQA's
    choices are drawn.
    """
    try:
        found = Dataset.from_list([dict(row) for row in rows])
    except (pyarrow.ArrowException, OverflowError) as error:
        where = f"evaluation.dataset {protocol.dataset_name}"
        rule = "each field must have one type in all rows, and numbers of 64 bits"
        cure = "Mend the rows, or name another dataset"
        raise RecipeError(where, rule, got=str(error).rstrip("."), cure=cure) from error
    if process is None:
        return found
    state = random.getstate()
    random.seed(protocol.seed)
    try:
        return process(found)
    finally:
        random.setstate(state)
