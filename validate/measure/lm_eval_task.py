"""lm-evaluation-harness at both ends of an evaluation: it builds the requests, and it reads and
scores the answers.

In: a protocol. Out: `Questions`, which any server may be asked; then, from their answers, lm-eval's
scores. Dataset, prompt, shots, stop words, filters and scores are lm-eval's own; between its two
ends the requests are ours (`tasks.py`).

Easy to get wrong: lm-eval's own HTTP models drop `finish_reason`, retry, and can score a failed
request as an empty answer. Here its model is a record of answers. And files of tasks name Python
functions, and to import those may download something: IFEval's wants NLTK's data.
"""

import io
import json
import logging
import random
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from importlib.metadata import version
from pathlib import Path
from typing import Any

import lm_eval.tasks
from datasets import Dataset
from datasets.exceptions import DatasetsError
from httpx import HTTPError
from jinja2 import TemplateError
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.api.task import Task
from lm_eval.evaluator import evaluate
from pyarrow import ArrowException

from ...checkpoints.json_file import read_lines
from ...recipes.errors import KeepMTPError, RecipeError
from ...recipes.extras import install_command
from ...recipes.frozen import Json, frozen
from ...recipes.model_file import find_path
from ...recipes.protocol import Evaluation
from ...recipes.tasks import TASKS
from ..facts.evaluated import ScoreFact, score_of
from .store import sum_of

VERSIONS = {"lm-eval": version("lm_eval"), "datasets": version("datasets")}

_CURE = (
    "Mend the rows, or lower --shots; for a dataset of the Hub, accept its terms there and set "
    "HF_TOKEN, or name a file of such rows (--dataset)"
)
# What lm-eval and datasets raise at a row or a place that they cannot read.
_UNREADABLE = (
    *(DatasetsError, ArrowException, HTTPError, TemplateError, OSError, RuntimeError),
    *(ArithmeticError, LookupError, TypeError, ValueError, AttributeError, AssertionError),
)


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
        tasks: lm-eval's, by name.
        rows: that are asked of each, by number.
    """

    protocol: Evaluation
    items: tuple[Question, ...]
    dataset_sha256: str
    tasks: Mapping[str, Task]
    rows: Mapping[str, list[int]]

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
        if self.protocol.api == "chat":
            return json.loads(prompt)
        return prompt


class Recorded(LM):
    """A model whose answers are on record; without any it answers nothing. It keeps what it is
    asked.
    """

    def __init__(self, answers: Sequence[str] = ()) -> None:
        super().__init__()
        self.answers = answers
        self.requests = list[Instance]()

    @property
    def tokenizer_name(self) -> str:
        """Of no tokenizer: what is asked is a text."""
        return ""

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Messages as they are: the server applies its template."""
        return json.dumps(chat_history)

    def generate_until(self, requests: list[Instance]) -> list[str]:
        """The answers, in the order of the requests."""
        self.requests = requests
        return list(self.answers) or [""] * len(requests)

    def loglikelihood(self, requests: list[Instance]) -> list[tuple[float, bool]]:
        """No task of `TASKS` asks for it."""
        raise NotImplementedError

    loglikelihood_rolling: Any = loglikelihood


