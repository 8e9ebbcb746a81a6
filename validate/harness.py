"""lm-evaluation-harness at both ends of an evaluation: it builds the requests, and it reads and scores the answers.

In: a protocol. Out: `Questions`, which any server may be asked; then, from their answers, lm-eval's scores. Prompt,
shots, stop words, filters and scores are lm-eval's own; between its two ends the requests are ours (`asking.py`).

Easy to get wrong: lm-eval's own HTTP models drop `finish_reason`, retry, and can score a failed request as an empty
answer. Here its model only repeats recorded answers, found by the very prompt they were given to; a prompt without one
ends the evaluation.
"""

import hashlib
import io
import json
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast

import datasets
import lm_eval.tasks
import yaml
from datasets import Dataset
from datasets.exceptions import DatasetsError
from httpx import HTTPError
from huggingface_hub.errors import HfHubHTTPError
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.api.task import ConfigurableTask
from lm_eval.evaluator import evaluate

from ..recipes.errors import RecipeError, refuse
from ..recipes.protocol import Evaluation
from .report_schema import ScoreFact

VERSIONS = {"lm-eval": version("lm_eval"), "datasets": version("datasets")}
METRIC = "exact_match"

_HUB_SUBSET = "main"
_FIELDS = ("question", "answer")
_ANSWER = re.compile(r"#### -?\$?[0-9.,]*[0-9]")
_WHOLE_ANSWER = re.compile(_ANSWER.pattern + r"\.?\Z")  # lm-eval compares all that follows "#### "
_BESIDE_THE_PACKAGE = Path(__file__).parent.parent
_UNREADABLE = (DatasetsError, HfHubHTTPError, HTTPError, OSError, ValueError, TypeError, RuntimeError)

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One request.

    Attributes:
        number: from 0, in the dataset's order.
        prompt: a text, or for chat a JSON list of messages.
        sha256: of the prompt.
        stop: words that end an answer.
    """

    number: int
    prompt: str
    sha256: str
    stop: tuple[str, ...]

    @property
    def messages(self) -> list[dict[str, str]]:
        """The prompt of a chat."""
        return json.loads(self.prompt)


@dataclass(frozen=True, slots=True, kw_only=True)
class Questions:
    """All requests of a protocol.

    Attributes:
        protocol: that they are of.
        items: by number.
        dataset_sha256: of questions and reference answers, in order.
        task: lm-eval's.
    """

    protocol: Evaluation
    items: tuple[Question, ...]
    dataset_sha256: str
    task: ConfigurableTask


def questions(protocol: Evaluation) -> Questions:
    """Read the dataset and let lm-eval build every request.

    Raises:
        RecipeError: no such dataset, a row without question or readable answer, or too few rows for the shots.
    """
    splits, asked, shown = _splits(protocol)
    _refuse_few_rows(protocol, len(splits[asked]), len(splits[shown]), is_shared=asked == shown)
    with _quiet():
        task = _task(protocol, splits, asked, shown)
        task.build_all_requests(
            limit=protocol.limit, apply_chat_template=protocol.api == "chat", fewshot_as_multiturn=True,
            chat_template=_Recorded({}).apply_chat_template if protocol.api == "chat" else None,
        )  # fmt: skip
    requests: list[tuple[Any, ...]] = [tuple(request.args) for request in task.instances]
    items = tuple(
        Question(number=number, prompt=args[0], sha256=_sum(args[0]), stop=tuple(args[1]["until"]))
        for number, args in enumerate(requests)
    )
    pairs = (json.dumps([row[field] for field in _FIELDS]) for row in splits[asked][: len(items)])
    return Questions(protocol=protocol, items=items, dataset_sha256=_sum("\n".join(pairs)), task=task)


def scores(asked: Questions, answers: Mapping[int, str]) -> tuple[tuple[ScoreFact, ...], dict[str, tuple[bool, ...]]]:
    """lm-eval's scores of the answers.

    Args:
        asked: from `questions`.
        answers: text by number, for every question.

    Returns: a score for each of the task's filters, and by filter whether each answer is right, in order.
    """
    model = _Recorded({item.sha256: answers[item.number] for item in asked.items})
    name = asked.protocol.task
    asked.task.set_fewshot_seed(asked.protocol.seed)  # each request draws its shots from one stream
    with _quiet():
        # simple_evaluate() would do the same after running pip, git and lscpu for its record of the environment.
        found = cast(Mapping[str, Any], evaluate(
            model, {"tasks": {name: asked.task}}, limit=asked.protocol.limit,
            apply_chat_template=asked.protocol.api == "chat", fewshot_as_multiturn=True,
        ))  # fmt: skip
    result: Mapping[str, Any] = found["results"][name]
    right: dict[str, list[bool]] = {}
    for sample in found["samples"][name]:  # a filter at a time, documents in order
        right.setdefault(sample["filter"], []).append(bool(sample[METRIC]))
    facts = tuple(
        ScoreFact(filter=one, value=float(result[f"{METRIC},{one}"]), stderr=float(result[f"{METRIC}_stderr,{one}"]))
        for one in right
    )
    return facts, {one: tuple(values) for one, values in right.items()}


# --- lm-eval ----------------------------------------------------------------------------------------------------------


class _Recorded(LM):
    """lm-eval's view of a server that has already answered: texts by their prompt's sum."""

    def __init__(self, answers: Mapping[str, str]) -> None:
        super().__init__()
        self.answers = answers

    @property
    def tokenizer_name(self) -> str:
        """lm-eval asks for it with a chat template; it would name a cache, which is off."""
        return ""

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Messages as they are: the server applies its template."""
        assert add_generation_prompt, "the last turn is the user's"
        return json.dumps(chat_history)

    def generate_until(self, requests: list[Instance]) -> list[str]:
        """The recorded answers."""
        return [self.answers[_sum(request.args[0])] for request in requests]

    def loglikelihood(self, requests: list[Instance]) -> list[tuple[float, bool]]:
        """Not asked for by a task that generates."""
        raise NotImplementedError

    def loglikelihood_rolling(self, requests: list[Instance]) -> list[float]:
        """Not asked for by a task that generates."""
        raise NotImplementedError


