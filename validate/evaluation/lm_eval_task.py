"""lm-evaluation-harness at both ends of an evaluation: it builds the requests, and it reads and scores the answers.

In: a protocol. Out: `Questions`, which any server may be asked; then, from their answers, lm-eval's scores. Prompt,
shots, stop words, filters and scores are lm-eval's own; between its two ends the requests are ours (`ask.py`).

Easy to get wrong: lm-eval's own HTTP models drop `finish_reason`, retry, and can score a failed request as an empty
answer. Here its model only repeats recorded answers, found by the very prompt they were given to; a prompt without one
ends the evaluation.
"""

import hashlib
import io
import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast

import lm_eval.tasks
import yaml
from datasets import Dataset
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.api.task import ConfigurableTask
from lm_eval.evaluator import evaluate

from ...recipes.protocol import Evaluation
from .dataset import FIELDS, Rows, read_rows
from .evaluated import ScoreFact

VERSIONS = {"lm-eval": version("lm_eval"), "datasets": version("datasets")}
METRIC = "exact_match"


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

    @property
    def prompts_sha256(self) -> str:
        """Of all that is sent: what another lm-eval or datasets draws or words otherwise is not the same question."""
        return _sum("\n".join(json.dumps([item.prompt, item.stop]) for item in self.items))


def questions(protocol: Evaluation) -> Questions:
    """Read the dataset and let lm-eval build every request.

    Raises:
        RecipeError: no such dataset, a row without question or readable answer, or too few rows for the shots.
    """
    config = _config(protocol)
    with _quiet():
        rows = read_rows(protocol, asked=config["test_split"], shown=config["fewshot_split"])
        task = _task(protocol, rows)
        task.build_all_requests(
            limit=protocol.limit,
            apply_chat_template=protocol.api == "chat",
            fewshot_as_multiturn=True,
            chat_template=_Recorded({}).apply_chat_template if protocol.api == "chat" else None,
        )
    requests: list[tuple[Any, ...]] = [tuple(request.args) for request in task.instances]
    items = tuple(
        Question(number=number, prompt=args[0], sha256=_sum(args[0]), stop=tuple(args[1]["until"]))
        for number, args in enumerate(requests)
    )
    pairs = (json.dumps([row[field] for field in FIELDS]) for row in rows.asked[: len(items)])
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
        found = cast(
            Mapping[str, Any],
            evaluate(
                model,
                {"tasks": {name: asked.task}},
                limit=asked.protocol.limit,
                apply_chat_template=asked.protocol.api == "chat",
                fewshot_as_multiturn=True,
            ),
        )
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


def _task(protocol: Evaluation, rows: Rows) -> ConfigurableTask:
    """lm-eval's own task with nothing replaced but where its rows come from, and the number of shots."""
    splits = {"asked": Dataset.from_list([dict(row) for row in rows.asked])}
    # It leaves a question out of its own shots only where both are of one split.
    splits["shown"] = splits["asked"] if rows.is_shared else Dataset.from_list([dict(row) for row in rows.shown])
    task = ConfigurableTask(
        config=_config(protocol)
        | {
            "custom_dataset": lambda **_: splits,
            "test_split": "asked",
            "fewshot_split": "asked" if rows.is_shared else "shown",
            "training_split": None,
            "num_fewshot": protocol.shots,
        }
    )
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


def _sum(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
