"""keepmtp.json: what is written is what is read, and what is not ours is one sentence."""

import json

import measured
import pytest
from data_files import cases, put_json
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
    put_json(tmp_path / RECORD, measured.recorded() | {"colour": "red"})
    assert read_record(tmp_path / RECORD).recipe.model == "glm"


@cases
def test_a_record_that_is_not_ours(text, changed, got, tmp_path):
    if changed:
        text = json.dumps(measured.recorded(**changed))
    if text is not None:
        text = text.replace("DEEP", "[" * 100_000)
        (tmp_path / RECORD).write_bytes(text.encode("latin-1"))
    with pytest.raises(
        CheckpointError, match=rf"^here: must be keepmtp's own record; got {got}\. Look\.$"
    ):
        read_record(tmp_path / RECORD, where="here", cure="Look")
