"""Reads what the next decoder layer is stored as while this one computes.

In: a plan over a local source, and tensors of it. Out: their stored bytes in main memory, read by a thread; they become
weights only when the layer's turn comes, on the device where these go. So the device holds one layer, and main memory
one more, as it is stored.

Easy to get wrong: memory that is read into is memory that the states of the layers need too. No more is read ahead than
a part of what is free; the rest is read when it is needed, as without this module.
"""

import threading
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType

from torch import Tensor

from ....checkpoints.safetensors_file import Entry
from ....checkpoints.values import read_tensor
from ....recipes.family import HFName
from ...needs.free_memory import free_host_bytes
from ...plan.plan import Plan
from ...plan.tensor_plan import TensorPlan
from ...run.ranks import Ranks

SHARE_AHEAD = 0.25
"""Of the memory that is free on a machine; its processes divide it."""


class ReadAhead:
    """State: the thread, and what it was last asked for. A context: after it, the thread has ended."""

    def __init__(self, plan: Plan, ranks: Ranks):
        self._plan, self._ranks = plan, ranks
        self._pool = ThreadPoolExecutor(1, "read-ahead")
        self._stop = threading.Event()
        self._coming: Future[dict[HFName, Tensor]] | None = None

    def __enter__(self) -> "ReadAhead":
        return self

    def __exit__(self, _type: type | None, _error: BaseException | None, _traceback: TracebackType | None) -> None:
        self._stop.set()
        self._pool.shutdown()

    def start(self, tensors: Iterable[TensorPlan]) -> None:
        """Begin to read these; `take` gives them."""
        entries = [self._plan.entries[name] for tensor in tensors for name in tensor.inputs]
        room = int(free_host_bytes() * SHARE_AHEAD) // self._ranks.local_size
        self._coming = self._pool.submit(self._read, entries, room)

    def take(self) -> dict[HFName, Tensor]:
        """What was asked for last, as it is stored, on the host: all of it, or as much as there was room for.

        Raises:
            CheckpointError: a file ends early.
        """
        coming, self._coming = self._coming, None
        return coming.result() if coming else {}

    def _read(self, entries: Iterable[Entry], room: int) -> dict[HFName, Tensor]:
        found: dict[HFName, Tensor] = {}
        # A copy from pinned memory is several times faster.
        is_pinned = self._ranks.device.type != "cpu"
        for entry in entries:
            # PyTorch makes a pinned buffer as long as the next power of two.
            room -= 1 << (entry.num_bytes - 1).bit_length() if is_pinned else entry.num_bytes
            if self._stop.is_set() or room < 0:
                break
            found[entry.name] = read_tensor(self._plan.source, entry, pinned=is_pinned)
        return found
