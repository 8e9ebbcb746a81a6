"""The task tool-calls: each row of tool_calls.yaml with each line of words is a conversation
through a server's own chat endpoint and parser of tool calls, whole and streamed, by a server
without prefix caching and by one with it.

In: a protocol, and a healthy server. Out: `Questions`, each a `Dialogue` with the calls that are
right in its turns; a line for each; then scores.

Easy to get wrong: an answer that cannot be read is no wrong call. Neither is right, and each has a
score of its own. And what was said before a turn is what should have been said, not what a model
said. So one wrong call is one wrong turn, and source and checkpoint are asked the same.
"""

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from ...checkpoints.source import Source, view_of
from ...recipes.errors import RecipeError
from ...recipes.frozen import Json, Raw, frozen
from ...recipes.protocol import Evaluation
from ...recipes.yaml_file import load_shipped
from ..facts.evaluated import ScoreFact, score_of
from .harness import takes_tools
from .lm_eval_task import Question, Questions, sum_of
from .room import options_of
from .server import Server
from .store import Answer

_PARSER = "--tool-call-parser"
_SENT = {"max_tokens", "temperature", "top_p", "seed"}
_LEAST_SECONDS = 600.0
_WAYS = (("expected", "streamed"), ("cached", "cached streamed"))
# What an answer may lack to be read at all: an end; calls that are JSON and that the parser found;
# arguments that their tool's schema takes.
_LACKS = ("ended", "JSON", "schema")
# A call in a text has one of these in every form that vLLM parses; a sentence about a tool has not.
_IN_CALLS = re.compile(r"[{<=|]")
_DATA = load_shipped(Path(__file__).with_suffix(".yaml"))


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
                calls.append((tool, arguments))
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


def refuse_tools(source: Source, extra: Sequence[str]) -> None:
    """Refuse a server that could call no tool.

    Raises:
        RecipeError: a chat template without tools, or no parser of calls.
    """
    if not takes_tools(source, extra):
        raise RecipeError(
            source.where,
            "needs a chat template with tools for the task tool-calls",
            got="one without that word",
            cure="Use -- --chat-template FILE, or leave the task out",
        )
    if not parser_words(source, extra)[-1]:
        raise RecipeError(
            source.where,
            "needs a parser of tool calls, and its family's table names none",
            got=f"no {_PARSER}",
            cure=f"Add -- {_PARSER} NAME",
        )


def parser_words(source: Source, extra: Sequence[str]) -> tuple[str, ...]:
    """The words with which vLLM reads tool calls; the last is "" where nobody names a parser."""
    name = options_of(extra).get(_PARSER) or view_of(source).family.tool_parser
    return "--enable-auto-tool-choice", _PARSER, name


def answer(server: Server, asked: Questions, number: int) -> Answer:
    """All turns of one conversation, whole and then streamed."""
    protocol = asked.protocol
    item: Any = asked.items[number]
    said = []
    for is_streamed, turn in product((False, True), list[Turn](item.turns)):
        body = protocol.model_dump(include=_SENT)
        body |= {"messages": turn.messages, "tools": TOOLS}
        timeout = _LEAST_SECONDS + protocol.max_tokens
        said.append(server.say(body, is_streamed=is_streamed, timeout=timeout))
    texts, reasons, nums = zip(*said, strict=True)
    return Answer(
        question=number,
        prompt_sha256=sum_of(item.prompt),
        text=json.dumps(texts, ensure_ascii=False),
        finish_reason="length" if "length" in reasons else "stop",
        num_tokens=sum(nums),
    )


def scores(
    asked: Questions, answers: Sequence[Sequence[str]]
) -> tuple[tuple[ScoreFact, ...], dict[str, list[bool]]]:
    """Scores of the answers.

    Args:
        asked: from `conversations`.
        answers: texts for every conversation, by server.

    Returns: the shares of conversations that make the right calls in every turn: `expected` where
        they are asked whole, and by the other ways; and of those whose answers all ended, had calls
        in JSON, and kept to the schemas, in all ways. And by name what each conversation gets.
    """
    right = defaultdict[str, list[bool]](list)
    for number, item in enumerate(asked.items):
        assert isinstance(item, Dialogue)
        lacks = set[str]()
        for names, texts in zip(_WAYS, answers, strict=False):
            said = iter(json.loads(texts[number]))
            for name in names:
                found = [_lacks(turn, next(said)) for turn in item.turns]
                right[name].append(not any(found))
                lacks.update(found)
        for name in _LACKS:
            right[name].append(name not in lacks)
    return tuple([score_of(name, values) for name, values in right.items()]), right


def num_calls(texts: Iterable[str]) -> int:
    """The calls that the parser found in all turns of these answers."""
    return sum([len(said[1]) for text in texts for said in json.loads(text) if said])


def _lacks(turn: Turn, said: Any) -> str:
    """What an answer lacks, by `_LACKS` or "right calls"; "" where nothing."""
    from jsonschema import Draft202012Validator  # which other tasks do without

    if said is None:
        return "ended"
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
    return "" if is_right and not left else "right calls"
