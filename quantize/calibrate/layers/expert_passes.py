"""Further passes over a layer's batches, in which statistics are taken of some routed experts only.

In: a model with one real layer, and its batches. Out: `ExpertPasses`, which runs them again: what hooks of statistics
see of the chosen experts is what they saw, or would have seen, in the first pass. So what does not fit the memory for
all experts at once is taken from some at a time, and comes out bit for bit.

Easy to get wrong: what runs after one layer's experts may feed another layer's, as in an MTP block of two layers. Then
the other experts must compute as before, too.
"""

from collections.abc import Callable, Collection, Mapping, Sized
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from compressed_tensors.utils import patch_attr
from llmcompressor.modeling.moe import context as moe_context
from llmcompressor.modeling.moe.linear_experts import LinearExperts2D
from llmcompressor.modifiers.utils.hooks import HooksMixin
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ...needs.free_memory import free_host_bytes
from ...run.processes import place_of_process

_SHARE = 0.5
"""Of the free memory, what statistics may take: a forward takes the rest, and other processes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StatisticsRoom:
    """Bytes that statistics may take, on the device that calibrates and on the host; None for no limit."""

    device: int | None = None
    host: int | None = None

    @classmethod
    def of(cls, device: torch.device) -> "StatisticsRoom":
        """What is free while the layer's weights are there, divided among the processes of this machine."""
        host = int(free_host_bytes() * _SHARE) // place_of_process().local_size
        if device.type == "cpu":
            return cls(device=host, host=host)
        free, _ = torch.cuda.mem_get_info(device)
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return cls(device=int((free + unused) * _SHARE), host=host)


class ExpertPasses:
    """State: the model and its batches.

    Attributes:
        model: one layer of it is real.
        room: for statistics.
        routed: in the first pass experts compute their own tokens only.
    """

    def __init__(self, model: Any, batches: Any, room: StatisticsRoom, *, routed: bool = False):
        self.model, self._batches, self.room, self.routed = model, batches, room, routed

    def __len__(self) -> int:
        """Number of batches, of this rank."""
        assert isinstance(self._batches, Sized)
        return len(self._batches)

    @cached_property
    def expert_of(self) -> Mapping[nn.Module, nn.Module]:
        """Module inside a routed expert -> the expert."""
        return {module: expert for stack in self._stacks for expert in _experts(stack) for module in expert.modules()}

    def run(self, chosen: Collection[nn.Module], *, every_token: bool) -> None:
        """All batches once more. Hooks see the chosen experts, on every token or on their own, and nothing else."""
        with torch.no_grad(), HooksMixin.disable_hooks(), ExitStack() as stack:
            if len(self._stacks) == 1:  # nobody reads what the other experts compute
                stack.enter_context(patch_attr(moe_context, "_CALIBRATE_ALL_EXPERTS", False))
            for handle in self._first(chosen) if every_token else _watched(chosen):
                stack.callback(handle.remove)
            for batch in self._batches:
                self.model(**batch)

    def _first(self, chosen: Collection[nn.Module]) -> list[RemovableHandle]:
        """Hooks that let the chosen experts of a stack compute all tokens, before the stack does what it does."""

        def hook(stack: LinearExperts2D, args: tuple[Tensor, ...], kwargs: Mapping[str, Tensor]) -> None:
            hidden = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
            with patch_attr(HooksMixin, "_HOOKS_DISABLED", False):
                for expert in _experts(stack):
                    if expert in chosen:
                        expert(hidden)

        return [stack.register_forward_pre_hook(hook, with_kwargs=True) for stack in self._stacks]

    @cached_property
    def _stacks(self) -> list[LinearExperts2D]:
        return [
            module
            for module in self.model.modules()
            if isinstance(module, LinearExperts2D) and not any(value.is_meta for value in module.parameters())
        ]


def _experts(stack: LinearExperts2D) -> list[nn.Module]:
    """Without the activation function, which is in the list, too."""
    return [stack[index] for index in range(stack.num_experts)]


def _watched(chosen: Collection[nn.Module]) -> list[RemovableHandle]:
    """Hooks that let those of statistics see what the chosen experts compute in their turn."""

    def set_disabled(value: bool) -> Callable[..., None]:
        return lambda *_: setattr(HooksMixin, "_HOOKS_DISABLED", value)

    handles = [expert.register_forward_pre_hook(set_disabled(False)) for expert in chosen]
    return handles + [expert.register_forward_hook(set_disabled(True)) for expert in chosen]
