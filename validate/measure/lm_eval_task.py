"""lm-evaluation-harness at both ends of an evaluation: it builds the requests, and it reads and scores the answers.

In: a protocol. Out: `Questions`, which any server may be asked; then, from their answers, lm-eval's scores. Prompt,
shots, stop words, filters and scores are lm-eval's own; between its two ends the requests are ours (`gsm8k.py`).

Easy to get wrong: lm-eval's own HTTP models drop `finish_reason`, retry, and can score a failed request as an empty
answer. Here its model only repeats recorded answers, found by the very prompt they were given to; a prompt without one
ends the evaluation. lm-eval's `repeats` are not used: most of its filters keep the first answer alone. Here each run is
scored by itself, and the score is their mean.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, cast

from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.evaluator import evaluate

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
        asked: the question's place in its run, from 0.
        run: from 0.
        prompt: a text, or for chat a JSON list of messages. One that ends with an assistant's is to be continued.
        sha256: of the prompt.
        stop: words that end an answer.
        max_tokens: of an answer.
    """

    number: int
    asked: int
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
        """Of all that is sent: what another lm-eval or datasets draws or words otherwise is not the same question."""
        first = self.items[: self.num_asked]  # other runs send the same
        return _sum("\n".join(json.dumps([item.prompt, item.stop]) for item in first))


def questions(protocol: Evaluation, *, runs_code: bool = False) -> Questions:
    """Read the dataset and let lm-eval build every request.

    Args:
        protocol: which task, and how it is asked.
        runs_code: whether the user lets programs run that a model wrote.

    Raises:
        RecipeError: a task that cannot be scored here, no such dataset, a row that lm-eval cannot read or score, or too
            few rows for the shots.
    """
    refuse_task(protocol, runs_code=runs_code)
    with quiet():
        tasks, rows = open_tasks(protocol)
        for task in tasks.values():
            task.build_all_requests(
                limit=_limit(protocol),
                apply_chat_template=protocol.api == "chat",
                fewshot_as_multiturn=True,
                chat_template=_Recorded(()).apply_chat_template if protocol.api == "chat" else None,
            )
        if not TASKS[protocol.task].runs_code:
            _refuse_unscored(protocol, tasks)
    one_run = [request for task in tasks.values() for request in task.instances]
    items = [
        _question(protocol, run * len(one_run) + number, number, run, request)
        for run in range(protocol.repeats)
        for number, request in enumerate(one_run)
    ]
    rows_asked = (json.dumps([row[field] for field in fields_of(protocol.task)]) for row in rows)
    dataset_sha256 = _sum("\n".join(rows_asked))
    return Questions(protocol=protocol, items=tuple(items), dataset_sha256=dataset_sha256, tasks=tasks)


def scores(asked: Questions, answers: Mapping[int, str]) -> tuple[tuple[ScoreFact, ...], dict[str, tuple[float, ...]]]:
    """lm-eval's scores of the answers.

    Args:
        asked: from `questions`.
        answers: text by number, for every question of every run.

    Returns: each of the task's scores, the mean over questions and runs; and by its name what each answer gets, by
        number: True or False, or a share from 0 to 1 where an answer can be partly right.
    """
    row, num = TASKS[asked.protocol.task], asked.num_asked
    right: dict[str, list[float]] = {name: [] for name in row.scores}
    for run in range(asked.protocol.repeats):
        samples = _samples(asked, [(item.sha256, answers[item.number]) for item in asked.items if item.run == run])
        for name, (metric, filter_name) in row.scores.items():
            for sample in samples:
                if sample["filter"] == filter_name:  # RULER names its metric by the length of the prompt
                    right[name].append(float(sample[metric or str(sample["doc"]["max_length"])]))
    facts, by_filter = [], {}
    for name, values in right.items():
        value, stderr = mean_of_questions(values, num)
        facts.append(ScoreFact(filter=name, value=value, stderr=stderr))
        # True and False, where no answer is partly right.
        by_filter[name] = tuple(map(bool, values)) if set(values) <= {0.0, 1.0} else tuple(values)
    return tuple(facts), by_filter


