"""How far a long run is: a bar on a terminal, lines in a log, JSON lines for machines; on standard error all of them.

In: what the stations report of their steps. Out: nothing but what is shown, so that standard output can be piped.

Easy to get wrong: a terminal has one live bar at a time, and an error must not be printed over it. `watching` ends the
one of calibration when packing begins, and whichever is left when the run does.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

if TYPE_CHECKING:
    from ..quantize.calibrate.backbone import Progress as Step
    from ..validate.evaluation.ask import Step as Asked

# What a step of calibration is made of.
_PARTS = {"backbone": "layer", "mtp": "policy"}
_LINE_SECONDS = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Watch:
    """What a run tells of its progress.

    Attributes:
        calibration: called after each step.
        packing: given the number of source bytes, a context whose value is told about bytes done; None for silence.
    """

    calibration: "Callable[[Step], None] | None"
    packing: Callable[[int], AbstractContextManager[Callable[[int], None]]] | None


def place_in_run() -> tuple[int, int]:
    """(rank, processes) as torchrun says; (0, 1) without it."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    return (int(os.environ.get("RANK", "0")), size) if size > 1 else (0, 1)


def watching(console: Console, *, as_json: bool) -> AbstractContextManager[Watch]:
    """The watch of one run: silent on all but the first process."""
    if place_in_run()[0]:
        return nullcontext(Watch(calibration=None, packing=None))
    if as_json:
        return nullcontext(Watch(calibration=_json_line, packing=None))
    return _bars(console)


def bytes_bar(console: Console, label: str) -> Callable[[int], AbstractContextManager[Callable[[int], None]]]:
    """A bar with rate and time left, for what is told the number of bytes first and then of bytes done.

    What it gives fits packing (`cli.pipeline`), and hashing (`checkpoints.identity.Watch`), from any thread.
    """

    @contextmanager
    def bar(total_bytes: int) -> Iterator[Callable[[int], None]]:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(binary_units=True),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=console) as progress:
            task = progress.add_task(label, total=total_bytes)
            yield lambda done: progress.advance(task, done)

    return bar


def asking(console: Console, *, as_json: bool) -> "AbstractContextManager[Callable[[Asked], None]]":
    """What is told how far an evaluation is: a bar for each checkpoint, or lines, at most one in ten seconds."""
    return _asking_bars(console) if console.is_terminal and not as_json else _asking_lines(console, as_json=as_json)


def in_words(step: "Step") -> str:
    """`layer 12 of 61, 14,203 tok/s, ETA 0:41:10, peak 18.2 GiB`."""
    return (
        f"{_PARTS.get(step.step, 'step')} {step.done:,} of {step.total:,}  {step.tokens_per_second:,.0f} tok/s  "
        f"ETA {timedelta(seconds=round(step.eta_seconds))}  peak {step.memory_gib:.1f} GiB"
    )


def _json_line(step: "Step") -> None:
    sys.stderr.write(json.dumps(asdict(step)) + "\n")
    sys.stderr.flush()


@contextmanager
def _bars(console: Console) -> Iterator[Watch]:
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[told]}"))
    bars, tasks = Progress(*columns, console=console), dict[str, TaskID]()

    def show(step: "Step") -> None:
        if not console.is_terminal:
            console.print(f"{step.step}  {in_words(step)}", highlight=False, markup=False, soft_wrap=True)
            return
        bars.start()
        if step.step not in tasks:
            tasks[step.step] = bars.add_task(step.step, total=step.total, told="")
        bars.update(tasks[step.step], completed=step.done, total=step.total, told=in_words(step))

    def stop() -> None:
        if tasks:
            bars.stop()

    def packing(total_bytes: int) -> AbstractContextManager[Callable[[int], None]]:
        stop()
        return bytes_bar(console, "packing")(total_bytes)

    try:
        yield Watch(calibration=show, packing=packing)
    finally:
        stop()


@contextmanager
def _asking_bars(console: Console) -> "Iterator[Callable[[Asked], None]]":
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[told]}"))
    tasks = dict[str, TaskID]()
    with Progress(*columns, console=console) as bars:

        def show(step: "Asked") -> None:
            if step.role not in tasks:
                tasks[step.role] = bars.add_task(step.role, total=step.total, told="")
            bars.update(tasks[step.role], completed=step.done, told=escape(step.doing or _asked_in_words(step)))

        yield show


@contextmanager
def _asking_lines(console: Console, *, as_json: bool) -> "Iterator[Callable[[Asked], None]]":
    told: dict[str, float] = {}

    def show(step: "Asked") -> None:
        kind, now = f"{step.role}{bool(step.doing)}", time.monotonic()
        if now - told.get(kind, -_LINE_SECONDS) < _LINE_SECONDS and step.done < step.total:
            return
        told[kind] = now
        if as_json:
            sys.stderr.write(json.dumps(asdict(step)) + "\n")
            sys.stderr.flush()
        else:
            words = step.doing or _asked_in_words(step)
            console.print(f"{step.role}  {words}", highlight=False, markup=False, soft_wrap=True)

    yield show


def _asked_in_words(step: "Asked") -> str:
    left = "" if step.eta_seconds is None else f"  ETA {timedelta(seconds=round(step.eta_seconds))}"
    return f"question {step.done:,} of {step.total:,}  {step.tokens_per_second:,.0f} tok/s{left}"
