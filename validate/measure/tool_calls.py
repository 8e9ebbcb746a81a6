"""The task tool-calls: conversations through a server's own chat endpoint and parser of tool calls,
each whole and streamed, by a server without prefix caching and by one with it.

In: conversations and a healthy server. Out: a line for each; then scores.

Easy to get wrong: an answer that cannot be read is no wrong call. Neither is right, and each has a
score of its own.
"""

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import product
from typing import Any

from ...checkpoints.source import Source, view_of
from ...recipes.errors import RecipeError
from ..facts.evaluated import ScoreFact, score_of
from .conversations import SCHEMAS, TOOLS, Call, Dialogue, Turn
from .harness import takes_tools
from .lm_eval_task import Questions, sum_of
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
    is_named = any(call.tool in content for call in turn.wanted)
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
        call = Call(tool=tool, arguments=given)
        if call in left:
            left.remove(call)
        else:
            is_right = False
    return "" if is_right and not left else "right calls"
