"""What each quantized module saw during calibration: its tokens, and whether every value was finite.

In: a model and the names of its quantized modules. Out: a `Coverage` for each of them, summed over the ranks, the
range of its inputs, and for some the mean square of each input channel, which is how much its error counts.

Easy to get wrong: during calibration every expert computes every token. How many tokens the router sent to an expert is
counted apart, from the router's choice. And values are not looked at one by one: that they are finite follows from the
range of the inputs and the largest weight, and only where it does not follow the batches run once more.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from llmcompressor.modeling.moe.linear_experts import LinearExperts2D
from torch import Tensor, nn

from ....recipes.errors import CheckpointError, RecipeError
from ...run.ranks import has_others
from .inputs import InputRanges


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

    While it is entered as a context, hooks on the modules count.
    """

    def __init__(self, model: Any, modules: Iterable[str], *, routed: bool = False, weighted: Collection[str] = ()):
        """Counts in these modules; `routed` where experts compute their own tokens only.

        Inputs of the `weighted` ones are squared, too.
        """
        self._model, self._is_routed = model, routed
        self._modules = {name: model.get_submodule(name) for name in modules}
        self._tokens = dict.fromkeys(self._modules, 0)
        self._routed: dict[str, Any] = {}
        self._handles: list[Any] = []
        device = next((module.weight.device for module in self._modules.values()), torch.device("cpu"))
        dtypes = [module.weight.dtype for module in self._modules.values()]
        self._weighted = {slot: name for slot, name in enumerate(self._modules) if name in weighted}
        self.ranges = InputRanges(dtypes, device, self._weighted)

    def __enter__(self) -> None:
        for slot, (name, module) in enumerate(self._modules.items()):
            self._handles.append(module.register_forward_pre_hook(self._count(slot, name), with_kwargs=True))
        for name, module in self._model.named_modules():
            if isinstance(module, LinearExperts2D):
                hook = self._count_routed(name, module.num_experts)
                self._handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def finish(self, num_batches: int) -> None:
        """Sums over the ranks; raises RecipeError without batches, CheckpointError for a module never called.

        An expert may be without tokens where each computes its own.
        """
        if not num_batches:
            raise no_batch()
        if has_others():
            self._sum_over_ranks()
        silent = [name for name in self._uncalled() if not self._is_routed or self._routed_to(name) is None]
        if silent:
            raise CheckpointError(
                silent[0],
                "every quantized module must be called during calibration",
                got=f"{len(silent)} modules without a token",
                cure="Keep them in the recipe",
            )

    def is_finite(self) -> bool:
        """False if a module may have been handed, or have returned, NaN or infinity."""
        return self.ranges.prove_finite([*self._modules.values()])

    def fill_observers(self) -> None:
        """Gives the observers of static input scales what they would have found themselves.

        Schemes with such scales observe the smallest and largest value of all batches (`recipes/schemes.py`).
        """
        for slot, module in enumerate(self._modules.values()):
            observer = getattr(module, "input_observer", None)
            if observer is not None:
                observer.min_vals, observer.max_vals = self.ranges.of(slot)
        for name in self._uncalled():
            observer = getattr(self._modules[name], "input_observer", None)
            if observer is not None:
                observer.min_vals, observer.max_vals = self.ranges.of_all(self._slots_like(name))

    def importances(self) -> dict[str, Tensor]:
        """Of the weighted modules, over all ranks: F32 [K] on the CPU, ones for an expert that no token reached."""
        return {
            name: (
                (self.ranges.squares[slot] / self._tokens[name]).float().cpu()
                if self._tokens[name]
                else torch.ones(self._modules[name].weight.shape[-1])
            )
            for slot, name in self._weighted.items()
        }

    def coverage(self) -> tuple[Coverage, ...]:
        """One entry for each quantized module, in their order."""
        return tuple(
            Coverage(
                module=name,
                tokens=self._tokens[name],
                routed=self._routed_to(name),
                has_few_tokens=self._is_routed and 0 < (self._routed_to(name) or 0) < module.weight.shape[-1],
            )
            for name, module in self._modules.items()
        )

    def _uncalled(self) -> list[str]:
        return [name for name, tokens in self._tokens.items() if not tokens]

    def _slots_like(self, name: str) -> list[int]:
        """The same projection of all experts of a layer: vLLM takes one input scale for them."""
        stack = next(stack for stack in self._routed if name.startswith(f"{stack}."))
        leaf = name.rpartition(".")[2]
        return [
            slot
            for slot, other in enumerate(self._modules)
            if other.startswith(f"{stack}.") and other.rpartition(".")[2] == leaf
        ]

    def _routed_to(self, name: str) -> int | None:
        """Tokens that the router sent to the expert a module belongs to; None outside routed experts."""
        for experts, counts in self._routed.items():
            index = name.removeprefix(f"{experts}.").split(".")[0]
            if name.startswith(f"{experts}.") and index.isdecimal():
                return int(counts[int(index)])
        return None

    def _sum_over_ranks(self) -> None:
        own = self._tokens, {name: counts.cpu() for name, counts in self._routed.items()}
        of_ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(of_ranks, own)
        self._tokens = {name: sum(tokens[name] for tokens, _ in of_ranks) for name in self._modules}
        self._routed = {name: sum(routed[name] for _, routed in of_ranks) for name in self._routed}
        self._sum_squares()

    def _sum_squares(self) -> None:
        """All modules at once; one that this rank never called has a sum of 0 here."""
        if not self._weighted:
            return
        weights = {slot: self._modules[name].weight for slot, name in self._weighted.items()}
        own = [
            self.ranges.squares.get(slot, torch.zeros(weight.shape[-1], dtype=torch.float64, device=weight.device))
            for slot, weight in weights.items()
        ]
        summed = torch.cat(own)
        dist.all_reduce(summed)
        self.ranges.squares = dict(zip(weights, summed.split([len(each) for each in own]), strict=True))

    def _count(self, slot: int, name: str) -> Callable[..., None]:
        def hook(_module: nn.Module, args: tuple, kwargs: dict) -> None:
            value = args[0] if args else next(iter(kwargs.values()))
            self._tokens[name] += value.numel() // value.shape[-1]
            self.ranges.read(slot, value)

        return hook

    def _count_routed(self, name: str, num_experts: int) -> Callable[..., None]:
        def hook(_module: nn.Module, args: tuple, kwargs: dict) -> None:
            index = kwargs["top_k_index"] if "top_k_index" in kwargs else args[1]
            counts = torch.bincount(index.flatten(), minlength=num_experts)[:num_experts]
            self._routed[name] = self._routed[name] + counts if name in self._routed else counts

        return hook


