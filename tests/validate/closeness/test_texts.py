"""Which files are held-out text, and which text is refused because it was calibrated on."""

import json
from pathlib import Path

import measured
import pytest
from keepmtp.checkpoints.record import Record
from keepmtp.recipes.errors import KeepMTPError, RecipeError
from keepmtp.validate.measure.texts import HELD_OUT, held_out

ROOT = Path(__file__).parents[3]
TURNS = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]


def rows(path: Path, *found: object) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in found))
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
    assert found.against == "" and len(found.sha256) == 64


def test_a_txt_file_is_one_text(tmp_path):
    (tmp_path / "a.txt").write_text("One.\n\nTwo.\n")
    assert held_out(tmp_path / "a.txt", None).texts == ("One.\n\nTwo.\n",)


@pytest.mark.parametrize("model", HELD_OUT)
def test_a_shipped_model_has_a_text_of_its_own(model):
    """None of which its recipes calibrate on."""
    for used in ("models/problems.jsonl", "models/docs.jsonl"):
        found = held_out(None, record(model, dataset=used))
        assert len(found.texts) > 200 and f"is a row of {used}" in found.against


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.jsonl", "{}\n", r"a\.jsonl:1: must be an object with .*got \{\}"),
        ("a.jsonl", '{"text": "fine"}\n\n{"text": 3}\n', r"a\.jsonl:3: must be an object"),
        ("a.jsonl", '{"text": "fine"}\nfine\n', r"a\.jsonl:2: must be JSON; got Expecting value"),
        ("a.jsonl", "[" * 100_000, r"a\.jsonl:1: values must be at most 64 levels deep"),
        (
            "a.jsonl",
            '{"text": "\\ud800"}',
            r"a\.jsonl:1: every character must be one that UTF-8 can write",
        ),
        ("a.jsonl", '{"tokens": [1e999]}', r"a\.jsonl:1: must be an object"),
        ("a.jsonl", '{"tokens": [2147483648]}', r"a\.jsonl:1: must be an object"),
        ("a.jsonl", '{"text": "  "}\n', r"a\.jsonl:1: must be"),
        ("a.jsonl", '{"tokens": [1, -1]}\n', r"a\.jsonl:1: must be"),
        ("a.jsonl", "\n", "must hold a text; got an empty file"),
        ("a.txt", " \n", "must hold a text; got an empty file"),
        ("a.csv", "text\n", r"must be a \.jsonl or a \.txt file; got \.csv"),
    ],
)
def test_another_form_is_refused_with_its_line(name, content, says, tmp_path):
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
    """Twins: the same texts are good for a checkpoint that was calibrated on others."""
    used = rows(tmp_path / "used.jsonl", {"text": "Mine."}, {"text": "Two of it."})
    mine = rows(tmp_path / "mine.jsonl", {"text": "Fresh."}, {"text": "Two of it.\n"})
    with pytest.raises(
        RecipeError, match=r"used\.jsonl: must be .*; got the very file that it was calibrated on"
    ):
        held_out(used, record(dataset=str(used)))
    for data in ({"dataset": str(used)}, {"dataset": "org/data", "also": [{"dataset": str(used)}]}):
        with pytest.raises(
            RecipeError, match=r"mine\.jsonl:2: must be text .*; got the text of .*used\.jsonl:2"
        ):
            held_out(mine, record(**data))
    others = rows(tmp_path / "others.jsonl", {"text": "Else."})
    assert len(held_out(mine, record(dataset=str(others))).texts) == 2


def test_a_dataset_that_is_not_here_is_said_not_to_be_compared(tmp_path):
    mine = rows(tmp_path / "mine.jsonl", {"text": "Fresh."})
    assert held_out(mine, record(dataset="org/ultrachat")).against == (
        "Whether a text is in org/ultrachat, which it was calibrated on, was not looked up."
    )
