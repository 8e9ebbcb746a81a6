"""How far a long run is: a bar on a terminal, lines in a log, JSON lines for machines. All on
standard error.

In: the steps that a run reports. Out: nothing but what is shown, so that standard output can be
piped.
"""

import io
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
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
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from ..quantize.run.processes import place_of_process
from ..quantize.run.progress import SILENT, CalibrationStep, RunProgress, Step
from ..recipes.errors import printable, size_in_words
from ..recipes.frozen import Advance, Bar, Say
from .tables import say

if TYPE_CHECKING:
    from ..checkpoints.source import Source

    AnyStep = CalibrationStep | Step
    Show = Callable[[str, int, int, str, AnyStep], None]

# The word for one step in each part of calibration.
_STEP_WORDS = {"backbone": "layer", "mtp": "policy", "tuning": "training step"}
_LINE_SECONDS = 30.0
_WHAT = TextColumn("{task.description}", markup=False)


@contextmanager
def run_progress(console: Console, *, as_json: bool) -> Iterator[RunProgress]:
    """The progress of one run. Only the first process shows any."""
    with ExitStack() as shown:

        def packing(total_bytes: int) -> AbstractContextManager[Advance]:
            # A terminal has one live bar at a time: calibration's ends when packing begins. The
            # stack ends the last one, so that no error is printed over it.
            shown.close()
            return bytes_bar(console, "packing")(total_bytes)

        if place_of_process().rank:
            yield SILENT
        elif as_json:
            yield RunProgress(calibration=_json_line)
        else:
            show = shown.enter_context(_parts(console))

            def calibrating(step: CalibrationStep) -> None:
                show(step.step, step.done, step.total, in_words(step), step)

            yield RunProgress(
                calibration=calibrating,
                packing=packing,
                values=bytes_bar(console, "reading values"),
                download=partial(downloaded, console=console),
            )


@contextmanager
def spinner(console: Console, *, is_shown: bool = True) -> Iterator[Say]:
    """What loaders do now, on a terminal."""
    is_hidden = not (is_shown and console.is_terminal)
    columns = (SpinnerColumn(), _WHAT, TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=is_hidden) as progress:
        task = progress.add_task("starting vLLM", total=None)

        def tell(doing: str) -> None:
            progress.update(task, description=printable(doing))

        yield tell


def bytes_bar(console: Console, label: str) -> Bar:
    """Rate and time left, for packing and for hashing: a bar on a terminal, else lines. Any thread
    may call it.
    """

    @contextmanager
    def bar(total_bytes: int) -> Iterator[Advance]:
        lock = Lock()
        done = 0

        def advance(num_bytes: int) -> None:
            nonlocal done
            with lock:
                done += num_bytes
                show(done, total_bytes)

        with _bytes(console, label) as show:
            yield advance

    return bar


