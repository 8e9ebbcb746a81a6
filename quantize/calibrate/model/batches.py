"""Batches of a text as inputs of one decoder layer, or of what comes after the last one.

In: a skeleton, the states that the layer before has left, and the rows of this process. Out: one
batch at a time, read anew in each iteration. The backbone pass, the MTP block, its training, its
acceptance and the search all take their batches from here.
"""

from collections.abc import Iterator

from torch import Tensor

from ....recipes.frozen import frozen
from .skeleton import Batch, Skeleton
from .states import States, Stream


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
        """The same, with the states that the layer reads."""
        for first, last in self.ranges():
            yield self.batch(first, last)

    def batch(self, first: int, last: int) -> Batch:
        """The sequences from `first` on; without `last`, which may be another process's."""
        state = None
        if self.index:  # the first layer reads token ids alone
            device = self.skeleton.device
            state = self.states.read(self.index, self.stream, first, last, device)
        return Batch(ids=self.ids[first:last], state=state, first=first)

    def ranges(self) -> list[tuple[int, int]]:
        """The rows of each batch: the first, and the one after the last."""
        found = []
        for first in range(self.rows.start, self.rows.stop, self.size):
            found.append((first, min(first + self.size, self.rows.stop)))
        return found
