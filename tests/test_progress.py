"""What a person, a log and a machine see of a long run."""

import io
import json
from dataclasses import dataclass

import pytest
from rich.console import Console

from keepmtp.progress import in_words, place_in_run, watching


@dataclass(frozen=True)
class Step:
    """As `quantize/calibrate.py` tells it, without its torch."""

    step: str = "backbone"
    done: int = 12
    total: int = 61
    tokens_per_second: float = 14203.4
    eta_seconds: float = 2470.2
    memory_gib: float = 18.23


WORDS = "layer 12 of 61  14,203 tok/s  ETA 0:41:10  peak 18.2 GiB"


def test_the_step_in_words():
    assert in_words(Step()) == WORDS
    assert in_words(Step(step="mtp", done=2, total=7)).startswith("policy 2 of 7  ")


def test_the_fields_are_those_of_the_run():
    from keepmtp.quantize.calibrate import Progress

    assert set(Progress.__dataclass_fields__) == set(Step.__dataclass_fields__)


def test_a_log_has_a_line_a_step():
    file = io.StringIO()
    with watching(Console(file=file, width=40), as_json=False) as watch:
        watch.calibration(Step())
        watch.calibration(Step(step="mtp", done=1, total=2))
    assert [line.split()[0] for line in file.getvalue().splitlines()] == ["backbone", "mtp"]
    assert WORDS in file.getvalue()


def test_a_terminal_has_one_bar_at_a_time_and_none_when_an_error_is_printed():
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=120)
    with pytest.raises(ZeroDivisionError), watching(console, as_json=False) as watch:
        watch.calibration(Step())
        watch.calibration(Step(done=13))
        with watch.packing(100) as advance:
            advance(40)
            1 / 0  # noqa: B018
    assert not console._live_stack if hasattr(console, "_live_stack") else console._live is None
    told = file.getvalue()
    assert "layer 13 of 61" in told and "packing" in told


def test_machines_get_json_lines(capsys):
    with watching(Console(stderr=True), as_json=True) as watch:
        watch.calibration(Step())
        assert watch.packing is None
    out, err = capsys.readouterr()
    assert out == "" and json.loads(err) == Step().__dict__


def test_other_processes_are_silent(monkeypatch):
    assert place_in_run() == (0, 1)
    monkeypatch.setenv("RANK", "3")
    assert place_in_run() == (0, 1), "a stray variable is no torchrun"
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert place_in_run() == (3, 8)
    with watching(Console(), as_json=False) as watch:
        assert watch.calibration is None and watch.packing is None
