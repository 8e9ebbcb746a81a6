"""Our own conversations, and those of a file in BFCL's form: which are asked, left out, refused."""

import json
import time
from collections import Counter
from pathlib import Path

import pytest
from data_files import put_lines
from keepmtp.recipes.errors import KeepMTPError
from keepmtp.recipes.protocol import Evaluation
from keepmtp.validate.measure.conversations import conversations, is_right, meets
from keepmtp.validate.measure.tool_calls import scores
from pydantic import ValidationError

# Of BFCL's own form, with its words for types; the last one wants no call.
SUM = {
    "question": [[{"role": "user", "content": "Add 2.5 and 4, please."}]],
    "function": [
        {
            "name": "math.add",
            "description": "Adds.",
            "parameters": {
                "type": "dict",
                "properties": {
                    "numbers": {"type": "array", "items": {"type": "float"}},
                    "unit": {"type": "string"},
                    "extra": {"type": "any"},
                },
                "required": ["numbers"],
            },
        }
    ],
    "ground_truth": [{"math.add": {"numbers": [[2.5, 4], [4, 2.5]], "unit": ["", "New York"]}}],
}
HELLO = SUM | {"question": [[{"role": "user", "content": "Hello"}]], "ground_truth": []}


def asked(folder: Path, *rows, **protocol):
    path = folder / "rows.jsonl"
    put_lines(path, rows)
    return conversations(Evaluation(task="tool-calls", dataset=str(path), **protocol))


def test_our_own_are_120_and_hold_what_breaks():
    found = conversations(Evaluation(task="tool-calls"))
    assert len(found.items) == 120 and not found.notes
    assert len({item.prompt for item in found.items}) == 120
    kinds = Counter[int](len(turn.wanted) for item in found.items for turn in item.turns)
    assert min(kinds[0], kinds[1], kinds[2]) >= 36 and sum(kinds.values()) == 180
    for item in found.items[:12]:
        assert any(ord(letter) > 127 for letter in item.prompt)
    last = found.items[119].turns[-1]
    assert last.messages[0]["role"] == "system" and last.messages[-1]["role"] == "tool"
    called = last.messages[-2]["tool_calls"][0]
    assert called["id"] == last.messages[-1]["tool_call_id"] and len(called["id"]) == 9
    assert json.loads(called["function"]["arguments"]).keys() == {"name"}


def test_a_row_of_bfcl_takes_each_of_its_values(tmp_path):
    found = asked(tmp_path, SUM, HELLO)
    schema = found.items[0].schemas["math.add"]
    assert schema["type"] == "object"
    assert schema["properties"]["numbers"]["items"] == {"type": "number"}
    call = found.items[0].turns[0].wanted[0]
    assert call.arguments == {"numbers": [2.5, 4], "unit": "New York"}
    for given, expected in (
        ({"numbers": [2.5, 4]}, True),
        ({"numbers": [4, 2.5], "unit": "New York"}, True),
        ({"numbers": [4, 2.5], "unit": "York"}, False),
        ({"numbers": [4]}, False),
        ({"numbers": [True, 2.5]}, False),
        ({"numbers": [4, 2.5], "extra": 1}, False),
        ({"unit": "New York"}, False),
    ):
        call = json.dumps([["", [["math.add", json.dumps(given)]]]] * 2)
        words = json.dumps([["Hello to you", []]] * 2)
        _, right = scores(found, [[call, words]])
        assert right["expected"] == [expected, True], given
    _, right = scores(found, [[call, json.dumps([["", []]] * 2)]])
    assert right["expected"] == [False, False] and right["schema"] == [False, True]
    assert right["JSON"] == right["ended"] == [True, True]