@contextmanager
def _bytes(console: Console, label: str) -> Iterator[Callable[[int, int], None]]:
    """Called with the number of bytes that are done, and in all."""
    paced = Paced(first_after=_LINE_SECONDS)
    columns = (
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(_WHAT, *columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task(label, total=None)

        def show(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)
            if not console.is_terminal and paced.is_due(done, total):
                say(console, f"{label}  {paced.in_words(done, total)}")

        yield show


class Paced:
    """When a log gets its next line: every half a minute, and when a part of the work has ended.

    Args:
        clock: in seconds.
        first_after: seconds until the first line.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, *, first_after: float = 0.0
    ) -> None:
        self._clock = clock
        self._began = clock()
        self._shown_at = self._began + first_after - _LINE_SECONDS
        self._ended = set[str]()

    def is_due(self, done: int, total: int, part: str = "") -> bool:
        """Whether to print a line now. The caller prints it."""
        now = self._clock()
        is_end = done >= total and part not in self._ended
        if now - self._shown_at < _LINE_SECONDS and not is_end:
            return False
        self._shown_at = now
        if is_end:
            self._ended.add(part)
        return True

    def in_words(self, done: int, total: int) -> str:
        """`12.4 of 700.1 GiB (1 %)  235.0 MiB/s  ETA 0:49:53`."""
        # Neither seconds nor bytes are 0, so that there is a rate to divide by.
        seconds = max(self._clock() - self._began, 1e-3)
        rate = max(done, 1) / seconds
        share = f"{size_in_words(done)} of {size_in_words(total)} ({100 * done // max(1, total)} %)"
        return f"{share}  {rate / 2**20:,.1f} MiB/s{_eta((total - done) / rate)}"


def downloaded(source: "Source", console: Console, *, is_shown: bool = True) -> "Source":
    """The same source with its files on this machine, as `download`: a bar on a terminal, else
    lines.
    """
    from huggingface_hub.utils import tqdm

    from ..checkpoints.source import download

    class Bar(tqdm):
        """Of the Hub client's bars, the one of the bytes on disk is shown, in our manner."""

        def __init__(self, *words: Any, **settings: Any) -> None:
            self.is_of_bytes = settings.pop("name", "") == "huggingface_hub.snapshot_download"
            # The client's own class is silent: see `_common` in main.py.
            super(tqdm, self).__init__(
                *words, **settings | {"disable": not is_shown, "file": io.StringIO()}
            )

        def display(self, msg: str | None = None, pos: int | None = None) -> None:
            """Called by the Hub's client, now and then."""
            if self.is_of_bytes and self.total and not console.file.closed:
                show(int(self.n), int(self.total))

    with ExitStack() as shown:
        if source.folder is None or source.mtp_source is not None:
            show = shown.enter_context(_bytes(console, "download"))
        return download(source, bars=Bar)


@contextmanager
def _parts(console: Console, *, as_json: bool = False) -> "Iterator[Show]":
    """The parts of a long run: on a terminal a bar for each, with words after it; else a line now
    and then.
    """
    is_bar = console.is_terminal and not as_json
    paced = Paced()
    tasks = {}
    words_column = TextColumn("{task.fields[words]}", markup=False)
    with Progress(_WHAT, BarColumn(), words_column, console=console, disable=not is_bar) as bars:

        def show(part: str, done: int, total: int, words: str, step: "AnyStep") -> None:
            if is_bar:
                if part not in tasks:
                    tasks[part] = bars.add_task(part, total=total, words="")
                bars.update(tasks[part], completed=done, total=total, words=printable(words))
            elif not paced.is_due(done, total, part):
                return
            elif as_json:
                _json_line(step)
            else:
                say(console, f"{part}  {words}")

        yield show


@contextmanager
def asking(console: Console, *, as_json: bool) -> Iterator[Callable[[Step], None]]:
    """The progress of what is measured with servers: a bar a checkpoint, or lines."""

    def asked(step: Step) -> None:
        num = f"{step.unit} {step.done:,} of {step.total:,}"
        eta = _eta(step.eta_seconds)
        rate = ""
        if step.tokens_per_second > 0:
            rate = f"  {step.tokens_per_second:,.0f} tok/s"
        words = step.doing or f"{num}{rate}{eta}"
        show(f"{step.role} {step.task}".rstrip(), step.done, step.total, words, step)

    with _parts(console, as_json=as_json) as show:
        yield asked


def _eta(seconds: float | None) -> str:
    if seconds is None:
        return ""
    return f"  ETA {timedelta(seconds=round(seconds))}"


def in_words(step: "CalibrationStep") -> str:
    """`layer 12 of 61  14,203 tok/s  ETA 0:41:10  peak 18.2 GiB`."""
    return (
        f"{_STEP_WORDS.get(step.step, 'step')} {step.done:,} of {step.total:,}  "
        f"{step.tokens_per_second:,.0f} tok/s"
        f"{_eta(step.eta_seconds)}  peak {step.memory_gib:.1f} GiB"
    )


def _json_line(step: "AnyStep") -> None:
    sys.stderr.write(json.dumps(asdict(step)) + "\n")
    sys.stderr.flush()
