"""What a server would accept of an MTP block's drafts, without a server, and how sure a comparison
of two blocks is.

In: a backbone's own choices on held-out text (`target.py`), and MTP blocks. Out: an `Acceptance`:
the share of drafts that a server at temperature 0 accepts, by position, and how many tokens a step
yields; and `Kept`: the share of another's acceptance that is kept, with limits that hold at a
confidence.

Such a server drafts after text that the target wrote. So a slot counts only where the held-out text
is what the target would have written: token i+1 is the target's choice at slot i and does not end
the text; for step k the same is true of the k-1 tokens after it. There, teacher forcing is what the
server does: step k reads the drafts before it, and where they were accepted they are the text. A
rejected draft ends a server's step, so position k is accepted only where all positions before it
are.

A server does not draft at every slot either: after n accepted drafts, its next one starts n + 1
slots on. Slots are weighted by how often it drafts there, in stretches of text that the target
would have written.

A sequence is the sample, not a slot: slots of one text go right or wrong together. The limits are
the jackknife's over sequences, both blocks on the same ones, so that what is hard for both cancels
out (B. Efron, "The Jackknife, the Bootstrap and Other Resampling Plans", SIAM 1982, chapter 3).

Easy to get wrong: a draft is compared with the choice of the same target, right or wrong, never
with the text. And no server drafts a prompt: counted as if the model had written it, it lowers
every figure (`held_out_written` of the data). And where all sequences say the same, the jackknife
sees no error at all. So many slots without a loss allow a loss all the same: 1 - (1 -
confidence)^(1 / slots) at most, as Clopper and Pearson's limit says.

Source: vLLM 0.32.0 v1/spec_decode/metrics.py (accepted tokens by position over drafts),
v1/core/sched/scheduler.py (counted before a text is cut at its end); compared with real counters in
tests/vllm/test_acceptance_without_server.py.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from scipy import stats
from torch import Tensor

from ....checkpoints.json_file import read_object
from ....recipes.errors import RecipeError
from ...plan.plan import Plan
from ..layers.forwards import serving
from .facts import DIGITS, AcceptanceFact
from .mtp_block import MtpBlock, draft_steps
from .target import Target, block_input, sequences

NUM_STEPS = 3
"""Positions of a draft that are measured, where the model has a block for each."""
FEWEST_SEQUENCES = 4
"""Sequences below which nothing is known."""


class NothingCounts(RecipeError):
    """The held-out text has no slot that counts for acceptance."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Acceptance:
    """What a server accepts of the drafts on held-out text.

    Attributes:
        num_slots: slots of the text that count.
        counts: [held_out, 2, K, K] float64. By sequence, by tokens drafted a step (entry k - 1 is
            for k), by position: slots whose earlier drafts were accepted, weighted by how often a
            server drafts there; and of these, the slots whose draft is the target's choice.
    """

    num_slots: int
    counts: Tensor

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> "Acceptance":
        """From what `as_json` gave."""
        return cls(
            num_slots=values["num_slots"],
            counts=torch.tensor(values["counts"], dtype=torch.float64),
        )

    def as_json(self) -> dict[str, Any]:
        """The same value, for a file."""
        return {"num_slots": self.num_slots, "counts": self.counts.tolist()}

    def by_position(self, k: int) -> tuple[float, ...]:
        """Share of drafts whose token at each position is accepted, as a server counts it."""
        return tuple(_rates(self.counts.sum(dim=0), k).tolist())

    def mean_accepted_length(self, k: int) -> float:
        """Tokens a step of the target: the accepted ones and its own."""
        return 1 + sum(self.by_position(k))

    def kept_of(self, other: "Acceptance", confidence: float) -> "Kept":
        """The least that is kept of another's share of accepted tokens, whatever a server drafts a
        step.

        A released block of which no draft is accepted has nothing to lose: all is kept.

        Args:
            other: measured on the same held-out text.
            confidence: of each limit, one-sided.
        """
        # A sequence that counts for neither says nothing.
        says_something = (self.counts + other.counts).flatten(start_dim=1).any(dim=1)
        own, theirs = self.counts[says_something], other.counts[says_something]
        limits = []
        for k in self._ks:
            kept, reach = float(_share(own.sum(dim=0), theirs.sum(dim=0), k)), math.inf
            if (num_rows := len(own)) >= FEWEST_SEQUENCES:
                without = _share(own.sum(dim=0) - own, theirs.sum(dim=0) - theirs, k)
                error = math.sqrt(num_rows - 1) * float(without.std(correction=0))
                reach = student_t(confidence, num_rows - 1) * error
                reach = max(reach, unseen(self.num_slots, confidence))
            limits.append((kept, max(0.0, kept - reach)))
        value, low = map(min, zip(*limits, strict=True))
        return Kept(value=value, low=low, num_slots=self.num_slots, confidence=confidence)

    def fact(self) -> AcceptanceFact:
        """The figures for the record, by the number of tokens drafted a step."""
        by_position, lengths = {}, {}
        for k in self._ks:
            by_position[str(k)] = tuple(round(rate, DIGITS) for rate in self.by_position(k))
            lengths[str(k)] = round(self.mean_accepted_length(k), DIGITS)
        return AcceptanceFact(
            num_slots=self.num_slots, by_position=by_position, mean_accepted_length=lengths
        )

    @property
    def _ks(self) -> range:
        return range(1, self.counts.shape[-1] + 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """A share that is kept, and its one-sided limit at a confidence.

    Attributes:
        value: the estimate.
        low: with `confidence` it is above this.
        num_slots: slots that it was measured on.
    """

    value: float
    low: float
    num_slots: int
    confidence: float

    def needed_slots(self, least: float) -> int | None:
        """About how many slots would show that `least` is kept.

        None where these do, where the estimate is below it, and where so little is known that
        nobody can say.
        """
        margin, spread = self.value - least, self.value - self.low
        if self.low >= least or margin <= 0 or not self.low:
            return None
        needed = fewest_slots(1 - min(margin, 0.5), self.confidence)
        # The limit without a loss shrinks with the slots, the jackknife's with their root.
        if spread > unseen(self.num_slots, self.confidence) * (1 + 1e-9):
            needed = max(needed, math.ceil(self.num_slots * (spread / margin) ** 2))
        return needed


def student_t(confidence: float, degrees: int) -> float:
    """The one-sided quantile of Student's t."""
    return float(stats.t.ppf(confidence, degrees))


def unseen(num_slots: int, confidence: float) -> float:
    """The largest share of slots that may be lost where none of `num_slots` was."""
    return 1 - (1 - confidence) ** (1 / num_slots) if num_slots else 1.0


def fewest_slots(least: float, confidence: float) -> int:
    """Slots that show that a share of `least` is kept, if no draft is lost on them."""
    return math.ceil(math.log1p(-confidence) / math.log(least)) if least < 1 else 2**63


def _share(own: Tensor, theirs: Tensor, k: int) -> Tensor:
    """[...]: the share of another's accepted tokens that is kept where k are drafted, of counts
    [..., 2, K, K].
    """
    kept, before = (_rates(counts, k).mean(dim=-1) for counts in (own, theirs))
    return torch.where(before > 0, kept / before, 1.0)


def _rates(counts: Tensor, k: int) -> Tensor:
    """[..., k]: what is accepted at each position, as a share of all drafts, from counts [..., 2,
    K, K].
    """
    reached, accepted = counts[..., k - 1, :k].unbind(dim=-2)
    return torch.where(reached > 0, accepted / reached, 0.0).cumprod(dim=-1)


# --- measuring ------------------------------------------------------------------------------------


def acceptance(target: Target, blocks: Sequence[MtpBlock]) -> Acceptance:
    """What a server accepts of the drafts of `blocks` with one backbone, on the text that a model
    wrote.

    Args:
        target: the backbone; the blocks are given its hidden states.
        blocks: filled, on the pass's device: one that takes every step, or one a step.

    Raises:
        NothingCounts: the held-out text has no slot that counts.
    """
    backbone, skeleton = target.backbone, target.backbone.skeleton
    model, written = skeleton.model, backbone.data.held_out_written
    num_steps = NUM_STEPS if len(blocks) == 1 else min(NUM_STEPS, len(blocks))
    embedding, ends = model.get_input_embeddings(), end_ids(skeleton.plan)
    counts = torch.zeros(len(target.choices), 3, num_steps, num_steps, dtype=torch.float64)
    with torch.no_grad(), skeleton.head(), ExitStack() as stack:
        for block in blocks:
            stack.enter_context(serving(block))
        for sequence in sequences(backbone, target.stream):
            row = sequence.first
            ids, hidden = (
                sequence.ids.to(skeleton.device),
                block_input(skeleton, blocks[0], sequence),
            )
            outputs = draft_steps(blocks, embedding, ids=ids, hidden=hidden, num_steps=num_steps)
            drafts = []
            for step, output in enumerate(outputs):
                head: Any = blocks[min(step, len(blocks) - 1)].head or model.get_output_embeddings()
                # Of BF16 it takes five times as long.
                drafts.append(head(output).float().argmax(dim=-1).cpu())
            counts[row] = server_counts(
                sequence.ids[0],
                target.choices[row],
                torch.cat(drafts),
                ends=ends,
                written=None if written is None else written[row],
            )
    counts = backbone.ranks.sum(counts)
    num_slots = int(counts[:, 0, 0, 0].sum())
    if not num_slots:
        raise NothingCounts(
            skeleton.plan.recipe.name,
            "the held-out text must resemble what the model writes",
            got="not one token that is the model's own choice",
            cure="Raise calibration.held_out, or name a dataset in the model's chat format",
        )
    return Acceptance(num_slots=num_slots, counts=counts[:, 1:])


def server_counts(
    ids_S: Tensor,
    choices_S: Tensor,
    drafts_KS: Tensor,
    *,
    ends: Collection[int],
    written: Tensor | None,
) -> Tensor:
    """What a server would have counted over one text.

    Args:
        ids_S: the text, int64.
        choices_S: the target's choice after each token.
        drafts_KS: of step k, slot i: the draft for token i + k + 1.
        ends: tokens that end a text; a server drafts nothing after them.
        written: [S] bool, tokens that count as the model's; None for all.

    Returns: [3, K, K] float64, by tokens drafted a step and by position: slots that count (in every
        entry), slots reached and slots accepted, weighted by how often a server that drafts so many
        drafts there.
    """
    num_steps, length = drafts_KS.shape
    is_own_S = F.pad(ids_S[1:] == choices_S[:-1], (0, 1))  # at slot i: token i + 1
    # A server drafts nothing after an end, but a draft may run across one, and vLLM counts what it
    # does there.
    counts_S = ~torch.isin(ids_S, torch.tensor(sorted(ends), dtype=ids_S.dtype))
    if written is not None:
        counts_S &= written
    is_slot_S = is_own_S & F.pad(counts_S[1:], (0, 1))
    both, open_S = [], is_slot_S
    for step, drafts_S in enumerate(drafts_KS, start=1):
        # The step reads tokens up to i + step; its draft is for the target's choice after that
        # token.
        is_right_S = F.pad(drafts_S[: length - step] == choices_S[step:], (0, step))
        both.append(torch.stack([open_S, open_S & is_right_S]))
        open_S = both[-1][1] & F.pad(is_own_S[step:], (0, step))
    both_2KS = torch.stack(both, dim=1).double()
    counts = torch.zeros(3, num_steps, num_steps, dtype=torch.float64)
    counts[0] = is_slot_S.sum()
    for k in range(1, num_steps + 1):
        num_accepted = both_2KS[1, :k].sum(dim=0).int().tolist()
        counts[1:, k - 1] = (both_2KS * _visits(is_slot_S.tolist(), num_accepted, k)).sum(dim=-1)
    return counts


def _visits(is_slot: Sequence[bool], num_accepted: Sequence[int], k: int) -> Tensor:
    """[S] float64: how often a server that drafts `k` tokens drafts at each slot.

    It begins at one of a stretch's first k + 1 slots, each as likely as another.

    Args:
        is_slot: whether a server drafts there.
        num_accepted: drafts that are accepted there.
    """
    visits, place = [0.0] * len(is_slot), 0
    for slot, (counts, accepted) in enumerate(zip(is_slot, num_accepted, strict=True)):
        if not counts:
            place = 0
            continue
        place += 1
        if place <= k + 1:
            visits[slot] += 1.0
        following = slot + accepted + 1
        # The text is left, or ends, where a slot between does not count.
        if following < len(is_slot) and all(is_slot[slot : following + 1]):
            visits[following] += visits[slot]
    return torch.tensor(visits, dtype=torch.float64) / (k + 1)


def end_ids(plan: Plan) -> frozenset[int]:
    """Tokens after which a server stops."""
    assert plan.source.folder is not None
    path = plan.source.folder / "generation_config.json"
    holders = [
        plan.source.config,
        plan.view.text_config,
        read_object(path, path) if path.is_file() else {},
    ]
    found: set[int] = set()
    for holder in holders:
        value = holder.get("eos_token_id")
        found |= {
            each
            for each in (value if isinstance(value, list) else [value])
            if isinstance(each, int)
        }
    return frozenset(found)
