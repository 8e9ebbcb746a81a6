"""Run an MTP block over whole sequences exactly as vLLM 0.32 runs it one token at a time.

In: an MTP block, the tokens, the target's final-normed hidden states. Out: for each draft step k
the hidden states from which the draft head predicts. Slot i of step k predicts token i + k + 1:

    step 1, slot i: token i+1, hidden of the target at i,     position i
    step k, slot i: token i+k, hidden of step k-1 at slot i,  position i+k-1

Both families hand the MTP block the hidden state AFTER the target's final norm (glm4_moe.py and
qwen3_5.py return it so), and feed its own output back for the next draft
(v1/spec_decode/llm_base_proposer.py, `propose`).

The easy thing to get wrong is what step k attends to. In vLLM the cache holds step 1 entries for
every token the target has confirmed, and later drafts append only their own entry; so slot i of
step k sees step 1 at slots <= i, and of steps 2..k only slot i. Running step 2 as a plain causal
pass over step 2 states trains a block that vLLM never runs.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import DynamicCache


def draft_hidden(
    mtp: Any, embedding: nn.Embedding, *, ids_BT: Tensor, hidden_BTH: Tensor, num_steps: int
) -> list[Tensor]:
    """Head inputs of draft steps 1..num_steps, each [B, T, H]; the last k slots of step k have no
    real target.

    Args:
        mtp: the block. `mtp(embeds_BTH, hidden_BTH, positions_T, mask_TS, cache)` gives the hidden
            state that is fed back, and `mtp.head_input` of it what the shared `lm_head` multiplies.
        embedding: the target's token embedding, shared with the block.
        ids_BT: [B, T] int64, padded on the right.
        hidden_BTH: [B, T, H], the target's hidden states after its final norm.
        num_steps: recursive steps; every step is fed the true tokens, as after accepted drafts.
    """
    length = ids_BT.shape[1]
    cache = DynamicCache()
    outputs: list[Tensor] = []
    for step in range(1, num_steps + 1):
        embeds_BTH = embedding(_shifted(ids_BT, step))
        positions_T = torch.arange(step - 1, step - 1 + length)
        hidden_BTH = mtp(embeds_BTH, hidden_BTH, positions_T, _draft_mask(length, step), cache)
        outputs.append(mtp.head_input(hidden_BTH))
    return outputs


def step_targets(values_BT: Tensor, step: int) -> Tensor:
    """Align per-token values with the slots that predict them: slot i gets the value of token i +
    step + 1.

    Step 0 is the target model itself. Slots past the end get 0.
    """
    return _shifted(values_BT, step + 1)


def _shifted(values_BT: Tensor, shift: int) -> Tensor:
    return F.pad(values_BT[:, shift:], (0, shift))


def _draft_mask(length: int, step: int) -> Tensor:
    """[T, step * T] bool, True where a slot of `step` may attend; the cache holds the steps one
    after another.
    """
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    itself = torch.eye(length, dtype=torch.bool)
    return torch.cat([causal, *[itself] * (step - 1)], dim=1)
