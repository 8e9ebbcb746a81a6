"""What each quantized module saw during calibration: its tokens, and whether every value was finite.

In: a model and the names of its quantized modules. Out: a `Coverage` for each of them, summed over the ranks.

Easy to get wrong: during calibration every expert computes every token. How many tokens the router sent to an expert is
counted apart, from the router's choice.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from llmcompressor.modeling.moe.linear_experts import LinearExperts2D
from torch import Tensor, nn

from ...recipes.errors import CheckpointError, RecipeError
from .ranks import has_others


@dataclass(frozen=True, slots=True, kw_only=True)
class Coverage:
    """What one quantized module saw.

    Attributes:
        tokens: rows of its input, over all batches and ranks.
        routed: for a routed expert, how many of them the router sent there; None for other modules.
    """

    module: str
    tokens: int
    routed: int | None


class TokenCounter:
    """State: tokens of each quantized module, and checks for finite values that wait to be read.

    While it is entered as a context, hooks on the modules count.
    """

    def __init__(self, model: Any, modules: Iterable[str]):
        self._model = model
        self._modules = tuple(modules)
        self._tokens: dict[str, int] = {}
        self._routed: dict[str, Any] = {}
        self._finite: list[tuple[str, str, Tensor]] = []
        self._handles: list[Any] = []

    def __enter__(self) -> None:
        for name in self._modules:
            module = self._model.get_submodule(name)
            self._handles.append(module.register_forward_hook(self._count(name), with_kwargs=True))
        for name, module in self._model.named_modules():
            if isinstance(module, LinearExperts2D):
                hook = self._count_routed(name, module.num_experts)
                self._handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def check(self, num_batches: int) -> None:
        """Raises CheckpointError naming the first module, in the order of calls, with a value that is not finite."""
        if not self._finite:
            return
        # One transfer from the GPU for all modules.
        is_finite = torch.stack([flag for _, _, flag in self._finite]).tolist()
        for (name, side, _), good in zip(self._finite, is_finite, strict=True):
            if not good:
                raise CheckpointError(
                    name,
                    "activations must be finite during calibration",
                    got=f"NaN or infinity in its {side}, batch {num_batches}",
                    cure="Look for a broken weight in this layer, or calibrate in BF16 instead of F16",
                )
        self._finite.clear()

    def finish(self, num_batches: int) -> None:
        """Sums over the ranks; raises RecipeError without batches, CheckpointError for a module never called."""
        if not num_batches:
            raise no_batch()
        if has_others():
            self._sum_over_ranks()
        silent = [name for name in self._modules if not self._tokens.get(name)]
        if silent:
            raise CheckpointError(
                silent[0],
                "every quantized module must be called during calibration",
                got=f"{len(silent)} modules without a token",
                cure="Keep them in the recipe",
            )

    def coverage(self) -> tuple[Coverage, ...]:
        """One entry for each quantized module, in their order."""
        return tuple(
            Coverage(module=name, tokens=self._tokens[name], routed=self._routed_to(name)) for name in self._modules
        )

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
        self._tokens = {name: sum(tokens.get(name, 0) for tokens, _ in of_ranks) for name in self._modules}
        self._routed = {name: sum(routed[name] for _, routed in of_ranks) for name in self._routed}

    def _count(self, name: str) -> Callable[..., None]:
        def hook(_module: nn.Module, args: tuple, kwargs: dict, output: Tensor) -> None:
            value = args[0] if args else next(iter(kwargs.values()))
            self._tokens[name] = self._tokens.get(name, 0) + value.numel() // value.shape[-1]
            for side, tensor in (("input", value), ("output", output)):
                if tensor.numel():
                    # The largest magnitude is NaN or infinite if any element is: one reduction, no mask.
                    self._finite.append((name, side, tensor.abs().amax().isfinite()))

        return hook

    def _count_routed(self, name: str, num_experts: int) -> Callable[..., None]:
        def hook(_module: nn.Module, args: tuple, kwargs: dict) -> None:
            index = kwargs["top_k_index"] if "top_k_index" in kwargs else args[1]
            counts = torch.bincount(index.flatten(), minlength=num_experts)[:num_experts]
            self._routed[name] = self._routed[name] + counts if name in self._routed else counts

        return hook


def no_batch() -> RecipeError:
    """The refusal of a rank that has nothing to calibrate with."""
    rule = "there must be a batch for every rank"
    return RecipeError("calibration", rule, got="none", cure="Raise calibration.samples")
