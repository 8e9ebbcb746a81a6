"""What a server is asked, unless the user brings prompts: eight word problems of GSM8K's kind.

Every language model goes on with them, and the models that ship with keepmtp were trained on such
(these eight are held out). Acceptance depends on the text: for a figure about your traffic, bring
your traffic.
"""

from pathlib import Path

from ...checkpoints.json_file import read_text
from ...recipes.errors import RecipeError

_QUESTIONS = (
    "Ann has 33 stamps. Ann buys 18 more and then gives away 14. How many stamps are left?",
    "Amy has 7 boxes with 6 rings in each box. How many rings are there in all?",
    "Bob shares 72 shells among 9 friends. How many shells does each friend get?",
    "Ned has 8 boxes with 5 toys in each box and 4 more toys. How many toys are there in all?",
    "Ben has 34 cards. Ben buys 20 more and then gives away 2. How many cards are left?",
    "Joe has 3 boxes with 9 pens in each box. How many pens are there in all?",
    "Eva has 5 boxes with 7 apples in each box and 4 more apples. "
    "How many apples are there in all?",
    "Ida has 36 eggs. Ida gives away 18 eggs. How many eggs are left?",
)
PROMPTS = tuple(f"Question: {question}\nAnswer:" for question in _QUESTIONS)


def read_prompts(path: Path) -> tuple[str, ...]:
    """Prompts from a file: one a line, or, in a .jsonl file, one object a line; see
    `bench_prompts.read`.

    Raises:
        CheckpointError: no such file, or no JSON; see `json_file.read_lines`.
        RecipeError: no prompt in it, or a line that is no such object.
    """
    if path.suffix == ".jsonl":
        from .bench_prompts import read  # which imports httpx

        return tuple(item.text for item in read(path).items)
    cure = 'Give one prompt a line, or a .jsonl file with {"prompt": ...} lines'
    prompts = tuple(line for line in read_text(path, cure=cure).splitlines() if line.strip())
    if not prompts:
        raise RecipeError(path, "must hold a prompt", got="an empty file", cure=cure)
    return prompts
