"""How a checkpoint is evaluated, and what its results must be: the `evaluation` and `gates` blocks
of a recipe.

In: YAML. Out: frozen values. The defaults here are for a recipe without these blocks, so every
default is part of the
protocol: reports and model cards print each of them.

Easy to get wrong: two scores can be compared only if every field of `Evaluation` is the same. A
GSM8K score changes by several points with the shots, the chat template and the filter that reads
the answer. What a recipe leaves out is the task's own (tasks.py), not one default for all tasks.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import (
    AfterValidator,
    Discriminator,
    Field,
    Tag,
    model_validator,
)

from .errors import RecipeError
from .knobs import Contradiction, Fraction, Frozen
from .tasks import TASKS, TaskName

Api = Literal["completions", "chat"]
DatasetName = Annotated[str, Field(min_length=1)]

_Count = Annotated[int, Field(gt=0)]
_FILES = (".jsonl", ".parquet")


class Evaluation(Frozen):
    """One protocol, for the source and for the checkpoint.

    Attributes:
        task: a task of lm-evaluation-harness (tasks.py). It has the prompt, the stop words and the
            filters.
        dataset: None for the task's own on the Hub, or a file of rows with the fields that the
            task's dataset has.
        dataset_revision: Hub revision; None for the newest. A file has none.
        shots: solved examples before each question. The shots for a file are other rows of it.
        api: `completions` sends the text as it is. `chat` sends messages through the model's chat
            template, with the shots as earlier turns.
        max_tokens: limit of the tokens for each answer. An answer that is cut there counts like the
            others.
        k: drafted tokens in each step (method=mtp).
        concurrency: number of requests at the same time.
        limit: number of questions, two or more, from the first; None for all.
        seed: for the choice of shots and for the server, which adds 1 for each further run.
        repeats: runs; each asks every question once.
        temperature: 0 is greedy.
        top_p: least share of probability that is drawn from.
        prefix_caching: the server keeps what it computed for the start of a prompt, for the next
            prompt that starts so.
    """

    task: TaskName = "gsm8k"
    dataset: DatasetName | None = None
    dataset_revision: str | None = None
    shots: Annotated[int, Field(ge=0)] = 8
    api: Api = "completions"
    max_tokens: _Count = 1024
    k: Annotated[int, Field(gt=0, le=1024)] = 1
    concurrency: _Count = 32
    limit: Annotated[int, Field(gt=1)] | None = None
    seed: Annotated[int, Field(ge=0)] = 1234
    repeats: Annotated[int, Field(gt=0, le=1024)] = 1
    temperature: Annotated[float, Field(ge=0, le=2)] = 0.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    prefix_caching: bool = False

    @model_validator(mode="before")
    @classmethod
    def _as_the_task_is_asked(cls, given: object) -> object:
        if not isinstance(given, Mapping):
            return given
        task = given.get("task", "gsm8k")
        usual = {}
        if isinstance(task, str) and task in TASKS:
            usual = TASKS[task].protocol
        return {**usual, **given}

    @property
    def dataset_name(self) -> str:
        """The file, or the task's repository on the Hub."""
        if self.dataset is None:
            return TASKS[self.task].hub
        return self.dataset

    @property
    def title(self) -> str:
        """The task, or "<task> form" where the questions are from a file."""
        if self.dataset is None:
            return self.task
        return f"{self.task} form"

    def contradictions(self) -> Iterator[Contradiction]:
        if self.dataset is not None and Path(self.dataset).suffix not in _FILES:
            kinds = " or ".join(_FILES)
            rule = f"dataset: must be a {kinds} file, or left out for the task's own on the Hub"
            cure = "Name a file of rows with the fields that the task's dataset has"
            yield rule, repr(self.dataset), cure
        if self.dataset is not None and self.dataset_revision is not None:
            rule = "dataset_revision: must be left out for a file"
            yield rule, repr(self.dataset_revision), "Remove it"
        if self.repeats > 1 and not self.temperature:
            rule = "repeats: must be 1 where temperature is 0, because all runs are the same"
            yield rule, self.repeats, "Set a temperature"


def _each_once(tasks: tuple[Evaluation, ...]) -> tuple[Evaluation, ...]:
    named = set[str]()
    for evaluation in tasks:
        if evaluation.task in named:
            raise RecipeError(
                "evaluation",
                "must name each task once",
                got=f"{evaluation.task} twice",
                cure="Leave one out: the answers to a task are in one file",
            )
        named.add(evaluation.task)
    return tasks


_Listed = Annotated[tuple[Evaluation, ...], Field(min_length=1), AfterValidator(_each_once)]


def _form_of(value: object) -> str:
    """Which of the two a recipe has, so that a fault in it is said of that form alone."""
    if isinstance(value, (list, tuple)):
        return "groups"
    return "word"


Evaluations = Annotated[
    Annotated[Evaluation, Tag("word")] | Annotated[_Listed, Tag("groups")],
    Discriminator(_form_of),
]
"""One protocol, or a list of them, one for each task."""


def listed(evaluation: Evaluation | tuple[Evaluation, ...]) -> tuple[Evaluation, ...]:
    """The protocols of a recipe, the first task first."""
    if isinstance(evaluation, tuple):
        return evaluation
    return (evaluation,)


class Gates(Frozen):
    """What a checkpoint must keep of its source.

    Attributes:
        max_drop: of the GSM8K score, as a share of all questions (0.02: two points).
        filter: the gate uses the score of this filter; the report has both.
        min_acceptance: least share of the source's draft acceptance.
        max_worst_drop: of each task's score, as a share of its questions; None: no gate.
        max_divergence: from the source on held-out text as served, nats a token; None: no gate.
        max_flips: share of tokens where the first choice may be another than the source's; None: no
            gate.
        confidence: of each judgement, one-sided. If the limit is between the estimate and its
            bound, there are too few samples: not measured.
        min_speedup: least tokens a second with drafting over those without it, for one request at a
            time on a GPU; the slowest repetition of one k must reach it against the fastest without
            drafting. None: no such gate.
    """

    max_drop: Fraction = 0.02
    filter: Literal["strict-match", "flexible-extract"] = "flexible-extract"
    min_acceptance: Annotated[float, Field(gt=0, le=1)] = 0.97
    max_worst_drop: Fraction | None = None
    max_divergence: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    max_flips: Fraction | None = None
    confidence: Annotated[float, Field(gt=0.5, lt=1)] = 0.95
    min_speedup: Annotated[float, Field(gt=0, le=100)] | None = None
