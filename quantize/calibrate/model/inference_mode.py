"""Model code that computes under `torch.inference_mode`: refused, or run under `no_grad`.

In: a model, and the recipe's policy. Out: `guard`, a context in which no forward of the model makes
inference tensors; CheckpointError where one begins to.

Easy to get wrong: weights that are loaded inside such a forward are inference tensors, and GPTQ's
write to them fails hours later, at the first such layer: "Inplace update to inference tensor
outside InferenceMode" (llm-compressor #2745). llm-compressor's own warning looks at
`module.forward` of each instance, which calibration has replaced by then, and is silent in the
pipeline that crashes. A decorator could be seen on the class, `with torch.inference_mode()` inside
a forward only when it runs.

Source: torch 2.13 autograd/grad_mode.py (`inference_mode`), compressed-tensors 0.19.0
offload/cache/base.py (`__setitem__`, the write that fails), llm-compressor 0.14.0.1
utils/transformers.py (`warn_inference_mode_forwards`).
"""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from compressed_tensors.utils import patch_attr
from torch import nn

from ....recipes.errors import CheckpointError


@contextmanager
def guard(model: nn.Module, *, policy: Literal["refuse", "unwrap"]) -> Iterator[None]:
    """The context to calibrate in: in it, no forward of the model computes under inference mode.

    Args:
        model: as it will be calibrated.
        policy: the recipe's `calibration.decorated_forward`: `torch.inference_mode` is refused in a
            forward, or it is `torch.no_grad` meanwhile, in this process.

    Raises: CheckpointError naming class and module.
    """

    def enter(self: Any) -> None:
        if self.mode and policy == "refuse":
            _refuse(model)
        self._inference_mode_context = torch.no_grad() if self.mode else torch.enable_grad()
        self._inference_mode_context.__enter__()

    # The class itself is changed, because a forward enters it from its source, or from a
    # decorator's closure that nobody else can reach: a forward on the instance is passed over by
    # `super().forward` and by llm-compressor's wrapper, which look it up on the class (checked
    # against torch 2.13, compressed-tensors 0.19.0 offload/module.py).
    with patch_attr(torch.inference_mode, "__enter__", enter):
        yield


def _refuse(model: nn.Module) -> None:
    """The innermost module that is running is to blame; code that runs outside of all may go on."""
    frame, names = inspect.currentframe(), {module: name for name, module in model.named_modules()}
    while frame is not None:
        module = frame.f_locals.get("self")
        if isinstance(module, nn.Module) and module in names:
            cls = type(module)
            file = cls.__module__.rpartition(".")[2]
            raise CheckpointError(
                f"{file}.{cls.__qualname__}.forward",
                "must not compute under torch.inference_mode: calibration cannot write the weights "
                "that were loaded in it (llm-compressor #2745)",
                got=f"inference mode at {names[module] or 'the model itself'}",
                cure="Set calibration.decorated_forward: unwrap, or write torch.no_grad instead in "
                f"{file}.py",
            )
        frame = frame.f_back
