"""What servers are asked when their speed is measured: prompts from a file, put in an order and
brought to a length.

In: a .jsonl file, or the problems that ship with keepmtp. Each line is one object in one of these
forms:

    {"prompt": "..."}                             a text
    {"messages": [{"role": ..., "content": ...}]} SPEED-Bench as its prepare.py writes it
    {"turns": ["...", ...]}                       user messages; MT-Bench's rows on the Hub
    {"question": "..."}                           a problem; GSM8K's rows

Out: `Prompts`, and for each load a list of texts, the same for every k.

Easy to get wrong: random tokens as prompts overstate the speed of drafting, and so does one prompt
that is asked again and again. Only what a user would write is asked; and of a conversation its
first message alone, since an answer must be the model's own.
"""

import hashlib
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Any, NamedTuple

from ...checkpoints.json_file import read_lines
from ...recipes.errors import RecipeError
from ...recipes.model_file import find_path
from ..facts.benched import RequestForm
from .server import Server

SHIPPED = "models/held_out.jsonl"
"""Word problems that the shipped models were not trained on: short, and easy to draft."""

_CURE = 'Give a .jsonl file, each line an object with "prompt", "messages", "turns" or "question"'
# SPEED-Bench's rows on the Hub have these words where a licence keeps the text elsewhere; its
# prepare.py fetches it.
_PLACEHOLDER = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE"


class Prompt(NamedTuple):
    """One prompt: as a message of the user, and as a text."""

    message: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompts:
    """All prompts of a file; `sha256` of them in its order."""

    name: str
    sha256: str
    items: tuple[Prompt, ...]


def read(path: Path | None) -> Prompts:
    """Prompts of a file, or the shipped ones.

    Raises:
        CheckpointError: no such file, or no JSON; see `json_file.read_lines`.
        RecipeError: no prompt in it, or a line of another form; it names the line.
    """
    path = path or find_path(SHIPPED)
    assert path is not None, f"{SHIPPED} ships with keepmtp"
    if path.suffix != ".jsonl":
        rule, got = "must be a .jsonl file with prompts", path.suffix or "no ending"
        raise RecipeError(path, rule, got=got, cure=_CURE)
    items = tuple(_item(row, where) for where, row in read_lines(path, cure=_CURE))
    if not items:
        raise RecipeError(path, "must hold a prompt", got="an empty file", cure=_CURE)
    content = json.dumps([[[["user", item.message]], item.text] for item in items])
    sha256 = hashlib.sha256(content.encode()).hexdigest()
    return Prompts(name=path.name, sha256=sha256, items=items)


def _item(row: Any, where: str) -> Prompt:
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
            rule = "must begin with a text of the user"
            raise RecipeError(where, rule, got=json.dumps(row)[:60], cure=_CURE)
    if not said.strip() or _PLACEHOLDER in said:
        cure = "Fetch it with the dataset's prepare.py"
        got = said[:60] or "an empty one"
        raise RecipeError(where, "must hold the prompt itself", got=got, cure=cure)
    return item


def taken(prompts: Prompts, number: int, seed: int) -> tuple[Prompt, ...]:
    """So many prompts in an order that the seed gives; from the first again where the file has
    fewer.
    """
    order = list(prompts.items)
    random.Random(seed).shuffle(order)  # noqa: S311 - an order, not a secret
    return tuple(islice(cycle(order), number))


def texts(
    items: Sequence[Prompt], *, form: RequestForm, context: int, server: Server | None = None
) -> list[str]:
    """What is sent for some prompts.

    Args:
        items: from `taken`.
        form: messages or text.
        context: tokens that a prompt is brought to; 0 leaves it as it is.
        server: counts tokens, where there is a context.

    Returns: a text for each prompt, in their order.

    A prompt that is too short gets other prompts of the list before it, until there are enough
    tokens; then, as of one that is too long, the last `context` tokens are kept. So its own words
    stay the last, and no text is made up.
    """
    said = [item.message if form == "chat" else item.text for item in items]
    if not context or server is None:
        return said
    before = [server.tokens_of(f"{text}\n\n") for text in said]
    made = []
    for at, text in enumerate(said):
        own = server.tokens_of(text)
        if len(own) != context:
            tokens = brought(own, before[at + 1 :] + before[: at + 1], context)
            text = server.text_of(tokens).lstrip("\ufffd")
        made.append(text)
    return made


def brought(own: list[int], before: Sequence[list[int]], context: int) -> list[int]:
    """The last tokens of a prompt with others before it."""
    tokens, others = own, cycle(before)
    while len(tokens) < context:
        tokens = next(others) + tokens
    return tokens[-context:]
