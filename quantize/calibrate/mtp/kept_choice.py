"""Sparse attention whose later draft steps read the keys that step 1 chose, as vLLM does where config.json says so.

In: a block whose attention has an indexer. Out: hooks on its indexers that repeat, in later steps, what step 1 chose
for the same slot.

Easy to get wrong: such a step does not see its own key. Step 1 chose among the tokens that the target has confirmed,
and nobody chooses afterwards.

Source: vLLM 0.32.0 v1/spec_decode/llm_base_proposer.py and v1/worker/gpu/spec_decode/mtp/speculator.py
(`index_share_for_mtp_iteration`), models/deepseek_v32/nvidia/mtp.py (`set_skip_topk`, `compact_topk_indices`).
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

KEY = "index_share_for_mtp_iteration"
"""The key of config.json. A server's `speculative_config` may say otherwise, which nobody knows here."""


class KeptChoice:
    """State: what each indexer chose in step 1, and how many keys there are now."""

    def __init__(self, block: nn.Module):
        """Put hooks on the indexers under `block`."""
        self._chosen: dict[nn.Module, Tensor] = {}
        self._is_first, self._num_keys = True, 0
        for module in block.modules():
            indexer = getattr(module, "indexer", None)
            if isinstance(indexer, nn.Module):
                indexer.register_forward_hook(self._repeat)

    def begin(self, mask_TS: Tensor) -> None:
        """A step begins; in step 1 there are as many keys as slots."""
        num_slots, self._num_keys = mask_TS.shape
        self._is_first = num_slots == self._num_keys

    def _repeat(self, indexer: nn.Module, _args: Any, output: Tensor) -> Tensor:
        if self._is_first:
            self._chosen[indexer] = output
            return output
        chosen = self._chosen[indexer]
        if not chosen.is_floating_point():  # places of keys; those of step 1 are the first
            return chosen
        added = self._num_keys - chosen.shape[-1]  # a mask to be added to that of attention
        return F.pad(chosen, (0, added), value=torch.finfo(chosen.dtype).min)


def keeps_choice(config: Mapping[str, Any]) -> bool:
    """Whether vLLM's drafts repeat the choice of step 1, by config.json alone.

    Args:
        config: that of the language model.
    """
    return bool(config.get(KEY, False))
