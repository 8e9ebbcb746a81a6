"""How a checkpoint is evaluated, and what its results must be: the `evaluation` and `gates` blocks of a recipe.

In: YAML. Out: frozen values. The defaults here are for a recipe without these blocks, so every default is part of the
protocol: reports and model cards print each of them.

Easy to get wrong: two scores can be compared only if every field of `Evaluation` is the same. A GSM8K score changes by
several points with the shots, the chat template and the filter that reads the answer.
"""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from .errors import RecipeError

Task = Literal["gsm8k", "gsm8k_platinum"]
Api = Literal["completions", "chat"]
DatasetName = Annotated[str, Field(min_length=1)]

_Count = Annotated[int, Field(gt=0)]
_HUB = {"gsm8k": "openai/gsm8k", "gsm8k_platinum": "madrylab/gsm8k-platinum"}


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Evaluation(_Frozen):
    """One protocol, for the source and for the checkpoint.

    Attributes:
        task: a task of lm-evaluation-harness. It has the prompt, the stop words and two filters (strict-match,
            flexible-extract).
        dataset: None for the task's own on the Hub, or a .jsonl file with the fields `question` and `answer`.
        dataset_revision: Hub revision; None for the newest. A file has none.
        shots: solved examples before each question. The shots for a file are other rows of it.
        api: `completions` sends the text as it is. `chat` sends messages through the model's chat template, with the
            shots as earlier turns.
        max_tokens: limit of the tokens for each answer. An answer that is cut there counts like the others.
        k: drafted tokens in each step (method=mtp).
        concurrency: number of requests at the same time.
        limit: number of questions, from the first; None for all.
        seed: for the choice of shots and for the server. Decoding is greedy.
        prefix_caching: the server keeps what it computed for the start of a prompt, for the next prompt that starts so.
    """

    task: Task = "gsm8k"
    dataset: DatasetName | None = None
    dataset_revision: str | None = None
    shots: Annotated[int, Field(ge=0)] = 8
    api: Api = "completions"
    max_tokens: _Count = 1024
    k: Annotated[int, Field(gt=0, le=1024)] = 1
    concurrency: _Count = 32
    limit: _Count | None = None
    seed: Annotated[int, Field(ge=0)] = 1234
    prefix_caching: bool = False

    @property
    def dataset_name(self) -> str:
        """The file, or the task's repository on the Hub."""
        return self.dataset or _HUB[self.task]

    @property
    def title(self) -> str:
        """The task, or "<task> form" where the questions are from a file."""
        return f"{self.task} form" if self.dataset else self.task

    @model_validator(mode="after")
    def _dataset_is_a_file(self) -> "Evaluation":
        if self.dataset is not None and Path(self.dataset).suffix != ".jsonl":
            raise RecipeError(
                "dataset",
                f"must be a .jsonl file, or left out for {_HUB[self.task]}",
                got=repr(self.dataset),
                cure="Name a file with the fields question and answer",
            )
        if self.dataset is not None and self.dataset_revision is not None:
            raise RecipeError(
                "dataset_revision", "must be left out for a file", got=repr(self.dataset_revision), cure="Remove it"
            )
        return self


class Gates(_Frozen):
    """What a checkpoint must keep of its source.

    Attributes:
        max_drop: of the GSM8K score, as a share of all questions (0.02: two points).
        filter: the gate uses the score of this filter; the report has both.
        min_acceptance: least share of the source's draft acceptance.
        max_divergence: from the source on held-out text as served, nats a token (`keepmtp closeness`); None: no gate.
        max_flips: share of tokens where the first choice may be another than the source's; None: no gate.
        confidence: of each judgement, one-sided. If the limit is between the estimate and its bound, the gate neither
            passes nor fails: there are too few samples.
        min_speedup: least tokens a second with drafting over those without it, for one request at a time on a GPU; the
            slowest repetition of one k must reach it against the fastest without drafting. None: no such gate.
    """

    max_drop: Annotated[float, Field(gt=0, lt=1)] = 0.02
    filter: Literal["strict-match", "flexible-extract"] = "flexible-extract"
    min_acceptance: Annotated[float, Field(gt=0, le=1)] = 0.97
    max_divergence: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    max_flips: Annotated[float, Field(gt=0, lt=1)] | None = None
    confidence: Annotated[float, Field(gt=0.5, lt=1)] = 0.95
    min_speedup: Annotated[float, Field(gt=0, le=100)] | None = None
