"""Losses of drafts against acceptance that is computed by hand, and their gradients against
PyTorch's own.
"""

import math
from typing import get_args

import pytest
import torch
from keepmtp.quantize.calibrate.mtp import draft_loss as module
from keepmtp.quantize.calibrate.mtp.draft_loss import draft_loss, losses
from keepmtp.recipes.schema import MtpTuned

LOSSES = get_args(MtpTuned.model_fields["loss"].annotation)
P = torch.tensor([[0.5, 0.3, 0.2], [0.9, 0.05, 0.05]])
Q = torch.tensor([[0.2, 0.3, 0.5], [0.05, 0.9, 0.05]])
ACCEPTED = (0.2 + 0.3 + 0.2, 0.05 + 0.05 + 0.05)


def test_the_loss_is_what_rejection_sampling_rejects():
    """Drafts are drawn and judged one by one: drawn from q, kept with probability min(1, p / q)."""
    found = losses("tv", P.log(), Q.log())
    assert found.tolist() == pytest.approx([1 - share for share in ACCEPTED], abs=1e-6)
    rng = torch.Generator().manual_seed(0)
    for slot, share in enumerate(ACCEPTED):
        drafts = torch.multinomial(Q[slot], 40_000, replacement=True, generator=rng)
        kept = torch.rand(40_000, generator=rng) < (P[slot] / Q[slot])[drafts]
        # Four standard errors.
        assert kept.float().mean().item() == pytest.approx(
            share, abs=4 * math.sqrt(share * (1 - share) / 40_000)
        )


def test_the_other_losses_by_hand():
    by_hand = {
        "nla": [-math.log(share) for share in ACCEPTED],
        "ce": [-math.log(0.2), -math.log(0.05)],
        "kl_div": [
            sum(p * math.log(p / q) for p, q in zip(*rows, strict=True))
            for rows in zip(P.tolist(), Q.tolist(), strict=True)
        ],
    }
    shares = [math.exp(-3 * share) for share in ACCEPTED]
    by_hand["lk_hybrid"] = [
        share * kl + (1 - share) * (1 - accepted)
        for share, kl, accepted in zip(shares, by_hand["kl_div"], ACCEPTED, strict=True)
    ]
    for name, values in by_hand.items():
        assert losses(name, P.log(), Q.log()).tolist() == pytest.approx(values, rel=1e-5), name
    assert losses("tv", P.log(), P.log()).tolist() == pytest.approx([0.0, 0.0], abs=1e-6)


@pytest.mark.parametrize("loss", LOSSES)
def test_slots_in_parts_are_all_slots_at_once(loss, monkeypatch):
    rng = torch.Generator().manual_seed(1)
    draft, target = (torch.randn(11, 8, generator=rng) for _ in range(2))
    heads = tuple(torch.nn.Linear(8, 50, bias=False).requires_grad_(False) for _ in range(2))
    whole = draft.clone().requires_grad_()
    value = losses(loss, heads[1](target), heads[0](whole)).sum()
    value.backward()
    for slots in (3, 256):
        monkeypatch.setattr(module, "SLOTS", slots)
        total, gradient = draft_loss(draft, target, heads, loss)
        torch.testing.assert_close(total, value.detach())
        torch.testing.assert_close(gradient, whole.grad)


def test_nan_is_not_hidden():
    bad = torch.tensor([[math.nan, 0.0, 1.0]])
    assert all(losses(loss, P[:1].log(), bad).isnan().all() for loss in LOSSES)
