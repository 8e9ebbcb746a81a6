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
from threading import Lock
from typing import TYPE_CHECKING, Any

from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, TextColumn

from ..quantize.run.processes import place_of_process
from ..quantize.run.progress import SILENT, CalibrationStep, RunProgress, Step
from ..recipes.errors import printable, size_in_words
from ..recipes.frozen import Advance, Bar, Say
from .tables import ERR, tell

if TYPE_CHECKING:
    from ..checkpoints.source import Source

# The word for one step in each part of calibration.
_STEP_WORDS = {"backbone": "layer", "mtp": "policy", "tuning": "training step"}
_LINE_SECONDS = 30.0
_WHAT = TextColumn("{task.description}", markup=False)


@contextmanager
def run_progress(*, as_json: bool) -> Iterator[RunProgress]:
    """The progress of one run. Only the first process shows any."""
    with ExitStack() as shown:

        def packing(total_bytes: int) -> AbstractContextManager[Advance]:
            # A terminal has one live bar at a time: calibration's ends when packing begins. The
            # stack ends the last one, so that no error is printed over it.
            shown.close()
            return bytes_bar("packing")(total_bytes)

        if place_of_process().rank:
            yield SILENT
        elif as_json:
            yield RunProgress(calibration=_json_line)
        else:
            show = shown.enter_context(_bars())
            yield RunProgress(
                calibration=lambda step: show(step.step, step.done, step.total, in_words(step)),
                packing=packing,
                values=bytes_bar("reading values"),
                download=downloaded,
            )


@contextmanager
def spinner(*, is_shown: bool = True) -> Iterator[Say]:
    """What loaders do now, on a terminal."""
    with _live(SpinnerColumn(), is_shown=is_shown, transient=True) as progress:
        task = progress.add_task("starting vLLM", total=None)
        yield lambda doing: progress.update(task, description=printable(doing))


def _live(*columns: ProgressColumn, is_shown: bool, transient: bool = False) -> Progress:
    """Bars on a terminal. An answer that goes into a file is none of its lines."""
    return Progress(
        _WHAT,
        *columns,
        console=ERR,
        transient=transient,
        disable=not (is_shown and ERR.is_terminal),
        redirect_stdout=sys.stdout.isatty(),
    )


def bytes_bar(label: str) -> Bar:
    """Rate and time left, for packing and for hashing. Any thread may call it."""

    @contextmanager
    def bar(total_bytes: int) -> Iterator[Advance]:
        lock = Lock()
        done = 0

        def advance(num_bytes: int) -> None:
            nonlocal done
            with lock:
                done += num_bytes
                show(label, done, total_bytes)

        with _bars(first_after=_LINE_SECONDS) as show:
            yield advance

    return bar


@contextmanager
def _bars(*, as_json: bool = False, first_after: float = 0.0) -> "Iterator[Callable[..., None]]":
    """The parts of a long run: on a terminal a bar for each, with words after it; else a line now
    and then. Without words they are those of bytes.
    """
    paced = Paced(first_after=first_after)
    tasks = {}
    words_column = TextColumn("{task.fields[words]}", markup=False)
    with _live(BarColumn(), words_column, is_shown=not as_json) as bars:

        def show(
            part: str, done: int, total: int, words: str = "", step: Step | None = None
        ) -> None:
            if not bars.disable:
                if part not in tasks:
                    tasks[part] = bars.add_task(part, total=total, words="")
                words = words or paced.in_words(done, total)
                bars.update(tasks[part], completed=done, total=total, words=printable(words))
            elif paced.is_due(done, total, part):
                if as_json:
                    _json_line(step)
                else:
                    tell(f"{part}  {words or paced.in_words(done, total)}")

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


def downloaded(source: "Source", *, is_shown: bool = True) -> "Source":
    """The same source with its files on this machine, as `download`, with a bar or lines."""
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
            if self.is_of_bytes and self.total and not ERR.file.closed:
                show("download", int(self.n), int(self.total))

    with _bars(first_after=_LINE_SECONDS) as show:
        return download(source, bars=Bar)


@contextmanager
def asking(*, as_json: bool) -> Iterator[Callable[[Step], None]]:
    """The progress of what is measured with servers: a bar a checkpoint, or lines."""

    def asked(step: Step) -> None:
        rate = ""
        if step.tokens_per_second > 0:
            rate = f"  {step.tokens_per_second:,.0f} tok/s"
        num = f"{step.unit} {step.done:,} of {step.total:,}"
        words = step.doing or f"{num}{rate}{_eta(step.eta_seconds)}"
        show(f"{step.role} {step.task}".rstrip(), step.done, step.total, words, step)

    with _bars(as_json=as_json) as show:
        yield asked


def _eta(seconds: float | None) -> str:
    if seconds is None:
        return ""
    return f"  ETA {timedelta(seconds=round(seconds))}"


def in_words(step: CalibrationStep) -> str:
    """`layer 12 of 61  14,203 tok/s  ETA 0:41:10  peak 18.2 GiB`."""
    return (
        f"{_STEP_WORDS.get(step.step, 'step')} {step.done:,} of {step.total:,}  "
        f"{step.tokens_per_second:,.0f} tok/s"
        f"{_eta(step.eta_seconds)}  peak {step.memory_gib:.1f} GiB"
    )


def _json_line(step: Any) -> None:
    sys.stderr.write(json.dumps(asdict(step)) + "\n")
    sys.stderr.flush()
