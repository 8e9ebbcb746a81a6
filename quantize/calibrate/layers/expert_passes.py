"""Further passes over a layer's batches, in which statistics are taken of some routed experts only.

In: a model with one real layer, and its batches. Out: `ExpertPasses`, which runs them again: what
hooks of statistics see of the chosen experts is what they saw, or would have seen, in the first
pass. So what does not fit the memory for all experts at once is taken from some at a time, and
comes out bit for bit. The hooks see the other modules, too, and know themselves what they wait for.

Easy to get wrong: what runs after one layer's experts may feed another layer's, as in an MTP block
of two layers. Then the other experts must compute as before, too.
"""

from collections.abc import Collection
from typing import Any

import torch
from torch import nn

from ...needs.free_memory import free_host_bytes
from ...run.processes import place_of_process
from ..model.experts import SortedExperts

_SHARE = 0.5
"""Of the free memory, what statistics may take: a forward takes the rest, and other processes."""


def host_room() -> int:
    """Bytes that statistics may take in main memory; the processes of this machine divide it."""
    return int(free_host_bytes() * _SHARE) // place_of_process().local_size


class ExpertPasses:
    """State: the model and its batches.

    Attributes:
        model: one layer of it is real.
        room: bytes for statistics, in main memory; None for no limit.
        expert_of: module inside a routed expert -> the expert.

    Args:
        routed: in the first pass experts compute their own tokens only.
    """

    def __init__(self, model: Any, batches: Any, room: int | None, *, routed: bool = False):
        self.model, self._batches, self.room, self._routed = model, batches, room, routed
        self._stacks = [
            module
            for module in model.modules()
            if isinstance(module, SortedExperts)
            and not any(value.is_meta for value in module.parameters())
        ]
        # The activation function is in the stack, too.
        experts = [stack[index] for stack in self._stacks for index in range(stack.num_experts)]
        self.expert_of = {module: expert for expert in experts for module in expert.modules()}

    def run(self, chosen: Collection[nn.Module]) -> None:
        """All batches once more. The chosen experts compute every token."""
        # Where nobody reads what the other experts compute, they do as little as they can.
        is_changed = self._routed or len(self._stacks) == 1
        try:
            for stack in self._stacks:
                stack.every_token = chosen if is_changed else None
            with torch.no_grad():
                for batch in self._batches:
                    self.model(**batch)
        finally:
            for stack in self._stacks:
                stack.every_token = None
