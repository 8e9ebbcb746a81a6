"""What each quantized module saw during calibration: its tokens, and whether every value was finite.

In: a model and the names of its quantized modules. Out: a `Coverage` for each of them, summed over the ranks, the
range of its inputs, and for some the mean square of each input channel, which is how much its error counts.

Easy to get wrong: during calibration every expert computes every token. How many tokens the router sent to an expert is
counted apart, from the router's choice. And values are not looked at one by one: that they are finite follows from the
range of the inputs and the largest weight, and only where it does not follow the batches run once more.
"""

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from llmcompressor.modeling.moe.linear_experts import LinearExperts2D
from torch import Tensor, nn

from ....recipes.errors import CheckpointError, RecipeError
from ...run.ranks import gathered, has_others
from ..model.hooks import hooked, input_of
from .inputs import InputRanges
from .work import LayerWork


@dataclass(frozen=True, slots=True, kw_only=True)
class Coverage:
    """What one quantized module saw.

    Attributes:
        tokens: rows of its input, over all batches and ranks.
        routed: for a routed expert, how many of them the router sent there; None for other modules.
        has_few_tokens: its statistics are of fewer tokens than it has input channels, and of none but the router's.
    """

    module: str
    tokens: int
    routed: int | None
    has_few_tokens: bool = False


class TokenCounter:
    """State: tokens of each quantized module, and the range of its inputs.

    Attributes:
        modules: the quantized ones, by name.
        device: where their weights are.
        ranges: of their inputs.
    """

    def __init__(self, model: Any, work: LayerWork):
        """Counts in the modules that are quantized; inputs of the weighted ones are squared, too."""
        self._work = work
        self.modules: dict[str, Any] = {name: model.get_submodule(name) for name in work.schemes}
        self._tokens = dict.fromkeys(self.modules, 0)
        self._stacks = {name: each for name, each in model.named_modules() if isinstance(each, LinearExperts2D)}
        self._routed: dict[str, Tensor] = {}
        """Stack of experts -> how many tokens the router sent to each."""
        weights = [module.weight for module in self.modules.values()]
        self.device = weights[0].device
        self._weighted = {slot: name for slot, name in enumerate(self.modules) if name in work.weighted}
        self.ranges = InputRanges([weight.dtype for weight in weights], self.device, self._weighted)

    def counting(self) -> AbstractContextManager[None]:
        """Hooks on the modules count while this lasts."""
        modules = enumerate(self.modules.items())
        hooks = [(module, partial(self._count, slot, name)) for slot, (name, module) in modules]
        hooks += [(stack, partial(self._count_routed, name)) for name, stack in self._stacks.items()]
        return hooked(module.register_forward_pre_hook(hook, with_kwargs=True) for module, hook in hooks)

    def finish(self, num_batches: int) -> None:
        """Sums over the ranks; raises RecipeError without batches, CheckpointError for a module never called.

        An expert may be without tokens where each computes its own.
        """
        if not num_batches:
            raise no_batch()
        self._sum_over_ranks()
        silent = [
            name
            for name, tokens in self._tokens.items()
            if not tokens and (not self._work.routed or self._routed_to(name) is None)
        ]
        if silent:
            raise CheckpointError(
                silent[0],
                "every quantized module must be called during calibration",
                got=f"{len(silent)} modules without a token",
                cure="Keep them in the recipe",
            )

    def is_finite(self) -> bool:
        """False if a module may have been handed, or have returned, NaN or infinity."""
        return self.ranges.prove_finite([*self.modules.values()])

    def fill_observers(self) -> None:
        """Gives the observers of static input scales what they would have found themselves.

        Schemes with such scales observe the smallest and largest value of all batches (`recipes/schemes.py`).
        """
        for slot, (name, module) in enumerate(self.modules.items()):
            observer = getattr(module, "input_observer", None)
            if observer is not None:
                slots = [slot] if self._tokens[name] else self._slots_like(name)
                observer.min_vals, observer.max_vals = self.ranges.of_all(slots)

    def importances(self) -> dict[str, Tensor]:
        """Of the weighted modules, over all ranks: F32 [K] on the CPU, ones for an expert that no token reached."""
        found = {}
        for slot, name in self._weighted.items():
            mean = torch.ones(self.modules[name].weight.shape[-1])
            if self._tokens[name]:
                mean = (self.ranges.squares[slot] / self._tokens[name]).float().cpu()
            found[name] = mean
        return found

    def coverage(self) -> tuple[Coverage, ...]:
        """One entry for each quantized module, in their order."""
        found = []
        for name, module in self.modules.items():
            routed = self._routed_to(name)
            has_few = self._work.routed and 0 < (routed or 0) < module.weight.shape[-1]
            found.append(Coverage(module=name, tokens=self._tokens[name], routed=routed, has_few_tokens=has_few))
        return tuple(found)

    def _slots_like(self, name: str) -> list[int]:
        """The same projection of all experts of a layer: vLLM takes one input scale for them."""
        stack = next(stack for stack in self._routed if name.startswith(f"{stack}."))
        leaf = name.rpartition(".")[2]
        others = enumerate(self.modules)
        return [slot for slot, each in others if each.startswith(f"{stack}.") and each.rpartition(".")[2] == leaf]

    def _routed_to(self, name: str) -> int | None:
        """Tokens that the router sent to the expert a module belongs to; None outside routed experts."""
        for stack, counts in self._routed.items():
            index = name.removeprefix(f"{stack}.").split(".")[0]
            if name.startswith(f"{stack}.") and index.isdecimal():
                return int(counts[int(index)])
        return None

    def _sum_over_ranks(self) -> None:
        """Sums of squares at once; one that this rank never called has a sum of 0 here."""
        of_ranks = gathered((self._tokens, {name: counts.cpu() for name, counts in self._routed.items()}))
        self._tokens = {name: sum(tokens[name] for tokens, _ in of_ranks) for name in self.modules}
        for name in self._routed:
            self._routed[name] = torch.stack([routed[name] for _, routed in of_ranks]).sum(0)
        if self._weighted and has_others():
            for slot, name in self._weighted.items():
                weight = self.modules[name].weight
                nothing = torch.zeros(weight.shape[-1], dtype=torch.float64, device=weight.device)
                self.ranges.squares.setdefault(slot, nothing)
            own = [self.ranges.squares[slot] for slot in self._weighted]
            summed = torch.cat(own)
            dist.all_reduce(summed)
            self.ranges.squares = dict(zip(self._weighted, summed.split([len(each) for each in own]), strict=True))

    def _count(self, slot: int, name: str, _module: nn.Module, args: tuple, kwargs: dict) -> None:
        value = input_of(args, kwargs)
        self._tokens[name] += value.numel() // value.shape[-1]
        self.ranges.read(slot, value)

    def _count_routed(self, name: str, stack: Any, args: tuple, kwargs: dict) -> None:
        index = kwargs["top_k_index"] if "top_k_index" in kwargs else args[1]
        counts = torch.bincount(index.flatten(), minlength=stack.num_experts)[: stack.num_experts]
        self._routed[name] = self._routed[name] + counts if name in self._routed else counts


