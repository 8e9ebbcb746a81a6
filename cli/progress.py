"""How far a long run is: a bar on a terminal, lines in a log, JSON lines for machines. All on standard error.

In: the steps that the stages of a run report. Out: nothing but what is shown, so that standard output can be piped.

Easy to get wrong: a terminal has one live bar at a time, and an error must not be printed over it. `run_progress` ends
the bar of calibration when packing begins, and ends the last bar when the run ends.
"""

import io
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import asdict
from datetime import timedelta
from functools import partial
from threading import Lock
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from ..quantize.run.processes import place_of_process
from ..quantize.run.progress import SILENT, BytesBar, CalibrationStep, RunProgress
from .tables import escape, say, size_in_words

if TYPE_CHECKING:
    from ..checkpoints.source import Source
    from ..validate.facts.step import Step as AskedStep
    from ..validate.measure.bench import BenchStep

    AnyStep = CalibrationStep | AskedStep | BenchStep

# The word for one step in each part of calibration.
_STEP_WORDS = {"backbone": "layer", "mtp": "policy", "tuning": "training step"}
_LINE_SECONDS = 30.0


def place_in_run() -> tuple[int, int]:
    """(rank, processes) as torchrun or srun says; (0, 1) without them."""
    place = place_of_process()
    return place.rank, place.size


def run_progress(console: Console, *, as_json: bool) -> AbstractContextManager[RunProgress]:
    """The progress of one run. Only the first process shows any."""
    if place_in_run()[0]:
        return nullcontext(SILENT)
    if as_json:
        return nullcontext(RunProgress(calibration=_json_line))
    return _bars(console)


def bytes_bar(console: Console, label: str) -> BytesBar:
    """Rate and time left, for packing and for hashing: a bar on a terminal, else lines. Any thread may call it."""

    @contextmanager
    def bar(total_bytes: int) -> Iterator[Callable[[int], None]]:
        if console.is_terminal:
            with _bytes_progress(console) as progress:
                task = progress.add_task(label, total=total_bytes)
                yield lambda num_bytes: progress.advance(task, num_bytes)
            return
        paced, lock, done = Paced(first_after=_LINE_SECONDS), Lock(), 0

        def advance(num_bytes: int) -> None:
            nonlocal done
            with lock:
                done += num_bytes
                if paced.is_due(done, total_bytes):
                    say(console, f"{label}  {paced.in_words(done, total_bytes)}")

        yield advance

    return bar


def _bytes_progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=console,
    )


class Paced:
    """When a log gets its next line: every half a minute, and when a part of the work has ended.

    Args:
        clock: in seconds.
        first_after: seconds until the first line.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, *, first_after: float = 0.0) -> None:
        self._clock, self._began = clock, clock()
        self._shown_at = self._began + first_after - _LINE_SECONDS
        self._ended = set[str]()

    def is_due(self, done: int, total: int, part: str = "") -> bool:
        """Whether to print a line now. The caller prints it."""
        now, is_end = self._clock(), done >= total and part not in self._ended
        if now - self._shown_at < _LINE_SECONDS and not is_end:
            return False
        self._shown_at = now
        if is_end:
            self._ended.add(part)
        return True

    def in_words(self, done: int, total: int) -> str:
        """`12.4 of 700.1 GiB (1 %)  235.0 MiB/s  ETA 0:49:53`."""
        seconds = max(self._clock() - self._began, 1e-3)
        rate = done / seconds
        left = timedelta(seconds=round((total - done) / rate)) if rate else "unknown"
        share = f"{size_in_words(done)} of {size_in_words(total)} ({100 * done // max(1, total)} %)"
        return f"{share}  {rate / 2**20:,.1f} MiB/s  ETA {left}"


def downloaded(source: "Source", console: Console, *, is_shown: bool = True) -> "Source":
    """The same source with its files on this machine, as `download`: a bar on a terminal, else lines."""
    from huggingface_hub.utils import tqdm

    from ..checkpoints.source import download

    paced, bar = Paced(first_after=_LINE_SECONDS), _bytes_progress(console)
    task = bar.add_task("download", total=None)

    class Bar(tqdm):
        """Of the Hub client's bars, the one of the bytes on disk is shown, in our manner."""

        def __init__(self, *words: Any, **settings: Any) -> None:
            self.is_of_bytes = settings.pop("name", "") == "huggingface_hub.snapshot_download"
            # The client's own class is silent: see `_common` in main.py.
            super(tqdm, self).__init__(*words, **settings | {"disable": not is_shown, "file": io.StringIO()})

        def display(self, msg: str | None = None, pos: int | None = None) -> None:
            """Called by the Hub's client, now and then."""
            done, total = int(self.n), int(self.total or 0)
            if not (self.is_of_bytes and total) or console.file.closed:
                return
            if console.is_terminal:
                bar.start()
                bar.update(task, completed=done, total=total)
            elif paced.is_due(done, total):
                say(console, f"download  {paced.in_words(done, total)}")

    try:
        return download(source, bars=Bar)
    finally:
        if console.is_terminal:
            bar.stop()


