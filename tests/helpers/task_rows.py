"""A few rows of each task in its dataset's own form, written for these tests, and texts that answer
them.

A real dataset has other questions; what lm-eval reads of a row, and how it reads an answer, is the
same.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

MMLU_PRO_SUBJECTS = (
    "biology",
    "business",
    "chemistry",
    "computer_science",
    "economics",
    "engineering",
    "health",
    "history",
    "law",
    "math",
    "other",
    "philosophy",
    "physics",
    "psychology",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskRows:
    """Rows, and what answers them.

    Attributes:
        rows: of a file.
        mark: what of a row its prompt alone contains.
        right: the text that answers a row, given its prompt.
        wrong: one that does not.
    """

    rows: Sequence[Mapping[str, Any]]
    mark: Callable[[Mapping[str, Any]], str]
    right: Callable[[Mapping[str, Any], str], str]
    wrong: str


def _mmlu_pro() -> list[dict[str, Any]]:
    rows = []
    for number, word in enumerate(MMLU_PRO_SUBJECTS):
        options = [f"{each} of them" for each in range(number, number + 10)]
        row = {
            "options": options,
            "answer": "ABCDEFGHIJ"[number % 10],
            "category": word.replace("_", " "),
        }
        for kind, thought in (
            ("asked", ""),
            ("asked again", ""),
            ("shown", "A: Let's think step by step. So it is (B)."),
        ):
            rows.append(
                {**row, "question": f"How many are {kind} in {word}?", "cot_content": thought}
            )
    return rows


def _choice_of(row: Mapping[str, Any], prompt: str) -> str:
    """The letter that the drawn order gives the correct answer."""
    found = re.search(rf"\((.)\) {re.escape(row['Correct Answer'])}(?:\\n|\n)", prompt)
    assert found, prompt
    return f"The answer is ({found[1]})."


_AIME = [(f"What is {n} times {n + 1}?", n * (n + 1)) for n in (3, 4, 5, 6)]
_IFEVAL = (
    ("punctuation:no_comma", {}, "A text of some words."),
    (
        "length_constraints:number_words",
        {"relation": "at least", "num_words": 4},
        "Here are more than four, easily.",
    ),
    ("detectable_format:json_format", {}, '{"a": [1, 2]}'),
    ("keywords:existence", {"keywords": ["otter"]}, "The otter swims, and sleeps."),
)

TASK_ROWS: Mapping[str, TaskRows] = {
    "gsm8k": TaskRows(
        rows=[
            {"question": f"Ann has {n} pens, buys 2. How many?", "answer": f"#### {n + 2}"}
            for n in (3, 5, 7, 9)
        ],
        mark=lambda row: row["question"],
        right=lambda row, _: f"It is so.\n{row['answer']}",
        wrong="#### 99",
    ),
    "mmlu_pro": TaskRows(
        rows=_mmlu_pro(),
        mark=lambda row: row["question"],
        right=lambda row, _: f"So the answer is ({row['answer']}).",
        wrong="Nobody knows.",
    ),
    "ifeval": TaskRows(
        rows=[
            {
                "key": number,
                "prompt": f"Write {number} lines of something.",
                "instruction_id_list": [rule, "detectable_format:title"] if number == 3 else [rule],
                "kwargs": [values, {}] if number == 3 else [values],
            }
            for number, (rule, values, _) in enumerate(_IFEVAL)
        ],
        mark=lambda row: row["prompt"],
        right=lambda row, _: _IFEVAL[row["key"]][2] + "\n<<Title>>" * (row["key"] == 3),
        wrong="a, b",
    ),
    "humaneval": TaskRows(
        rows=[
            {
                "task_id": f"Own/{number}",
                "prompt": f'def plus_{number}(a):\n    """Return a plus {number}."""\n',
                "canonical_solution": f"    return a + {number}\n",
                "test": f"def check(candidate):\n    assert candidate(1) == {number + 1}\n",
                "entry_point": f"plus_{number}",
            }
            for number in range(4)
        ],
        mark=lambda row: row["entry_point"] + "(a)",
        right=lambda row, _: row["canonical_solution"] + "```\nDone.",
        wrong="    return a\n",
    ),
    "gpqa_diamond": TaskRows(
        rows=[
            {
                "Question": f"Which number is {number}?",
                "Correct Answer": str(number),
                **{f"Incorrect Answer {each}": f"{number}{each}" for each in (1, 2, 3)},
            }
            for number in (20, 30, 40, 50)
        ],
        mark=lambda row: row["Question"],
        right=_choice_of,
        wrong="The answer is (Z).",
    ),
    "math500": TaskRows(
        rows=[
            {
                "problem": f"Halve the number {number}.",
                "solution": rf"Half of it is $\boxed{{\frac{{{number}}}{{2}}}}$.",
                "answer": rf"\frac{{{number}}}{{2}}",
                "subject": "Algebra",
            }
            for number in (3, 5, 7, 9)
        ],
        mark=lambda row: row["problem"],
        right=lambda row, _: (
            f"Final Answer: The final answer is ${row['answer']}$. I hope it is correct."
        ),
        wrong=r"It is $\boxed{0}$.",
    ),
    "aime24": TaskRows(
        rows=[
            {"ID": "1", "Problem": problem, "Solution": "", "Answer": answer}
            for problem, answer in _AIME
        ],
        mark=lambda row: row["Problem"],
        right=lambda row, _: rf"<think>$1$</think> It is $\boxed{{{row['Answer']}}}$.",
        wrong=r"\boxed{1}",
    ),
    "aime25": TaskRows(
        rows=[{"problem": problem, "answer": str(answer), "id": "1"} for problem, answer in _AIME],
        mark=lambda row: row["problem"],
        right=lambda row, _: f"It is ${row['answer']}$.",
        wrong="",
    ),
}
"""gsm8k_platinum has gsm8k's form."""


def answer(task: str, prompt: str, *, each: int = 3) -> str:
    """A recorded model: of `each` rows the second is answered wrong, the third is cut in the
    middle, others right.
    """
    found = TASK_ROWS[task]
    number, row = max(enumerate(found.rows), key=lambda item: prompt.rfind(found.mark(item[1])))
    text = found.right(row, prompt)
    return (text, found.wrong, text[: len(text) // 2])[number % each] if number % each < 3 else text
