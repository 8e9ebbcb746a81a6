"""lm-evaluation-harness at both ends of an evaluation: it builds the requests, and it reads and
scores the answers.

In: a protocol. Out: `Questions`, which any server may be asked; then, from their answers, lm-eval's
scores. Prompt, shots, stop words, filters and scores are lm-eval's own, and so are its tasks, with
rows that are given in place of those it would download; between its two ends the requests are ours
(`tasks.py`).

Easy to get wrong: lm-eval's own HTTP models drop `finish_reason`, retry, and can score a failed
request as an empty answer. Here its tasks get recorded answers. And files of tasks name Python
functions, and to import those may download something: IFEval's wants NLTK's data.
"""

import hashlib
import io
import json
import logging
import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import field
from importlib.metadata import version
from itertools import chain, product, zip_longest
from pathlib import Path
from typing import Any

import lm_eval.tasks
import pyarrow
from datasets import Dataset
from lm_eval.api.task import ConfigurableTask
from lm_eval.tasks._yaml_loader import load_yaml

from ...recipes.errors import RecipeError
from ...recipes.extras import install_command
from ...recipes.frozen import Json, frozen, without
from ...recipes.protocol import Evaluation
from ...recipes.tasks import TASKS
from ..facts.evaluated import ScoreFact, score_of
from .dataset import Row, Rows, read_rows

VERSIONS = {"lm-eval": version("lm_eval"), "datasets": version("datasets")}

_CURE = "Mend the row, or name another dataset"
_UNSCORED = (LookupError, TypeError, ValueError, AttributeError, AssertionError)


@frozen
class Question:
    """One request.

    Attributes:
        prompt: a text, or for chat a JSON list of messages.
        stop: words that end an answer.
    """

    prompt: str
    stop: tuple[str, ...]


@frozen
class Questions:
    """All requests of a protocol. A run asks them in the dataset's order; runs go on counting.

    Attributes:
        protocol: that they are of.
        items: of one run; further runs ask the same.
        dataset_sha256: of questions and reference answers, in order.
        tasks: lm-eval's.
        notes: what the environment of a result says of them.
    """

    protocol: Evaluation
    items: tuple[Question, ...]
    dataset_sha256: str
    tasks: Sequence[ConfigurableTask]
    notes: Mapping[str, str] = field(default_factory=dict)

    @property
    def num(self) -> int:
        """Requests of all runs."""
        return len(self.items) * self.protocol.repeats

    @property
    def prompts_sha256(self) -> str:
        """Of all that is sent: what another lm-eval or datasets draws or words otherwise is not the
        same question.
        """
        return sum_of("\n".join([json.dumps([item.prompt, item.stop]) for item in self.items]))

    def sent(self, number: int) -> str | list[dict[str, str]]:
        """The text, or the messages, of a request."""
        prompt = self.items[number % len(self.items)].prompt
        return json.loads(prompt) if self.protocol.api == "chat" else prompt


def questions(protocol: Evaluation) -> Questions:
    """Read the dataset and let lm-eval build every request.

    Args:
        protocol: which task, and how it is asked.

    Raises:
        RecipeError: a task that cannot be scored here, no such dataset, a row that lm-eval cannot
            read or score, or too few rows for the shots.
    """
    row = TASKS[protocol.task]
    _refuse_task(protocol)
    with _quiet():
        try:
            tasks, rows = _open_tasks(protocol)
        except (ImportError, AssertionError) as error:
            raise RecipeError(
                f"evaluation.task {protocol.task}",
                "needs keepmtp's `evaluate` extra",
                got=str(error).rstrip("."),
                cure=f"Run {install_command('evaluate')}",
            ) from error
        for task in tasks:
            task.build_all_requests(
                limit=None if row.group else protocol.limit,  # sub-tasks' rows are cut before
                apply_chat_template=protocol.api == "chat",
                fewshot_as_multiturn=True,
                chat_template=_as_json,
            )
        _refuse_unscored(protocol, tasks)
    requests: list[Any] = [*chain.from_iterable(task.instances for task in tasks)]
    items = []
    for request in requests:
        prompt, given = request.args
        items.append(Question(prompt=prompt, stop=tuple(given["until"])))
    dataset = [json.dumps([*row.values()]) for row in rows]
    return Questions(
        protocol=protocol,
        items=tuple(items),
        dataset_sha256=sum_of("\n".join(dataset)),
        tasks=tasks,
    )


def scores(
    asked: Questions, answers: Sequence[str]
) -> tuple[tuple[ScoreFact, ...], dict[str, list[bool]]]:
    """lm-eval's scores of the answers.

    Args:
        asked: from `questions`.
        answers: texts, for every question of every run.

    Returns: each of the task's scores, the mean over questions and runs; and by its name what each
        answer gets.
    """
    row = TASKS[asked.protocol.task]
    num = len(asked.items)
    right: dict[str, list[bool]] = {name: [] for name in row.scores}
    # lm-eval's own repeats are not used: most of its filters keep the first answer alone. Here each
    # run is scored by itself.
    for run in range(asked.protocol.repeats):
        texts = iter(answers[run * num :])
        for task in asked.tasks:
            for request in task.instances:
                request.resps = [next(texts)]
            with _quiet():
                task.apply_filters()
                for request, (name, (metric, each)) in product(task.instances, row.scores.items()):
                    found = task.process_results(request.doc, [request.filtered_resps[each]])
                    right[name].append(bool(found[metric]))
    return tuple([score_of(name, values, num) for name, values in right.items()]), right


