"""How far a long run is, after each of its steps; `cli/progress.py` shows it.

In: how many steps are done, and since when; or what a station has asked so far. Out: a
`CalibrationStep`, or a `Step`, for a caller's callback.

Easy to get wrong: steps of an earlier run, and what it has asked, count as done, but this process
did not spend its time on them.
"""

import math
import resource
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from ...recipes.frozen import Bar, frozen, unwatched

if TYPE_CHECKING:
    from ...checkpoints.source import Source
    from .ranks import Ranks

_REPORTS = 200  # of a run: a log has a line for each


@frozen
class CalibrationStep:
    """One step of a long run; `seconds` a step, on average."""

    step: str
    done: int
    total: int
    seconds: float
    tokens_per_second: float
    eta_seconds: float
    memory_gib: float


def _nothing() -> None:
    """What nobody asked for."""


ProgressCallback = Callable[[CalibrationStep], None]


@frozen
class RunProgress:
    """Who is called while a checkpoint is made; None for nobody."""

    # Called once nothing refuses the run, before anything is fetched or computed.
    accepted: Callable[[], None] = _nothing
    # Called after each step.
    calibration: ProgressCallback | None = None
    # Called with the number of source bytes when packing begins.
    packing: Bar = unwatched
    # Called with the number of bytes of the output whose values are read, before it gets its name.
    values: Bar | None = None
    # Brings a source to this machine, and shows how far it is.
    download: "Callable[[Source], Source] | None" = None


SILENT = RunProgress()


def reporter(
    progress: ProgressCallback | None, ranks: "Ranks", step: str, *, total: int, tokens: int
) -> Callable[[int], None]:
    """What is called after each step, with the number of all that are done; those that were done
    before the first call count as an earlier run's.

    Args:
        progress: called on the first rank.
        ranks: of the run; the peak memory is that of their device.
        step: what the steps are, "backbone" or "mtp".
        total: steps in all.
        tokens: tokens that one step computes.
    """
    started = time.monotonic()
    seen = []

    def report(done: int) -> None:
        seen.append(done)
        is_due = done == total or done % math.ceil(total / _REPORTS) == 0
        if not (progress and ranks.is_first and is_due):
            return
        seconds = (time.monotonic() - started) / (done + 1 - seen[0])
        memory_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        if ranks.device.type != "cpu":
            import torch

            memory_bytes = torch.cuda.max_memory_allocated(ranks.device)
        progress(
            CalibrationStep(
                step=step,
                done=done,
                total=total,
                seconds=seconds,
                tokens_per_second=tokens / seconds,
                eta_seconds=seconds * (total - done),
                memory_gib=memory_bytes / 2**30,
            )
        )

    return report


@frozen
class Step:
    """How far one checkpoint is."""

    # Which one, as its station names it.
    role: str
    # What else than asking is going on; "" while it is asked.
    doing: str
    # How many are done and how many there are, counted in `unit`.
    done: int
    total: int
    # Of this sitting alone: generated, or read as a prompt.
    tokens_per_second: float = 0.0
    # Time that is left, at this sitting's rate; None where there is none yet.
    eta_seconds: float | None = None
    # What is asked one at a time.
    unit: str = "question"
    # The task that is asked; "" where a station has but one.
    task: str = ""
