"""How far a long run is: a bar on a terminal, lines in a log, JSON lines for machines; on standard error all of them.

In: what the stations report of their steps. Out: nothing but what is shown, so that standard output can be piped.

Easy to get wrong: a terminal has one live bar at a time, and an error must not be printed over it. `watching` ends the
one of calibration when packing begins, and whichever is left when the run does.
"""

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

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

if TYPE_CHECKING:
    from .quantize.calibrate import Progress as Step

# What a step of calibration is made of.
_PARTS = {"backbone": "layer", "mtp": "policy"}


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

    @contextmanager
    def packing(total_bytes: int) -> Iterator[Callable[[int], None]]:
        stop()
        columns = (
            TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn(),
            TimeRemainingColumn(),
        )  # fmt: skip
        with Progress(*columns, console=console) as progress:
            task = progress.add_task("packing", total=total_bytes)
            yield lambda done: progress.advance(task, done)

    try:
        yield Watch(calibration=show, packing=packing)
    finally:
        stop()
