"""Tokenizers in the process of the test: a child of each imports transformers anew, for a second.

What a child is for, a stranger's tokenizer or template, is tested with `child`.
"""

from typing import Any

import pytest
from keepmtp.checkpoints.source import Source
from keepmtp.quantize.calibrate.data import data
from keepmtp.quantize.calibrate.data.tokenize import Encoders
from keepmtp.quantize.calibrate.data.tokenize_child import _Ways
from transformers import AutoTokenizer


class Here(Encoders):
    """The same questions, answered by the same functions."""

    def __init__(self, source: Source, *, may_run_code: bool):
        assert source.folder is not None
        self.source = source
        self._may_run_code = may_run_code
        tokenizer = AutoTokenizer.from_pretrained(source.folder)
        self._has_template = bool(tokenizer.chat_template)
        self._ways = _Ways(tokenizer=tokenizer, folder=source.folder)

    def __exit__(self, *_: object) -> None: ...

    def _asked(self, question: Any, form: Any, where: str) -> Any:
        name, *given = question
        return form.validate_python(getattr(self._ways, name)(*given), strict=True)


@pytest.fixture(autouse=True)
def here(monkeypatch) -> None:
    monkeypatch.setattr(data, "Encoders", Here)


@pytest.fixture
def child(here, monkeypatch) -> None:
    monkeypatch.setattr(data, "Encoders", Encoders)
