"""The tasks that `keepmtp eval` knows: which of lm-evaluation-harness's they are, and how each is
asked by default.

In: tasks.yaml. Out: `TASKS`, a row for each task.

Easy to get wrong: a score says nothing without its protocol, so a recipe that only names a task
still has all of one. Shots and token limits are those of lm-eval 0.4.13's own file of the task
(`file`), with two exceptions. GSM8K keeps the 8 shots of chain-of-thought papers. GPQA-Diamond,
MATH-500 and AIME are sampled as cards of reasoning models say (DeepSeek-R1: temperature 0.6, top_p
0.95, 32,768 tokens), because such a model repeats itself without end where it is decoded greedily.
Cards average AIME over 8 to 64 runs: here 8, and 4 of GPQA-Diamond's 198 questions.
"""

from collections.abc import Mapping, Sequence
from dataclasses import field
from pathlib import Path
from typing import Literal, get_args

from .frozen import Raw, frozen
from .yaml_file import load_shipped

TaskName = Literal[
    "gsm8k",
    "gsm8k_platinum",
    "mmlu_pro",
    "ifeval",
    "gpqa_diamond",
    "math500",
    "aime24",
    "aime25",
    "tool-calls",
]


@frozen
class TaskRow:
    """One task."""

    # The task's file, below lm-eval's folder of tasks, without ".yaml".
    file: str = ""
    # The dataset's repository, and `subset` in it.
    hub: str
    subset: str | None = None
    # Of a row that lm-eval reads, each with what it must be (measure/dataset.py).
    fields: Mapping[str, str]
    # Fields of rows that the task cannot ask, and the rule that says why.
    refused: Mapping[str, str] = field(default_factory=dict)
    # Name of each score: lm-eval's metric and filter.
    scores: Mapping[str, Sequence[str]]
    # The score that cards show and gates judge.
    headline: str
    # Fields of `Evaluation`, where a recipe does not say otherwise.
    protocol: Raw = field(default_factory=dict)
    # Packages that this task needs beyond the other tasks.
    packages: Sequence[str] = ()
    # The column that says which of lm-eval's sub-tasks a row belongs to; "" where the task is one.
    group: str = ""
    # Solved examples, at most; None: as many as there are rows to draw from.
    max_shots: int | None = 0
    # The column that is filled only in rows that are shots; "" where each row may be one.
    shown_by: str = ""


_RAW = load_shipped(Path(__file__).with_suffix(".yaml"))
TASKS: Mapping[str, TaskRow] = {task: TaskRow(**_RAW[task]) for task in get_args(TaskName)}
