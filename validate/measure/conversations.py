"""The conversations of the task tool-calls: each row of tool_calls.yaml with each line of words.

In: a protocol. Out: `Questions`, each a `Dialogue` with the calls that are right in its turns.

Easy to get wrong: what was said before a turn is what should have been said, not what a model said.
So one wrong call is one wrong turn, and source and checkpoint are asked the same.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...recipes.frozen import Json, Raw, frozen
from ...recipes.protocol import Evaluation
from ...recipes.yaml_file import load_shipped
from .lm_eval_task import Question, Questions, sum_of

_DATA = load_shipped(Path(__file__).with_name("tool_calls.yaml"))


@frozen
class Call:
    """A call of a tool."""

    tool: str
    arguments: Any


@frozen
class Turn:
    """One request: all messages before it, and the calls that are right, in any order; none: words
    alone.
    """

    messages: Sequence[Raw]
    wanted: Sequence[Call]

    @property
    def answer(self) -> Json:
        """The message that is right."""
        calls = []
        for number, call in enumerate(self.wanted):
            function = {"name": call.tool, "arguments": _text(call.arguments)}
            # Some templates take an id of nine letters and digits alone.
            calls.append({"id": f"call{number:05}", "type": "function", "function": function})
        if calls:
            return {"role": "assistant", "content": "", "tool_calls": calls}
        return {"role": "assistant", "content": "Fine."}


@frozen
class Dialogue(Question):
    """Turns that are asked one after another."""

    turns: Sequence[Turn]


def conversations(protocol: Evaluation) -> Questions:
    """Every row with every line of words; the first few have all rows and all scripts."""
    rows = _DATA["rows"]
    lines = _DATA["words"]
    num = len(rows) * len(lines)
    items = []
    for number in range(num)[: protocol.limit]:
        row = _text(rows[number % len(rows)])
        # Ten rows and twelve lines have no more than 60 pairs if both go on by one.
        line = lines[(number + 2 * number // num) % len(lines)]
        for name, word in zip(("CITY", "NAME", "TEXT"), line, strict=True):
            row = row.replace(name, _text(word)[1:-1])
        turns = _turns(json.loads(row))
        # The last turn's is the longest.
        items.append(Dialogue(prompt=_text([TOOLS, turns[-1].messages]), stop=(), turns=turns))
    return Questions(protocol=protocol, items=tuple(items), dataset_sha256=sum_of(f"{items}"))


def _schema(form: Any) -> Json:
    """The schema of a short form: a type; values to choose from; a list of one type; or fields."""
    if isinstance(form, str):
        return {"type": form}
    if isinstance(form, list):
        return {"enum": form} if form[1:] else {"type": "array", "items": _schema(form[0])}
    fields = {name: _schema(field) for name, field in form.items()}
    return {"type": "object", "properties": fields, "required": [*fields]}


def _turns(row: Sequence[Any]) -> list[Turn]:
    """Of words and calls in turn: words are the user's, or the answer of each called tool."""
    messages: list[Json] = [{"role": "system", "content": _DATA["system"]}]
    turns = []
    for words, made in zip(row[::2], row[1::2], strict=True):
        called = messages[-1].get("tool_calls", ())
        said = [{"role": "tool", "content": words, "tool_call_id": call["id"]} for call in called]
        messages = [*messages, *(said or [{"role": "user", "content": words}])]
        calls = []
        for tool, given in (made or {}).items():
            for arguments in given if isinstance(given, list) else [given]:
                calls.append(Call(tool=tool, arguments=arguments))
        turns.append(Turn(messages=messages, wanted=calls))
        messages = [*messages, turns[-1].answer]
    return turns


def _text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


SCHEMAS = {tool: _schema(fields) for tool, fields in _DATA["tools"].items()}
"""Of each tool's arguments."""
TOOLS = [
    {"type": "function", "function": {"name": tool, "parameters": schema}}
    for tool, schema in SCHEMAS.items()
]
"""The same in OpenAI's form."""
