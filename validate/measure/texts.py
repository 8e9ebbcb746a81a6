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
from collections.abc import Iterator, Mapping
from itertools import cycle, islice
from pathlib import Path
from typing import Any, NamedTuple

from ...checkpoints.identity import file_sha256
from ...checkpoints.json_file import read_lines, read_text
from ...checkpoints.record import Record
from ...recipes.errors import RecipeError
from ...recipes.frozen import frozen
from ...recipes.model_file import find_path
from ..facts.benched import RequestForm

# Word problems that the shipped models were not trained on: short, and easy to draft.
SHIPPED = "models/held_out.jsonl"
# The text for a model that ships with keepmtp, by its name in the recipe.
HELD_OUT: Mapping[str, str] = {
    "tiny-docs": "models/docs_held_out.jsonl",
    "tiny-glm4-moe": "models/held_out.jsonl",
    "tiny-qwen3_5": "models/held_out.jsonl",
}
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

# Plain text; or messages, which go through the model's chat template; or tokens, which are sent as
# they are.
Text = str | tuple[Mapping[str, str], ...] | tuple[int, ...]


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
    rows = read_lines(path, cure=_PROMPTS_CURE)
    if path.suffix != ".jsonl":
        lines = read_text(path, cure=_PROMPTS_CURE).splitlines()
        rows = [(str(path), {"prompt": line}) for line in lines if line.strip()]
    items = tuple([_prompt(row, where) for where, row in rows])
    if not items:
        raise RecipeError(path, "must hold a prompt", got="an empty file", cure=_PROMPTS_CURE)
    return Prompts(name=path.name, sha256=_sum(items), items=items)


def _prompt(row: Any, where: str) -> Prompt:
    # Random tokens as prompts overstate the speed of drafting, and so does one prompt that is asked
    # again and again. Only what a user would write is asked; and of a conversation its first
    # message alone, since an answer must be the model's own.
    form = "{}"
    match row:
        case {"question": str(said)}:
            form = "Question: {}\nAnswer:"
        case (
            {"prompt": str(said)}
            | {"messages": [{"role": "user", "content": str(said)}, *_]}
            | {"turns": [str(said), *_]}
        ):
            pass
        case _:
            got = json.dumps(row)[:60]
            rule = "must begin with a text of the user"
            raise RecipeError(where, rule, got=got, cure=_PROMPTS_CURE)
    if not said.strip() or _PLACEHOLDER in said:
        got = said[:60] or "an empty one"
        cure = "Fetch it with the dataset's prepare.py"
        raise RecipeError(where, "must hold the prompt itself", got=got, cure=cure)
    return Prompt(said, form.format(said))


def texts(prompts: Prompts, number: int, *, seed: int, form: RequestForm) -> list[str]:
    """So many prompts in an order that the seed gives, as messages or as texts; from the first
    again where the file has fewer.
    """
    order = list(prompts.items)
    random.Random(seed).shuffle(order)  # noqa: S311 - an order, not a secret
    number_of = {"chat": 0, "completions": 1}[form]
    return [prompt[number_of] for prompt in islice(cycle(order), number)]


# --- held-out texts -------------------------------------------------------------------------------


@frozen
class HeldOut:
    """The texts of one file.

    Attributes:
        path: what the user named.
        sha256: of the file.
        texts: in the file's order, none of them empty.
    """

    path: str
    sha256: str
    texts: tuple[Text, ...]


def held_out(path: Path | None, record: Record | None) -> HeldOut:
    """Read the texts, and refuse a file of calibration.

    Args:
        path: the user's file; None for the one that ships with the model.
        record: the checkpoint's keepmtp.json, if it has one.

    Raises:
        CheckpointError: no regular file, or no JSON; see `json_file.read_lines`.
        RecipeError: no file, no text in it, a line of another form, or a file that the checkpoint
            was calibrated on.
    """
    name = path
    if name is None and record:
        name = HELD_OUT.get(record.recipe.model)
    if name is None:
        raise RecipeError("--text", "names the held-out text to compare on", got="none", cure=_CURE)
    file = find_path(name)
    if file is None:
        raise RecipeError(name, "must be a file of held-out text", got="no such file", cure=_CURE)
    _refuse_calibrated(file, record)
    rows = list(_rows(file))
    if not rows:
        raise RecipeError(name, "must hold a text", got="an empty file", cure=_CURE)
    return HeldOut(
        path=str(name),
        sha256=file_sha256(file),
        texts=tuple([text for _, text in rows]),
    )


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
        if not text or not str(text).strip():
            got = json.dumps(row)[:60]
            rule = f"must be an object with {FORMS}"
            raise RecipeError(where, rule, got=got, cure="Mend the line")
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
        case {"messages": [*turns]} if all(map(_is_turn, turns)):
            return tuple([{"role": turn["role"], "content": turn["content"]} for turn in turns])
        case {"tokens": [*ids]} if all(type(each) is int and 0 <= each < 2**31 for each in ids):
            return tuple(ids)
    return None


def _refuse_calibrated(file: Path, record: Record | None) -> None:
    data = None
    if record and record.calibration:
        data = record.calibration.get("data")
    if not isinstance(data, dict):
        return
    for each in (data, *(data.get("also") or ())):
        used = find_path(str(each.get("dataset")))
        if used is not None and file.samefile(used):
            raise RecipeError(
                file,
                "must be text that the checkpoint was not calibrated on",
                got="the very file that it was calibrated on",
                cure="Name another --text",
            )


def _is_turn(turn: Any) -> bool:
    match turn:
        case {"role": str(), "content": str()}:
            return True
    return False


def _sum(content: Any) -> str:
    if not isinstance(content, str):
        content = json.dumps(content)
    return hashlib.sha256(content.strip().encode()).hexdigest()


# What is asked, unless the user brings prompts: every language model goes on with them.
PROMPTS = tuple([prompt.text for prompt in read_prompts(None).items[:8]])
