"""How far a long run is, after each of its steps.

In: how many steps are done, and since when. Out: a `CalibrationStep` for a caller's callback.

Easy to get wrong: steps of an earlier run count as done, but this process did not spend its time on
them.
"""

import resource
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from ...recipes.frozen import frozen

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


ProgressCallback = Callable[[CalibrationStep], None]


BytesBar = Callable[[int], AbstractContextManager[Callable[[int], None]]]
"""Called with the number of bytes in all. Returns a context, whose value is called with the bytes
done since then.
"""


@frozen
class RunProgress:
    """Who is called while a checkpoint is made; None for nobody.

    Attributes:
        calibration: called after each step.
        packing: called with the number of source bytes when packing begins.
        values: called with the number of bytes of the output whose values are read, before it gets
            its name.
        download: brings a source to this machine, and shows how far it is.
    """

    calibration: ProgressCallback | None = None
    packing: BytesBar | None = None
    values: BytesBar | None = None
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