def test_objects_in_a_list_take_each_of_their_values(tmp_path):
    """As in BFCL's rows of orders: each field of each object has values of its own."""
    schema = {"type": "dict", "properties": {"items": {"type": "array"}}}
    wanted = [[{"name": ["cola", "coke"], "size": ["", "large"]}]]
    row = SUM | {
        "function": [{"name": "order", "parameters": schema}],
        "ground_truth": [{"order": {"items": wanted}}],
    }
    found = asked(tmp_path, row, HELLO)
    (turn,) = found.items[0].turns
    assert not found.notes and turn.wanted[0].arguments == {
        "items": [{"name": "cola", "size": "large"}]
    }
    for items, expected in (
        ([{"name": "coke"}], True),
        ([{"name": "coke", "size": "large"}], True),
        ([{"name": "tea"}], False),
        ([{"name": "coke"}] * 2, False),
        ([], False),
    ):
        assert is_right({"items": items}, turn.wanted[0].wanted) == expected, items


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "dict", "properties": {"numbers": {"type": "string"}}},
        {"type": "dict", "properties": {"numbers": {"type": "no type"}}},
        {"type": "dict", "required": ["another"]},
        {"type": "dict", "properties": {"unit": {"pattern": "["}}},
        {"$ref": "#"},
        {"type": "dict", "properties": {"numbers": {"$ref": "http://127.0.0.1:9/schema"}}},
        {"$id": 5},
        {"$id": "http://[", "$ref": "x"},
        {"$ref": "#/x", "x": 5},
        {"$ref": "#/type/a", "type": []},
        {"properties": {"numbers": {"items": {"multipleOf": 10**400}}}},
    ],
)
def test_a_schema_that_no_right_call_meets_is_left_out_and_counted(schema, tmp_path):
    broken = SUM | {"function": [SUM["function"][0] | {"parameters": schema}]}
    found = asked(tmp_path, SUM, broken, HELLO)
    assert len(found.items) == 2 and found.notes == {
        "left out": "1 whose schemas no right call meets"
    }
    with pytest.raises(
        KeepMTPError, match="conversations whose right calls meet their tools' schemas; got 1"
    ):
        asked(tmp_path, SUM, broken)


def test_a_schema_that_takes_seconds_is_met_by_nothing():
    began = time.process_time()
    assert not meets({"pattern": "(a+)+$"}, "a" * 40 + "!")
    assert not meets({"uniqueItems": True}, [{"number": number} for number in range(9_000)])
    assert time.process_time() - began < 10
    assert meets({"pattern": "(a+)+$"}, "a")


def test_the_order_of_parallel_calls_does_not_matter(tmp_path):
    """The first call is right as either of two, and the second as one of them alone."""
    row = SUM | {
        "ground_truth": [
            {"math.add": {"numbers": [[1], [2]]}},
            {"math.add": {"numbers": [[1]]}},
        ]
    }
    found = asked(tmp_path, row, HELLO)
    one, two = [["math.add", json.dumps({"numbers": [number]})] for number in (1, 2)]
    for calls, expected in (([one, two], True), ([two, one], True), ([two, two], False)):
        said = json.dumps([["", calls]] * 2)
        _, right = scores(found, [[said, json.dumps([["Hello", []]] * 2)]])
        assert right["expected"] == [expected, True], calls


@pytest.mark.parametrize(
    "changed, says",
    [
        ({"question": [*SUM["question"], *SUM["question"]]}, "question"),  # of BFCL's multi_turn_*
        ({"ground_truth": ["math.add(2, 4)"]}, "ground_truth.0"),
        ({"function": [{"name": "add"}]}, "function.0.parameters"),
    ],
)
def test_a_row_of_another_form_is_named(changed, says, tmp_path):
    with pytest.raises(KeepMTPError) as caught:
        asked(tmp_path, SUM, SUM | changed)
    message = str(caught.value)
    assert "rows.jsonl:2: must be a conversation of one turn in BFCL's form; got " in message
    assert says in message and message.endswith("Mend the row, or name another dataset.")


@pytest.mark.parametrize(
    "changed", [{"repeats": 2, "temperature": 0.6}, {"api": "completions"}, {"shots": 2}]
)
def test_it_is_asked_in_one_way_alone(changed):
    with pytest.raises(
        ValidationError, match="api, shots, repeats: must be chat, 0, 1 for tool-call"
    ):
        Evaluation(task="tool-calls", **changed)
