"""Conversations with tools: each row of tool_calls.yaml with each line of words, through a server's
own chat endpoint and parser of tool calls.

In: a healthy server. Out: of each conversation its turns with the calls that are right; what was
said; and what an answer lacks.

Easy to get wrong: an answer that cannot be read is no wrong call, and each is a fault of its own.
And what was said before a turn is what should have been said, not what a model said. So one wrong
call is one wrong turn, and every server is asked the same.
"""

import json
import re
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from ...checkpoints.source import Source, small_bytes, view_of
from ...recipes.frozen import Json, Raw, frozen
from ...recipes.yaml_file import load_shipped
from ..facts.lossless import InAnswer
from .harness import TEMPLATES
from .replies import Said
from .room import options_of
from .server import Server

_PARSER = "--tool-call-parser"
# A call in a text has one of these in every form that vLLM parses; a sentence about a tool has not.
_IN_CALLS = re.compile(r"[{<=|]")
_DATA = load_shipped(Path(__file__).with_suffix(".yaml"))
_SECONDS = 4800.0  # for an answer
MOST_TOKENS = 4096
"""Of an answer in a conversation, where a model may think first."""


@frozen
class Turn:
    """One request: all messages before it, and the calls that are right, in any order; none: words
    alone.
    """

    messages: Sequence[Raw]
    wanted: Sequence[tuple[str, Any]]

    @property
    def answer(self) -> Json:
        """The message that is right."""
        calls = []
        for number, (tool, arguments) in enumerate(self.wanted):
            function = {"name": tool, "arguments": _text(arguments)}
            # Some templates take an id of nine letters and digits alone.
            calls.append({"id": f"call{number:05}", "type": "function", "function": function})
        if calls:
            return {"role": "assistant", "content": "", "tool_calls": calls}
        return {"role": "assistant", "content": "Fine."}


@cache
def conversations() -> tuple[tuple[Turn, ...], ...]:
    """Every row with every line of words; the first few have all rows and all scripts."""
    rows = _DATA["rows"]
    lines = _DATA["words"]
    num = len(rows) * len(lines)
    found = []
    for number in range(num):
        row = _text(rows[number % len(rows)])
        # Ten rows and twelve lines have no more than 60 pairs if both go on by one.
        line = lines[(number + 2 * number // num) % len(lines)]
        for name, word in zip(("CITY", "NAME", "TEXT"), line, strict=True):
            row = row.replace(name, _text(word)[1:-1])
        found.append(_turns(json.loads(row)))
    return tuple(found)


def _schema(form: Any) -> Json:
    """The schema of a short form: a type; values to choose from; a list of one type; or fields."""
    if isinstance(form, str):
        return {"type": form}
    if isinstance(form, list):
        return {"enum": form} if form[1:] else {"type": "array", "items": _schema(form[0])}
    fields = {name: _schema(field) for name, field in form.items()}
    return {"type": "object", "properties": fields, "required": [*fields]}


def _turns(row: Sequence[Any]) -> tuple[Turn, ...]:
    """Of words and calls in turn: words are the user's, or the answer of each called tool."""
    messages: list[Json] = [{"role": "system", "content": _DATA["system"]}]
    turns = []
    for words, made in zip(row[::2], row[1::2], strict=True):
        called = messages[-1].get("tool_calls", ())
        said = [{"role": "tool", "content": words, "tool_call_id": call["id"]} for call in called]
        messages = [*messages, *(said or [{"role": "user", "content": words}])]
        calls = []
        for tool, given in (made or {}).items():
            if not isinstance(given, list):
                given = [given]
            calls += [(tool, arguments) for arguments in given]
        turns.append(Turn(messages=messages, wanted=calls))
        messages = [*messages, turns[-1].answer]
    return tuple(turns)


def _text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


SCHEMAS = {tool: _schema(fields) for tool, fields in _DATA["tools"].items()}
"""Of each tool's arguments."""
TOOLS = [
    {"type": "function", "function": {"name": tool, "parameters": schema}}
    for tool, schema in SCHEMAS.items()
]
"""The same in OpenAI's form."""


def parser_words(source: Source, extra: Sequence[str]) -> tuple[str, ...]:
    """The words with which vLLM reads tool calls; none where the chat template asks for no tool, as
    far as its text shows, or nobody names a parser.

    Raises:
        CheckpointError: see `source.small_bytes`.
    """
    words = options_of(extra)
    name = words.get(_PARSER) or view_of(source).family.tool_parser
    named = words.get("--chat-template", "")
    texts = [small_bytes(source, each) for each in (*TEMPLATES, "tokenizer_config.json")]
    if named:
        texts = [named.encode()]
        if "{" not in named and Path(named).is_file():
            texts = [Path(named).read_bytes()]
    # A mode of the tokenizer has its template in code.
    if name and ("--tokenizer-mode" in words or any(b"tools" in text for text in texts if text)):
        return "--enable-auto-tool-choice", _PARSER, name
    return ()


def longest(turns: Sequence[Turn]) -> str:
    """What is sent in the last turn, and before it the tools."""
    return _text([TOOLS, turns[-1].messages])


def held(
    server: Server, turns: Sequence[Turn], *, max_tokens: int, is_streamed: bool
) -> tuple[str, int]:
    """What a server says in each turn, as JSON, and its tokens."""
    said = []
    num_tokens = 0
    for turn in turns:
        body = {"messages": turn.messages, "tools": TOOLS, "temperature": 0.0, "seed": 0}
        body["max_tokens"] = max_tokens
        one, num = server.say(body, is_streamed=is_streamed, timeout=_SECONDS)
        said.append(one)
        num_tokens += num
    return json.dumps(said, ensure_ascii=False), num_tokens


def seen_in_turns(turns: Sequence[Turn], text: str) -> Iterator[InAnswer]:
    """The faults of what `held` gave."""
    for turn, said in zip(turns, json.loads(text), strict=True):
        fault = _lacks(turn, said)
        if fault:
            yield fault


def _lacks(turn: Turn, said: Said) -> InAnswer | None:
    """What is wrong with an answer."""
    from jsonschema import Draft202012Validator  # which other requests do without

    if said is None:
        return "no end"
    content, calls = said
    is_named = any(tool in content for tool, _ in turn.wanted)
    if not calls and is_named and _IN_CALLS.search(content):
        return "JSON"  # the parser left it in the text
    is_right = bool(calls or content.strip())
    left = list(turn.wanted)
    for tool, text in calls:
        try:
            given = json.loads(text)
        except (ValueError, RecursionError):
            return "JSON"
        if tool not in SCHEMAS or not Draft202012Validator(SCHEMAS[tool]).is_valid(given):
            return "schema"
        if (tool, given) in left:
            left.remove((tool, given))
        else:
            is_right = False
    if left or not is_right:
        return "calls"
    return None
