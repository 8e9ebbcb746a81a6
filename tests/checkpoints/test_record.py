"""keepmtp.json: what is written is what is read, and what is not ours is one sentence."""

import json

import measured
import pytest
from keepmtp.checkpoints.record import RECORD, Record, read_record
from keepmtp.recipes.errors import CheckpointError


def test_a_record_is_read_as_it_was_written(tmp_path):
    """To the byte: order, parts of a recipe that no reader knows, and a summary's own values."""
    written = measured.recorded(
        summary={"b": [1, 0.1, None], "a": {"1": "\u00fc"}}, keep=["x"], calibration=None
    )
    text = json.dumps(written, indent=2) + "\n"
    (tmp_path / RECORD).write_text(text)
    record = read_record(tmp_path / RECORD)
    assert record.text() == text and Record.model_validate(written) == record
    assert record.recipe.name == "glm.fp8" and record.recipe.whole == written["recipe"]


def test_a_record_without_batches_has_no_calibration(tmp_path):
    record = Record.model_validate(measured.recorded())
    assert record.calibration is None and json.loads(record.text()) == measured.recorded()


def test_a_later_keepmtp_may_write_more(tmp_path):
    (tmp_path / RECORD).write_text(json.dumps(measured.recorded() | {"colour": "red"}))
    assert read_record(tmp_path / RECORD).recipe.model == "glm"


SIZE = "source.files.a: Input should be .*"


@pytest.mark.parametrize(
    ("text", "got"),
    [
        (None, "No such file or directory"),
        ("", "an empty file"),
        ("\u00ff", "invalid start byte at byte 0"),
        ("[" * 100_000, "more levels"),
        ("[]", "a list"),
        ("{}", "keepmtp: Field required"),
        (measured.recorded() | {"recipe": 7}, "recipe: Input should be a valid dictionary.*"),
        (measured.recorded(backbone=7), "recipe.backbone: Input should be a valid dictionary"),
        (measured.recorded(made_from={"files": {"a": "big"}}), SIZE),
        (measured.recorded(made_from={"files": {"a": -1}}), SIZE),
        (measured.recorded(made_from={"files": {"a": 2**63}}), SIZE),
        (measured.recorded(made_from={"files": {"a": float("nan")}}), SIZE),
        (measured.recorded(model="../../x"), r"recipe\.model: must be a plain name .*"),
        (measured.recorded(variant="a\x1b[2J/b"), r"recipe\.variant: must be a plain name .*"),
    ],
)
def test_a_record_that_is_not_ours(text, got, tmp_path):
    if isinstance(text, dict):
        text = json.dumps(text)
    if text is not None:
        (tmp_path / RECORD).write_bytes(text.encode("latin-1"))
    with pytest.raises(
        CheckpointError, match=rf"^here: must be keepmtp's own record; got {got}\. Look\.$"
    ):
        read_record(tmp_path / RECORD, where="here", cure="Look")