def _task(protocol: Evaluation, splits: Mapping[str, Sequence[Row]], asked: str, shown: str) -> ConfigurableTask:
    """lm-eval's own task with nothing replaced but where its rows come from, and the number of shots."""
    config = _config(protocol)
    tables = {name: Dataset.from_list([dict(row) for row in rows]) for name, rows in splits.items()}
    task = ConfigurableTask(config=config | {
        "custom_dataset": lambda **_: tables, "test_split": asked, "fewshot_split": shown, "training_split": None,
        "num_fewshot": protocol.shots,
    })  # fmt: skip
    task.set_fewshot_seed(protocol.seed)
    return task


def _config(protocol: Evaluation) -> dict[str, Any]:
    # gsm8k/gsm8k.yaml and gsm8k_platinum/gsm8k-platinum.yaml: plain YAML, without lm-eval's tags for code.
    path = Path(lm_eval.tasks.__path__[0]) / protocol.task / f"{protocol.task.replace('_', '-')}.yaml"
    config = yaml.safe_load(path.read_text(encoding="utf-8"))
    del config["tag"]
    return config


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


# --- the dataset ------------------------------------------------------------------------------------------------------


def _splits(protocol: Evaluation) -> tuple[dict[str, Sequence[Row]], str, str]:
    """Rows by split, the split that is asked, and the one that shots are drawn from."""
    if protocol.dataset is not None:
        return {"test": _file_rows(protocol.dataset)}, "test", "test"
    config = _config(protocol)
    asked, shown = config["test_split"], config["fewshot_split"]
    splits = _hub_splits(protocol)
    for name in (asked, shown):
        if name not in splits:
            rule, got = f"must have the splits {asked} and {shown}", ", ".join(splits)
            raise RecipeError(refuse(protocol.dataset_name, rule, got, "Correct dataset_revision"))
        for number, row in enumerate(splits[name]):
            _refuse_row(row, f"{protocol.dataset_name} {name} row {number}")
    return {name: splits[name] for name in (asked, shown)}, asked, shown


def _hub_splits(protocol: Evaluation) -> dict[str, Sequence[Row]]:
    try:
        with _quiet():
            found = datasets.load_dataset(protocol.dataset_name, _HUB_SUBSET, revision=protocol.dataset_revision)
    except _UNREADABLE as error:
        got = " ".join(str(error.__cause__ or error).split()).rstrip(".")[:300] or type(error).__name__
        cure = ("Correct evaluation.dataset_revision, or, where the Hub is out of reach, name a .jsonl file with the "
                "fields question and answer (--dataset)")  # fmt: skip
        raise RecipeError(refuse(protocol.dataset_name, "must be a dataset that can be read", got, cure)) from error
    return {str(name): split.to_list() for name, split in found.items()}


def _file_rows(name: str) -> list[Row]:
    path = next((path for path in (Path(name), _BESIDE_THE_PACKAGE / name) if path.is_file()), None)
    cure = 'Name a .jsonl file of {"question": ..., "answer": "... #### 12"} lines'
    if path is None:
        raise RecipeError(refuse(f"evaluation.dataset {name}", "must be a file", "no such file", cure))
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(refuse(path, "must be a text file", str(error), cure)) from error
    rows = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise RecipeError(refuse(f"{path}: row {number}", "must be a JSON object", str(error), cure)) from error
        rows.append(_refuse_row(row, f"{path}: row {number}", _WHOLE_ANSWER))
    if not rows:
        raise RecipeError(refuse(path, "must hold questions", "none", cure))
    return rows


def _refuse_row(row: object, where: str, answer: re.Pattern[str] = _ANSWER) -> Row:
    """The row's question and answer."""
    cure = "Mend the row, or name another dataset"
    if not isinstance(row, Mapping):
        raise RecipeError(refuse(where, "must be an object with question and answer", _short(row), cure))
    for field in _FIELDS:
        if field not in row:
            got = ", ".join(map(str, row)) or "no field"
            raise RecipeError(refuse(where, f"must have the field {field}", got, cure))
        if not isinstance(row[field], str) or not row[field].strip():
            raise RecipeError(refuse(where, f"{field} must be a text", _short(row[field]), cure))
    if not answer.search(row["answer"]):
        raise RecipeError(refuse(where, 'answer must end with "#### " and a number', _short(row["answer"]), cure))
    return {field: row[field] for field in _FIELDS}


def _refuse_few_rows(protocol: Evaluation, num_asked: int, num_shown: int, *, is_shared: bool) -> None:
    where = f"evaluation.dataset {protocol.dataset_name}"
    most = num_shown - is_shared  # no question is its own example
    if protocol.shots > most:
        rule = f"must have more rows than evaluation.shots, {protocol.shots}"
        raise RecipeError(refuse(where, rule, num_shown, f"Use --shots {most} or fewer, or a longer dataset"))
    if min(num_asked, protocol.limit or num_asked) < 2:
        raise RecipeError(refuse(where, "must be asked two questions or more, to have a standard error", 1,
                                 "Raise --limit, or name a longer dataset"))  # fmt: skip


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:28]}...{text[-28:]}"


def _sum(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
