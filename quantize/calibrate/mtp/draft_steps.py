"""Draft steps of MTP blocks over whole sequences, as vLLM 0.32.0 runs them token by token.

In: filled blocks, token ids, and the target's hidden states. Out: for each step, what the head multiplies. Slot i of
draft step k predicts token i + k + 1:

    step 1, slot i: token i+1, hidden state of the target at i,     position i
    step k, slot i: token i+k, hidden state of step k-1 at slot i,  position i+k-1

Easy to get wrong: what step k attends to. vLLM's cache has step 1's keys for each token that the target has confirmed;
later steps append their own only. So slot i of step k sees step 1 at slots <= i, and of the later steps slot i alone. A
causal pass over the states of step 2 is a block that vLLM never runs.

Source: vLLM 0.32.0 v1/spec_decode/llm_base_proposer.py (`propose`), v1/spec_decode/step3p5.py for blocks that take one
step each.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import DynamicCache

if TYPE_CHECKING:  # the block's forward makes its mask here
    from .mtp_block import MtpBlock

# Attention of these kinds caches what its indexer chooses keys by.
_INDEXED = frozenset({"deepseek_sparse_attention", "minimax_m3_sparse", "qwen_sparse_attention"})


def draft_steps(
    blocks: "Sequence[MtpBlock]", embedding: nn.Module, *, ids: Tensor, hidden: Tensor, num_steps: int
) -> list[Tensor]:
    """Head inputs of draft steps 1..num_steps, each [B, T, H]; the last k slots of step k have no real target.

    Args:
        blocks: one block that takes every step, or one block a step, as Step-3.5 has them.
        embedding: the target's token embedding.
        ids: [B, T] int64; every step reads the true tokens, as a server does after drafts that were accepted.
        hidden: the target's hidden states, see `MtpBlock.forward`.
        num_steps: at most as many as there are blocks, if there are several.
    """
    assert len(blocks) == 1 or num_steps <= len(blocks)
    cache = new_cache(blocks[0])
    positions: list[Tensor] = []
    outputs: list[Tensor] = []
    for step in range(1, num_steps + 1):
        block = blocks[min(step, len(blocks)) - 1]
        if len(blocks) > 1:
            cache, positions = new_cache(block), []
        positions.append(_positions(ids, step))
        mask = step_mask(positions, block.window)
        output, hidden = block(embedding(_shifted(ids, step)), hidden, positions[-1], mask, cache)
        outputs.append(output)
    return outputs


def new_cache(block: "MtpBlock") -> DynamicCache:
    """An empty cache for `block` that holds every key: the mask decides what a slot may see.

    Indexers want a cache of their own kind; the kind for a sliding window would forget keys that step 1 left.
    """
    return DynamicCache(config=block.config) if block.kind in _INDEXED else DynamicCache()


def step_mask(positions: Sequence[Tensor], window: int | None) -> Tensor:
    """[T, steps * T] bool: where slots of the last step may attend; the cache holds the steps one after another.

    Args:
        positions: [T] of each step.
        window: how many tokens back a slot sees, itself counted.
    """
    length, device = len(positions[-1]), positions[-1].device
    causal = torch.ones(length, length, dtype=torch.bool, device=device).tril()
    itself = torch.eye(length, dtype=torch.bool, device=device)
    mask = torch.cat([causal, *[itself] * (len(positions) - 1)], dim=1)
    if window is not None:
        mask &= positions[-1][:, None] - torch.cat(list(positions))[None] < window
    return mask


def step_targets(values_BT: Tensor, step: int) -> Tensor:
    """Values of tokens, aligned with the slots that predict them: slot i gets that of token i + step + 1, 0 past the
    end. Step 0 is the target itself.
    """
    return _shifted(values_BT, step + 1)


def _positions(ids_BT: Tensor, step: int) -> Tensor:
    """[T]: the positions of each step are one further than those of the step before."""
    return torch.arange(ids_BT.shape[1], device=ids_BT.device) + step - 1


def _shifted(values_BT: Tensor, shift: int) -> Tensor:
    return F.pad(values_BT[:, shift:], (0, shift))
