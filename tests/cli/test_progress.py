"""What a person, a log and a machine see of a long run."""

import io
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest
from commands import GLM
from keepmtp.checkpoints.source import open_source
from keepmtp.cli.progress import (
    Paced,
    asking,
    bytes_bar,
    downloaded,
    live_line,
    run_progress,
)
from keepmtp.cli.tables import show
from keepmtp.quantize.run.processes import place_of_process
from keepmtp.quantize.run.progress import CalibrationStep
from keepmtp.quantize.run.progress import Step as Asked
from keepmtp.recipes.frozen import unwatched
from rich.console import Console

STEP = CalibrationStep(
    step="backbone",
    done=12,
    total=61,
    seconds=50.4,
    tokens_per_second=14203.4,
    eta_seconds=2470.2,
    memory_gib=18.23,
)
ASKED = Asked(
    role="source", doing="", done=700, total=1319, tokens_per_second=1480.2, eta_seconds=70.4
)


class Screen(Console):
    """A log, a terminal or a notebook."""

    def __init__(self, *, is_terminal: bool, is_notebook: bool) -> None:
        kind = {"force_terminal": is_terminal, "force_jupyter": is_notebook}
        super().__init__(file=io.StringIO(), width=120, **kind)
        self.file.isatty = lambda: is_terminal

    @property
    def text(self) -> str:
        return self.file.getvalue()  # type: ignore[attr-defined]


@pytest.fixture
def screen(monkeypatch) -> Callable[..., Screen]:
    """Called with what it is: what is written on standard error from then on."""

    def shown(*, is_terminal: bool = False, is_notebook: bool = False) -> Screen:
        made = Screen(is_terminal=is_terminal, is_notebook=is_notebook)
        monkeypatch.setattr("keepmtp.cli.progress.ERR", made)
        monkeypatch.setattr("keepmtp.cli.tables.ERR", made)
        return made

    return shown


def test_a_log_has_the_first_step_and_the_last_of_each_part(screen):
    log = screen()
    with run_progress() as progress:
        for done in (12, 13, 61):
            progress.calibration(replace(STEP, done=done))
        for done in (1, 2):
            progress.calibration(replace(STEP, step="mtp", done=done, total=2))
    assert log.text.splitlines() == [
        "backbone  layer 12 of 61  14,203 tok/s  ETA 0:41:10  peak 18.2 GiB",
        "backbone  layer 61 of 61  14,203 tok/s  ETA 0:41:10  peak 18.2 GiB",
        "mtp  policy 2 of 2  14,203 tok/s  ETA 0:41:10  peak 18.2 GiB",
    ]


def test_a_terminal_has_one_bar_at_a_time_and_none_when_an_error_is_printed(screen):
    terminal = screen(is_terminal=True)
    with pytest.raises(ZeroDivisionError), run_progress() as progress:
        progress.calibration(STEP)
        progress.calibration(replace(STEP, done=13))
        with progress.packing(100) as advance:
            advance(40)
            1 / 0  # noqa: B018
    assert "layer 12 of 61" in terminal.text and "packing" in terminal.text
    assert terminal.text.endswith("\r\x1b[2K")


@pytest.mark.parametrize("kind", ["is_notebook", "is_terminal"])
def test_a_line_is_written_over_until_its_part_has_ended(kind, screen):
    seen = screen(**{kind: True})
    with run_progress() as progress:
        for done in (12, 13, 61):  # the second comes within a tenth of a second
            progress.calibration(replace(STEP, done=done))
        with progress.packing(2 * GIB) as advance:
            advance(GIB)
            advance(GIB)
    layers, packing = seen.text.replace("\x1b[2K", "").split("\n")[:2]
    rate = "14,203 tok/s  ETA 0:41:10  peak 18.2 GiB"
    assert [line.rstrip() for line in layers.split("\r")] == [
        "",
        f"backbone  layer 12 of 61  {rate}",
        f"backbone  layer 61 of 61  {rate}",
    ]
    shares = [line[len("packing  ") :][:23] for line in packing.split("\r") if line]
    assert shares == ["1.0 GiB of 2.0 GiB (50 ", "2.0 GiB of 2.0 GiB (100"]


