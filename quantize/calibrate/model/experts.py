"""Experts of a model on the meta device as single linear layers, which is how checkpoints and
algorithms see them.

In: a model whose routed experts are 3-D stacks. Out: the same model with one linear layer an expert
and a projection.

Easy to get wrong: a gate may read constants of its experts (limits, slopes); the new modules keep
them.
"""

from typing import Any, cast

import torch
from llmcompressor.modeling.moe.linear_experts import LinearExperts2D
from llmcompressor.modeling.moe.linearize import get_non_linearized_moes

from ....recipes.errors import CheckpointError


def linear_experts(model: Any) -> None:
    """Replaces experts stored as 3-D stacks by one linear layer each, on the meta device, in place.

    Raises: CheckpointError where an expert module has a constructor or a forward of its own (Llama
    4).
    """
    for name, module in get_non_linearized_moes(model):
        experts_class: Any = LinearExperts2D.get_linear_experts_cls(cast(Any, type(module)))
        own = experts_class.__init__, experts_class.forward
        if own != (LinearExperts2D.__init__, LinearExperts2D.forward):
            raise CheckpointError(
                name,
                "experts must have the common layout to be calibrated",
                got=type(module).__name__,
                cure="Use a data-free scheme for this model",
            )
        with torch.device("meta"):
            linear = experts_class(getattr(module, "config", model.config))
        for key, value in vars(module).items():
            if isinstance(value, int | float) and not hasattr(linear, key):
                setattr(linear, key, value)
        model.set_submodule(name, linear)
