"""The file of answers: what goes on, what is set aside, what is refused."""

import json
from pathlib import Path

import pytest
from headers import header
from keepmtp.recipes.errors import CheckpointError
from keepmtp.recipes.protocol import Evaluation
from keepmtp.validate.measure.answers import (
    Answer,
    Samples,
    Sitting,
    correct,
    drafts_of,
    finish,
    read_samples,
)
from keepmtp.validate.measure.line_file import open_lines


def answer(number: int, text: str = " it is 1\n#### 1") -> Answer:
    return Answer(question=number, prompt_sha256="p", text=text, finish_reason="stop", num_tokens=4)


def sitting(number: int, drafts: int, accepted: tuple[int, ...]) -> Sitting:
    return Sitting(
        sitting=number,
        as_served="native",
        reason="",
        seconds=1.5,
        drafts=drafts,
        draft_tokens=2 * drafts,
        accepted_tokens=sum(accepted),
        accepted_per_position=accepted,
    )


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / "out" / "gsm8k.source.jsonl"


def begun(path: Path, **changed) -> Samples:
    samples: Samples = open_lines(path, header(**changed))
    for line in (
        answer(2),
        sitting(1, 5, (4, 1)),
        answer(0, "\u2028 odd \U0001f600 ends\x85"),
        sitting(1, 9, (8, 2)),
    ):
        samples.add(line)
    return samples


def test_a_file_goes_on(path):
    begun(path)
    samples = open_lines(path, header(), lambda words: pytest.fail(words))
    assert samples.missing == (1,) and samples.lines[0].text == "\u2028 odd \U0001f600 ends\x85"
    samples.add(answer(1))
    samples.add(sitting(2, 1, (1,)))
    assert not samples.missing and list(read_samples(path).lines) == [2, 0, 1]
    drafts = drafts_of(read_samples(path))
    assert (drafts.drafts, drafts.draft_tokens, drafts.accepted_tokens) == (10, 20, 11)
    assert drafts.accepted_per_position == (9, 2)


def test_a_full_disk_is_said(tmp_path):
    full = tmp_path / "gsm8k.source.jsonl"
    full.symlink_to("/dev/full")
    samples = Samples(full, header())
    with pytest.raises(
        CheckpointError,
        match=r"must be writable; got No space left on device\. Make room, and run the same ",
    ):
        samples.add(answer(0))
    assert samples.missing == (0, 1, 2), "an answer counts once it is on the disk"


def test_finished_it_is_in_order_and_changes_no_more(path):
    samples = begun(path)
    samples.add(answer(1))
    right = {"strict-match": (True, False, True), "flexible-extract": (True, True, True)}
    finish(samples, right)
    before = path.read_bytes()
    found = read_samples(path)
    assert (
        list(found.lines) == [0, 1, 2] and {name: correct(found, name) for name in right} == right
    )
    finish(found, right)
    assert path.read_bytes() == before
    kinds = [next(iter(json.loads(line))) for line in path.read_text().split("\n")[:-1]]
    assert kinds == ["samples", "question", "question", "question", "sitting"]


@pytest.mark.parametrize(
    "changed",
    [
        {"protocol": Evaluation(shots=5)},
        {"protocol": Evaluation(limit=3)},
        {"checkpoint_sha256": "e"},
        {"vllm": "0.33.0"},
        {"dataset_sha256": "e"},
        {"device": "GPU"},
        {"words": ("--tensor-parallel-size", "2")},
        {"role": "checkpoint"},
    ],
)
def test_answers_to_something_else_are_set_aside_and_taken_back(path, changed):
    begun(path)
    said: list[str] = []
    other = open_lines(path, header(**changed), said.append)
    aside = path.with_name(f"gsm8k.source.{header().digits}.jsonl")
    assert not other.lines and not path.exists()
    assert said == [f"What was asked otherwise, or of other bytes, is kept in {aside.name}."]
    other.add(answer(1))
    mine = open_lines(path, header(), said.append)
    again = path.with_name(f"gsm8k.source.{header(**changed).digits}.jsonl")
    assert again.name in said[1] and again != aside and not aside.exists(), "taken back"
    assert set(mine.lines) == {0, 2} and set(read_samples(again).lines) == {1}


@pytest.mark.parametrize("cut", [1, 20, 60])
def test_a_line_that_a_crash_cut_is_asked_again(path, cut):
    begun(path)
    whole = path.read_bytes()
    path.write_bytes(whole + whole.splitlines(keepends=True)[1][:cut])
    with pytest.raises(CheckpointError, match="a part of a line"):
        read_samples(path)
    samples = open_lines(path, header())
    assert samples.missing == (1,) and path.read_bytes() == whole
    path.write_bytes(whole[:cut])
    assert open_lines(path, header()).missing == (0, 1, 2), "not even the first line"


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (
            answer(0).model_dump_json(),
            "must be of a place that was asked for, and is there once; got 0",
        ),
        (
            answer(3).model_dump_json(),
            "must be of a place that was asked for, and is there once; got 3",
        ),
        (
            '{"question": 1}',
            "must be a line that keepmtp wrote (Answer); got prompt_sha256: Field required",
        ),
        (
            answer(1).model_dump_json().replace('"stop"', '"abort"'),
            "finish_reason: Input should be 'stop' or 'length'",
        ),
        ('{"sitting": 0}', "must be a line that keepmtp wrote (Sitting)"),
        ("text", "must be a line that keepmtp wrote"),
    ],
)
def test_a_line_that_is_none_is_named(path, line, says):
    begun(path)
    with open(path, "a") as file:
        file.write(line + "\n")
    with pytest.raises(CheckpointError) as caught:
        open_lines(path, header())
    assert f"{path}:6: " in str(caught.value) and says in str(caught.value)
    assert "Move the file away, and what it held is measured again." in str(caught.value)


def test_a_sibling_has_answered_already(tmp_path):
    """One release, two checkpoints of it: a finished file of the very same questions to the same
    bytes is taken.
    """
    made = tmp_path / "one.report" / "gsm8k.source.jsonl"
    path = tmp_path / "two.report" / made.name
    samples = begun(made)
    assert not open_lines(path, header()).lines, "an unfinished one is another run's"
    samples.add(answer(1))
    others = (
        {"prompts_sha256": "q"},
        {"checkpoint_sha256": "d"},
        {"vllm": "0.33.0"},
        {"words": ("--seed", "1")},
    )
    for changed in others:
        assert not open_lines(path, header(**changed)).lines, changed
    (tmp_path / "a.report").mkdir()
    (tmp_path / "a.report" / made.name).write_text("torn")
    said: list[str] = []
    taken = open_lines(path, header(), said.append)
    assert said == ["The same was asked before: gsm8k.source.jsonl is taken from one.report."]
    assert path.read_bytes() == made.read_bytes() and not taken.missing
    open_lines(path, header(), lambda words: pytest.fail(words))  # what is there stays
    assert not open_lines(tmp_path / "elsewhere" / made.name, header()).lines, (
        "not an evidence folder"
    )
