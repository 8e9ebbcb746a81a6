"""What drafting changes: answers with MTP on against answers with MTP off."""

from math import comb
from pathlib import Path

import pytest
from headers import header
from keepmtp.validate.facts.binomial import sign_test
from keepmtp.validate.facts.evaluated import Arm
from keepmtp.validate.measure.answers import MOST_SHOWN, Answer, Samples, drafting, finish
from keepmtp.validate.measure.line_file import open_lines

FILTER = "flexible-extract"


def samples(folder: Path, role: Arm, answers: list[tuple[str, bool]]) -> Samples:
    """A finished file of answers: text, and whether it is right."""
    first = header(role=role, num_questions=len(answers))
    found: Samples = open_lines(folder / f"gsm8k.{role}.jsonl", first)
    for number, (text, _) in enumerate(answers):
        found.add(
            Answer(
                question=number, prompt_sha256="p", text=text, finish_reason="stop", num_tokens=1
            )
        )
    finish(found, {FILTER: [right for _, right in answers]})
    return found


def test_what_drafting_changes_is_counted_named_and_shown(tmp_path):
    long = "step " * 60
    off = [
        ("#### 1", True),
        (f"{long}so 2\n#### 2", True),
        ("#### 3", True),
        ("#### 4", False),
        ("#### 5", False),
    ]
    on = [
        ("#### 1", True),
        (f"{long}so 3\n#### 3", False),
        ("  ", False),
        ("#### 4!", False),
        ("#### 5", False),
    ]
    found = drafting(samples(tmp_path, "plain", off), samples(tmp_path, "checkpoint", on), [FILTER])
    right, texts = found.switches
    assert (right.reads, right.both, right.only_plain, right.only_drafting, right.neither) == (
        FILTER,
        1,
        2,
        0,
        2,
    )
    assert right.questions == (1, 2) and right.chance == pytest.approx(0.5)
    assert (texts.reads, texts.only_plain, texts.only_drafting, texts.questions) == (
        "not empty",
        1,
        0,
        (2,),
    )
    assert found.num_changed == 3 and [one.question for one in found.changed] == [1, 2, 3]
    first, _, last = found.changed
    assert (
        first.plain.startswith("...")
        and first.plain.endswith("so 2\n#### 2")
        and len(first.plain) < 100
    )
    assert first.drafting.endswith("so 3\n#### 3") and (last.plain, last.drafting) == (
        "#### 4",
        "#### 4!",
    )


def test_equal_answers_change_nothing_and_few_are_shown(tmp_path):
    same = [("#### 1", True)] * 9
    found = drafting(
        samples(tmp_path, "plain", same), samples(tmp_path, "checkpoint", same), [FILTER]
    )
    assert (
        not found.num_changed
        and not found.changed
        and {switch.chance for switch in found.switches} == {1.0}
    )
    (tmp_path / "other").mkdir()
    others = samples(tmp_path / "other", "checkpoint", [("#### 2", False)] * 9)
    changed = drafting(samples(tmp_path / "other", "plain", same), others, [FILTER])
    assert changed.num_changed == 9 and len(changed.changed) == MOST_SHOWN


@pytest.mark.parametrize(
    ("one", "other"), [(0, 0), (1, 0), (3, 3), (0, 21), (9, 2), (30, 12), (500, 400)]
)
def test_the_sign_test_is_the_binomial_sum(one, other):
    """Counted out: twice the tail of a fair coin, at most 1."""
    num, fewer = one + other, min(one, other)
    tail = sum(comb(num, heads) for heads in range(fewer + 1)) / 2**num
    assert sign_test(one, other) == pytest.approx(min(1.0, 2 * tail), rel=1e-9)
