"""What a backbone predicts on held-out text: its perplexity, its first choices, and how far they moved.

In: a finished backbone pass with the hidden states of held-out text after its last layer, and for a quantized one the
backbone as released. Out: a `Target`, by held-out sequence: greedy choices, log likelihood, and the divergence from the
other's predictions.

Easy to get wrong: a divergence is of all that a model might say next, over every slot. Perplexity looks at the text's
own token alone, which may become likelier by chance while the model gets worse.
"""

import math
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import repeat
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from ....recipes.family import HFName
from ...run.statistics import write_statistics
from ..layers.backbone import Backbone
from ..model.skeleton import Batch, Skeleton
from ..model.states import Stream

_SLOTS_AT_ONCE = 256
"""Slots whose predictions are compared at a time: in F32, those of a whole sequence are gigabytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetRow:
    """One backbone on one held-out sequence.

    Attributes:
        choices: [S] int64 on the CPU, its greedy choice after each token.
        log_likelihood: of the sequence's tokens but the first, natural, summed.
        divergence: the Kullback-Leibler divergence of its predictions from the reference's, natural, summed over the
            sequence's slots; None where it is compared with nothing.
    """

    choices: Tensor
    log_likelihood: float
    divergence: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """One backbone on the held-out text; `rows` are by their number in `held_out_ids`."""

    rows: dict[int, TargetRow]

    @property
    def choices(self) -> dict[int, Tensor]:
        """By row, [S] int64 on the CPU: its greedy choice after each token."""
        return {number: row.choices for number, row in self.rows.items()}

    @property
    def num_slots(self) -> int:
        """Slots where it predicts, the last of each sequence included."""
        return sum(len(row.choices) for row in self.rows.values())

    @property
    def num_tokens(self) -> int:
        """Predicted tokens that are known: all but the first of each sequence."""
        return self.num_slots - len(self.rows)

    @property
    def log_likelihood(self) -> float:
        """Theirs, natural, summed."""
        return math.fsum(row.log_likelihood for row in self.rows.values())

    @property
    def perplexity(self) -> float:
        """Per token."""
        return math.exp(min(-self.log_likelihood / self.num_tokens, 700.0))

    @property
    def divergence(self) -> float:
        """Nats a slot, see `TargetRow`; 0 where it is compared with nothing."""
        return math.fsum(row.divergence or 0.0 for row in self.rows.values()) / self.num_slots


Reference = tuple[Backbone, Stream]
"""A finished pass over the same held-out text and one of its streams: whose predictions another's are compared with."""


def target(backbone: Backbone, stream: Stream, *, reference: Reference | None = None) -> Target:
    """The choices and the perplexity of one backbone on held-out text, and how far it is from another one.

    Each rank measures its rows and leaves them in the pass's folder, where all read all: another number of processes
    can go on with them, and sums the same numbers in the same order.

    Args:
        backbone: a finished pass.
        stream: `source` for the backbone as released, `served` for the quantized one.
        reference: what it is compared with, the backbone as released.
    """
    known = _measured_rows(backbone, stream, reference)
    own = [row for first, last in backbone.batches(stream).ranges() for row in range(first, last)]
    if not known.keys() >= {*own}:
        _keep_rows(backbone, stream, _measured(backbone, stream, reference))
    backbone.ranks.wait()
    return Target(rows=_measured_rows(backbone, stream, reference))


def _measured(backbone: Backbone, stream: Stream, reference: Reference | None) -> dict[int, TargetRow]:
    """This rank's rows."""
    found: dict[int, TargetRow] = {}
    skeletons = {id(each.skeleton): each.skeleton for each in (backbone, *(reference or ())[:1])}
    with torch.no_grad(), ExitStack() as stack:
        for skeleton in skeletons.values():
            stack.enter_context(skeleton.head())
        others = sequences(*reference) if reference else repeat((0, None))
        for (row, sequence), (_, other) in zip(sequences(backbone, stream), others, strict=False):
            logits_SV = _logits(backbone.skeleton, sequence)
            ids_S = sequence.ids[0].to(logits_SV.device)
            likelihood = -F.cross_entropy(logits_SV[:-1].float(), ids_S[1:], reduction="sum")
            apart = None
            if reference is not None and other is not None:
                apart = divergence(_logits(reference[0].skeleton, other), logits_SV)
            found[row] = TargetRow(
                choices=logits_SV.argmax(dim=-1).cpu(), log_likelihood=likelihood.item(), divergence=apart
            )
    return found


