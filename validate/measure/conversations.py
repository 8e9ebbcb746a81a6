"""The conversations of the task tool-calls: our own (tool_calls.yaml), or those of a file in the
form of the Berkeley Function Calling Leaderboard (BFCL).

In: a protocol. Out: `Conversations`, each with the calls that are right in each of its turns.

Easy to get wrong: what was said before a turn is what should have been said, not what a model said.
So one wrong call is one wrong turn, and source and checkpoint are asked the same.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ValidationError

from ...recipes.errors import RecipeError, first_fault
from ...recipes.frozen import Json, Raw, frozen
from ...recipes.protocol import Evaluation
from ...recipes.yaml_file import load_shipped
from .dataset import file_rows

_CURE = "Mend the row, or name another dataset"
# As BFCL itself replaces them (bfcl_eval/constants/type_mappings.py).
_TYPES = {"dict": "object", "float": "number", "tuple": "array"}
Call = tuple[str, Raw]
"""A tool's name, and its arguments; or for each argument the values that are right, "" among them
where it may be left out.
"""
_Told = tuple[list[Json], list[Call]]
"""What is said before a turn that was not said before, and the calls that are right."""


@frozen
class Turn:
    """One request: all messages before it, and the calls that are right, in any order; none: words
    alone.
    """

    messages: tuple[Raw, ...]
    wanted: tuple[Call, ...]

    @property
    def answer(self) -> Json:
        """The message that is right, for the turns after it."""
        if not self.wanted:
            return {"role": "assistant", "content": "Fine."}
        calls = []
        for number, (name, args) in zip(_ids(self.wanted), self.wanted, strict=True):
            function = {"name": name, "arguments": _json(example(args))}
            calls.append({"id": number, "type": "function", "function": function})
        return {"role": "assistant", "content": "", "tool_calls": calls}


@frozen
class Conversation:
    """Turns that are asked one after another, with the same tools in OpenAI's form."""

    tools: tuple[Raw, ...]
    turns: tuple[Turn, ...]

    @property
    def prompt(self) -> str:
        """All that is sent with the last turn, which is the longest."""
        return _json([self.tools, self.turns[-1].messages])

    @property
    def schemas(self) -> Mapping[str, Raw]:
        """Of each tool's arguments."""
        tools = [tool["function"] for tool in self.tools]
        return {tool["name"]: tool["parameters"] for tool in tools}


@frozen
class Conversations:
    """All that is asked under a protocol: every conversation whole and streamed, without prefix
    caching and, where the protocol says so, with it.

    Attributes:
        num_unmeetable: conversations that are left out, because the right call does not meet its
            own tool's schema, or the schema is none.
    """

    protocol: Evaluation
    items: tuple[Conversation, ...]
    num_unmeetable: int

    @property
    def num(self) -> int:
        """Answers: a conversation each way."""
        return len(self.items) * (4 if self.protocol.prefix_caching else 2)

    @property
    def dataset_sha256(self) -> str:
        """Of questions and right calls, in order."""
        return _sum([[turn.wanted for turn in each.turns] for each in self.items], self)

    @property
    def prompts_sha256(self) -> str:
        """Of all that is sent."""
        return _sum([], self)


def conversations(protocol: Evaluation) -> Conversations:
    """Read our own conversations or those of a file.

    Raises:
        RecipeError: no such file, a row that is none of BFCL's, or too few that can be asked.
    """
    if protocol.repeats > 1:
        raise RecipeError(
            "evaluation.repeats",
            "tool-calls asks every conversation in each way once",
            got=protocol.repeats,
            cure="Leave it out",
        )
    if protocol.dataset is None:
        found = list(_own())
    else:
        found = [_of_row(row, where) for where, row in file_rows(protocol)]
    asked = found[: protocol.limit]
    items = tuple([each for each in asked if _is_meetable(each)])
    if len(items) < 2:
        raise RecipeError(
            f"evaluation.dataset {protocol.dataset_name}",
            "must hold two conversations or more whose right calls meet their tools' schemas",
            got=f"{len(items)} of {len(asked)}",
            cure="Raise --limit, or name another dataset",
        )
    return Conversations(protocol=protocol, items=items, num_unmeetable=len(asked) - len(items))


def meets(schema: Raw, value: Any) -> bool:
    """Whether arguments are as a tool's schema has them; nothing meets a schema that is none."""
    import jsonschema  # which other tasks do without
    from referencing import Registry
    from referencing.exceptions import Unresolvable

    try:
        # With a registry of its own it fetches no schema that another one names.
        judge = jsonschema.Draft202012Validator(schema, registry=Registry())
        judge.check_schema(schema)
        return judge.is_valid(value)
    except (jsonschema.SchemaError, Unresolvable):
        return False


def _is_meetable(conversation: Conversation) -> bool:
    schemas = conversation.schemas
    calls = [call for turn in conversation.turns for call in turn.wanted]
    return all(name in schemas and meets(schemas[name], example(args)) for name, args in calls)


