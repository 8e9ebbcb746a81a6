"""How far a long run is, after each of its steps; `cli/progress.py` shows it.

In: how many steps are done, and since when; or what a station has asked so far. Out: a
`CalibrationStep`, or a `Step`, for a caller's callback.

Easy to get wrong: steps of an earlier run, and what it has asked, count as done, but this process
did not spend its time on them.
"""

import resource
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from ...recipes.frozen import Bar, frozen

if TYPE_CHECKING:
    import torch

    from ...checkpoints.source import Source


@frozen
class CalibrationStep:
    """One step of a long run, for people and as a JSON line."""

    step: str
    done: int
    total: int
    tokens_per_second: float
    eta_seconds: float
    memory_gib: float


def _nothing() -> None:
    """What nobody asked for."""


ProgressCallback = Callable[[CalibrationStep], None]


@frozen
class RunProgress:
    """Who is called while a checkpoint is made; None for nobody."""

    # Brings the packages of the extra that the run needs, before they are asked for.
    install: Callable[[str], None] | None = None
    # Called once nothing refuses the run, before anything is fetched or computed.
    accepted: Callable[[], None] = _nothing
    # Called after each step.
    calibration: ProgressCallback | None = None
    # Called with the number of source bytes when packing begins.
    packing: Bar | None = None
    # Called with the number of bytes of the output whose values are read, before it gets its name.
    values: Bar | None = None
    # Brings a source to this machine, and shows how far it is.
    download: "Callable[[Source], Source] | None" = None


SILENT = RunProgress()


def progress_since(
    started: float,
    step: str,
    *,
    done: int,
    total: int,
    num_here: int,
    tokens: int,
    device: "torch.device",
) -> CalibrationStep:
    """The progress of a run.

    Args:
        started: `time.monotonic()` when this process began with its first step.
        step: what the steps are, "backbone" or "mtp".
        done: steps done, those of an earlier run included.
        total: steps in all.
        num_here: steps done since `started`.
        tokens: tokens that one step computes.
        device: whose peak memory is reported.
    """
    seconds = (time.monotonic() - started) / num_here
    memory_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    if device.type != "cpu":
        import torch

        memory_bytes = torch.cuda.max_memory_allocated(device)
    return CalibrationStep(
        step=step,
        done=done,
        total=total,
        tokens_per_second=tokens / seconds,
        eta_seconds=seconds * (total - done),
        memory_gib=memory_bytes / 2**30,
    )


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
