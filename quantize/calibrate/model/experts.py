"""Experts of a model on the meta device as single linear layers, which is how checkpoints and
algorithms see them.

In: a model whose routed experts are 3-D stacks. Out: the same model with one linear layer an expert
and a projection.

Easy to get wrong: a gate may read constants of its experts (limits, slopes); the new modules keep
them. And an output is a sum in BF16, which rounds after each expert: experts are added in their
order.
"""

from collections.abc import Collection
from typing import Any, cast

import torch
from llmcompressor.modeling.moe.context import get_calibrate_all_experts_flag
from llmcompressor.modeling.moe.linear_experts import LinearExperts2D
from llmcompressor.modeling.moe.linearize import get_non_linearized_moes
from torch import Tensor, nn

from ....recipes.errors import CheckpointError


def linear_experts(model: Any) -> None:
    """Replaces experts stored as 3-D stacks by one linear layer each, on the meta device, in place.

    Raises: CheckpointError where an expert module has a constructor or a forward of its own (Llama
    4).
    """
    for name, module in get_non_linearized_moes(model):
        experts_class: Any = LinearExperts2D.get_linear_experts_cls(cast(Any, type(module)))
        has_common_code = all(
            getattr(experts_class, method) is getattr(LinearExperts2D, method)
            for method in ("__init__", "forward")
        )
        if not has_common_code:
            raise CheckpointError(
                name,
                "experts must have the common layout to be calibrated",
                got=type(module).__name__,
                cure="Use a data-free scheme for this model",
            )
        sorted_class: Any = type("SortedExperts", (SortedExperts, experts_class), {})
        with torch.device("meta"):
            linear = sorted_class(getattr(module, "config", model.config))
        for key, value in vars(module).items():
            if isinstance(value, int | float) and not hasattr(linear, key):
                setattr(linear, key, value)
        model.set_submodule(name, linear)


class SortedExperts(LinearExperts2D):
    """Experts whose tokens are found by one sort, where llm-compressor searches all tokens once for
    each expert.

    On a GPU each search waits until the GPU has done what it was given; this waits once. Outputs
    are the same bits: each expert computes the same rows, which are added in the same order.

    Attributes:
        every_token: the experts that compute every token; None: all do under
            `moe_calibration_context`, else none.
    """

    every_token: Collection[nn.Module] | None = None

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Source: llm-compressor 0.14.0.1 modeling/moe/linear_experts.py.

        Args:
            hidden_states: [T, H].
            top_k_index: [T, K] int64, the experts of each token; first choices are added before
                second ones.
            top_k_weights: [T, K], their weights.
        """
        total = torch.zeros_like(hidden_states)
        sees_all = get_calibrate_all_experts_flag()
        chosen = top_k_index.t().flatten()
        order = chosen.argsort(stable=True)
        counts = torch.bincount(chosen, minlength=self.num_experts).tolist()
        tokens_of = (order % len(top_k_index)).split(counts)
        weights_of = top_k_weights.t().flatten()[order, None].split(counts)
        for expert, tokens, weights in zip(self, tokens_of, weights_of, strict=False):
            if sees_all if self.every_token is None else expert in self.every_token:
                rows = expert(hidden_states)[tokens]
            elif len(tokens):
                rows = expert(hidden_states[tokens])
            else:
                continue
            total.index_add_(0, tokens, (rows * weights).to(total.dtype))
        return total
