"""What servers are asked: prompts, which they answer, and held-out texts, which they predict.

In: the user's file, or what ships with keepmtp; for texts also the record of the checkpoint. Out:
`Prompts`, and the requests of a load; `HeldOut`. A line of a .jsonl file with prompts is one object
in one of these forms:

    {"prompt": "..."}                             a text
    {"messages": [{"role": ..., "content": ...}]} SPEED-Bench as its prepare.py writes it
    {"turns": ["...", ...]}                       user messages; MT-Bench's rows on the Hub
    {"question": "..."}                           a problem; GSM8K's rows

Easy to get wrong: acceptance and speed depend on the text, and on its own calibration text a
checkpoint is closer to its source than anywhere else.
"""

import hashlib
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from itertools import cycle, islice
from pathlib import Path
from typing import Any, NamedTuple

from ...checkpoints.json_file import read_lines, read_text
from ...checkpoints.record import Record
from ...recipes.errors import RecipeError
from ...recipes.frozen import frozen
from ...recipes.model_file import find_path
from ..facts.benched import RequestForm

SHIPPED = "models/held_out.jsonl"
"""Word problems that the shipped models were not trained on: short, and easy to draft."""
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
PROMPTS = tuple([f"Question: {question}\nAnswer:" for question in _QUESTIONS])
"""What serve-check asks, unless the user brings prompts: every language model goes on with them."""
HELD_OUT: Mapping[str, str] = {
    "tiny-docs": "models/docs_held_out.jsonl",
    "tiny-glm4-moe": "models/held_out.jsonl",
    "tiny-qwen3_5": "models/held_out.jsonl",
}
"""The text for a model that ships with keepmtp, by its name in the recipe."""
FORMS = (
    '{"text": ...}, {"prompt": ..., "completion": ...}, {"question": ..., "answer": ...}, '
    '{"messages": [...]} or {"tokens": [...]}'
)
_CURE = f"Give a .txt file, which is one text, or a .jsonl file with {FORMS} a line"
_PROMPTS_CURE = (
    'Give one prompt a line, or a .jsonl file, each line an object with "prompt", "messages", '
    '"turns" or "question"'
)
# SPEED-Bench's rows on the Hub have these words where a licence keeps the text elsewhere; its
# prepare.py fetches it.
_PLACEHOLDER = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE"

Text = str | tuple[Mapping[str, str], ...] | tuple[int, ...]
"""Plain text; or messages, which go through the model's chat template; or tokens, which are sent as
they are.
"""


# --- prompts --------------------------------------------------------------------------------------


class Prompt(NamedTuple):
    """One prompt: as a message of the user, and as a text."""

    message: str
    text: str


@frozen
class Prompts:
    """All prompts of a file; `sha256` of them in its order."""

    name: str
    sha256: str
    items: tuple[Prompt, ...]


def read_prompts(path: Path | None) -> Prompts:
    """Prompts of a file, or the shipped ones.

    Raises:
        CheckpointError: no such file, or no JSON; see `json_file.read_lines`.
        RecipeError: no prompt in it, or a line of another form; it names the line.
    """
    if path is None:
        path = find_path(SHIPPED)
    assert path is not None, f"{SHIPPED} ships with keepmtp"
    items = []
    if path.suffix == ".jsonl":
        for where, row in read_lines(path, cure=_PROMPTS_CURE):
            items.append(_prompt(row, where))
    else:
        for line in read_text(path, cure=_PROMPTS_CURE).splitlines():
            if line.strip():
                items.append(Prompt(line, line))
    if not items:
        raise RecipeError(path, "must hold a prompt", got="an empty file", cure=_PROMPTS_CURE)
    return Prompts(name=path.name, sha256=_sum(items), items=tuple(items))


def _prompt(row: Any, where: str) -> Prompt:
    # Random tokens as prompts overstate the speed of drafting, and so does one prompt that is asked
    # again and again. Only what a user would write is asked; and of a conversation its first
    # message alone, since an answer must be the model's own.
    match row:
        case {"question": str(said)}:
            item = Prompt(said, f"Question: {said}\nAnswer:")
        case (
            {"prompt": str(said)}
            | {"messages": [{"role": "user", "content": str(said)}, *_]}
            | {"turns": [str(said), *_]}
        ):
            item = Prompt(said, said)
        case _:
            raise RecipeError(
                where,
                "must begin with a text of the user",
                got=json.dumps(row)[:60],
                cure=_PROMPTS_CURE,
            )
    if not said.strip() or _PLACEHOLDER in said:
        raise RecipeError(
            where,
            "must hold the prompt itself",
            got=said[:60] or "an empty one",
            cure="Fetch it with the dataset's prepare.py",
        )
    return item


def texts(prompts: Prompts, number: int, *, seed: int, form: RequestForm) -> list[str]:
    """So many prompts in an order that the seed gives, as messages or as texts; from the first
    again where the file has fewer.
    """
    order = list(prompts.items)
    random.Random(seed).shuffle(order)  # noqa: S311 - an order, not a secret
    taken = islice(cycle(order), number)
    if form == "chat":
        return [prompt.message for prompt in taken]
    return [prompt.text for prompt in taken]


