"""The conversations of the task tool-calls: our own (tool_calls.yaml), or those of a file in the
form of the Berkeley Function Calling Leaderboard (BFCL).

In: a protocol. Out: `Questions`, each a `Dialogue` with the calls that are right in its turns.

Easy to get wrong: what was said before a turn is what should have been said, not what a model said.
So one wrong call is one wrong turn, and source and checkpoint are asked the same.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from ...checkpoints.json_file import read_lines
from ...recipes.errors import RecipeError, first_fault
from ...recipes.frozen import Json, Raw, frozen
from ...recipes.match_clock import SIMPLER, MatchClock
from ...recipes.model_file import find_path
from ...recipes.protocol import Evaluation
from ...recipes.yaml_file import load_shipped
from .lm_eval_task import Question, Questions, sum_of

_CURE = "Mend the row, or name another dataset"
_ANY = '["array", "boolean", "null", "number", "object", "string"]'
_TYPES = {"dict": '"object"', "float": '"number"', "tuple": '"array"', "any": _ANY}
# What jsonschema raises at a stranger's schema: a reference into a number, an address that is none,
# a multiple of what no float holds.
_ODD = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
_clock = MatchClock(
    lambda what, got: RecipeError(what, "must be met in a moment", got=got, cure=SIMPLER)
)
_DATA = load_shipped(Path(__file__).with_name("tool_calls.yaml"))


@frozen
class Call:
    """A call that is right: one, and for each argument all values that are right, "" among them
    where it may be left out.
    """

    tool: str
    arguments: Raw
    wanted: Raw


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
    """Turns that are asked one after another.

    Attributes:
        schemas: of each tool's arguments.
        tools: the same in OpenAI's form.
    """

    schemas: Mapping[str, Raw]
    tools: Sequence[Raw]
    turns: Sequence[Turn]

    def takes(self, tool: str, given: Any) -> bool:
        """Whether a tool of this name has a schema that the arguments meet."""
        return tool in self.schemas and meets(self.schemas[tool], given)


def conversations(protocol: Evaluation) -> Questions:
    """Read our own conversations or those of a file; those with a schema that no right call meets
    are left out.

    Raises:
        RecipeError: no such file, a row of another form, or too few that can be asked.
    """
    if protocol.dataset is None:
        found = list(_own())
    else:
        path = find_path(protocol.dataset) or Path(protocol.dataset)
        found = [_of_row(row, where) for where, row in read_lines(path, cure=_CURE)]
    found = found[: protocol.limit]
    items = []
    for item in found:
        calls = [call for turn in item.turns for call in turn.wanted]
        if all(item.takes(call.tool, call.arguments) for call in calls):
            items.append(item)
    num_left = len(found) - len(items)
    if len(items) < 2:
        raise RecipeError(
            f"evaluation.dataset {protocol.dataset_name}",
            "must hold two conversations whose right calls meet their tools' schemas",
            got=f"{len(items)} of {len(found)}",
            cure="Raise --limit, or name another dataset",
        )
    return Questions(
        protocol=protocol,
        items=tuple(items),
        dataset_sha256=sum_of(f"{items}"),
        notes={"left out": f"{num_left:,} whose schemas no right call meets"} if num_left else {},
    )


def meets(schema: Any, value: Any) -> bool:
    """Whether a value is as a schema has it; nothing meets a schema that is none, or one that takes
    seconds.
    """
    import jsonschema  # which other tasks do without
    from referencing import Registry
    from referencing.exceptions import Unresolvable

    # With a registry of its own it fetches no schema that another one names.
    try:
        judge = jsonschema.Draft202012Validator(schema, registry=Registry())
        judge.check_schema(schema)
        return _clock.timed(judge.is_valid, "a tool's schema", value)
    except (jsonschema.SchemaError, Unresolvable, re.error, RecipeError, *_ODD):
        return False


def is_right(given: Any, wanted: Any) -> bool:
    """Whether arguments, or a part of them, are among those that are right."""
    if isinstance(wanted, Mapping) and isinstance(given, Mapping):
        fields = [
            any(is_right(given.get(name, ""), value) for value in _several(values))
            for name, values in wanted.items()
        ]
        return given.keys() <= wanted.keys() and all(fields)
    if isinstance(wanted, list) and isinstance(given, list):
        return len(given) == len(wanted) and all(map(is_right, given, wanted))
    return given == wanted


def _own() -> Iterator[Dialogue]:
    """Every row with every line of words; the first few have all rows and all scripts."""
    rows, lines = _DATA["rows"], _DATA["words"]
    tools = [{"name": name, "parameters": _schema(of)} for name, of in _DATA["tools"].items()]
    system = {"role": "system", "content": _DATA["system"]}
    num = len(rows) * len(lines)
    for number in range(num):
        row = _text(rows[number % len(rows)])
        # Ten rows and twelve lines have no more than 60 pairs if both go on by one.
        line = lines[(number + 2 * number // num) % len(lines)]
        for name, word in zip(("CITY", "NAME", "TEXT"), line, strict=True):
            row = row.replace(name, _text(word)[1:-1])
        yield _conversation(tools, _turns(json.loads(row), [system]))


def _schema(form: Any) -> Json:
    """The schema of a short form: a type; values to choose from; a list of one type; or fields."""
    if isinstance(form, str):
        return {"type": form}
    if isinstance(form, list):
        return {"enum": form} if form[1:] else {"type": "array", "items": _schema(form[0])}
    fields = {name: _schema(field) for name, field in form.items()}
    return {"type": "object", "properties": fields, "required": [*fields]}


def _turns(row: Sequence[Any], messages: list[Json]) -> list[Turn]:
    """Of words and calls in turn: words are the user's, or the answer of each called tool."""
    turns = []
    for words, made in zip(row[::2], row[1::2], strict=True):
        called = messages[-1].get("tool_calls", ())
        said = [{"role": "tool", "content": words, "tool_call_id": call["id"]} for call in called]
        messages = [*messages, *(said or [{"role": "user", "content": words}])]
        calls = []
        for tool, given in (made or {}).items():
            for one in _several(given):
                wanted = {name: [value] for name, value in one.items()}
                calls.append(Call(tool=tool, arguments=one, wanted=wanted))
        turns.append(Turn(messages=messages, wanted=calls))
        messages = [*messages, turns[-1].answer]
    return turns