def _logits(skeleton: Skeleton, sequence: Batch) -> Tensor:
    return computed(skeleton, skeleton.model, sequence).logits[0]


def divergence(reference_SV: Tensor, logits_SV: Tensor) -> float:
    """Kullback-Leibler divergence of predictions from the reference's, natural, summed over the slots.

    Args:
        reference_SV: logits in any dtype.
        logits_SV: logits on the same device.
    """
    total = 0.0
    for pair in zip(reference_SV.split(_SLOTS_AT_ONCE), logits_SV.split(_SLOTS_AT_ONCE), strict=True):
        wanted, found = (F.log_softmax(part.float(), dim=-1) for part in pair)
        total += F.kl_div(found, wanted, reduction="sum", log_target=True).item()
    return max(0.0, total)


def _keep_rows(backbone: Backbone, stream: Stream, rows: Mapping[int, TargetRow]) -> None:
    path = backbone.folder / "figures" / f"target-{stream}-{min(rows):06d}-{max(rows) + 1:06d}.safetensors"
    divergences = [row.divergence for row in rows.values() if row.divergence is not None]
    tensors = {
        HFName("rows"): torch.tensor([*rows]),
        HFName("choices"): torch.stack([row.choices for row in rows.values()]),
        HFName("log_likelihood"): torch.tensor([row.log_likelihood for row in rows.values()], dtype=torch.float64),
    }
    if divergences:
        tensors[HFName("divergence")] = torch.tensor(divergences, dtype=torch.float64)
    write_statistics(path, tensors, {"fingerprint": (backbone.folder / "fingerprint").read_text()})


def _measured_rows(backbone: Backbone, stream: Stream, reference: Reference | None) -> dict[int, TargetRow]:
    """What any process has left for this stream, by row, in the order of the rows."""
    found: dict[int, TargetRow] = {}
    for path in sorted((backbone.folder / "figures").glob(f"target-{stream}-*.safetensors")):
        kept = load_file(path)
        if reference is not None and "divergence" not in kept:  # it was compared with nothing
            continue
        apart = kept["divergence"].tolist() if "divergence" in kept else [None] * len(kept["rows"])
        values = zip(kept["choices"], kept["log_likelihood"].tolist(), apart, strict=True)
        rows = [TargetRow(choices=own, log_likelihood=likely, divergence=far) for own, likely, far in values]
        found |= dict(zip(kept["rows"].tolist(), rows, strict=True))
    return dict(sorted(found.items()))


def agreement(one: Target, other: Target) -> float:
    """Share of slots of held-out text where two backbones choose the same token."""
    same = [(choices == other.choices[row]).sum().item() for row, choices in one.choices.items()]
    return sum(same) / sum(map(len, one.choices.values()))


def decoder_output(skeleton: Skeleton, batch: Batch) -> Tensor:
    """[B, S, H]: what the target's head multiplies."""
    return computed(skeleton, skeleton.model.get_decoder(), batch).last_hidden_state


def computed(skeleton: Skeleton, module: Any, batch: Batch) -> Any:
    """What the model, or its decoder, computes from the states after the last layer."""
    (output,) = [module(**arguments, use_cache=False) for arguments in skeleton.feed(len(skeleton), [batch])]
    return output


def sequences(backbone: Backbone, stream: Stream) -> Iterator[tuple[int, Batch]]:
    """This rank's sequences one by one, with their row in the data: logits of a batch may not fit."""
    for batch in backbone.batches(stream):
        assert batch.state is not None
        for row in range(len(batch.ids)):
            state = tuple(None if part is None else part[row : row + 1] for part in batch.state)
            yield batch.first + row, Batch(ids=batch.ids[row : row + 1], state=state, first=batch.first + row)
