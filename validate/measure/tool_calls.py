"""The task tool-calls: conversations through a server's own chat endpoint and parser of tool calls,
each whole and streamed, with prefix caching and without.

In: `Conversations` and a healthy server. Out: a line for each conversation and way; then, from all
lines, scores and what was wrong.

Easy to get wrong: a call that cannot be read is another fault than a wrong call. It counts for the
scores, and in a column of its own.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ...checkpoints.source import Source, view_of
from ...recipes.errors import RecipeError
from ..facts.evaluated import CALL_FAULTS, ScoreFact, mean_of_questions
from .conversations import Call, Conversation, Conversations, Turn, meets
from .harness import Work, takes_tools
from .room import options_of
from .server import Server
from .store import Answer

_CALLS = "--enable-auto-tool-choice"
_PARSER = "--tool-call-parser"
_WRONG, _OFF_SCHEMA, _NO_JSON, _EARLY, _BROKEN = CALL_FAULTS
_UNREADABLE = {_OFF_SCHEMA, _NO_JSON, _EARLY}
# Answers of one server: all whole, then all streamed. The second server has prefix caching.
_WAYS = ("expected", "streamed", "cached", "cached streamed")
_LEAST_SECONDS = 600.0
# What BFCL does not compare in texts either (bfcl_eval/eval_checker/ast_eval/ast_checker.py).
_LOOSE = str.maketrans(dict.fromkeys(" ,./-_*^", "") | {"'": '"'})


def refuse_tools(source: Source, extra: Sequence[str]) -> None:
    """Refuse a server that could call no tool.

    Raises:
        RecipeError: a chat template without tools, or no parser of calls.
    """
    if not takes_tools(source, extra):
        raise RecipeError(
            source.where,
            "needs a chat template with tools for the task tool-calls",
            got="one without the word",
            cure="Use -- --chat-template FILE, or leave the task out",
        )
    if not parser_words(source, extra)[-1]:
        raise RecipeError(
            source.where,
            "needs a parser of tool calls, and its family's table names none",
            got=f"no {_PARSER}",
            cure=f"Add -- {_PARSER} NAME, as `vllm serve --help=tool-call-parser` lists them",
        )


def parser_words(source: Source, extra: Sequence[str]) -> tuple[str, ...]:
    """The words with which vLLM reads tool calls; the last is "" where nobody names a parser."""
    name = options_of(extra).get(_PARSER) or view_of(source).family.tool_parser
    return _CALLS, _PARSER, name


def works(work: Work, asked: Conversations, words: tuple[str, ...]) -> list[Work]:
    """A server without prefix caching, and one with it where the protocol says so."""
    num = 2 * len(asked.items)
    plain = replace(work, words=words, is_asked=lambda place: place < num)
    cached = replace(
        plain,
        name=f"{work.name}.cached",
        words=(*words, "--enable-prefix-caching"),
        is_asked=lambda place: place >= num,
    )
    return [plain, cached][: asked.num // num]


def answer(server: Server, asked: Conversations, number: int) -> Answer:
    """All turns of one conversation, in one way."""
    protocol = asked.protocol
    way, at = divmod(number, len(asked.items))
    conversation = asked.items[at]
    said = []
    for turn in conversation.turns:
        body = {
            "messages": list(turn.messages),
            "tools": list(conversation.tools),
            "max_tokens": protocol.max_tokens,
            "temperature": protocol.temperature,
            "top_p": protocol.top_p,
            "seed": protocol.seed,
        }
        timeout = _LEAST_SECONDS + protocol.max_tokens
        said.append(server.say(body, is_streamed=way % 2 == 1, timeout=timeout))
    whole = [one for one in said if one]
    reasons = [one.finish_reason for one in whole]
    return Answer(
        question=number,
        prompt_sha256=hashlib.sha256(conversation.prompt.encode()).hexdigest(),
        text=json.dumps([one and [one.content, one.calls] for one in said], ensure_ascii=False),
        finish_reason="length" if "length" in reasons else "stop",
        num_tokens=sum([one.num_tokens for one in whole]),
    )


def scores(
    asked: Conversations, answers: Sequence[str]
) -> tuple[tuple[ScoreFact, ...], dict[str, list[bool]], Mapping[str, int]]:
    """Scores of the answers.

    Args:
        asked: from `conversations`.
        answers: lines' texts, for every conversation and way.

    Returns: `expected`, `streamed` and so on are the shares of conversations whose every turn makes
        the calls that are right, by way; `valid` those whose every call meets its schema, in all
        ways. By name what each conversation gets. Answers that are not right, by `CALL_FAULTS`.
    """
    num = len(asked.items)
    found = []
    for number, text in enumerate(answers):
        conversation = asked.items[number % num]
        said = json.loads(text)
        pairs = zip(conversation.turns, said, strict=True)
        found.append([_fault(conversation, turn, one) for turn, one in pairs])
    faults = Counter[str](dict.fromkeys(CALL_FAULTS, 0))
    faults.update([fault for turns in found for fault in turns if fault])
    right = dict[str, list[bool]]()
    for way, name in enumerate(_WAYS[: asked.num // num]):
        of_way = found[way * num : (way + 1) * num]
        right[name] = [not any(turns) for turns in of_way]
        if way % 2:  # the answers before are the same ones whole
            for turns, whole in zip(of_way, found[(way - 1) * num :], strict=False):
                pairs = zip(turns, whole, strict=True)
                faults[_BROKEN] += sum(
                    [one in _UNREADABLE and other not in _UNREADABLE for one, other in pairs]
                )
    right["valid"] = [
        not any(fault in _UNREADABLE for turns in found[at::num] for fault in turns)
        for at in range(num)
    ]
    facts = []
    for name, values in right.items():
        value, stderr = mean_of_questions(values, num)
        facts.append(ScoreFact(filter=name, value=value, stderr=stderr))
    return tuple(facts), right, faults


def _fault(conversation: Conversation, turn: Turn, said: list[Any] | None) -> str:
    """What is wrong with an answer, by `CALL_FAULTS`; "" where nothing is."""
    if said is None:
        return _EARLY
    content, calls = said
    if not calls and any(name in content for name, _ in turn.wanted):
        return _NO_JSON
    read = []
    for name, text in calls:
        try:
            read.append((name, json.loads(text)))
        except (ValueError, RecursionError):
            return _NO_JSON
    schemas = conversation.schemas
    if not all(name in schemas and meets(schemas[name], given) for name, given in read):
        return _OFF_SCHEMA
    if not turn.wanted and not content.strip():
        return _WRONG
    return "" if _are_right(read, turn.wanted) else _WRONG


def _are_right(calls: Sequence[tuple[str, Any]], wanted: Sequence[Call]) -> bool:
    """Whether each call is one that is wanted, in any order, and none is left."""
    left = list(wanted)
    for name, given in calls:
        for one in left:
            if one[0] == name and _has_fields(given, one[1]):
                left.remove(one)
                break
        else:
            return False
    return not left


def _has_fields(given: Any, wanted: Mapping[str, Sequence[Any]]) -> bool:
    if not isinstance(given, Mapping) or not given.keys() <= wanted.keys():
        return False
    for name, values in wanted.items():
        if name not in given and "" not in values:
            return False
        if name in given and not any(_is_same(given[name], value) for value in values):
            return False
    return True


def _is_same(given: Any, wanted: Any) -> bool:
    if isinstance(wanted, Mapping):
        return _has_fields(given, wanted)
    if isinstance(wanted, list):
        return (
            isinstance(given, list)
            and len(given) == len(wanted)
            and all(map(_is_same, given, wanted))
        )
    if isinstance(wanted, str) and isinstance(given, str):
        return _loose(given) == _loose(wanted)
    # To Python a truth is a number.
    return isinstance(given, bool) == isinstance(wanted, bool) and given == wanted


def _loose(text: str) -> str:
    return text.translate(_LOOSE).casefold()
