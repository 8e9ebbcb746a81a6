"""A few rows of each task in its dataset's own form (task_rows.yaml), and texts that answer them.

A real dataset has other questions; what lm-eval reads of a row, and how it reads an answer, is the
same. gsm8k_platinum has gsm8k's form.
"""

import re

from data_files import table

TASK_ROWS = table("helpers/task_rows")
MMLU_PRO_SUBJECTS = TASK_ROWS["mmlu_pro"]["subjects"]
SHOWN = "A: Let's think step by step. So it is (B)."
TASK_ROWS["mmlu_pro"]["rows"] = [
    {
        "options": [f"{each} of them" for each in range(number, number + 10)],
        "answer": "ABCDEFGHIJ"[number % 10],
        "category": word.replace("_", " "),
        "question": f"How many are {kind} in {word}?",
        "cot_content": SHOWN if kind == "shown" else "",
    }
    for number, word in enumerate(MMLU_PRO_SUBJECTS)
    for kind in ("asked", "asked again", "shown")
]


def answer(task: str, prompt: str) -> str:
    """A recorded model: of each three rows the second is answered wrong, the third is cut in the
    middle.
    """
    found = TASK_ROWS[task]
    mark, texts = found["mark"], found["right"]
    number, row = max(enumerate(found["rows"]), key=lambda item: prompt.rfind(item[1][mark]))
    # The letter that the drawn order gives the correct answer.
    choice = re.search(rf"\((.)\) {row.get('Correct Answer')}(?:\\n|\n)", prompt)
    right = texts[number % len(texts)].format(**row, letter=choice and choice[1])
    return (right, found["wrong"], right[: len(right) // 2])[number % 3]