# --- requests ---------------------------------------------------------------------------------------------------------


def _limit(protocol: Evaluation) -> int | None:
    """What lm-eval is to cut at; rows of sub-tasks are cut before."""
    return None if TASKS[protocol.task].group else protocol.limit


def _question(protocol: Evaluation, number: int, asked: int, run: int, request: Instance) -> Question:
    prompt, given = cast(tuple[str, Mapping[str, Any]], request.args)
    most = given["max_gen_toks"] if TASKS[protocol.task].has_own_lengths else protocol.max_tokens
    return Question(
        number=number,
        asked=asked,
        run=run,
        prompt=prompt,
        sha256=_sum(prompt),
        stop=tuple(given["until"]),
        max_tokens=min(most, protocol.max_tokens),
    )


def _refuse_unscored(protocol: Evaluation, tasks: Tasks) -> None:
    """Score an empty answer to each question: what lm-eval cannot read of a row fails now, not after all answers."""
    for name, task in tasks.items():
        for number, request in enumerate(task.instances, 1):
            try:
                task.process_results(request.doc, [""])
            except _UNSCORED as error:
                where = f"evaluation.dataset {protocol.dataset_name}: question {number} of {name}"
                got = " ".join(f"{type(error).__name__}: {error}".split()).rstrip(".")
                cure = "Mend the row, or name another dataset"
                raise RecipeError(where, "must be one that lm-eval can score", got=got, cure=cure) from error


# --- scores -----------------------------------------------------------------------------------------------------------


def _samples(asked: Questions, answers: Sequence[tuple[str, str]]) -> list[Mapping[str, Any]]:
    """What lm-eval says of one run's answers: sub-tasks in order, a filter at a time, documents in order."""
    for task in asked.tasks.values():
        task.set_fewshot_seed(asked.protocol.seed)  # each request draws its shots from one stream
    with quiet():
        # simple_evaluate() would do the same after running pip, git and lscpu for its record of the environment.
        found = cast(
            Mapping[str, Any],
            evaluate(
                _Recorded(answers),
                {"tasks": dict(asked.tasks)},
                limit=_limit(asked.protocol),
                bootstrap_iters=0,
                apply_chat_template=asked.protocol.api == "chat",
                fewshot_as_multiturn=True,
                confirm_run_unsafe_code=TASKS[asked.protocol.task].runs_code,
            ),
        )
    return [sample for name in asked.tasks for sample in found["samples"][name]]


# --- lm-eval's model --------------------------------------------------------------------------------------------------


class _Recorded(LM):
    """lm-eval's view of a server that has already answered: each prompt's sum and its text, in the questions' order."""

    def __init__(self, answers: Sequence[tuple[str, str]]) -> None:
        super().__init__()
        self.answers = answers

    @property
    def tokenizer_name(self) -> str:
        """lm-eval asks for it with a chat template; it would name a cache, which is off."""
        return ""

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Messages as they are: the server applies its template, and goes on where the last one is an assistant's."""
        assert add_generation_prompt == (chat_history[-1]["role"] == "user")
        return json.dumps(chat_history)

    def generate_until(self, requests: list[Instance]) -> list[str]:
        """The recorded answers."""
        for request, (sha256, _) in zip(requests, self.answers, strict=True):
            if _sum(request.args[0]) != sha256:
                raise KeyError(sha256)
        return [text for _, text in self.answers]

    def loglikelihood(self, requests: list[Instance]) -> list[tuple[float, bool]]:
        """Not asked for by a task that generates."""
        raise NotImplementedError

    def loglikelihood_rolling(self, requests: list[Instance]) -> list[float]:
        """Not asked for by a task that generates."""
        raise NotImplementedError


def _sum(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
