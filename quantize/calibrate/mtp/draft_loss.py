"""How far drafts are from being accepted, as a loss whose gradient reaches the draft's hidden
states.

In: for each slot what the head multiplies, of the draft and of the target at the token that is
drafted. Out: the sum of the loss over the slots, and its gradient.

p is the target's distribution and q the draft's; their overlap, the sum of min(p, q), is the share
of drafts that rejection sampling accepts (Leviathan et al., "Fast Inference from Transformers via
Speculative Decoding", 2023).

    tv         1 - overlap: the share that is rejected; a small gradient where they hardly overlap
    nla        -log overlap
    kl_div     the divergence of q from p
    lk_hybrid  kl_div where they hardly overlap, else tv: a share of exp(-3 overlap) of kl_div
    ce         -log q of the target's choice: temperature 0, and nothing else of the target counts

Easy to get wrong: logits of a batch are gigabytes, with 150,000 tokens a vocabulary. They are made
for a few slots at a time, and are gone before the next ones; only the gradient of hidden states
stays.

Source: the names and their meaning are those of speculators (docs, "Loss Functions"), for drafts of
other kinds.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

SLOTS = 256
"""Slots whose logits are in memory together."""
COPIES = 6
"""F32 values of each logit that are there at a time: of draft and target, their distributions and
the gradients.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftLoss:
    """The loss of some slots.

    Attributes:
        total: summed over them, as a number on their device.
        gradient: [N, H] of the total by the draft's hidden states.
    """

    total: Tensor
    gradient: Tensor


def draft_loss(draft_NH: Tensor, target_NH: Tensor, heads: tuple[Any, Any], loss: str) -> DraftLoss:
    """The loss of the drafts of one step.

    Args:
        draft_NH: what the head multiplies at N slots to draft a token.
        target_NH: what it multiplies where the target chooses that token.
        heads: of draft and target, mostly the same; they get no gradient.
        loss: its name.
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
            value = LOSSES[loss](target_NV, head(states).float()).sum()
        (gradient_NH[part],) = torch.autograd.grad(value, states)
        total += value.detach()
    return DraftLoss(total=total, gradient=gradient_NH)


def overlap(target_NV: Tensor, draft_NV: Tensor) -> Tensor:
    """[N]: the share of drafts that rejection sampling accepts at temperature 1, from logits."""
    return torch.minimum(target_NV.softmax(dim=-1), draft_NV.softmax(dim=-1)).sum(dim=-1)


def _tv(target_NV: Tensor, draft_NV: Tensor) -> Tensor:
    return 1 - overlap(target_NV, draft_NV)


def _nla(target_NV: Tensor, draft_NV: Tensor) -> Tensor:
    # NaN has to stay: a clamp would hide it.
    return -(overlap(target_NV, draft_NV) + torch.finfo(torch.float32).tiny).log()


def _kl_div(target_NV: Tensor, draft_NV: Tensor) -> Tensor:
    wanted, found = target_NV.log_softmax(dim=-1), draft_NV.log_softmax(dim=-1)
    return F.kl_div(found, wanted, reduction="none", log_target=True).sum(dim=-1)


def _lk_hybrid(target_NV: Tensor, draft_NV: Tensor) -> Tensor:
    shared = overlap(target_NV, draft_NV)
    share = torch.exp(-3 * shared.detach())
    return share * _kl_div(target_NV, draft_NV) + (1 - share) * (1 - shared)


def _ce(target_NV: Tensor, draft_NV: Tensor) -> Tensor:
    return F.cross_entropy(draft_NV, target_NV.argmax(dim=-1), reduction="none")


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "tv": _tv,
    "nla": _nla,
    "lk_hybrid": _lk_hybrid,
    "kl_div": _kl_div,
    "ce": _ce,
}
"""Name -> loss of each slot, from logits of target and draft."""