def find_not_finite(model: Any, modules: Iterable[str], batches: Iterable[Mapping[str, Tensor]]) -> None:
    """Raises CheckpointError naming the first module, in the order of calls, with a value that is not finite.

    Every input and output is looked at; what was handed to a module and could not be proven finite may still be so.
    """
    found: list[tuple[str, str]] = []

    def watch(name: str) -> Callable[..., None]:
        def hook(_module: nn.Module, args: tuple, kwargs: dict, output: Tensor) -> None:
            value = args[0] if args else next(iter(kwargs.values()))
            found.extend((name, side) for side, x in (("input", value), ("output", output)) if not x.isfinite().all())

        return hook

    handles = [model.get_submodule(name).register_forward_hook(watch(name), with_kwargs=True) for name in modules]
    try:
        for number, batch in enumerate(batches, start=1):
            model(**batch)
            for name, side in found:
                raise CheckpointError(
                    name,
                    "activations must be finite during calibration",
                    got=f"NaN or infinity in its {side}, batch {number}",
                    cure="Look for a broken weight in this layer, or calibrate in BF16 instead of F16",
                )
    finally:
        for handle in handles:
            handle.remove()


def no_batch() -> RecipeError:
    """The refusal of a rank that has nothing to calibrate with."""
    rule = "there must be a batch for every rank"
    return RecipeError("calibration", rule, got="none", cure="Raise calibration.samples")