def _conversation(tools: Sequence[Raw], turns: Sequence[Turn]) -> Dialogue:
    sent = [{"type": "function", "function": tool} for tool in tools]
    return Dialogue(
        prompt=_text([sent, turns[-1].messages]),  # the last turn's is the longest
        stop=(),
        schemas={tool["name"]: tool["parameters"] for tool in tools},
        tools=sent,
        turns=turns,
    )


# --- a file in BFCL's form ------------------------------------------------------------------------


class _Function(BaseModel, extra="allow"):
    name: str
    parameters: Json


class _Row(BaseModel):
    """BFCL's `question` and `function`, and its `ground_truth`, which BFCL has in another file: for
    each argument of a call the values that are right.
    """

    question: tuple[tuple[dict[str, str], ...]]
    function: tuple[_Function, ...]
    ground_truth: tuple[Mapping[str, Mapping[str, list[Any]]], ...]


def _of_row(row: Raw, where: str) -> Dialogue:
    # BFCL has names of its own for JSON's types (bfcl_eval/constants/type_mappings.py).
    text = _text(row)
    for name, of_json in _TYPES.items():
        text = text.replace(f'"type": "{name}"', f'"type": {of_json}')
    try:
        read = _Row.model_validate_json(text)
    except ValidationError as error:
        raise RecipeError(
            where,
            "must be a conversation of one turn in BFCL's form",
            got=first_fault(error),
            cure=_CURE,
        ) from error
    wanted = []
    for tool, values in chain(*(calls.items() for calls in read.ground_truth)):
        wanted.append(Call(tool=tool, arguments=_first(values), wanted=values))
    tools = [tool.model_dump() for tool in read.function]
    return _conversation(tools, [Turn(messages=read.question[0], wanted=wanted)])


def _first(wanted: Any) -> Any:
    """Of all arguments that are right one."""
    if isinstance(wanted, Mapping):
        kept = {name: [one for one in _several(of) if one != ""] for name, of in wanted.items()}
        return {name: _first(values[0]) for name, values in kept.items() if values}
    return [_first(one) for one in wanted] if isinstance(wanted, list) else wanted


def _several(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list) else [value]


def _text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
