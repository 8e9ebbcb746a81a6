"""Batches of a text as inputs of one decoder layer, or of what comes after the last one.

In: a skeleton, the states that the layer before has left, and the rows of this process. Out: one
batch at a time, read anew in each iteration. The backbone pass, the MTP block, its training, its
acceptance and the search all take their batches from here.
"""

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

from torch import Tensor

from ....recipes.frozen import frozen
from .skeleton import Batch, Skeleton
from .states import LayerState, States, Stream


@frozen
class Batches:
    """Some sequences of one stream; an iteration gives the arguments of the model's forward.

    Attributes:
        skeleton: the model's class.
        states: of the pass.
        stream: whose states are read.
        index: of the layer; the number of layers: after the last one.
        ids: of all sequences of the stream's text, [sequences, S].
        rows: which of them.
        size: sequences in a batch.
    """

    skeleton: Skeleton
    states: States
    stream: Stream
    index: int
    ids: Tensor
    rows: range
    size: int

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        for batch in self.batches():
            with self.skeleton.fed(self.index, batch) as arguments:
                yield arguments

    def batches(self) -> Iterator[Batch]:
        """The same, with the states that the layer reads; those of the next batch are read while
        this one is used.
        """
        ranges = self.ranges()
        reads = deque[Future[LayerState | None]]()
        with ThreadPoolExecutor(1, "batches") as pool:
            for place, own in enumerate(ranges):
                for following in ranges[place + len(reads) : place + 2]:
                    reads.append(pool.submit(self._read, *following))
                yield self._batch(*own, reads.popleft().result())

    def batch(self, first: int, last: int) -> Batch:
        """The sequences from `first` on; without `last`, which may be another process's."""
        return self._batch(first, last, self._read(first, last))

    def _read(self, first: int, last: int) -> LayerState | None:
        """Into main memory; nothing for the first layer, which reads token ids alone."""
        return self.states.read(self.index, self.stream, first, last) if self.index else None

    def _batch(self, first: int, last: int, state: LayerState | None) -> Batch:
        if state is not None:
            device = self.skeleton.device
            state = tuple(value if value is None else value.to(device) for value in state)
        return Batch(ids=self.ids[first:last], state=state, first=first)

    def ranges(self) -> list[tuple[int, int]]:
        """The rows of each batch: the first, and the one after the last."""
        found = []
        for first in range(self.rows.start, self.rows.stop, self.size):
            found.append((first, min(first + self.size, self.rows.stop)))
        return found
