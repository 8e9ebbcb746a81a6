"""What a backbone predicts on held-out text: its perplexity, its first choices, and how far they
moved.

In: a finished backbone pass with the hidden states of held-out text after its last layer, and for a
quantized one the backbone as released. Out: a `Target`, with a row for each held-out sequence:
greedy choices, log likelihood, and the divergence from the other's predictions. An MTP block is
measured against it (`acceptance.py`).

Easy to get wrong: a divergence is of all that a model might say next, over every slot. Perplexity
looks at the text's own token alone, which may become likelier by chance while the model gets worse.
"""

import math
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from ....recipes.family import HFName
from ...run.ranks import gathered
from ...run.statistics import read_metadata, write_statistics
from ..layers.backbone import Backbone
from ..model.skeleton import Batch, Skeleton
from ..model.states import Stream
from .mtp_block import MtpBlock

_SLOTS_AT_ONCE = 256
"""Slots whose predictions are compared at a time: in F32, those of a whole sequence are
gigabytes.
"""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Target:
    """One backbone on the held-out text of its pass.

    Attributes:
        backbone: the finished pass.
        stream: whose hidden states are its own: `source` for the backbone as released, `served` for
            the quantized one.
        choices: [R, S] int64 on the CPU, its greedy choice after each token.
        log_likelihoods: [R] float64, of each sequence's tokens but the first, natural, summed.
        reference: what it is compared with; None for the released model.
        divergences: [R] float64, the Kullback-Leibler divergence of its predictions from the
            reference's, natural, summed over each sequence's slots; zero without a reference.
    """

    backbone: Backbone
    stream: Stream
    choices: Tensor
    log_likelihoods: Tensor
    reference: "Target | None"
    divergences: Tensor

    @property
    def perplexity(self) -> float:
        """Per token that is predicted and known: all but the first of each sequence."""
        likelihood = math.fsum(self.log_likelihoods.tolist())
        return math.exp(min(-likelihood / self.choices[:, 1:].numel(), 700.0))

    @property
    def divergence(self) -> float:
        """Nats a slot, the last slot of each sequence included."""
        return math.fsum(self.divergences.tolist()) / self.choices.numel()

    @property
    def agreement(self) -> float:
        """Share of slots where it chooses what the reference chooses."""
        other = self if self.reference is None else self.reference
        return (self.choices == other.choices).sum().item() / self.choices.numel()


def target(backbone: Backbone, stream: Stream, *, reference: Target | None = None) -> Target:
    """The choices and the perplexity of one backbone on held-out text, and how far it is from
    another one.

    It is kept in the pass's folder, for a run that goes on, and a sum is of the same numbers in the
    same order whatever the number of processes.

    Args:
        backbone: a finished pass.
        stream: `source` for the backbone as released, `served` for the quantized one.
        reference: what it is compared with, over the same text.
    """
    name = f"target-{stream}-compared" if reference else f"target-{stream}"
    path = backbone.folder / "figures" / f"{name}.safetensors"
    if not backbone.ranks.of_first(path.is_file):
        rows: dict[int, tuple[Tensor, float, float]] = {}
        for of_rank in gathered(_measured(backbone, stream, reference)):
            rows |= of_rank
        choices, *sums = zip(*(rows[row] for row in sorted(rows)), strict=True)
        if backbone.ranks.is_first:
            tensors = {HFName("choices"): torch.stack(choices)}
            for key, values in zip(("log_likelihoods", "divergences"), sums, strict=True):
                tensors[HFName(key)] = torch.tensor(values, dtype=torch.float64)
            write_statistics(path, tensors, {})
        backbone.ranks.wait()
    read_metadata(path)  # a damaged file is refused
    return Target(backbone=backbone, stream=stream, reference=reference, **load_file(path))


def _measured(
    backbone: Backbone, stream: Stream, reference: Target | None
) -> dict[int, tuple[Tensor, float, float]]:
    """This rank's rows: choices, log likelihood, divergence."""
    found, skeletons, others = {}, [backbone.skeleton], iter(())
    if reference is not None:
        others = sequences(reference.backbone, reference.stream)
        if reference.backbone.skeleton is not backbone.skeleton:
            skeletons.append(reference.backbone.skeleton)
    with torch.no_grad(), ExitStack() as stack:
        for skeleton in skeletons:
            stack.enter_context(skeleton.head())
        for sequence in sequences(backbone, stream):
            logits_SV, apart = _logits(skeletons[0], sequence), 0.0
            ids_S = sequence.ids[0].to(logits_SV.device)
            loss = F.cross_entropy(logits_SV[:-1].float(), ids_S[1:], reduction="sum").item()
            if other := next(others, None):
                apart = divergence(_logits(skeletons[-1], other), logits_SV)
            found[sequence.first] = logits_SV.argmax(dim=-1).cpu(), -loss, apart
    return found


def divergence(reference_SV: Tensor, logits_SV: Tensor) -> float:
    """Kullback-Leibler divergence of predictions from the reference's, natural, summed over the
    slots.

    Args:
        reference_SV: logits in any dtype.
        logits_SV: logits on the same device.
    """
    total = 0.0
    for pair in zip(
        reference_SV.split(_SLOTS_AT_ONCE), logits_SV.split(_SLOTS_AT_ONCE), strict=True
    ):
        wanted, found = (F.log_softmax(part.float(), dim=-1) for part in pair)
        total += F.kl_div(found, wanted, reduction="sum", log_target=True).item()
    return max(0.0, total)


def sequences(backbone: Backbone, stream: Stream) -> Iterator[Batch]:
    """This rank's sequences one by one: logits of a batch may not fit."""
    for batch in backbone.batches(stream).batches():
        assert batch.state is not None
        for row in range(len(batch.ids)):
            state = tuple(None if part is None else part[row : row + 1] for part in batch.state)
            yield Batch(ids=batch.ids[row : row + 1], state=state, first=batch.first + row)


def _logits(skeleton: Skeleton, sequence: Batch) -> Tensor:
    return computed(skeleton, skeleton.model, sequence).logits[0]


def computed(skeleton: Skeleton, module: Any, batch: Batch) -> Any:
    """What the model, or its decoder, computes from the states after the last layer."""
    (output,) = [
        module(**arguments, use_cache=False) for arguments in skeleton.feed(len(skeleton), [batch])
    ]
    return output


def head_input(skeleton: Skeleton, batch: Batch) -> Tensor:
    """[B, S, H]: what the target's head multiplies, after the final norm."""
    return computed(skeleton, skeleton.model.get_decoder(), batch).last_hidden_state


def block_input(skeleton: Skeleton, block: MtpBlock, batch: Batch) -> Tensor:
    """The hidden states an MTP block reads for the tokens of a batch: after the final norm, or
    before it.
    """
    if block.draft.reads_normed:
        hidden = head_input(skeleton, batch)
    else:
        assert batch.state is not None and batch.state[0] is not None
        hidden = batch.state[0].to(skeleton.device)
    # A foreign model may have computed it in inference mode, whose tensors nothing may be hooked
    # to.
    return hidden.clone() if hidden.is_inference() else hidden
