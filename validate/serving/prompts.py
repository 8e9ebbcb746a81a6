"""What a server is asked, unless the user brings prompts: eight word problems of GSM8K's kind.

Every language model goes on with them, and the models that ship with keepmtp were trained on such (these eight are held
out). Acceptance depends on the text: for a figure about your traffic, bring your traffic.
"""

import json
from pathlib import Path

from ...recipes.errors import RecipeError

_QUESTIONS = (
    "Ann has 33 stamps. Ann buys 18 more and then gives away 14. How many stamps are left?",
    "Amy has 7 boxes with 6 rings in each box. How many rings are there in all?",
    "Bob shares 72 shells among 9 friends. How many shells does each friend get?",
    "Ned has 8 boxes with 5 toys in each box and 4 more toys. How many toys are there in all?",
    "Ben has 34 cards. Ben buys 20 more and then gives away 2. How many cards are left?",
    "Joe has 3 boxes with 9 pens in each box. How many pens are there in all?",
    "Eva has 5 boxes with 7 apples in each box and 4 more apples. How many apples are there in all?",
    "Ida has 36 eggs. Ida gives away 18 eggs. How many eggs are left?",
)
PROMPTS = tuple(f"Question: {question}\nAnswer:" for question in _QUESTIONS)


def read_prompts(path: Path) -> tuple[str, ...]:
    """Prompts from a file: one a line, or, in a .jsonl file, one object with "prompt" a line.

    Raises:
        RecipeError: no such file, no prompt in it, or a line that is no such object.
    """
    cure = 'Give one prompt a line, or a .jsonl file with {"prompt": ...} lines'
    try:
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(path, "must be a text file with prompts", got=str(error), cure=cure) from error
    if not lines:
        raise RecipeError(path, "must hold a prompt", got="an empty file", cure=cure)
    if path.suffix != ".jsonl":
        return tuple(lines)
    prompts = []
    for number, line in enumerate(lines, 1):
        try:
            prompt = json.loads(line)["prompt"]
        except (ValueError, KeyError, TypeError) as error:
            raise RecipeError(
                f"{path}:{number}", 'must be an object with "prompt"', got=line[:60], cure=cure
            ) from error
        if not isinstance(prompt, str) or not prompt:
            raise RecipeError(f"{path}:{number}", '"prompt" must be a text', got=repr(prompt), cure=cure)
        prompts.append(prompt)
    return tuple(prompts)
