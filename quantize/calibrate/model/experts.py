"""Experts of a model on the meta device as single linear layers, which is how checkpoints and algorithms see them.

In: a model whose routed experts are 3-D stacks. Out: the same model with one linear layer an expert and a projection.

Easy to get wrong: a gate may read constants of its experts (limits, slopes); the new modules keep them. And an output
is a sum in BF16, which rounds after each expert: experts are added in their order.
"""

from typing import Any, cast

import torch
from llmcompressor.modeling.moe.context import get_calibrate_all_experts_flag
from llmcompressor.modeling.moe.linear_experts import LinearExperts2D
from llmcompressor.modeling.moe.linearize import get_non_linearized_moes
from torch import Tensor

from ....recipes.errors import CheckpointError


def linear_experts(model: Any) -> None:
    """Replaces experts stored as 3-D stacks by one linear layer each, on the meta device, in place.

    Raises: CheckpointError where an expert module has a constructor or a forward of its own (Llama 4).
    """
    for name, module in get_non_linearized_moes(model):
        experts_class: Any = LinearExperts2D.get_linear_experts_cls(cast(Any, type(module)))
        has_common_code = all(
            getattr(experts_class, method) is getattr(LinearExperts2D, method) for method in ("__init__", "forward")
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
    """Experts whose tokens are found by one sort, where llm-compressor searches all tokens once for each expert.

    On a GPU each search waits until the GPU has done what it was given; this waits once. Outputs are the same bits:
    each expert computes the same rows, which are added in the same order.
    """

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Source: llm-compressor 0.14.0.1 modeling/moe/linear_experts.py.

        Args:
            hidden_states: [T, H].
            top_k_index: [T, K] int64, the experts of each token.
            top_k_weights: [T, K], their weights.
        """
        total = torch.zeros_like(hidden_states)
        sees_all = get_calibrate_all_experts_flag()
        for expert, tokens, weights in zip(self, *self._by_expert(top_k_index, top_k_weights), strict=False):
            if sees_all:
                rows = expert(hidden_states)[tokens]
            elif len(tokens):
                rows = expert(hidden_states[tokens])
            else:
                continue
            total.index_add_(0, tokens, (rows * weights).to(total.dtype))
        return total

    def _by_expert(self, index_TK: Tensor, weights_TK: Tensor) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """For each expert its tokens [n] and their weights [n, 1]; first choices before second ones, as in `where`."""
        experts = index_TK.t().flatten()
        order = experts.argsort(stable=True)
        counts = torch.bincount(experts, minlength=self.num_experts).tolist()
        tokens = order % len(index_TK)
        return tokens.split(counts), weights_TK.t().flatten()[order, None].split(counts)
