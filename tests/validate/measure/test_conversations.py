"""The conversations of the task tool-calls: which are asked, which answers are right, what is refused."""

import json
from collections import Counter

import pytest
from keepmtp.recipes.protocol import Evaluation
from keepmtp.validate.measure.tool_calls import conversations, scores
from pydantic import ValidationError


def test_our_own_are_120_and_hold_what_breaks():
    found = conversations(Evaluation(task="tool-calls"))
    assert len(found.items) == 120
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


def test_the_order_of_parallel_calls_does_not_matter():
    asked = conversations(Evaluation(task="tool-calls", limit=2))
    malaga, lima = [["weather", json.dumps(given)] for _, given in asked.items[1].turns[0].wanted]
    (first,) = asked.items[0].turns
    (one,) = [["weather", json.dumps(given)] for _, given in first.wanted]
    for calls, expected in (
        ([malaga, lima], True),
        ([lima, malaga], True),
        ([lima, lima], False),
        ([malaga, lima, lima], False),
        ([malaga], False),
    ):
        texts = [json.dumps([["", said]] * 2) for said in ([one], calls)]
        _, right = scores(asked, [texts])
        assert right["expected"] == [True, expected], calls
        assert right["JSON"] == right["schema"] == [True, True], calls


@pytest.mark.parametrize(
    "changed",
    [
        {"repeats": 2, "temperature": 0.6},
        {"api": "completions"},
        {"shots": 2},
        {"dataset": "rows.jsonl"},
    ],
)
def test_it_is_asked_in_one_way_alone(changed):
    with pytest.raises(
        ValidationError,
        match="api, shots, repeats, dataset: must be chat, 0, 1 and none for tool-call",
    ):
        Evaluation(task="tool-calls", **changed)