def example(wanted: Any) -> Any:
    """Arguments that are right: of each one's values the first."""
    if isinstance(wanted, Mapping):
        firsts = {name: [one for one in values if one != ""][:1] for name, values in wanted.items()}
        return {name: example(first[0]) for name, first in firsts.items() if first}
    if isinstance(wanted, list):
        return [example(one) for one in wanted]
    return wanted


# --- our own --------------------------------------------------------------------------------------


def _own() -> Iterator[Conversation]:
    """Every row with every line of words, so that the first few have all rows and all scripts."""
    told = load_shipped(Path(__file__).with_name("tool_calls.yaml"))
    tools = [_tool(name, _short(fields)) for name, fields in told["tools"].items()]
    rows = told["rows"]
    num = len(rows) * len(told["words"])
    for number in range(num):
        row = _json(rows[number % len(rows)])
        # Ten rows and twelve lines have no more than 60 pairs if both go on by one.
        words = told["words"][(number + 2 * number // num) % len(told["words"])]
        for name, word in zip(("CITY", "NAME", "TEXT"), words, strict=True):
            row = row.replace(name, _json(word)[1:-1])
        yield _conversation(tools, _turns(json.loads(row), told["system"]))


def _short(form: Any) -> Json:
    """The schema of a short form: a type; values to choose from; a list of one type; or fields."""
    if isinstance(form, str):
        return {"type": form}
    if isinstance(form, list) and len(form) > 1:
        return {"enum": form}
    if isinstance(form, list):
        return {"type": "array", "items": _short(form[0])}
    fields = {name: _short(field) for name, field in form.items()}
    return {
        "type": "object",
        "properties": fields,
        "required": [*fields],
        "additionalProperties": False,
    }


def _turns(row: Sequence[Any], system: str) -> Iterator[_Told]:
    """Words and calls in turn: words are the user's, or each called tool's answer."""
    said = [{"role": "system", "content": system}]
    wanted = list[Call]()
    for words, calls in zip(row[::2], row[1::2], strict=True):
        answers = [{"role": "tool", "content": words, "tool_call_id": one} for one in _ids(wanted)]
        said += answers or [{"role": "user", "content": words}]
        wanted = []
        for name, args in (calls or {}).items():
            several = args if isinstance(args, list) else [args]
            wanted += [(name, _alone(one)) for one in several]
        yield said, wanted
        said = []


def _alone(value: Any) -> Any:
    """Arguments of which each has the one value that is right."""
    if isinstance(value, Mapping):
        return {name: [_alone(one)] for name, one in value.items()}
    return value


# --- a file in BFCL's form ------------------------------------------------------------------------


class _Message(BaseModel):
    role: Literal["system", "user"]
    content: str


class _Function(BaseModel):
    name: str
    parameters: Json
    description: str = ""


class _Row(BaseModel):
    """BFCL's `question` and `function`, and its `ground_truth`, which BFCL has in another file; an
    empty one wants no call.
    """

    question: tuple[tuple[_Message, ...]]
    function: tuple[_Function, ...]
    ground_truth: tuple[Mapping[str, Mapping[str, list[Any]]], ...]


def _of_row(row: Raw, where: str) -> Conversation:
    try:
        read = _Row.model_validate(row)
    except ValidationError as error:
        rule = "must be a conversation of one turn in BFCL's form"
        raise RecipeError(where, rule, got=first_fault(error), cure=_CURE) from error
    tools = [_tool(one.name, _json_types(one.parameters), one.description) for one in read.function]
    said = [message.model_dump() for message in read.question[0]]
    wanted = [call for calls in read.ground_truth for call in calls.items()]
    return _conversation(tools, [(said, wanted)])


def _json_types(schema: Any) -> Any:
    """A schema with JSON's names of types; BFCL's `any` is no limit."""
    if isinstance(schema, list):
        return [_json_types(one) for one in schema]
    if not isinstance(schema, Mapping):
        return schema
    found = {key: _json_types(value) for key, value in schema.items() if value != "any"}
    if isinstance(found.get("type"), str):
        found["type"] = _TYPES.get(found["type"], found["type"])
    return found


# --- both -----------------------------------------------------------------------------------------


def _tool(name: str, schema: Json, description: str = "") -> Json:
    about = {"name": name, "description": description, "parameters": schema}
    return {"type": "function", "function": about}


def _conversation(tools: Sequence[Json], turns: Iterable[_Told]) -> Conversation:
    """Each turn after all that was said before it."""
    before = list[Json]()
    found = []
    for said, wanted in turns:
        before += said
        found.append(Turn(messages=tuple(before), wanted=tuple(wanted)))
        before.append(found[-1].answer)
    return Conversation(tools=tuple(tools), turns=tuple(found))


def _ids(wanted: Sequence[Call]) -> list[str]:
    """Of nine letters and digits: some templates take no other."""
    return [f"call{number:05}" for number, _ in enumerate(wanted)]


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _sum(value: Any, asked: Conversations) -> str:
    text = _json([value, [item.prompt for item in asked.items]])
    return hashlib.sha256(text.encode()).hexdigest()
