"""Model code that computes under `torch.inference_mode`: found before calibration, then refused or
run under `no_grad`.

In: a model, and one batch it can be called with. Out: `guard`, a context in which no forward of the
model makes inference tensors; CheckpointError where that cannot be had.

Easy to get wrong: weights that are loaded inside such a forward are inference tensors, and GPTQ's
write to them fails hours later, at the first such layer: "Inplace update to inference tensor
outside InferenceMode" (llm-compressor #2745). llm-compressor's own warning looks at
`module.forward` of each instance, which calibration has replaced by then, and is silent in the
pipeline that crashes. A decorator could be seen on the class, `with torch.inference_mode()` inside
a forward only when it runs; so the model is run once.

Source: torch 2.13 autograd/grad_mode.py (`inference_mode`), compressed-tensors 0.19.0
offload/cache/base.py (`__setitem__`, the write that fails), llm-compressor 0.14.0.1
utils/transformers.py (`warn_inference_mode_forwards`).
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, Literal

import torch
from compressed_tensors.utils import patch_attr
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from ....recipes.errors import CheckpointError
from .hooks import hooked


@contextmanager
def without_inference_mode() -> Iterator[None]:
    """`torch.inference_mode` is `torch.no_grad` meanwhile, in this process.

    The class itself is changed, because a forward enters it from its source, or from a decorator's
    closure that nobody else can reach: a forward on the instance is passed over by
    `super().forward` and by llm-compressor's wrapper, which look it up on the class (checked
    against torch 2.13, compressed-tensors 0.19.0 offload/module.py).
    """

    def enter(self: Any) -> None:
        self._inference_mode_context = torch.no_grad() if self.mode else torch.enable_grad()
        self._inference_mode_context.__enter__()

    with patch_attr(torch.inference_mode, "__enter__", enter):
        yield


def modules_in_inference_mode(model: nn.Module, batch: Mapping[str, Any]) -> list[str]:
    """Run the model once and name the modules of one class in whose forward inference mode begins.

    Args:
        model: with weights for whatever the batch reaches.
        batch: the model's keyword arguments, [1, S] is enough.

    Returns: "" is the model itself; empty if all tensors are ordinary. A module that only holds an
        inference tensor (a table built under inference mode) counts as one.
    """
    finder = _InferenceModeFinder(model)
    with torch.no_grad(), finder.hooked(), finder:
        model(**batch)
    return next(iter(finder.begun.values()), [])


@contextmanager
def guard(
    model: nn.Module, batch: Mapping[str, Any], *, policy: Literal["refuse", "unwrap"]
) -> Iterator[None]:
    """The context to calibrate in: in it, no forward of the model computes under inference mode.

    Args:
        model: as it will be calibrated.
        batch: one sample.
        policy: the recipe's `calibration.decorated_forward`.

    Raises: CheckpointError naming class and module.
    """
    with without_inference_mode() if policy == "unwrap" else nullcontext():
        found = modules_in_inference_mode(model, batch)
        if found:
            cls = type(model.get_submodule(found[0]))
            more = f" and {len(found) - 1} more" if len(found) > 1 else ""
            file = cls.__module__.rpartition(".")[2]
            raise CheckpointError(
                f"{file}.{cls.__qualname__}.forward",
                "must not compute under torch.inference_mode: calibration cannot write the "
                "weights that were loaded in it (llm-compressor #2745)",
                got=f"inference mode at {found[0] or 'the model itself'}{more}",
                cure="Set calibration.decorated_forward: unwrap, or write torch.no_grad instead "
                f"in {file}.py",
            )
        yield


class _InferenceModeFinder(TorchFunctionMode):
    """State: the modules being run, and those that began inference mode.

    Every call of a torch function is seen, so a `with` block is found even if what leaves it is
    cloned, and a module's parameters are found however they are used.
    """

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model
        self.begun: dict[type, list[str]] = {}
        self._running: list[tuple[str, nn.Module, bool]] = []

    @contextmanager
    def hooked(self) -> Iterator[None]:
        """Hooks on every module that note which are running, and whether inference mode was on when
        they began.
        """

        def enter(name: str) -> Callable[..., None]:
            return lambda module, _: self._running.append(
                (name, module, torch.is_inference_mode_enabled())
            )

        def leave(*_: Any) -> None:
            self._running.pop()

        modules = dict(self.model.named_modules())
        hooks = [
            module.register_forward_pre_hook(enter(name), prepend=True)
            for name, module in modules.items()
        ]
        hooks += [
            module.register_forward_hook(leave, always_call=True) for module in modules.values()
        ]
        with hooked(hooks):
            yield

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        # Once a module is named, inference tensors may come from it; before that, one is the
        # running module's own.
        leaves = [] if self.begun else pytree.tree_leaves((args, kwargs, result))
        is_any = any(isinstance(leaf, Tensor) and leaf.is_inference() for leaf in leaves)
        if torch.is_inference_mode_enabled() or is_any:
            outside = [(name, module) for name, module, is_on in self._running if not is_on]
            name, module = outside[-1] if outside else ("", self.model)
            where = self.begun.setdefault(type(module), [])
            if name not in where:
                where.append(name)
        return result