def find_not_finite(model: Any, modules: Iterable[str], batches: Iterable[Mapping[str, Tensor]]) -> None:
    """Raises CheckpointError naming the first module, in the order of calls, with a value that is not finite.

    Every input and output is looked at; what was handed to a module and could not be proven finite may still be so.
    """

    def watch(name: str, number: int, _module: nn.Module, args: tuple, kwargs: dict, output: Tensor) -> None:
        for side, value in (("input", input_of(args, kwargs)), ("output", output)):
            if not value.isfinite().all():
                raise CheckpointError(
                    name,
                    "activations must be finite during calibration",
                    got=f"NaN or infinity in its {side}, batch {number}",
                    cure="Look for a broken weight in this layer, or calibrate in BF16 instead of F16",
                )

    own = {name: model.get_submodule(name) for name in modules}
    for number, batch in enumerate(batches, start=1):
        hooks = {module: partial(watch, name, number) for name, module in own.items()}
        with hooked(module.register_forward_hook(hook, with_kwargs=True) for module, hook in hooks.items()):
            model(**batch)


def no_batch() -> RecipeError:
    """The refusal of a rank that has nothing to calibrate with."""
    rule = "there must be a batch for every rank"
    return RecipeError("calibration", rule, got="none", cure="Raise calibration.samples")
