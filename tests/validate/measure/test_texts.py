"""Which files are held-out text or prompts, and which text is refused because it was calibrated
on.
"""

import json
import zlib
from pathlib import Path

import measured
import pytest
from data_files import table
from keepmtp.checkpoints.record import Record
from keepmtp.recipes.errors import KeepMTPError, RecipeError
from keepmtp.validate.measure.texts import HELD_OUT, PROMPTS, held_out, read_prompts, texts

LINES = table("validate/measure/refused_lines")
TURNS = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]


def rows(path: Path, *found: object) -> Path:
    lines = [row if isinstance(row, str) else json.dumps(row) for row in found]
    path.write_text("\n".join(lines) + "\n")
    return path


def record(model: str = "glm", **data: object) -> Record:
    summary = {"data": data} if data else None
    return Record.model_validate(measured.recorded(summary=summary, model=model))


def test_every_form_of_a_row(tmp_path):
    path = rows(
        tmp_path / "some.jsonl",
        {"text": "One.", "id": 7},
        {"prompt": "Question: 1 + 1?\nAnswer:", "completion": " 2"},
        {"question": "1 + 1?", "answer": "#### 2"},
        {"messages": TURNS},
        {"tokens": [5, 6, 7]},
    )
    found = held_out(path, None)
    assert found.texts == (
        "One.",
        "Question: 1 + 1?\nAnswer: 2",
        "Question: 1 + 1?\nAnswer: #### 2",
        tuple(TURNS),
        (5, 6, 7),
    )
    assert len(found.sha256) == 64


def test_a_txt_file_is_one_text(tmp_path):
    (tmp_path / "a.txt").write_text("One.\n\nTwo.\n")
    assert held_out(tmp_path / "a.txt", None).texts == ("One.\n\nTwo.\n",)


@pytest.mark.parametrize("model", HELD_OUT)
def test_a_shipped_model_has_a_text_of_its_own(model):
    """None of which its recipes calibrate on."""
    for used in ("models/problems.jsonl", "models/docs.jsonl"):
        found = held_out(None, record(model, dataset=used))
        assert len(found.texts) > 200


@pytest.mark.parametrize(
    "name, content, says",
    [
        ("a.jsonl", "\n", "must hold a text; got an empty file"),
        ("a.txt", " \n", "must hold a text; got an empty file"),
        ("a.csv", "text\n", r"must be a \.jsonl or a \.txt file; got \.csv"),
    ],
)
def test_another_file_is_refused(name, content, says, tmp_path):
    (tmp_path / name).write_text(content)
    with pytest.raises(KeepMTPError, match=says):
        held_out(tmp_path / name, None)


def test_a_file_that_is_not_there_or_not_named(tmp_path):
    with pytest.raises(RecipeError, match=r"held-out text; got no such file"):
        held_out(tmp_path / "none.jsonl", None)
    for known in (None, record()):
        with pytest.raises(
            RecipeError, match=r"--text: names the held-out text to compare on; got none"
        ):
            held_out(None, known)


def test_text_of_the_calibration_is_refused(tmp_path):
    """Twins: the same text is good for a checkpoint that was calibrated on others."""
    used = rows(tmp_path / "used.jsonl", {"text": "Mine."}, {"text": "Two of it."})
    for data in ({"dataset": str(used)}, {"dataset": "org/data", "also": [{"dataset": str(used)}]}):
        with pytest.raises(
            RecipeError,
            match=r"used\.jsonl: must be .*; got the very file that it was calibrated on",
        ):
            held_out(used, record(**data))
    others = rows(tmp_path / "others.jsonl", {"text": "Else."})
    for dataset in (str(others), "org/ultrachat"):
        assert len(held_out(used, record(dataset=dataset)).texts) == 2


# --- prompts --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "row, message, text",
    [
        ({"prompt": "Go on:\u2028"}, "Go on:\u2028", "Go on:\u2028"),
        # As SPEED-Bench's prepare.py writes its rows, and as the Hub has them.
        (
            {
                "category": "coding",
                "messages": [
                    {"role": "user", "content": "Why is the sky blue?"},
                    {"role": "user", "content": "Shorter."},
                ],
            },
            "Why is the sky blue?",
            "Why is the sky blue?",
        ),
        ({"category": "coding", "sub_category": "", "turns": ["Why?", "Shorter."]}, "Why?", "Why?"),
        ({"question": "1 + 1?", "answer": "#### 2"}, "1 + 1?", "Question: 1 + 1?\nAnswer:"),
    ],
)
def test_forms(row, message, text, tmp_path):
    """Of a conversation the first message is asked: an answer must be the model's own."""
    prompts = read_prompts(rows(tmp_path / "prompts.jsonl", "", row))
    assert texts(prompts, 1, seed=0, form="chat") == [message]
    assert texts(prompts, 1, seed=0, form="completions") == [text]


@pytest.mark.parametrize(
    "reads, line, says",
    [(reads, line, says) for reads, lines in LINES.items() for line, says in lines],
)
def test_a_line_of_another_form_is_named(reads, line, says, tmp_path):
    path = rows(tmp_path / "a.jsonl", {"prompt": "good", "text": "good"}, "", line)
    with pytest.raises(KeepMTPError) as caught:
        held_out(path, None) if reads == "held_out" else read_prompts(path)
    assert f"a.jsonl:3: {says}" in str(caught.value)


def test_a_file_of_prompts(tmp_path):
    (tmp_path / "a.txt").write_text("One.\n\nTwo.\n")
    assert [item.text for item in read_prompts(tmp_path / "a.txt").items] == ["One.", "Two."]
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "test-00000.parquet").write_bytes(b"PAR1\xff")
    for name, says in (
        ("none.jsonl", "No such file"),
        ("test-00000.parquet", "UTF-8"),
        ("empty.jsonl", "empty"),
    ):
        with pytest.raises(KeepMTPError, match=says):
            read_prompts(tmp_path / name)


def test_prompts_are_asked_in_an_order_of_the_seed(tmp_path):
    assert len(read_prompts(None).items) == 400
    few = read_prompts(rows(tmp_path / "a.jsonl", *({"prompt": str(each)} for each in range(5))))
    sent = texts(few, 12, seed=0, form="chat")
    assert sorted(sent[:5]) == list("01234"), "each once before any is asked again"
    assert sent[5:10] == sent[:5]
    assert texts(few, 5, seed=0, form="chat") == sent[:5] != texts(few, 5, seed=1, form="chat")


def test_the_default_prompts_are_held_out():
    """By the rule of models/train/problems.py: CRC-32 of the question modulo 10 is 0."""
    assert len(PROMPTS) == 8
    for prompt in PROMPTS:
        question = prompt.removeprefix("Question: ").removesuffix("\nAnswer:")
        assert zlib.crc32(question.encode()) % 10 == 0, question
