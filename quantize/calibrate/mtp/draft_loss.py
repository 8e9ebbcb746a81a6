"""How far drafts are from being accepted, as a loss whose gradient reaches the draft's hidden
states.

In: for each slot what the head multiplies, of the draft and of the target at the token that is
drafted.
Out: the sum of the loss over the slots, and its gradient.

p is the target's distribution and q the draft's; their overlap, the sum of min(p, q), is the share
of drafts that rejection sampling accepts (Leviathan et al., "Fast Inference from Transformers via
Speculative Decoding", 2023).

    tv         1 - overlap: the share that is rejected; a small gradient where they hardly overlap
    nla        -log overlap
    kl_div     the divergence of q from p
    lk_hybrid  kl_div where they hardly overlap, tv where they do: exp(-3 overlap) of it is kl_div
    ce         -log q of the target's choice: temperature 0, and nothing else of the target counts

Easy to get wrong: logits of a batch are gigabytes, with 150,000 tokens a vocabulary. They are made
for a few slots at a time, and are gone before the next ones; only the gradient of hidden states
stays.

Source: the names and their meaning are those of speculators (docs, "Loss Functions"), for drafts of
other kinds.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

SLOTS = 256
"""Slots whose logits are in memory together."""


def draft_loss(
    draft_NH: Tensor, target_NH: Tensor, heads: tuple[Any, Any], loss: str
) -> tuple[Tensor, Tensor]:
    """The loss of the drafts of one step.

    Args:
        draft_NH: what the head multiplies at N slots to draft a token.
        target_NH: what it multiplies where the target chooses that token.
        heads: of draft and target, mostly the same; they get no gradient.
        loss: its name.

    Returns: the sum over the slots, as a number on their device, and its gradient by `draft_NH`.
    """
    head, target_head = heads
    total = torch.zeros((), device=draft_NH.device)
    gradient_NH = torch.empty_like(draft_NH)
    for start in range(0, len(draft_NH), SLOTS):
        part = slice(start, start + SLOTS)
        states = draft_NH[part].detach().requires_grad_()
        with torch.no_grad():
            target_NV = target_head(target_NH[part]).float()
        with torch.enable_grad():
            value = losses(loss, target_NV, head(states).float()).sum()
        (gradient_NH[part],) = torch.autograd.grad(value, states)
        total += value.detach()
    return total, gradient_NH


def losses(loss: str, target_NV: Tensor, draft_NV: Tensor) -> Tensor:
    """[N]: the loss of each slot, from logits of target and draft."""
    if loss == "ce":
        return F.cross_entropy(draft_NV, target_NV.argmax(dim=-1), reduction="none")
    overlap_N = torch.minimum(target_NV.softmax(dim=-1), draft_NV.softmax(dim=-1)).sum(dim=-1)
    if loss == "tv":
        return 1 - overlap_N
    if loss == "nla":  # NaN has to stay: a clamp would hide it
        return -(overlap_N + torch.finfo(torch.float32).tiny).log()
    wanted, found = target_NV.log_softmax(dim=-1), draft_NV.log_softmax(dim=-1)
    divergence_N = F.kl_div(found, wanted, reduction="none", log_target=True).sum(dim=-1)
    if loss == "kl_div":
        return divergence_N
    assert loss == "lk_hybrid", loss
    share_N = torch.exp(-3 * overlap_N.detach())
    return share_N * divergence_N + (1 - share_N) * (1 - overlap_N)
