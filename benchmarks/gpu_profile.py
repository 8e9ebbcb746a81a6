"""`make gpu-profile`: where the time of one wide layer's calibration goes on a GPU.

In: a model that gpu_models.py knows. Out: the time without a profile, then the kernels by their
time, how long the GPU did nothing, what the host waited for; with --trace the whole trace, which
https://ui.perfetto.dev shows.

Easy to get wrong: the profile itself takes time for each launch, so shares are read from it and the
seconds from the run without it.
"""

import argparse
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from figures import Figure, line
from gpu import missing

MODELS = ("glm-4.5-air", "deepseek-v3.1")
_SHOWN, _WIDEST = 40, 140


def main() -> None:
    """Print what one layer's calibration spends its time on."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true", help="Sizes for a CPU.")
    parser.add_argument("--samples", type=int, default=32, help="Sequences of 2,048 tokens.")
    parser.add_argument("--trace", type=Path, help="Write the trace here, as NAME.json.gz.")
    chosen = parser.parse_args()
    device = torch.device(chosen.device)
    if refusal := missing(device):
        print(refusal.replace("gpu-test", "gpu-profile"), file=sys.stderr)
        sys.exit(2)
    from keepmtp.quantize.run.ranks import joined

    with tempfile.TemporaryDirectory(prefix="keepmtp-profile-") as folder, joined():
        for figure in profiled(chosen, device, Path(folder)):
            print(line(figure), flush=True)


def profiled(chosen: argparse.Namespace, device: torch.device, folder: Path) -> Iterator[Figure]:
    """One layer three times: to warm up, for the clock, and under the profiler."""
    from gpu_models import random_tokens, seconds_of_pass, wide_plan

    source = folder / "source"
    plan = wide_plan(chosen.model, source, small=chosen.small, samples=chosen.samples)
    calibration = plan.recipe.calibration
    assert calibration is not None
    data = random_tokens(calibration, vocabulary=plan.view.text_config["vocab_size"])
    first = seconds_of_pass(plan, data, folder / "first", device)
    seconds = seconds_of_pass(plan, data, folder / "second", device)
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profile:
        under = seconds_of_pass(plan, data, folder / "third", device)
    if chosen.trace:
        profile.export_chrome_trace(str(chosen.trace))
    yield Figure(
        part=chosen.model,
        what=f"one layer, {data.ids.numel():,} tokens",
        measured=f"{first:.2f} s the first time, {seconds:.2f} s again, {under:.2f} s profiled",
    )
    for text in spent(events_of(profile)):
        yield Figure(part=chosen.model, what="profile", measured=text)


@dataclass(frozen=True, kw_only=True)
class Event:
    """A kernel or copy on the device, or a call of CUDA on the host; times in seconds."""

    name: str
    is_on_device: bool
    start: float
    seconds: float


def events_of(profile: Any) -> Iterator[Event]:
    """What a profile has seen, without the ranges that only name others."""
    for event in profile.profiler.kineto_results.events():
        is_on_device = event.device_type() == torch.autograd.DeviceType.CUDA
        if event.is_user_annotation() or not (is_on_device or event.name().startswith("cuda")):
            continue
        yield Event(
            name=event.name(),
            is_on_device=is_on_device,
            start=event.start_ns() / 1e9,
            seconds=event.duration_ns() / 1e9,
        )


def spent(events: Iterable[Event]) -> list[str]:
    """Kernels by time, the GPU's idle time, launches, and calls that wait."""
    count, seconds = Counter[str](), Counter[str]()
    spans = list[tuple[float, float]]()
    for event in events:
        name = event.name
        if event.is_on_device:
            spans.append((event.start, event.start + event.seconds))
        else:
            name = f"host in {name}"
        count[name] += 1
        seconds[name] += event.seconds
    if not spans:
        return ["no kernel ran on a GPU"]
    busy, end = 0.0, 0.0
    for start, stop in sorted(spans):
        busy += max(0.0, stop - max(start, end))
        end = max(end, stop)
    whole = end - min(spans)[0]
    told = [f"GPU busy {busy:.2f} s of {whole:.2f} s, {len(spans):,} kernels and copies"]
    for name, took in seconds.most_common(_SHOWN):
        told.append(f"{took:.3f} s, {count[name]:,} times: {name[:_WIDEST]}")
    return told


if __name__ == "__main__":
    main()