class _Parts:
    """The parts of a long run: on a terminal a bar for each, with words after it; else a line now and then."""

    def __init__(self, console: Console, *, as_json: bool = False) -> None:
        columns = TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[words]}")
        self._bars, self._tasks = Progress(*columns, console=console), dict[str, TaskID]()
        self._console, self._as_json, self._paced = console, as_json, Paced()

    def show(self, part: str, done: int, total: int, words: str, step: "AnyStep") -> None:
        if self._console.is_terminal and not self._as_json:
            self._bars.start()
            if part not in self._tasks:
                self._tasks[part] = self._bars.add_task(part, total=total, words="")
            self._bars.update(self._tasks[part], completed=done, total=total, words=escape(words))
        elif not self._paced.is_due(done, total, part):
            return
        elif self._as_json:
            _json_line(step)
        else:
            say(self._console, f"{part}  {words}")

    def close(self) -> None:
        if self._tasks:
            self._bars.stop()


@contextmanager
def asking(console: Console, *, as_json: bool) -> "Iterator[Callable[[AskedStep], None]]":
    """The progress of an evaluation or of closeness: a bar a checkpoint, or lines."""

    def show(step: "AskedStep") -> None:
        words = f"{step.unit} {step.done:,} of {step.total:,}  {step.tokens_per_second:,.0f} tok/s{_eta(step)}"
        parts.show(f"{step.role} {step.task}".rstrip(), step.done, step.total, step.doing or words, step)

    with closing(_Parts(console, as_json=as_json)) as parts:
        yield show


@contextmanager
def measuring(console: Console, *, as_json: bool) -> "Iterator[Callable[[BenchStep], None]]":
    """The progress of a speed matrix: a bar for each checkpoint, or lines."""

    def show(step: "BenchStep") -> None:
        total = step.there + step.left
        words = f"{step.there:,} of {total:,} repetitions{_eta(step)}  {step.doing}"
        parts.show(step.role, step.there, total, words, step)

    with closing(_Parts(console, as_json=as_json)) as parts:
        yield show


def _eta(step: "AskedStep | BenchStep") -> str:
    return "" if step.eta_seconds is None else f"  ETA {timedelta(seconds=round(step.eta_seconds))}"


def in_words(step: "CalibrationStep") -> str:
    """`layer 12 of 61  14,203 tok/s  ETA 0:41:10  peak 18.2 GiB`."""
    return (
        f"{_STEP_WORDS.get(step.step, 'step')} {step.done:,} of {step.total:,}  {step.tokens_per_second:,.0f} tok/s  "
        f"ETA {timedelta(seconds=round(step.eta_seconds))}  peak {step.memory_gib:.1f} GiB"
    )


def _json_line(step: "AnyStep") -> None:
    sys.stderr.write(json.dumps(asdict(step)) + "\n")
    sys.stderr.flush()


@contextmanager
def _bars(console: Console) -> Iterator[RunProgress]:
    def packing(total_bytes: int) -> AbstractContextManager[Callable[[int], None]]:
        parts.close()
        return bytes_bar(console, "packing")(total_bytes)

    with closing(_Parts(console)) as parts:
        yield RunProgress(
            calibration=lambda step: parts.show(step.step, step.done, step.total, in_words(step), step),
            packing=packing,
            values=bytes_bar(console, "reading values"),
            download=partial(downloaded, console=console),
        )
