"""OUT.log: what every run of one output said, and what it took.

In: the steps of a run. Out: lines behind those of earlier runs, and the `Results` of this one.

Easy to get wrong: a run that goes on with an earlier one has the time and the memory of its own
part alone.
"""

import resource
import time
from datetime import datetime, timedelta
from pathlib import Path

from ..quantize.plan.plan import Plan
from ..quantize.run.progress import CalibrationStep
from ..recipes.errors import size_in_words
from ..recipes.frozen import frozen
from ..validate.facts.vllm_env import cpu_here, gpus_here
from .progress import in_words


@frozen
class Results:
    """What a run took. None where no batches were needed, or no GPU was there."""

    hardware: str
    source_bytes: int
    output_bytes: int
    seconds: float
    seconds_a_layer: float | None
    peak_host_bytes: int
    peak_gpu_bytes: int | None

    def __str__(self) -> str:
        sizes = f"{size_in_words(self.source_bytes)} -> {size_in_words(self.output_bytes)}"
        words = [self.hardware, f"{sizes} in {timedelta(seconds=round(self.seconds))}"]
        if self.seconds_a_layer is not None:
            words.append(f"{self.seconds_a_layer:.1f} s a layer")
        words.append(f"peak {size_in_words(self.peak_host_bytes)} of the host")
        if self.peak_gpu_bytes is not None:
            words.append(f"{size_in_words(self.peak_gpu_bytes)} of a GPU")
        return f"Results: {'; '.join(words)}"


class RunLog:
    """The log next to an output."""

    def __init__(self, out: Path) -> None:
        self._path = out.with_name(f"{out.name}.log")
        self._began = time.monotonic()
        self._steps = dict[str, CalibrationStep]()
        self._lines = list[str]()

    def begin(self, line: str) -> None:
        """A line that is written with the next one: the run may be refused until then."""
        self._lines.append(f"{datetime.now():%Y-%m-%d %H:%M:%S}  {line}\n")

    def say(self, line: object) -> None:
        """One line, with its time."""
        self.begin(str(line))
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a", encoding="utf-8") as file:
            file.writelines(self._lines)
        self._lines.clear()

    def step(self, step: CalibrationStep) -> None:
        """A step of calibration."""
        self._steps[step.step] = step
        self.say(in_words(step))

    def results(self, plan: Plan) -> Results:
        """What the run took."""
        gpus = [gpu.name for gpu in gpus_here()]
        layers = self._steps.get("backbone")
        peaks = [step.memory_gib * 2**30 for step in self._steps.values() if gpus]
        return Results(
            hardware=", ".join(gpus) or f"{cpu_here()[0]}, no GPU",
            source_bytes=plan.num_bytes_before,
            output_bytes=plan.num_bytes_after,
            seconds=time.monotonic() - self._began,
            seconds_a_layer=layers and layers.seconds,
            peak_host_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            peak_gpu_bytes=round(max(peaks)) if peaks else None,
        )