def questions(protocol: Evaluation) -> Questions:
    """Read the dataset and let lm-eval build every request.

    Args:
        protocol: which task, and how it is asked.

    Raises:
        RecipeError: a task that cannot be scored here, no such dataset, rows that lm-eval cannot
            read or score, or too few of them.
    """
    _refuse_no_punkt(protocol)
    with _lm_evals(protocol):
        tasks = _tasks(protocol)
        # With a limit, a task of sub-tasks is asked so many in all, in turn from each, because a
        # dataset has one after another.
        turns = [(at, name) for name, task in tasks.items() for at in range(len(task.eval_docs))]
        rows = defaultdict[str, list[int]](list)
        for at, name in sorted(turns)[: protocol.limit]:
            rows[name].append(at)
        tasks = {name: task for name, task in tasks.items() if name in rows}
        # What lm-eval cannot read of a row fails now, not after all answers.
        model = Recorded()
        _evaluated(protocol, tasks, rows, model)
    if len(model.requests) < 2:
        raise RecipeError(
            f"evaluation.dataset {protocol.dataset_name}",
            "must be asked two questions or more, to have a standard error",
            got=len(model.requests),
            cure="Raise --limit, or name a longer dataset",
        )
    items = []
    docs = []
    for request in model.requests:
        prompt, given = request.arguments
        items.append(Question(prompt=prompt, stop=tuple(given["until"])))
        docs.append(json.dumps([*request.doc.values()], default=str))
    return Questions(
        protocol=protocol,
        items=tuple(items),
        dataset_sha256=sum_of("\n".join(docs)),
        tasks=tasks,
        rows=rows,
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
    protocol = asked.protocol
    num = len(asked.items)
    right = defaultdict[str, list[bool]](list)
    # lm-eval's own repeats are not used: most of its filters keep the first answer alone. Here each
    # run is scored by itself.
    for run in range(protocol.repeats):
        model = Recorded(answers[run * num : (run + 1) * num])
        with _lm_evals(protocol):
            scored = _evaluated(protocol, asked.tasks, asked.rows, model)
        for name, (metric, each) in TASKS[protocol.task].scores.items():
            for answer in scored:
                if answer["filter"] == each:
                    right[name].append(bool(answer[metric]))
    return tuple([score_of(name, values, num) for name, values in right.items()]), dict(right)


def _evaluated(
    protocol: Evaluation, tasks: Mapping[str, Task], rows: Mapping[str, list[int]], model: LM
) -> list[Json]:
    """Each answer by each filter with its metrics, in the order of the requests."""
    for task in tasks.values():
        task.set_fewshot_seed(protocol.seed)
    found: Any = evaluate(
        model,
        {"tasks": dict(tasks)},
        samples=dict(rows),
        bootstrap_iters=0,
        apply_chat_template=protocol.api == "chat",
        fewshot_as_multiturn=True,
    )
    return [answer for name in tasks for answer in found["samples"][name]]


def _tasks(protocol: Evaluation) -> dict[str, Task]:
    """lm-eval's own task, or its sub-tasks, with the protocol's dataset and number of shots."""
    row = TASKS[protocol.task]
    home, _, name = row.file.rpartition("/")
    changed: Json = {"dataset_kwargs": {"revision": protocol.dataset_revision}}
    splits: Json = {}
    if protocol.dataset is not None:
        splits = _splits(protocol)
        changed = {"custom_dataset": lambda **_: splits}
    manager = lm_eval.tasks.TaskManager(
        include_path=str(Path(lm_eval.tasks.__path__[0], home)), include_defaults=False
    )
    try:
        names: Any = (manager.task_index[name].cfg or {})["task"]  # of a group those of its tasks
        if isinstance(names, str):
            names = [names]
        # lm-eval changes its own tasks in a group alone.
        named = [{"task": name, **changed} for name in names]
        tasks = manager.load({"group": "keepmtp", "task": named})["tasks"]
    except (ImportError, AssertionError) as error:
        raise RecipeError(
            f"evaluation.task {protocol.task}",
            "needs keepmtp's `evaluate` extra",
            got=str(error).rstrip("."),
            cure=f"Run {install_command('evaluate')}",
        ) from error
    task: Any
    for task in tasks.values():
        if protocol.shots and not task.config.num_fewshot:
            rule = f"lm-eval asks {protocol.task} without examples"
            raise RecipeError("evaluation.shots", rule, got=protocol.shots, cure="Leave it out")
        task.set_config("num_fewshot", protocol.shots)
        # It leaves a question out of its own shots only where both are of one split.
        if protocol.dataset is not None and task.fewshot_cfg.split and not row.shown_by:
            task.fewshot_cfg.split = task.config.test_split
        # It would draw the order of GPQA's choices anew each time that it reads its rows.
        docs = task.eval_docs
        task.dataset = dict.fromkeys(task.dataset, docs)
        task.set_config("process_docs", None)
    num = sum([len(task.eval_docs) for task in tasks.values()])
    if splits and len(tasks) > 1 and num < len(splits["test"]):
        got = f"{num:,} of {len(splits['test']):,} rows"
        rule = f"each row must be of a part of {protocol.task}"
        raise RecipeError(str(protocol.dataset), rule, got=got, cure="Mend the rows")
    return tasks


def _splits(protocol: Evaluation) -> Json:
    """A file's rows, which are every split that a task may name.

    Raises:
        RecipeError: no such file, or a row without a field of the others.
        CheckpointError: a line that is no JSON; see `json_file.read_lines`.
    """
    path = find_path(str(protocol.dataset))
    if path is None or not path.is_file():
        where = f"evaluation.dataset {protocol.dataset}"
        cure = "Name a file of rows as the task's own dataset has them"
        raise RecipeError(where, "must be a file", got="no such file", cure=cure)
    if path.suffix == ".jsonl":
        rows = Dataset.from_list([row for _, row in read_lines(path, cure=_CURE)])
    else:
        rows = Dataset.from_parquet(str(path))
    for name in rows.column_names:
        column = rows[name][:]
        if None in column:  # it would be asked as a word, and never be answered right
            got = f"no {name} in row {column.index(None) + 1}"
            raise RecipeError(path, "each row must have every field", got=got, cure="Mend the row")
    shown = rows
    shown_by = TASKS[protocol.task].shown_by
    if shown_by:
        shown = rows.filter(lambda row: row[shown_by].strip())
        rows = rows.filter(lambda row: not row[shown_by].strip())
    return {"train": rows, "validation": shown, "test": rows}


def _refuse_no_punkt(protocol: Evaluation) -> None:
    """Refuse what lm-eval would download while it imports, or fail on hours later."""
    if protocol.task != "ifeval":
        return
    import langdetect
    import nltk

    langdetect.DetectorFactory.seed = 0  # without one it guesses otherwise each time
    try:
        nltk.data.find("tokenizers/punkt_tab")
    except LookupError as error:
        raise RecipeError(
            f"evaluation.task {protocol.task}",
            "needs NLTK's punkt_tab, which tells sentences apart",
            got="no punkt_tab",
            cure="Run python -m nltk.downloader punkt_tab",
        ) from error


@contextmanager
def _lm_evals(protocol: Evaluation) -> Iterator[None]:
    """For lm-eval's own code: without its bars and its warnings about settings that are deliberate
    here, and with a seed for the choices that it draws.

    Raises:
        RecipeError: a dataset that it cannot read, ask or score.
    """
    loggers = [logging.getLogger(name) for name in ("lm_eval", "datasets")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    state = random.getstate()
    random.seed(protocol.seed)
    try:
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            yield
    except KeepMTPError:
        raise
    except _UNREADABLE as error:
        cause = error.__cause__ or error
        raise RecipeError(
            f"evaluation.dataset {protocol.dataset_name}",
            "must hold rows that lm-eval can ask and score",
            got=" ".join(f"{type(cause).__name__}: {cause}".split()).rstrip("."),
            cure=_CURE,
        ) from error
    finally:
        random.setstate(state)
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
