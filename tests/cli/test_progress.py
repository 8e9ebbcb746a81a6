"""What a person, a log and a machine see of a long run."""

import io
import json
from dataclasses import dataclass
from pathlib import Path

import pytest
from keepmtp.checkpoints.source import download, open_source
from keepmtp.cli.progress import Paced, asking, bytes_bar, download_lines, in_words, place_in_run, run_progress
from rich.console import Console


@dataclass(frozen=True)
class Step:
    """As `quantize/calibrate/layers/backbone.py` reports it, without its torch."""

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
    from keepmtp.quantize.run.progress import CalibrationStep

    assert set(CalibrationStep.__dataclass_fields__) == set(Step.__dataclass_fields__)


def test_a_log_has_a_line_a_step():
    file = io.StringIO()
    with run_progress(Console(file=file, width=40), as_json=False) as progress:
        progress.calibration(Step())
        progress.calibration(Step(step="mtp", done=1, total=2))
    assert [line.split()[0] for line in file.getvalue().splitlines()] == ["backbone", "mtp"]
    assert WORDS in file.getvalue()


def test_a_terminal_has_one_bar_at_a_time_and_none_when_an_error_is_printed():
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=120)
    with pytest.raises(ZeroDivisionError), run_progress(console, as_json=False) as progress:
        progress.calibration(Step())
        progress.calibration(Step(done=13))
        with progress.packing(100) as advance:
            advance(40)
            1 / 0  # noqa: B018
    assert not console._live_stack if hasattr(console, "_live_stack") else console._live is None
    shown = file.getvalue()
    assert "layer 13 of 61" in shown and "packing" in shown


def test_machines_get_json_lines(capsys):
    with run_progress(Console(stderr=True), as_json=True) as progress:
        progress.calibration(Step())
        assert progress.packing is None
    out, err = capsys.readouterr()
    assert out == "" and json.loads(err) == Step().__dict__


def test_other_processes_are_silent(monkeypatch):
    assert place_in_run() == (0, 1)
    monkeypatch.setenv("RANK", "3")
    assert place_in_run() == (0, 1), "a stray variable is no torchrun"
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert place_in_run() == (3, 8)
    with run_progress(Console(), as_json=False) as progress:
        assert progress.calibration is None and progress.packing is None


@dataclass(frozen=True)
class Asked:
    """As `validate/measure/ask.py` reports it, without its lm-eval."""

    role: str = "source"
    doing: str = ""
    done: int = 700
    total: int = 1319
    tokens_per_second: float = 1480.2
    eta_seconds: float | None = 70.4
    unit: str = "question"
    task: str = ""


def test_the_fields_are_those_of_the_evaluation():
    from keepmtp.validate.facts.step import Step as Real

    assert set(Real.__dataclass_fields__) == set(Asked.__dataclass_fields__)


def test_a_log_of_an_evaluation_has_few_lines():
    file = io.StringIO()
    with asking(Console(file=file, width=40), as_json=False) as show:
        for doing in ("starting, 0 s", "starting, 1 s", "", "", ""):
            show(Asked(doing=doing))
        show(Asked(done=1319, eta_seconds=0.0))
        show(Asked(role="checkpoint", doing="writing a BF16 copy [x]", eta_seconds=None))
        show(Asked(role="checkpoint", done=2, total=64, unit="window"))
    assert file.getvalue().splitlines() == [
        "source  starting, 0 s",
        "source  question 700 of 1,319  1,480 tok/s  ETA 0:01:10",
        "source  question 1,319 of 1,319  1,480 tok/s  ETA 0:00:00",
        "checkpoint  writing a BF16 copy [x]",
        "checkpoint  window 2 of 64  1,480 tok/s  ETA 0:01:10",
    ]


def test_an_evaluation_on_a_terminal_and_for_machines(capsys):
    file = io.StringIO()
    with asking(Console(file=file, force_terminal=True, width=120), as_json=False) as show:
        show(Asked(doing="starting [x]"))
        show(Asked())
    assert "question 700 of 1,319" in file.getvalue()
    with asking(Console(stderr=True, force_terminal=True), as_json=True) as show:
        show(Asked())
    out, err = capsys.readouterr()
    assert out == "" and json.loads(err) == Asked().__dict__


# --- bytes in a log ---------------------------------------------------------------------------------------------------

GIB = 2**30


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_log_of_bytes_has_a_line_every_so_often():
    """A terabyte at a steady rate over an hour, one GiB at a time: each half a minute, and at the end."""
    clock, total = Clock(), 1000 * GIB
    paced, lines = Paced(clock), []
    for done in range(GIB, total + GIB, GIB):
        clock.now += 3.6
        if paced.is_due(done, total):
            lines.append((clock.now, paced.in_words(done, total)))
    times = [when for when, _ in lines]
    assert max(later - first for first, later in zip([0.0, *times], times, strict=False)) < 34
    assert len(lines) < 150
    assert lines[0][1] == "9.0 GiB of 1,000.0 GiB (0 %)  284.4 MiB/s  ETA 0:59:28"
    assert lines[-1][1] == "1,000.0 GiB of 1,000.0 GiB (100 %)  284.4 MiB/s  ETA 0:00:00"


def test_a_short_run_has_a_line_for_its_twentieths_and_no_more_than_one_in_five_seconds():
    clock, total = Clock(), 40 * GIB
    paced, times = Paced(clock), []
    for done in range(GIB, total + GIB, GIB):
        clock.now += 1
        if paced.is_due(done, total):
            times.append(clock.now)
    assert times == [5.0, 10.0, 15.0, 20.0, 25.0, 30.0, 35.0, 40.0]


def test_a_log_of_packing_and_of_hashing():
    file = io.StringIO()
    with bytes_bar(Console(file=file, width=30), "packing")(200) as advance:
        advance(40)
        advance(160)
    (line,) = file.getvalue().splitlines()
    assert line.startswith("packing  0.2 KiB of 0.2 KiB (100 %)  ") and line.endswith("ETA 0:00:00")


def test_a_log_of_a_download(tmp_path, serve_hub):
    """The Hub's own client, over the loopback Hub."""
    serve_hub(Path(__file__).parent.parent.parent / "models" / "tiny-glm4-moe")
    file = io.StringIO()
    bars = download_lines(Console(file=file, width=30))
    local = download(open_source("org/model"), to=tmp_path / "here", bars=bars)
    assert local.folder is not None
    lines = file.getvalue().splitlines()
    assert lines and all(line.startswith("download  ") and "/s  ETA " in line for line in lines), lines
    assert "(100 %)" in lines[-1]
    assert download_lines(Console(file=file, force_terminal=True)) is None
