"""What each quantized module saw during calibration: its tokens, and whether every value was
finite.

In: a model and the names of its quantized modules. Out: a `Coverage` for each of them, summed over
the ranks, the range of its inputs, and for some the mean square of each input channel, which is how
much its error counts.

Easy to get wrong: during calibration every expert computes every token. How many tokens the router
sent to an expert is counted apart, from the router's choice. And values are not looked at one by
one: that they are finite follows from the range of the inputs and the largest weight, and only
where it does not follow the batches run once more.
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
        has_few_tokens: its statistics are of fewer tokens than it has input channels, and of none
            but the router's.
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
        """Counts in the modules that are quantized; inputs of the weighted ones are squared,
        too.
        """
        self._work = work
        self.modules: dict[str, Any] = {name: model.get_submodule(name) for name in work.schemes}
        self.device = next(iter(self.modules.values())).weight.device
        self.ranges = InputRanges(self.modules)
        self._tokens = dict.fromkeys(self.modules, 0)
        self._stacks = {
            name: each for name, each in model.named_modules() if isinstance(each, LinearExperts2D)
        }
        self._routed: dict[str, Tensor] = {}
        """Stack of experts -> how many tokens the router sent to each."""

    def counting(self) -> AbstractContextManager[None]:
        """Hooks on the modules count while this lasts."""
        hooks = [(module, partial(self._count, name)) for name, module in self.modules.items()]
        hooks += [
            (stack, partial(self._count_routed, name)) for name, stack in self._stacks.items()
        ]
        return hooked(
            module.register_forward_pre_hook(hook, with_kwargs=True) for module, hook in hooks
        )

    def finish(self, num_batches: int) -> None:
        """Sums over the ranks; raises RecipeError without batches, CheckpointError for a module
        never called.

        An expert may be without tokens where each computes its own.
        """
        if not num_batches:
            raise no_batch()
        of_ranks = gathered(
            (self._tokens, {name: counts.cpu() for name, counts in self._routed.items()})
        )
        self._tokens = {name: sum(tokens[name] for tokens, _ in of_ranks) for name in self.modules}
        for name in self._routed:
            self._routed[name] = torch.stack([routed[name] for _, routed in of_ranks]).sum(0)
        silent = [name for name, tokens in self._tokens.items() if not tokens]
        if self._work.routed:
            silent = [name for name in silent if self._routed_to(name) is None]
        if silent:
            raise CheckpointError(
                silent[0],
                "every quantized module must be called during calibration",
                got=f"{len(silent)} modules without a token",
                cure="Keep them in the recipe",
            )

    def fill_observers(self) -> None:
        """Gives the observers of static input scales what they would have found themselves.

        Schemes with such scales observe the smallest and largest value of all batches
        (`recipes/schemes.py`). An expert without a token gets those of the same projection of all
        experts: vLLM takes one input scale for them.
        """
        for name, module in self.modules.items():
            observer = getattr(module, "input_observer", None)
            if observer is None:
                continue
            ends = self.ranges.ends[name]
            if not self._tokens[name]:
                stack, _, leaf = name.rpartition(".")
                stack = stack.rpartition(".")[0]
                alike = [
                    each
                    for each in self.modules
                    if each.startswith(f"{stack}.") and each.endswith(f".{leaf}")
                ]
                ends = torch.stack([self.ranges.ends[each] for each in alike]).amax(0)
            observer.min_vals, observer.max_vals = -ends[:1], ends[1:]

    def importances(self) -> dict[str, Tensor]:
        """Of the weighted modules, over all ranks: F32 [K] on the CPU, ones for an expert that no
        token reached.
        """
        found = {}
        for name in self.modules:
            if name not in self._work.weighted:
                continue
            width, tokens = self.modules[name].weight.shape[-1], self._tokens[name]
            # Of its own: modules share squares. A rank that has never called it adds nothing.
            squares = torch.zeros(width, dtype=torch.float64, device=self.device)
            squares += self.ranges.squares.get(name, 0)
            if has_others():
                dist.all_reduce(squares)
            found[name] = (squares / tokens).float().cpu() if tokens else torch.ones(width)
        return found

    def coverage(self) -> tuple[Coverage, ...]:
        """One entry for each quantized module, in their order."""
        found = []
        for name, module in self.modules.items():
            routed = self._routed_to(name)
            has_few = self._work.routed and 0 < (routed or 0) < module.weight.shape[-1]
            found.append(
                Coverage(
                    module=name, tokens=self._tokens[name], routed=routed, has_few_tokens=has_few
                )
            )
        return tuple(found)

    def _routed_to(self, name: str) -> int | None:
        """Tokens that the router sent to the expert a module belongs to; None outside routed
        experts.
        """
        for stack, counts in self._routed.items():
            index = name.removeprefix(f"{stack}.").split(".")[0]
            if name.startswith(f"{stack}.") and index.isdecimal():
                return int(counts[int(index)])
        return None

    def _count(self, name: str, _module: nn.Module, args: tuple, kwargs: dict) -> None:
        value = input_of(args, kwargs)
        self._tokens[name] += value.numel() // value.shape[-1]
        self.ranges.read(name, value, squared=name in self._work.weighted)

    def _count_routed(self, name: str, stack: Any, args: tuple, kwargs: dict) -> None:
        index = kwargs["top_k_index"] if "top_k_index" in kwargs else args[1]
        counts = torch.bincount(index.flatten(), minlength=stack.num_experts)[: stack.num_experts]
        self._routed[name] = self._routed[name] + counts if name in self._routed else counts


def find_not_finite(
    model: Any, modules: Iterable[str], batches: Iterable[Mapping[str, Tensor]]
) -> None:
    """Raises CheckpointError naming the first module, in the order of calls, with a value that is
    not finite.

    Every input and output is looked at; what was handed to a module and could not be proven finite
    may still be so.
    """

    def watch(
        name: str, number: int, _module: nn.Module, args: tuple, kwargs: dict, output: Tensor
    ) -> None:
        for side, value in (("input", input_of(args, kwargs)), ("output", output)):
            if not value.isfinite().all():
                raise CheckpointError(
                    name,
                    "activations must be finite during calibration",
                    got=f"NaN or infinity in its {side}, batch {number}",
                    cure="Look for a broken weight in this layer, or calibrate in BF16 instead of "
                    "F16",
                )

    own = {name: model.get_submodule(name) for name in modules}
    for number, batch in enumerate(batches, start=1):
        hooks = {module: partial(watch, name, number) for name, module in own.items()}
        with hooked(
            module.register_forward_hook(hook, with_kwargs=True) for module, hook in hooks.items()
        ):
            model(**batch)


def no_batch() -> RecipeError:
    """The refusal of a rank that has nothing to calibrate with."""
    rule = "there must be a batch for every rank"
    return RecipeError("calibration", rule, got="none", cure="Raise calibration.samples")
