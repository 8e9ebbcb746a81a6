"""The files of answers: what goes on, what is apart, what is refused; and what drafting changes."""

import json
from pathlib import Path

import pytest
from keepmtp.recipes.errors import CheckpointError
from keepmtp.recipes.protocol import Evaluation
from keepmtp.validate.facts.served import total
from keepmtp.validate.measure.lossless import drafting
from keepmtp.validate.measure.store import (
    Answer,
    Samples,
    Sitting,
    finish,
    open_lines,
    read_lines,
)
from measured import header

FILTER = "flexible-extract"


def answer(number: int, text: str = " it is 1\n#### 1") -> Answer:
    return Answer(question=number, prompt_sha256="p", text=text, finish_reason="stop", num_tokens=4)


def sitting(number: int, drafts: int, accepted: tuple[int, ...]) -> Sitting:
    counts = {"drafts": drafts, "draft_tokens": 2 * drafts, "accepted_tokens": sum(accepted)}
    served = {"as_served": "native", "reason": "", "seconds": 1.5}
    return Sitting(sitting=number, accepted_per_position=accepted, **counts, **served)


def opened(folder: Path, **changed) -> Samples:
    return open_lines(folder, "gsm8k.source", Answer, header(**changed))


@pytest.fixture
def begun(tmp_path) -> Samples:
    samples = opened(tmp_path)
    odd = answer(0, "\u2028 odd \U0001f600 ends\x85")
    for line in (answer(2), sitting(1, 5, (4, 1)), odd, sitting(1, 9, (8, 2))):
        samples.add(line)
    return samples


def test_a_file_goes_on(begun, tmp_path):
    samples = opened(tmp_path)
    assert samples.missing == [1] and samples.lines[0].text == "\u2028 odd \U0001f600 ends\x85"
    samples.add(answer(1))
    samples.add(sitting(2, 1, (1,)))
    found = read_lines(begun.path, Answer)
    assert not samples.missing and list(found.lines) == [2, 0, 1]
    assert total(list(found.sittings.values())).accepted_per_position == (9, 2)
    right = {"strict-match": (True, False, True), FILTER: (True, True, True)}
    finish(samples, right)
    before = begun.path.read_bytes()
    found = read_lines(begun.path, Answer)
    assert list(found.lines) == [0, 1, 2]
    for name, values in right.items():
        assert tuple(answer.correct[name] for answer in found.in_order()) == values
    finish(found, right)
    assert begun.path.read_bytes() == before, "in order, it changes no more"


def test_a_full_disk_is_said(tmp_path):
    full = tmp_path / "gsm8k.source.jsonl"
    full.symlink_to("/dev/full")
    samples = Samples(full, header())
    with pytest.raises(CheckpointError, match=r"got No space left on device\. Make room, and run"):
        samples.add(answer(0))
    assert samples.missing == [0, 1, 2], "an answer counts once it is on the disk"


@pytest.mark.parametrize(
    "changed",
    [
        {"protocol": {"shots": 5}},
        {"protocol": {"limit": 3}},
        {"checkpoint_sha256": "e"},
        {"vllm": "0.33.0"},
        {"dataset_sha256": "e"},
        {"prompts_sha256": "q"},
        {"device": "GPU"},
        {"words": ["--tensor-parallel-size", "2"]},
        {"role": "checkpoint"},
    ],
)
def test_answers_to_something_else_have_a_file_of_their_own(changed, begun, tmp_path):
    if "protocol" in changed:
        changed = changed | {"protocol": Evaluation(**changed["protocol"])}
    other = opened(tmp_path, **changed)
    assert not other.lines
    other.add(answer(1))
    assert set(opened(tmp_path).lines) == {0, 2} and set(opened(tmp_path, **changed).lines) == {1}


@pytest.mark.parametrize(
    "cut",
    [
        1,
        20,
        60,
    ],
)
def test_a_line_that_a_crash_cut_is_asked_again(cut, begun, tmp_path):
    whole = begun.path.read_bytes()
    begun.path.write_bytes(whole + whole.splitlines(keepends=True)[1][:cut])
    with pytest.raises(CheckpointError, match="must be JSON"):
        read_lines(begun.path, Answer)
    assert opened(tmp_path).missing == [1] and begun.path.read_bytes() == whole
    begun.path.write_bytes(whole[:cut])
    assert opened(tmp_path).missing == [0, 1, 2], "not even the first line"


@pytest.mark.parametrize(
    "line, says",
    [
        (
            '{"question": 1}',
            "a line that keepmtp wrote (Answer); got prompt_sha256: Field required",
        ),
        ({"finish_reason": "abort"}, "finish_reason: must be one of stop, length"),
        ('{"sitting": 0}', "must be a line that keepmtp wrote (Sitting)"),
        ("text", "must be JSON"),
    ],
)
def test_a_line_that_is_none_is_named(line, says, begun, tmp_path):
    if isinstance(line, dict):
        line = json.dumps(answer(1).model_dump() | line)
    with open(begun.path, "a") as file:
        file.write(line + "\n")
    with pytest.raises(CheckpointError) as caught:
        opened(tmp_path)
    assert f"{begun.path}:6: " in str(caught.value) and says in str(caught.value)
    assert "Move the file away, and what it held is measured again." in str(caught.value)


# --- what drafting changes ------------------------------------------------------------------------


def changes(folder: Path, off: list[tuple[str, bool]], on: list[tuple[str, bool]]):
    """Answers with MTP off and on: text, and whether it is right."""
    files = []
    for role, side in (("plain", off), ("checkpoint", on)):
        found = open_lines(folder, f"gsm8k.{role}", Answer, header(role=role, num=len(side)))
        for number, (text, _) in enumerate(side):
            found.add(answer(number, text))
        finish(found, {FILTER: [right for _, right in side]})
        files.append(found)
    return drafting(*files, [FILTER])


def test_what_drafting_changes_is_counted(tmp_path):
    off = [("#### 1", True), ("#### 2", True), ("#### 3", True), ("#### 4", False)]
    on = [("#### 1", True), ("#### 3", False), ("  ", False), ("#### 4!", False)]
    same = ("#### 5", False)
    found = changes(tmp_path, [*off, same], [*on, same])
    right, texts = (json.loads(switch.model_dump_json()) for switch in found.switches)
    counts = {"only_plain": 2, "only_drafting": 0}
    assert right == {"reads": FILTER, "chance": pytest.approx(0.5)} | counts
    assert (texts["reads"], texts["only_plain"], texts["only_drafting"]) == ("not empty", 1, 0)
    assert found.num_changed == 3


def test_equal_answers_change_nothing_and_others_are_all_counted(tmp_path):
    same = [("#### 1", True)] * 9
    found = changes(tmp_path / "same", same, same)
    assert not found.num_changed and {switch.chance for switch in found.switches} == {1.0}
    changed = changes(tmp_path / "other", same, [("#### 2", False)] * 9)
    assert changed.num_changed == 9