# --- held-out texts -------------------------------------------------------------------------------


@frozen
class HeldOut:
    """The texts of one file.

    Attributes:
        path: what the user named.
        sha256: of the file.
        texts: in the file's order, none of them empty.
        against: a sentence on whether they were compared with the text of calibration; "" where
            there was none.
    """

    path: str
    sha256: str
    texts: tuple[Text, ...]
    against: str


def held_out(path: Path | None, record: Record | None) -> HeldOut:
    """Read the texts, and refuse those of calibration.

    Args:
        path: the user's file; None for the one that ships with the model.
        record: the checkpoint's keepmtp.json, if it has one.

    Raises:
        CheckpointError: no regular file, or no JSON; see `json_file.read_lines`.
        RecipeError: no file, no text in it, a line of another form, or a text that the checkpoint
            was calibrated on.
    """
    model = ""
    if record:
        model = record.recipe.model
    name, file = text_file(path, model)
    rows = list(_rows(file))
    if not rows:
        raise RecipeError(name, "must hold a text", got="an empty file", cure=_CURE)
    against = _refuse_calibrated(file, rows, record)
    return HeldOut(
        path=name,
        sha256=hashlib.sha256(file.read_bytes()).hexdigest(),
        texts=tuple([text for _, text in rows]),
        against=against,
    )


def text_file(path: Path | None, model: str) -> tuple[str, Path]:
    """What the user named, or the file that ships with a model; and where it is.

    Raises:
        RecipeError: none of both, or no such file.
    """
    name = path or HELD_OUT.get(model)
    if name is None:
        raise RecipeError("--text", "names the held-out text to compare on", got="none", cure=_CURE)
    file = find_path(name)
    if file is None:
        raise RecipeError(name, "must be a file of held-out text", got="no such file", cure=_CURE)
    return str(name), file


def _rows(file: Path) -> Iterator[tuple[str, Text]]:
    """(file:line, text)."""
    if file.suffix == ".txt":
        whole = read_text(file, cure="Convert it")
        if whole.strip():
            yield f"{file}:1", whole
        return
    if file.suffix != ".jsonl":
        got = file.suffix or "no suffix"
        raise RecipeError(file, "must be a .jsonl or a .txt file", got=got, cure=_CURE)
    for where, row in read_lines(file, cure=_CURE):
        text = _text_of(row)
        if not text or (isinstance(text, str) and not text.strip()):
            raise RecipeError(
                where,
                f"must be an object with {FORMS}",
                got=json.dumps(row)[:60],
                cure="Mend the line",
            )
        yield where, text


def _text_of(row: Any) -> Text | None:
    """The text of a row; None where it has none of the forms."""
    match row:
        case {"text": str(text)}:
            return text
        case {"prompt": str(prompt), "completion": str(completion)}:
            return prompt + completion
        case {"question": str(question), "answer": str(answer)}:
            return f"Question: {question}\nAnswer: {answer}"
        case {"messages": [*turns]}:
            said = []
            for turn in turns:
                match turn:
                    case {"role": str(role), "content": str(content)}:
                        said.append({"role": role, "content": content})
                    case _:
                        return None
            return tuple(said)
        case {"tokens": [*ids]} if all(type(each) is int and 0 <= each < 2**31 for each in ids):
            return tuple(ids)
    return None


def _refuse_calibrated(file: Path, rows: Sequence[tuple[str, Text]], record: Record | None) -> str:
    """Refuse a text of calibration; else a sentence on what was compared."""
    data = None
    if record and record.calibration:
        data = record.calibration.get("data")
    if not isinstance(data, dict):
        return ""
    said = []
    rule = "must be text that the checkpoint was not calibrated on"
    cure = "Name another --text"
    for each in (data, *(data.get("also") or ())):
        name = each.get("dataset")
        # A file that was calibrated on is refused, and so is a row of it in another file. A dataset
        # of the Hub is not read again for that.
        used = find_path(str(name))
        if used is None or used.suffix != ".jsonl":
            why = "which it was calibrated on, was not looked up."
            said.append(f"Whether a text is in {name}, {why}")
            continue
        if file.samefile(used):
            raise RecipeError(file, rule, got="the very file that it was calibrated on", cure=cure)
        known = {}
        for where, text in _rows(used):
            known[_sum(text)] = where
        for where, text in rows:
            at = known.get(_sum(text))
            if at is not None:
                raise RecipeError(where, rule, got=f"the text of {at}", cure=cure)
        said.append(f"None of the texts is a row of {name}, which it was calibrated on.")
    return " ".join(said)


def _sum(content: Any) -> str:
    if not isinstance(content, str):
        content = json.dumps(content)
    return hashlib.sha256(content.strip().encode()).hexdigest()