def _refuse_task(protocol: Evaluation) -> None:
    """Refuse what cannot be scored here, before anything is read or started."""
    if "nltk" in TASKS[protocol.task].packages:
        import nltk

        try:  # lm-eval would download it while it imports, or fail on an answer hours later
            nltk.data.find("tokenizers/punkt_tab")
        except LookupError as error:
            raise RecipeError(
                f"evaluation.task {protocol.task}",
                "needs NLTK's punkt_tab, which tells sentences apart",
                got="no punkt_tab",
                cure="Run python -m nltk.downloader punkt_tab",
            ) from error


def _open_tasks(protocol: Evaluation) -> tuple[list[ConfigurableTask], list[Row]]:
    """lm-eval's tasks with the protocol's rows, and the rows that are asked, in the order
    of the questions.

    With a limit, a task of sub-tasks gets so many rows in all, in turn from each, because a dataset
    has one after another.
    """
    row = TASKS[protocol.task]
    if not row.group:
        config = _config(protocol)
        split = config.get("test_split") or config["validation_split"]
        rows = read_rows(protocol, asked=split, shown=config.get("fewshot_split") or split)
        return [_task(protocol, config, rows)], list(rows.asked[: protocol.limit])
    rows = read_rows(protocol, asked="test", shown="validation")
    turns = chain.from_iterable(zip_longest(*_by_group(row.group, rows.asked).values()))
    mixed = [question for question in turns if question is not None]
    shown = _by_group(row.group, rows.shown)
    tasks = []
    in_order = []
    for group, asked in _by_group(row.group, mixed[: protocol.limit]).items():
        of_group = Rows(asked=asked, shown=shown.get(group, []), is_shared=False)
        tasks.append(_task(protocol, _config(protocol, group), of_group))
        in_order += asked
    return tasks, in_order


def _by_group(column: str, rows: Sequence[Row]) -> Mapping[str, list[Row]]:
    groups = defaultdict[str, list[Row]](list)
    for row in rows:
        groups[str(row[column])].append(row)
    return groups


@contextmanager
def _quiet() -> Iterator[None]:
    """Without lm-eval's bars, and without its warnings about settings that are deliberate here."""
    logger = logging.getLogger("lm_eval")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            yield
    finally:
        logger.setLevel(level)


def _config(protocol: Evaluation, group: str = "") -> Json:
    """The file of a task or of a sub-task, with the functions that it names.

    mmlu_pro's "computer science" is in ..._computer_science.yaml.
    """
    row = TASKS[protocol.task]
    name = group.replace(" ", "_")
    path = Path(lm_eval.tasks.__path__[0], f"{row.file.format(name)}.yaml")
    if group and not (name.isidentifier() and path.is_file()):
        raise RecipeError(
            f"evaluation.dataset {protocol.dataset_name}",
            f"{row.group} must be a sub-task of lm-eval's {protocol.task}",
            got=repr(group),
            cure=_CURE,
        )
    if "langdetect" in row.packages:
        from langdetect import DetectorFactory

        DetectorFactory.seed = 0  # without one it guesses otherwise each time
    return load_yaml(path)


def _task(protocol: Evaluation, config: Json, rows: Rows) -> ConfigurableTask:
    """lm-eval's own task with nothing replaced but where its rows come from, and the number of
    shots.
    """
    process = config.get("process_docs")
    asked = shown = _dataset(protocol, rows.asked, process)
    # It leaves a question out of its own shots only where both are of one split.
    if rows.shown and not rows.is_shared:
        shown = _dataset(protocol, rows.shown, process)
    split = "asked" if rows.is_shared else "shown"
    if TASKS[protocol.task].max_shots is not None:
        split = None  # its shots are in its own file
    replaced = {
        "custom_dataset": lambda **_: {"asked": asked, "shown": shown},
        "test_split": "asked",
        "validation_split": None,
        "training_split": None,
        "fewshot_split": split,
        "num_fewshot": protocol.shots,
        "repeats": 1,
        "process_docs": None,
    }
    task = ConfigurableTask(config=without(config, "tag", "group") | replaced)
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
        raise RecipeError(
            f"evaluation.dataset {protocol.dataset_name}",
            "each field must have one type in all rows, and numbers of 64 bits",
            got=str(error).rstrip("."),
            cure=_CURE,
        ) from error
    if process is None:
        return found
    state = random.getstate()
    random.seed(protocol.seed)
    try:
        return process(found)
    finally:
        random.setstate(state)


def _refuse_unscored(protocol: Evaluation, tasks: Sequence[ConfigurableTask]) -> None:
    """Score an empty answer to each question: what lm-eval cannot read of a row fails now, not
    after all answers.
    """
    for task in tasks:
        for number, request in enumerate(task.instances, 1):
            try:
                task.process_results(request.doc, [""])
            except _UNSCORED as error:
                raise RecipeError(
                    f"evaluation.dataset {protocol.dataset_name}: question {number} of "
                    f"{task.config.task}",
                    "must be one that lm-eval can score",
                    got=" ".join(f"{type(error).__name__}: {error}".split()).rstrip("."),
                    cure=_CURE,
                ) from error


def _as_json(chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
    """Messages as they are: the server applies its template."""
    return json.dumps(chat_history)


def sum_of(text: str) -> str:
    """SHA-256 of a text."""
    return hashlib.sha256(text.encode()).hexdigest()
