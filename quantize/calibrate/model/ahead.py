"""Reads what the next decoder layer is stored as while this one computes.

In: a plan over a local source, and tensors of it. Out: nothing but the system's own cache of these
files, from which the layer is read when its turn comes. So no memory is promised to it: what is
short, the system takes back.
"""

import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from ....checkpoints.source import read
from ...plan.plan import Plan
from ...plan.tensor_plan import TensorPlan

_CHUNK_BYTES = 2**24


@contextmanager
def reading_ahead(plan: Plan, tensors: Iterable[TensorPlan]) -> Iterator[None]:
    """A thread reads these, until they are read or the context ends."""
    entries, stop = (
        [plan.entries[name] for tensor in tensors for name in tensor.inputs],
        threading.Event(),
    )

    def read_all() -> None:
        buffer = memoryview(bytearray(_CHUNK_BYTES))
        for entry in entries:
            for offset in range(0, entry.num_bytes, _CHUNK_BYTES):
                if stop.is_set():
                    return
                read(plan.source, entry, buffer[: entry.num_bytes - offset], offset=offset)

    with ThreadPoolExecutor(1, "read-ahead") as pool:
        pool.submit(read_all)  # what fails here, fails again when it is needed
        try:
            yield
        finally:
            stop.set()
