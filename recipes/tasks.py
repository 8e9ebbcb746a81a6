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
]


@frozen
class TaskRow:
    """One task."""

    # lm-eval's name of the task, or of a group, below its folder in lm-eval's folder of tasks.
    file: str
    # The dataset's repository.
    hub: str
    # Name of each score: lm-eval's metric and filter.
    scores: Mapping[str, Sequence[str]]
    # The score that cards show and gates judge.
    headline: str
    # Fields of `Evaluation`, where a recipe does not say otherwise.
    protocol: Raw = field(default_factory=dict)
    # The column that is filled only in a file's rows that are shots; "" where each row may be one.
    shown_by: str = ""


_RAW = load_shipped(Path(__file__).with_suffix(".yaml"))
TASKS: Mapping[str, TaskRow] = {task: TaskRow(**_RAW[task]) for task in get_args(TaskName)}
