"""How time and memory of a device are taken.

Easy to get wrong: a GPU computes later than it is asked to. A time counts only between two waits
for it.
"""

import time
from collections.abc import Callable

import torch


def seconds_of(call: Callable[[], object], device: torch.device, *, repeats: int) -> float:
    """The least time of some calls, after one that is not counted."""
    call()
    times = []
    for _ in range(repeats):
        wait_for(device)
        started = time.perf_counter()
        call()
        wait_for(device)
        times.append(time.perf_counter() - started)
    return min(times)


def wait_for(device: torch.device) -> None:
    """Return when the device has done what it was asked to."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def forget_peak(device: torch.device) -> None:
    """Begin to count the peak of the device's memory anew."""
    if device.type != "cpu":
        torch.accelerator.reset_peak_memory_stats(device)


def peak_bytes(device: torch.device) -> tuple[int, int]:
    """The most bytes that tensors took on the device since `forget_peak`, and that the allocator
    had of it for them; 0 for the CPU, which does not count.
    """
    if device.type == "cpu":
        return 0, 0
    accelerator = torch.accelerator
    return accelerator.max_memory_allocated(device), accelerator.max_memory_reserved(device)
