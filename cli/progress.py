"""How far a long run is: a line that is written over, on a terminal or in a notebook; lines in a
log. All on standard error.

In: the steps that a run reports. Out: nothing but what is shown, so that standard output can be
piped.
"""

import io
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from threading import Lock
from typing import TYPE_CHECKING, Any

from ..quantize.run.processes import place_of_process
from ..quantize.run.progress import SILENT, CalibrationStep, RunProgress, Step
from ..recipes.errors import size_in_words
from ..recipes.frozen import Advance, Bar, Say, silent
from .tables import ERR, clear, is_live, tell, write_over

if TYPE_CHECKING:
    from ..checkpoints.source import Source

# The word for one step in each part of calibration.
_STEP_WORDS = {"backbone": "layer", "mtp": "policy", "tuning": "training step"}
_LINE_SECONDS = 30.0
_LIVE_SECONDS = 0.1


@contextmanager
def run_progress() -> Iterator[RunProgress]:
    """The progress of one run, for `api.quantize` too. Only the first process shows any."""
    if place_of_process().rank:
        yield SILENT
        return
    with _lines() as show:

        def stepped(step: CalibrationStep) -> None:
            show(step.step, step.done, step.total, in_words(step))

        yield RunProgress(
            calibration=stepped,
            packing=bytes_bar("packing"),
            values=bytes_bar("reading values"),
            download=downloaded,
        )


@contextmanager
def live_line() -> Iterator[Say]:
    """What loaders do now, on a terminal or in a notebook."""
    say = silent
    if is_live():
        say = write_over
    try:
        yield say
    finally:
        clear()


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

        with _lines(first_after=_LINE_SECONDS) as show:
            yield advance

    return bar


@contextmanager
def _lines(first_after: float = 0.0) -> "Iterator[Callable[..., None]]":
    """The parts of a long run: one line that is written over, and stays at the end of each part; in
    a log a line now and then. Without words they are those of bytes.
    """
    is_over = is_live()
    paced = Paced(first_after=first_after)
    if is_over:
        paced = Paced(every=_LIVE_SECONDS)

    def show(part: str, done: int, total: int, words: str = "") -> None:
        if not paced.is_due(done, total, part):
            return
        line = f"{part}  {words or paced.in_words(done, total)}"
        if is_over:
            write_over(line, stays=done >= total)
        else:
            tell(line)

    try:
        yield show
    finally:
        clear()


class Paced:
    """When the next line is due: in a log each half minute, and when a part of the work has ended.

    Args:
        clock: in seconds.
        first_after: seconds until the first line.
        every: seconds between two lines.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        *,
        first_after: float = 0.0,
        every: float = _LINE_SECONDS,
    ) -> None:
        self._clock = clock
        self._began = clock()
        self._every = every
        self._shown_at = self._began + first_after - every
        self._ended = set[str]()

    def is_due(self, done: int, total: int, part: str = "") -> bool:
        """Whether to print a line now. The caller prints it."""
        now = self._clock()
        if done < total:
            self._ended.discard(part)
            if now - self._shown_at < self._every:
                return False
        elif part in self._ended:
            return False
        else:
            self._ended.add(part)
        self._shown_at = now
        return True

    def in_words(self, done: int, total: int) -> str:
        """`12.4 of 700.1 GiB (1 %)  235.0 MiB/s  ETA 0:49:53`."""
        # Neither seconds nor bytes are 0, so that there is a rate to divide by.
        seconds = max(self._clock() - self._began, 1e-3)
        rate = max(done, 1) / seconds
        share = f"{size_in_words(done)} of {size_in_words(total)} ({100 * done // max(1, total)} %)"
        return f"{share}  {rate / 2**20:,.1f} MiB/s{_eta((total - done) / rate)}"


def downloaded(source: "Source") -> "Source":
    """The same source with its files on this machine, as `download`, with a bar or lines."""
    from huggingface_hub.utils import tqdm

    from ..checkpoints.source import download

    class Bar(tqdm):
        """Of the Hub client's bars, the one of the bytes on disk is shown, in our manner."""

        def __init__(self, *words: Any, **settings: Any) -> None:
            self.is_of_bytes = settings.pop("name", "") == "huggingface_hub.snapshot_download"
            # The client's own class is silent: see `_common` in main.py.
            settings |= {"disable": False, "file": io.StringIO()}
            super(tqdm, self).__init__(*words, **settings)

        def display(self, msg: str | None = None, pos: int | None = None) -> None:
            """Called by the Hub's client, now and then."""
            if self.is_of_bytes and self.total and not ERR.file.closed:
                show("download", int(self.n), int(self.total))

    with _lines(first_after=_LINE_SECONDS) as show:
        return download(source, bars=Bar)


@contextmanager
def asking() -> Iterator[Callable[[Step], None]]:
    """The progress of what is measured with servers: a bar a checkpoint, or lines."""

    def asked(step: Step) -> None:
        words = step.doing or _of_step(step, step.unit)
        show(f"{step.role} {step.task}".rstrip(), step.done, step.total, words)

    with _lines() as show:
        yield asked


def _eta(seconds: float | None) -> str:
    if seconds is None:
        return ""
    return f"  ETA {timedelta(seconds=round(seconds))}"


def in_words(step: CalibrationStep) -> str:
    """`layer 12 of 61  14,203 tok/s  ETA 0:41:10  peak 18.2 GiB`."""
    words = _of_step(step, _STEP_WORDS.get(step.step, "step"))
    return f"{words}  peak {step.memory_gib:.1f} GiB"


def _of_step(step: CalibrationStep | Step, unit: str) -> str:
    rate = ""
    if step.tokens_per_second > 0:
        rate = f"  {step.tokens_per_second:,.0f} tok/s"
    return f"{unit} {step.done:,} of {step.total:,}{rate}{_eta(step.eta_seconds)}"
