"""The tasks that `keepmtp eval` knows: which of lm-evaluation-harness's they are, and how each is
asked by default.

In: nothing. Out: `TASKS`, a row for each task.

Easy to get wrong: a score says nothing without its protocol, so a recipe that only names a task
still has all of one. Shots and token limits are those of lm-eval 0.4.13's own file of the task
(`file`), with two exceptions. GSM8K keeps the 8 shots of chain-of-thought papers. GPQA-Diamond,
MATH-500 and AIME are sampled as cards of reasoning models say (DeepSeek-R1: temperature 0.6, top_p
0.95, 32,768 tokens), because such a model repeats itself without end where it is decoded greedily.
Cards average AIME over 8 to 64 runs: here 8, and 4 of GPQA-Diamond's 198 questions.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

TaskName = Literal[
    "gsm8k",
    "gsm8k_platinum",
    "mmlu_pro",
    "ifeval",
    "humaneval",
    "gpqa_diamond",
    "math500",
    "aime24",
    "aime25",
    "ruler",
]

_SAMPLED = {"shots": 0, "api": "chat", "max_tokens": 32768, "temperature": 0.6, "top_p": 0.95}


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskRow:
    """One task.

    Attributes:
        file: lm-eval's, below its folder of tasks, without ".yaml".
        chat_file: where another one asks through a chat template.
        hub: the dataset's repository, and `subset` in it; "" where no repository has the questions.
        scores: name of each score: lm-eval's metric and filter.
        headline: the score that cards show and gates judge.
        protocol: fields of `Evaluation`, where a recipe does not say otherwise.
        packages: that this task needs beyond the other tasks.
        group: the column that says which of lm-eval's sub-tasks a row belongs to; "" where the task
            is one.
        max_shots: solved examples, at most; None: as many as there are rows to draw from.
        shown_by: the column that is filled only in rows that are shots; "" where each row may be
            one.
        has_own_lengths: lm-eval's file says how long an answer may be, and no protocol allows more.
        runs_code: answers are programs, and are run.
    """

    file: str
    chat_file: str = ""
    hub: str
    subset: str | None = None
    scores: Mapping[str, tuple[str, str]]
    headline: str
    protocol: Mapping[str, Any] = field(default_factory=dict)
    packages: tuple[str, ...] = ()
    group: str = ""
    max_shots: int | None = 0
    shown_by: str = ""
    has_own_lengths: bool = False
    runs_code: bool = False

    def lm_eval_file(self, api: str, group: str = "") -> str:
        """The file's name for one way to ask, and for one sub-task."""
        return (self.chat_file if self.chat_file and api == "chat" else self.file).format(group)


_TWO_FILTERS: dict[str, Any] = {
    "scores": {name: ("exact_match", name) for name in ("strict-match", "flexible-extract")},
    "headline": "flexible-extract",
}
_GSM8K: dict[str, Any] = {"subset": "main", "max_shots": None} | _TWO_FILTERS
_AIME: dict[str, Any] = {
    "scores": {"exact_match": ("exact_match", "none")},
    "headline": "exact_match",
    "protocol": _SAMPLED | {"repeats": 8},
}

TASKS: Mapping[str, TaskRow] = {
    "gsm8k": TaskRow(file="gsm8k/gsm8k", hub="openai/gsm8k", **_GSM8K),
    "gsm8k_platinum": TaskRow(
        file="gsm8k_platinum/gsm8k-platinum", hub="madrylab/gsm8k-platinum", **_GSM8K
    ),
    "mmlu_pro": TaskRow(
        file="mmlu_pro/mmlu_pro_{}",
        hub="TIGER-Lab/MMLU-Pro",
        group="category",
        max_shots=None,
        shown_by="cot_content",
        headline="custom-extract",
        scores={"custom-extract": ("exact_match", "custom-extract")},
        protocol={"shots": 5, "max_tokens": 2048},
    ),
    "ifeval": TaskRow(
        file="ifeval/ifeval",
        hub="google/IFEval",
        packages=("langdetect", "immutabledict", "nltk"),
        headline="prompt_level_strict_acc",
        scores={
            "prompt_level_strict_acc": ("prompt_level_strict_acc", "none"),
            "prompt_level_loose_acc": ("prompt_level_loose_acc", "none"),
        },
        protocol={"shots": 0, "api": "chat", "max_tokens": 1280},
    ),
    "humaneval": TaskRow(
        file="humaneval/humaneval",
        chat_file="humaneval/humaneval_instruct",
        hub="openai/openai_humaneval",
        headline="pass@1",
        scores={"pass@1": ("pass@1", "create_test")},
        protocol={"shots": 0, "api": "chat"},
        runs_code=True,
    ),
    "gpqa_diamond": TaskRow(
        file="gpqa/cot_zeroshot/gpqa_diamond_cot_zeroshot",
        hub="Idavidrein/gpqa",
        subset="gpqa_diamond",
        **_TWO_FILTERS,
        protocol=_SAMPLED | {"repeats": 4},
    ),
    "math500": TaskRow(
        file="minerva_math/minerva_math500",
        hub="HuggingFaceH4/MATH-500",
        packages=("antlr4-python3-runtime", "math-verify", "sympy"),
        max_shots=4,
        headline="math_verify",
        scores={"math_verify": ("math_verify", "none"), "exact_match": ("exact_match", "none")},
        protocol=_SAMPLED,
    ),
    "aime24": TaskRow(file="aime/aime24", hub="Maxwell-Jia/AIME_2024", **_AIME),
    "aime25": TaskRow(file="aime/aime25", hub="math-ai/aime25", **_AIME),
    "ruler": TaskRow(
        file="ruler/{}",
        hub="",
        group="task",
        packages=("transformers",),
        has_own_lengths=True,
        headline="string_match",
        scores={"string_match": ("", "none")},
        protocol={"shots": 0, "max_tokens": 128},
    ),
}

assert tuple(TASKS) == get_args(TaskName)