def test_other_processes_are_silent(monkeypatch):
    monkeypatch.setenv("RANK", "3")
    assert place_of_process().size == 1, "a stray variable is no torchrun"
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert (place_of_process().rank, place_of_process().size) == (3, 8)
    with run_progress() as progress:
        assert progress.calibration is None and progress.packing is unwatched


def test_a_log_of_an_evaluation_has_few_lines(screen):
    log = screen()
    with asking() as show:
        for doing in ("starting, 0 s [x]", "starting, 1 s", "", "", ""):
            show(replace(ASKED, doing=doing))
        show(replace(ASKED, done=1319, eta_seconds=0.0))
        show(replace(ASKED, role="checkpoint", doing="writing a BF16 copy", eta_seconds=None))
        show(replace(ASKED, role="checkpoint", done=64, total=64, unit="window"))
    assert log.text.splitlines() == [
        "source  starting, 0 s [x]",
        "source  question 1,319 of 1,319  1,480 tok/s  ETA 0:00:00",
        "checkpoint  window 64 of 64  1,480 tok/s  ETA 0:01:10",
    ]


def test_an_evaluation_on_a_terminal(screen, monkeypatch):
    monkeypatch.setattr("keepmtp.cli.progress._LIVE_SECONDS", 0.0)
    terminal = screen(is_terminal=True)
    with asking() as show:
        show(replace(ASKED, doing="starting [x]"))
        show(ASKED)
    assert "question 700 of 1,319" in terminal.text


def test_an_answer_in_a_file_is_no_line_of_the_terminal(screen, capsys):
    """Each checkpoint's answer is printed while the next one is loaded."""
    terminal = screen(is_terminal=True)
    with live_line() as doing:
        doing("loading")
        show(["check passed"])
    assert capsys.readouterr().out == "check passed\n" and "passed" not in terminal.text


# --- bytes in a log -------------------------------------------------------------------------------

GIB = 2**30


def test_a_log_of_bytes_has_a_line_each_half_minute():
    """A terabyte at a steady rate over an hour, one GiB at a time; and a line at the end, once."""
    now = [0.0]
    total = 1000 * GIB
    paced = Paced(lambda: now[0], first_after=30.0)
    lines = []
    for done in [*range(GIB, total + GIB, GIB), total]:
        now[0] += 3.6
        if paced.is_due(done, total):
            lines.append((now[0], paced.in_words(done, total)))
    times = [0.0, *(when for when, _ in lines)]
    between = [later - first for first, later in pairwise(times)]
    assert max(between) < 34 and min(between[:-1]) >= 30
    assert lines[0][1] == "9.0 GiB of 1,000.0 GiB (0 %)  284.4 MiB/s  ETA 0:59:28"
    assert lines[-1][1] == "1,000.0 GiB of 1,000.0 GiB (100 %)  284.4 MiB/s  ETA 0:00:00"


def test_a_server_that_starts_for_ten_minutes_has_a_line_each_half_minute():
    """It says four times a second how long it has been starting, and then the questions go on."""
    paced = Paced((number / 4 for number in range(10_000)).__next__)
    due = [paced.is_due(0, 1319, "source") for _ in range(2400)]
    assert due[0] and sum(due) == 20
    assert paced.is_due(1319, 1319, "source") and not paced.is_due(1319, 1319, "source")
    assert paced.is_due(1319, 1319, "checkpoint"), "each part has its last line"


def test_a_log_of_packing_and_of_hashing(screen):
    log = screen()
    with bytes_bar("packing")(200) as advance:
        advance(40)
        advance(160)
    (line,) = log.text.splitlines()
    assert line.startswith("packing  0.2 KiB of 0.2 KiB (100 %)  ") and line.endswith("ETA 0:00:00")


@pytest.mark.parametrize("is_terminal", [False, True])
def test_a_download_is_shown_in_our_manner_alone(is_terminal, serve_hub, capfd, screen):
    """The Hub's own client, over the loopback Hub."""
    serve_hub(GLM)
    screen = screen(is_terminal=is_terminal)
    assert downloaded(open_source("org/model")).folder is not None
    assert capfd.readouterr().err == "" and "Fetching" not in screen.text
    assert "download " in screen.text and "MiB" in screen.text
    if not is_terminal:
        (line,) = screen.text.splitlines()
        assert "(100 %)" in line and "/s  ETA " in line
