"""What a person, a log and a machine see of a long run."""

import io
import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from keepmtp.checkpoints.source import open_source
from keepmtp.cli.progress import (
    Paced,
    asking,
    bytes_bar,
    downloaded,
    in_words,
    place_in_run,
    run_progress,
)
from keepmtp.quantize.run.progress import CalibrationStep
from keepmtp.validate.facts.step import Step as Asked
from rich.console import Console

STEP = CalibrationStep(
    step="backbone",
    done=12,
    total=61,
    tokens_per_second=14203.4,
    eta_seconds=2470.2,
    memory_gib=18.23,
)
ASKED = Asked(
    role="source", doing="", done=700, total=1319, tokens_per_second=1480.2, eta_seconds=70.4
)
WORDS = "layer 12 of 61  14,203 tok/s  ETA 0:41:10  peak 18.2 GiB"


def test_the_step_in_words():
    assert in_words(STEP) == WORDS
    assert in_words(replace(STEP, step="mtp", done=2, total=7)).startswith("policy 2 of 7  ")


def test_a_log_has_the_first_step_and_the_last_of_each_part():
    file = io.StringIO()
    with run_progress(Console(file=file, width=40), as_json=False) as progress:
        for step in (
            STEP,
            replace(STEP, done=13),
            replace(STEP, done=61),
            replace(STEP, step="mtp", done=1, total=2),
        ):
            progress.calibration(step)
        progress.calibration(replace(STEP, step="mtp", done=2, total=2))
    lines = file.getvalue().splitlines()
    assert [line.split()[0] for line in lines] == ["backbone", "backbone", "mtp"]
    assert WORDS in lines[0] and "layer 61 of 61" in lines[1] and "policy 2 of 2" in lines[2]


def test_a_terminal_has_one_bar_at_a_time_and_none_when_an_error_is_printed():
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=120)
    with pytest.raises(ZeroDivisionError), run_progress(console, as_json=False) as progress:
        progress.calibration(STEP)
        progress.calibration(replace(STEP, done=13))
        with progress.packing(100) as advance:
            advance(40)
            1 / 0  # noqa: B018
    assert not console._live_stack if hasattr(console, "_live_stack") else console._live is None
    shown = file.getvalue()
    assert "layer 13 of 61" in shown and "packing" in shown


def test_machines_get_json_lines(capsys):
    with run_progress(Console(stderr=True), as_json=True) as progress:
        progress.calibration(STEP)
        assert progress.packing is None
    out, err = capsys.readouterr()
    assert out == "" and json.loads(err) == asdict(STEP)


def test_other_processes_are_silent(monkeypatch):
    assert place_in_run() == (0, 1)
    monkeypatch.setenv("RANK", "3")
    assert place_in_run() == (0, 1), "a stray variable is no torchrun"
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert place_in_run() == (3, 8)
    with run_progress(Console(), as_json=False) as progress:
        assert progress.calibration is None and progress.packing is None


def test_a_log_of_an_evaluation_has_few_lines():
    file = io.StringIO()
    with asking(Console(file=file, width=40), as_json=False) as show:
        for doing in ("starting, 0 s [x]", "starting, 1 s", "", "", ""):
            show(replace(ASKED, doing=doing))
        show(replace(ASKED, done=1319, eta_seconds=0.0))
        show(replace(ASKED, role="checkpoint", doing="writing a BF16 copy", eta_seconds=None))
        show(replace(ASKED, role="checkpoint", done=64, total=64, unit="window"))
    assert file.getvalue().splitlines() == [
        "source  starting, 0 s [x]",
        "source  question 1,319 of 1,319  1,480 tok/s  ETA 0:00:00",
        "checkpoint  window 64 of 64  1,480 tok/s  ETA 0:01:10",
    ]


def test_an_evaluation_on_a_terminal_and_for_machines(capsys):
    file = io.StringIO()
    with asking(Console(file=file, force_terminal=True, width=120), as_json=False) as show:
        show(replace(ASKED, doing="starting [x]"))
        show(ASKED)
    assert "question 700 of 1,319" in file.getvalue()
    with asking(Console(stderr=True, force_terminal=True), as_json=True) as show:
        show(ASKED)
    out, err = capsys.readouterr()
    assert out == "" and json.loads(err) == asdict(ASKED)


# --- bytes in a log -------------------------------------------------------------------------------

GIB = 2**30


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_log_of_bytes_has_a_line_each_half_minute():
    """A terabyte at a steady rate over an hour, one GiB at a time; and a line at the end, once."""
    clock, total = Clock(), 1000 * GIB
    paced, lines = Paced(clock, first_after=30.0), []
    for done in [*range(GIB, total + GIB, GIB), total]:
        clock.now += 3.6
        if paced.is_due(done, total):
            lines.append((clock.now, paced.in_words(done, total)))
    times = [when for when, _ in lines]
    between = [later - first for first, later in zip([0.0, *times], times, strict=False)]
    assert max(between) < 34 and min(between[:-1]) >= 30
    assert lines[0][1] == "9.0 GiB of 1,000.0 GiB (0 %)  284.4 MiB/s  ETA 0:59:28"
    assert lines[-1][1] == "1,000.0 GiB of 1,000.0 GiB (100 %)  284.4 MiB/s  ETA 0:00:00"


def test_a_server_that_starts_for_ten_minutes_has_a_line_each_half_minute():
    """It says four times a second how long it has been starting, and then the questions go on."""
    clock = Clock()
    paced, due = Paced(clock), []
    for _ in range(2400):
        due.append(paced.is_due(0, 1319, "source"))
        clock.now += 0.25
    assert due[0] and sum(due) == 20
    assert paced.is_due(1319, 1319, "source") and not paced.is_due(1319, 1319, "source")
    assert paced.is_due(1319, 1319, "checkpoint"), "each part has its last line"


def test_a_log_of_packing_and_of_hashing():
    file = io.StringIO()
    with bytes_bar(Console(file=file, width=30), "packing")(200) as advance:
        advance(40)
        advance(160)
    (line,) = file.getvalue().splitlines()
    assert line.startswith("packing  0.2 KiB of 0.2 KiB (100 %)  ") and line.endswith("ETA 0:00:00")


@pytest.mark.parametrize("is_terminal", [False, True])
def test_a_download_is_shown_in_our_manner_alone(is_terminal, serve_hub, capfd):
    """The Hub's own client, over the loopback Hub."""
    serve_hub(Path(__file__).parent.parent.parent / "models" / "tiny-glm4-moe")
    file = io.StringIO()
    console = Console(file=file, width=100, force_terminal=is_terminal)
    assert downloaded(open_source("org/model"), console).folder is not None
    assert capfd.readouterr().err == "" and "Fetching" not in file.getvalue()
    if is_terminal:
        assert not console._live_stack if hasattr(console, "_live_stack") else console._live is None
        assert "download" in file.getvalue() and "MiB" in file.getvalue()
    else:
        (line,) = file.getvalue().splitlines()
        assert line.startswith("download  ") and "(100 %)" in line and "/s  ETA " in line
