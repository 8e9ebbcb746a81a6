"""What servers are asked when their speed is measured: prompts from a file, put in an order and
brought to a length.

In: a .jsonl file, or the problems that ship with keepmtp. Each line is one object in one of these
forms:

    {"prompt": "..."}                              a text
    {"messages": [{"role": ..., "content": ...}]}  a conversation; what SPEED-Bench prepares
    {"turns": ["...", ...]}                        user messages; rows of SPEED-Bench and MT-Bench
    {"question": "..."}                            a problem; GSM8K's rows

Out: `Prompt`s, and for each load a list of `Request`s, the same for every k.

Easy to get wrong: random tokens as prompts overstate the speed of drafting, and so does one prompt
that is asked again and again. Only what a user would write is asked, and of a conversation only up
to the first message that has no answer in the file, since an answer must be the model's own.
"""

import hashlib
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from ...checkpoints.json_file import read_lines
from ...recipes.errors import RecipeError
from ...recipes.model_file import find_path
from ..facts.benched import RequestForm
from .server import Server

SHIPPED = "models/held_out.jsonl"
"""Word problems that the shipped models were not trained on: short, and easy to draft."""

_CURE = 'Give a .jsonl file, each line an object with "prompt", "messages", "turns" or "question"'
_ROLES = ("system", "developer", "user", "assistant")
_LEAST_REQUESTS, _REQUESTS_A_SLOT = 16, 4
# SPEED-Bench's rows on the Hub have these words where a licence keeps the text elsewhere; its
# prepare.py fetches it.
_PLACEHOLDER = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE"


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One prompt: as (role, content) of each message, and as a text; None where only messages can
    say it.
    """

    messages: tuple[tuple[str, str], ...]
    text: str | None

    @property
    def last(self) -> str:
        """What the user says last."""
        return self.messages[-1][1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompts:
    """All prompts of a file; `sha256` of them in its order."""

    name: str
    sha256: str
    items: tuple[Prompt, ...]

    @property
    def needs_template(self) -> bool:
        """One of them is a conversation, which no text can say."""
        return any(item.text is None for item in self.items)


Request = Mapping[str, Any]
"""What is sent: {"messages": [...]} for the chat template, or {"text": ...}."""


def read(path: Path | None) -> Prompts:
    """Prompts of a file, or the shipped ones.

    Raises:
        CheckpointError: no such file, or no JSON; see `json_file.read_lines`.
        RecipeError: no prompt in it, or a line of another form; it names the line.
    """
    path = path or find_path(SHIPPED)
    assert path is not None, f"{SHIPPED} ships with keepmtp"
    if path.suffix != ".jsonl":
        raise RecipeError(
            path, "must be a .jsonl file with prompts", got=path.suffix or "no ending", cure=_CURE
        )
    items = tuple(_item(row, where) for where, row in read_lines(path, cure=_CURE))
    if not items:
        raise RecipeError(path, "must hold a prompt", got="an empty file", cure=_CURE)
    digest = hashlib.sha256(
        json.dumps([[item.messages, item.text] for item in items]).encode()
    ).hexdigest()
    return Prompts(name=path.name, sha256=digest, items=items)


def _item(value: Any, where: str) -> Prompt:
    row = value if isinstance(value, dict) else {}
    got = json.dumps(value)[:60]
    if isinstance(row.get("prompt"), str):
        item = Prompt(messages=(("user", row["prompt"]),), text=row["prompt"])
    elif isinstance(row.get("question"), str):
        item = Prompt(
            messages=(("user", row["question"]),), text=f"Question: {row['question']}\nAnswer:"
        )
    else:
        messages = row.get("messages") or [
            {"role": "user", "content": turn} for turn in row.get("turns") or ()
        ]
        asked = _conversation(messages, where, got)
        item = Prompt(messages=asked, text=asked[0][1] if len(asked) == 1 else None)
    if not item.last.strip() or _PLACEHOLDER in item.last:
        cure = "Fetch it with the dataset's prepare.py"
        raise RecipeError(
            where, "must hold the prompt itself", got=item.last[:60] or "an empty one", cure=cure
        )
    return item


def _conversation(messages: Any, where: str, got: str) -> tuple[tuple[str, str], ...]:
    """(role, content), up to the first message of the user that no answer follows; `got` is the
    line's beginning.
    """
    try:
        pairs = tuple((message["role"], message["content"]) for message in messages)
    except (TypeError, KeyError) as error:
        raise RecipeError(
            where, 'each message has "role" and "content"', got=got, cure=_CURE
        ) from error
    if any(role not in _ROLES or not isinstance(content, str) for role, content in pairs):
        raise RecipeError(
            where, f"each message is a text of {', '.join(_ROLES)}", got=got, cure=_CURE
        )
    roles = [role for role, _ in pairs]
    for at, role in enumerate(roles, 1):
        if role == "user" and roles[at : at + 1] != ["assistant"]:
            return pairs[:at]
    raise RecipeError(where, "must hold a prompt of the user", got=got, cure=_CURE)


# --- requests of a load
# -----------------------------------------------------------------------------------------------


def num_requests(concurrency: int, named: int) -> int:
    """How many a load has: what the user named, or for 0 four for each that is in flight, and
    sixteen at least.
    """
    return named or max(_LEAST_REQUESTS, _REQUESTS_A_SLOT * concurrency)


def taken(prompts: Prompts, number: int, seed: int) -> tuple[Prompt, ...]:
    """So many prompts in an order that the seed gives; from the first again where the file has
    fewer.
    """
    order = list(prompts.items)
    random.Random(seed).shuffle(order)  # noqa: S311 - an order, not a secret
    return tuple(islice(cycle(order), number))


def requests(
    items: Sequence[Prompt], *, form: RequestForm, context: int, server: Server
) -> list[Request]:
    """What is sent for some prompts.

    Args:
        items: from `taken`.
        form: messages or text.
        context: tokens that a prompt is brought to; 0 leaves it as it is.
        server: counts tokens.

    Returns: a request for each prompt, in their order.

    A prompt that is too short gets other prompts of the list before it, until there are enough
    tokens; then, as of one that is too long, the last `context` tokens are kept. So its own words
    stay the last, and no text is made up.
    """
    if not context:
        return [request(item, form) for item in items]
    # Of a conversation, its last message.
    said = [item.last if form == "chat" or item.text is None else item.text for item in items]
    before = [server.tokens_of(f"{text}\n\n") for text in said]
    made = []
    for at, text in enumerate(said):
        tokens = _brought(server.tokens_of(text), before[at + 1 :] + before[: at + 1], context)
        if tokens is not None:
            text = server.text_of(tokens).lstrip("\ufffd")
        made.append(request(Prompt(messages=(("user", text),), text=text), form))
    return made


def request(item: Prompt, form: RequestForm) -> Request:
    """What is sent for a prompt as it is."""
    if form == "completions":
        return {"text": item.text or ""}
    return {"messages": [{"role": role, "content": content} for role, content in item.messages]}


def _brought(own: list[int], before: Sequence[list[int]], context: int) -> list[int] | None:
    """The last tokens of a prompt with others before it; None where it has as many by itself."""
    if len(own) == context:
        return None
    tokens, others = own, cycle(before)
    while len(tokens) < context:
        tokens = next(others) + tokens
    return tokens[-context:]
