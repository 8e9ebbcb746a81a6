"""Prompt files in the forms that people have, and the requests of a load."""

import json

import pytest
from keepmtp.recipes.errors import KeepMTPError
from keepmtp.validate.measure.bench_prompts import brought, read, taken, texts

USER = {"role": "user", "content": "Why is the sky blue?"}
# As SPEED-Bench's prepare.py writes its rows, and as the Hub has them.
SPEED_BENCH = {
    "question_id": "1",
    "category": "coding",
    "messages": [USER, {"role": "user", "content": "Shorter."}],
}
ON_THE_HUB = {
    "question_id": "1",
    "category": "coding",
    "sub_category": "",
    "turns": ["Why?", "Shorter."],
    "difficulty": "",
}
PLACEHOLDER = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE USING SPECDEC_BENCH"


def written(tmp_path, *rows: object):
    path = tmp_path / "prompts.jsonl"
    path.write_text(
        "\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows) + "\n"
    )
    return path


@pytest.mark.parametrize(
    ("row", "message", "text"),
    [
        ({"prompt": "Go on:\u2028"}, "Go on:\u2028", "Go on:\u2028"),
        ({"messages": [USER]}, USER["content"], USER["content"]),
        (SPEED_BENCH, USER["content"], USER["content"]),
        (ON_THE_HUB, "Why?", "Why?"),
        ({"question": "1 + 1?", "answer": "#### 2"}, "1 + 1?", "Question: 1 + 1?\nAnswer:"),
        (
            {"messages": [USER, {"role": "assistant", "content": "So."}, USER]},
            *2 * [USER["content"]],
        ),
    ],
)
def test_forms(row, message, text, tmp_path):
    """Of a conversation the first message is asked: an answer must be the model's own."""
    (item,) = read(written(tmp_path, "", row)).items
    assert (item.message, item.text) == (message, text)
    assert texts([item], form="chat", context=0) == [message]
    assert texts([item], form="completions", context=0) == [text]


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ("not json", "must be JSON; got Expecting value"),
        ("[" * 100_000, "at most 64 levels deep"),
        ('{"prompt": "\\ud800"}', "half of a surrogate pair"),
        ([1], r"must begin with a text of the user; got \[1\]"),
        ({"text": "x"}, "must begin with a text of the user"),
        ({"messages": [{"role": "user"}]}, "must begin with a text of the user"),
        ({"messages": [{"role": "system", "content": "Be brief."}, USER]}, "a text of the user"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "a text of the user"),
        ({"prompt": "  "}, "the prompt itself; got "),
        ({"turns": [PLACEHOLDER]}, r"got FULL BENCHMARK.*prepare\.py"),
    ],
)
def test_a_line_of_another_form_is_named(row, says, tmp_path):
    with pytest.raises(KeepMTPError, match=rf"prompts\.jsonl:2: .*{says}"):
        read(written(tmp_path, {"prompt": "good"}, row))


def test_a_file_without_prompts_is_refused(tmp_path):
    for name, says in (
        ("none.jsonl", "No such file"),
        ("test-00000.parquet", r"got \.parquet"),
        ("empty.jsonl", "empty"),
    ):
        (tmp_path / "empty.jsonl").write_text("\n")
        with pytest.raises(KeepMTPError, match=says):
            read(tmp_path / name)


def test_a_load_has_enough_requests_in_an_order_of_the_seed(tmp_path):
    prompts = read(None)
    assert len(prompts.items) == 400 and prompts.name == "held_out.jsonl"
    few = read(written(tmp_path, *({"prompt": str(number)} for number in range(5))))
    sent = [item.text for item in taken(few, 12, 0)]
    assert sorted(sent[:5]) == list("01234") and sent[5:10] == sent[:5], (
        "each once before any is asked again"
    )
    assert taken(few, 5, 0) == taken(few, 12, 0)[:5] != taken(few, 5, 1), (
        "a longer load begins as a shorter one"
    )


def test_a_prompt_is_brought_to_a_length_and_its_own_words_stay_last():
    own, before = [1, 2, 3], [[4, 5], [6]]
    assert brought(own, before, 3) == own
    assert brought(own, before, 2) == [2, 3], "cut at its beginning"
    assert brought(own, before, 7) == [5, 6, 4, 5, 1, 2, 3], (
        "the nearest first, and all of them again"
    )
