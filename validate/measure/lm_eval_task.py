"""lm-evaluation-harness at both ends of an evaluation: it builds the requests, and it reads and
scores the answers.

In: a protocol. Out: `Questions`, which any server may be asked; then, from their answers, lm-eval's
scores. Prompt, shots, stop words, filters and scores are lm-eval's own; between its two ends the
requests are ours (`gsm8k.py`).

Easy to get wrong: lm-eval's own HTTP models drop `finish_reason`, retry, and can score a failed
request as an empty answer. Here its tasks get recorded answers. lm-eval's `repeats` are not used:
most of its filters keep the first answer alone. Here each run is scored by itself, and the score is
their mean.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, cast

from lm_eval.api.instance import Instance

from ...recipes.errors import RecipeError
from ...recipes.protocol import Evaluation
from ...recipes.tasks import TASKS
from ..facts.evaluated import ScoreFact, mean_of_questions
from .dataset import fields_of
from .lm_eval_tasks import Tasks, open_tasks, quiet, refuse_task

VERSIONS = {"lm-eval": version("lm_eval"), "datasets": version("datasets")}

_UNSCORED = (LookupError, TypeError, ValueError, AttributeError, AssertionError)


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One request.

    Attributes:
        number: from 0: a run's questions in the dataset's order, run after run.
        run: from 0.
        prompt: a text, or for chat a JSON list of messages. One that ends with an assistant's is to
            be continued.
        sha256: of the prompt.
        stop: words that end an answer.
        max_tokens: of an answer.
    """

    number: int
    run: int
    prompt: str
    sha256: str
    stop: tuple[str, ...]
    max_tokens: int

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
        tasks: lm-eval's.
    """

    protocol: Evaluation
    items: tuple[Question, ...]
    dataset_sha256: str
    tasks: Tasks

    @property
    def num_asked(self) -> int:
        """Questions of one run."""
        return len(self.items) // self.protocol.repeats

    @property
    def prompts_sha256(self) -> str:
        """Of all that is sent: what another lm-eval or datasets draws or words otherwise is not the
        same question.
        """
        first = self.items[: self.num_asked]  # other runs send the same
        return _sum("\n".join(json.dumps([item.prompt, item.stop]) for item in first))


def questions(protocol: Evaluation, *, runs_code: bool = False) -> Questions:
    """Read the dataset and let lm-eval build every request.

    Args:
        protocol: which task, and how it is asked.
        runs_code: whether the user lets programs run that a model wrote.

    Raises:
        RecipeError: a task that cannot be scored here, no such dataset, a row that lm-eval cannot
            read or score, or too few rows for the shots.
    """
    refuse_task(protocol, runs_code=runs_code)
    with quiet():
        tasks, rows = open_tasks(protocol)
        for task in tasks.values():
            task.build_all_requests(
                limit=None
                if TASKS[protocol.task].group
                else protocol.limit,  # sub-tasks' rows are cut before
                apply_chat_template=protocol.api == "chat",
                fewshot_as_multiturn=True,
                chat_template=_as_json,
            )
        if not TASKS[protocol.task].runs_code:
            _refuse_unscored(protocol, tasks)
    one_run = [request for task in tasks.values() for request in task.instances]
    items = [
        _question(protocol, run * len(one_run) + number, run, request)
        for run in range(protocol.repeats)
        for number, request in enumerate(one_run)
    ]
    rows_asked = (json.dumps([row[field] for field in fields_of(protocol.task)]) for row in rows)
    dataset_sha256 = _sum("\n".join(rows_asked))
    return Questions(
        protocol=protocol, items=tuple(items), dataset_sha256=dataset_sha256, tasks=tasks
    )


def scores(
    asked: Questions, answers: Mapping[int, str]
) -> tuple[tuple[ScoreFact, ...], dict[str, tuple[float, ...]]]:
    """lm-eval's scores of the answers.

    Args:
        asked: from `questions`.
        answers: text by number, for every question of every run.

    Returns: each of the task's scores, the mean over questions and runs; and by its name what each
    answer gets, by
        number: True or False, or a share from 0 to 1 where an answer can be partly right.
    """
    row, num = TASKS[asked.protocol.task], asked.num_asked
    right: dict[str, list[float]] = {name: [] for name in row.scores}
    filters = {name for _, name in row.scores.values()}
    requests = [(task, request) for task in asked.tasks.values() for request in task.instances]
    for run in range(asked.protocol.repeats):
        for number, (_, request) in enumerate(requests, run * num):
            request.resps = [answers[number]]
        with quiet():
            for task in asked.tasks.values():
                task.apply_filters()
            for task, request in requests:
                found = {
                    each: task.process_results(request.doc, [request.filtered_resps[each]])
                    for each in filters
                }
                for name, (metric, each) in row.scores.items():
                    # RULER names its metric by the length of the prompt.
                    right[name].append(float(found[each][metric or str(request.doc["max_length"])]))
    facts, by_filter = [], {}
    for name, values in right.items():
        value, stderr = mean_of_questions(values, num)
        facts.append(ScoreFact(filter=name, value=value, stderr=stderr))
        # True and False, where no answer is partly right.
        by_filter[name] = tuple(map(bool, values)) if set(values) <= {0.0, 1.0} else tuple(values)
    return tuple(facts), by_filter


# --- requests
# --------------------------------------------------------------------------------------------------


def _question(protocol: Evaluation, number: int, run: int, request: Instance) -> Question:
    prompt, given = cast(tuple[str, Mapping[str, Any]], request.args)
    most = given["max_gen_toks"] if TASKS[protocol.task].has_own_lengths else protocol.max_tokens
    return Question(
        number=number,
        run=run,
        prompt=prompt,
        sha256=_sum(prompt),
        stop=tuple(given["until"]),
        max_tokens=min(most, protocol.max_tokens),
    )


def _refuse_unscored(protocol: Evaluation, tasks: Tasks) -> None:
    """Score an empty answer to each question: what lm-eval cannot read of a row fails now, not
    after all answers.
    """
    for name, task in tasks.items():
        for number, request in enumerate(task.instances, 1):
            try:
                task.process_results(request.doc, [""])
            except _UNSCORED as error:
                where = f"evaluation.dataset {protocol.dataset_name}: question {number} of {name}"
                got = " ".join(f"{type(error).__name__}: {error}".split()).rstrip(".")
                cure = "Mend the row, or name another dataset"
                raise RecipeError(
                    where, "must be one that lm-eval can score", got=got, cure=cure
                ) from error


def _as_json(chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
    """Messages as they are: the server applies its template, and goes on where the last one is an
    assistant's.
    """
    assert add_generation_prompt == (chat_history[-1]["role"] == "user")
    return json.dumps(chat_history)


def _sum(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
