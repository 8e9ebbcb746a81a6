"""What a backbone predicts on held-out text, what a server would accept of an MTP block's drafts
there, without a server, and how sure a comparison of two blocks is.

In: a finished backbone pass with the hidden states of held-out text after its last layer, and MTP
blocks. Out: a `Target`: a backbone's own choices, its likelihoods, and how far it is from the
released one; an `Acceptance`: drafts that a server at temperature 0 accepts, by position; and what
is kept of another's, with a limit that holds at a confidence.

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
every figure (`held_out_written` of the data). And where few drafts are lost the jackknife sees too
small an error, and none where none is lost: the luck that hides a loss hides its spread. So a limit
is never nearer than Clopper and Pearson's for drafts that are accepted or lost each for itself. A
divergence is of all that a
model might say next, over every slot: perplexity looks at the text's own token alone, which may
become likelier by chance while the model gets worse.

Source: vLLM 0.32.0 v1/spec_decode/metrics.py (accepted tokens by position over drafts),
v1/core/sched/scheduler.py (counted before a text is cut at its end); compared with real counters in
tests/vllm/test_acceptance_without_server.py.
"""

import math
from collections.abc import Collection, Sequence
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
from ..layers.backbone import Backbone
from ..layers.forwards import serving
from ..layers.tables import served_tables
from ..model.skeleton import Batch, Skeleton
from ..model.states import Stream
from .facts import AcceptanceFact
from .mtp_block import MtpBlock, draft_steps

# Positions of a draft that are measured, where the model has a block for each.
NUM_STEPS = 3
# Sequences below which nothing is known.
FEWEST_SEQUENCES = 4
# Slots whose predictions are compared at a time: in F32, those of a whole sequence are gigabytes.
_SLOTS_AT_ONCE = 256


class NothingCounts(RecipeError):
    """The held-out text has no slot that counts for acceptance."""


# --- the backbone ---------------------------------------------------------------------------------


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

    def logits(self, row: int) -> Tensor:
        """[S, V], of one sequence, while the skeleton has its head."""
        sequence = self.backbone.batches(self.stream).batch(row, row + 1)
        skeleton = self.backbone.skeleton
        with served_tables(skeleton, self.stream):
            return computed(skeleton, sequence).logits[0]

    @property
    def perplexity(self) -> float:
        """Per token that is predicted and known: all but the first of each sequence."""
        loss = -float(self.log_likelihoods.sum()) / self.choices[:, 1:].numel()
        return math.exp(min(loss, 700.0))

    @property
    def divergence(self) -> float:
        """Nats a slot, the last slot of each sequence included."""
        return float(self.divergences.sum()) / self.choices.numel()

    @property
    def agreement(self) -> float:
        """Share of slots where it chooses what the reference chooses."""
        other = self.reference or self
        return (self.choices == other.choices).sum().item() / self.choices.numel()


def target(backbone: Backbone, stream: Stream, *, reference: Target | None = None) -> Target:
    """The choices and the perplexity of one backbone on held-out text, and how far it is from
    another one.

    Args:
        backbone: a finished pass.
        stream: `source` for the backbone as released, `served` for the quantized one.
        reference: what it is compared with, over the same text.
    """
    skeleton = backbone.skeleton
    choices_RS = torch.zeros_like(backbone.data.held_out_ids)
    figures_2R = torch.zeros(2, len(choices_RS), dtype=torch.float64)
    with torch.no_grad(), ExitStack() as heads:
        heads.enter_context(skeleton.head())
        if reference is not None and reference.backbone.skeleton is not skeleton:
            heads.enter_context(reference.backbone.skeleton.head())
        # One by one: the logits of a batch may not fit.
        for sequence in backbone.batches(stream, size=1).batches():
            row = sequence.first
            with served_tables(skeleton, stream):
                logits_SV = computed(skeleton, sequence).logits[0]
            ids_S = sequence.ids[0].to(logits_SV.device)
            choices_RS[row] = logits_SV.argmax(dim=-1)
            loss = F.cross_entropy(logits_SV[:-1].float(), ids_S[1:], reduction="sum")
            figures_2R[0, row] = -loss
            if reference is not None:
                figures_2R[1, row] = divergence(reference.logits(row), logits_SV)
    # A row is one rank's, and the others have zeros there.
    likelihoods_R, divergences_R = backbone.ranks.sum(figures_2R)
    return Target(
        backbone=backbone,
        stream=stream,
        choices=backbone.ranks.sum(choices_RS),
        log_likelihoods=likelihoods_R,
        reference=reference,
        divergences=divergences_R,
    )


def divergence(reference_SV: Tensor, logits_SV: Tensor) -> float:
    """Kullback-Leibler divergence of predictions from the reference's, natural, summed over the
    slots.

    Args:
        reference_SV: logits in any dtype.
        logits_SV: logits on the same device.
    """
    total = 0.0
    for first in range(0, len(logits_SV), _SLOTS_AT_ONCE):
        part = slice(first, first + _SLOTS_AT_ONCE)
        expected = F.log_softmax(reference_SV[part].float(), dim=-1)
        predicted = F.log_softmax(logits_SV[part].float(), dim=-1)
        total += F.kl_div(predicted, expected, reduction="sum", log_target=True).item()
    return max(0.0, total)


def computed(skeleton: Skeleton, batch: Batch, module: Any = None) -> Any:
    """What the model computes from the states after the last layer, or its decoder as `module`."""
    own = module or skeleton.model
    with skeleton.fed(len(skeleton), batch) as arguments:
        return own(**arguments, use_cache=False)


def head_input(skeleton: Skeleton, batch: Batch) -> Tensor:
    """[B, S, H]: what the target's head multiplies, after the final norm."""
    return computed(skeleton, batch, skeleton.model.get_decoder()).last_hidden_state


def block_input(skeleton: Skeleton, block: MtpBlock, batch: Batch) -> Tensor:
    """The hidden states an MTP block reads for the tokens of a batch: after the final norm, or
    before it.
    """
    if block.draft.reads_normed:
        hidden = head_input(skeleton, batch)
    else:
        assert batch.state is not None and batch.state[0] is not None
        hidden = batch.state[0].to(skeleton.device)
    if hidden.is_inference():  # of a foreign model: nothing may be hooked to such a tensor
        return hidden.clone()
    return hidden


# --- drafts ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class Acceptance:
    """What a server accepts of the drafts on held-out text.

    Attributes:
        counts: [held_out, 3, K, K] float64, of each sequence; see `server_counts`.
    """

    counts: Tensor

    @property
    def num_slots(self) -> int:
        """Slots of the text that count."""
        return int(self.counts[:, 0, 0, 0].sum())

    @property
    def ks(self) -> range:
        """Numbers of tokens that are drafted a step."""
        return range(1, self.counts.shape[-1] + 1)

    def by_position(self, k: int) -> tuple[float, ...]:
        """Share of drafts whose token at each position is accepted, as a server counts it."""
        return tuple(_rates(self.counts.sum(dim=0), k).tolist())

    def of_rows(self, rows: Sequence[int]) -> "Acceptance":
        """On some of the sequences."""
        return Acceptance(self.counts[list(rows)])

    def kept_of(self, other: "Acceptance", confidence: float) -> tuple[float, float]:
        """The least that is kept of another's share of accepted tokens, whatever a server drafts a
        step: the estimate, and a limit that it is above with this confidence.

        Args:
            other: measured on the same held-out text.
            confidence: of each limit, one-sided.
        """
        values, reaches = self.compared(other, confidence)
        return float(values.min()), max(0.0, float((values - reaches).min()))

    def compared(self, other: "Acceptance", confidence: float) -> Tensor:
        """What is kept of another's share of accepted tokens, by the number of tokens drafted a
        step, and how far from that the truth may be: [2, K] F64.

        A released block of which no draft is accepted has nothing to lose: all is kept.
        """
        # A sequence that counts for neither says nothing.
        says_something = (self.counts + other.counts).flatten(start_dim=1).any(dim=1)
        own = self.counts[says_something]
        theirs = other.counts[says_something]
        all_own = own.sum(dim=0)
        all_theirs = theirs.sum(dim=0)
        num_rows = len(own)
        found = torch.full((2, len(self.ks)), math.inf, dtype=torch.float64)
        for k in self.ks:
            kept = float(_share(all_own, all_theirs, k))
            found[0, k - 1] = kept
            if num_rows >= FEWEST_SEQUENCES:
                # Each sequence left out in turn.
                without = _share(all_own - own, all_theirs - theirs, k)
                error = math.sqrt(num_rows - 1) * float(without.std(correction=0))
                reach = float(stats.t.ppf(confidence, num_rows - 1)) * error
                share = float(_rates(all_theirs, k).mean())
                if share == 0:  # where none was accepted, none can be lost of all slots
                    share = 1.0
                least = least_share(kept, self.num_slots * share, confidence)
                found[1, k - 1] = max(reach, kept - least)
        return found

    def fact(self) -> AcceptanceFact:
        """The figures for the record, by the number of tokens drafted a step."""
        by_position = {}
        for k in self.ks:
            by_position[str(k)] = self.by_position(k)
        return AcceptanceFact(num_slots=self.num_slots, by_position=by_position)


def least_share(kept: float, total: float, confidence: float) -> float:
    """Clopper and Pearson's lower limit of a share that is kept of so many, each for itself.

    For a share above 1 it is as far below that as the limit of 1 is below 1.
    """
    num_kept = min(kept, 1.0) * total
    if not num_kept:
        return 0.0
    limit = float(stats.beta.ppf(1 - confidence, num_kept, total - num_kept + 1))
    return max(0.0, kept - 1.0) + limit


def fewest_slots(least: float, confidence: float) -> int:
    """Slots that show that a share of `least` is kept, if no draft is lost on them."""
    if least >= 1:  # more than anybody has
        return 2**63
    return math.ceil(math.log1p(-confidence) / math.log(least))


def _share(own: Tensor, theirs: Tensor, k: int) -> Tensor:
    """[...]: the share of another's accepted tokens that is kept where k are drafted, of counts
    [..., 3, K, K].
    """
    kept = _rates(own, k).mean(dim=-1)
    before = _rates(theirs, k).mean(dim=-1)
    return torch.where(before > 0, kept / before, 1.0)


def _rates(counts: Tensor, k: int) -> Tensor:
    """[..., k]: what is accepted at each position, as a share of all drafts, from counts [..., 3,
    K, K].
    """
    _, reached, accepted = counts[..., k - 1, :k].unbind(dim=-2)
    return torch.where(reached > 0, accepted / reached, 0.0).cumprod(dim=-1)


def acceptance(target: Target, blocks: Sequence[MtpBlock]) -> Acceptance:
    """What a server accepts of the drafts of `blocks` with one backbone, on the text that a model
    wrote.

    Args:
        target: the backbone; the blocks are given its hidden states.
        blocks: filled, on the pass's device: one that takes every step, or one a step.

    Raises:
        NothingCounts: the held-out text has no slot that counts.
    """
    backbone = target.backbone
    skeleton = backbone.skeleton
    model = skeleton.model
    embedding = model.get_input_embeddings()
    ends = end_ids(skeleton.plan)
    num_steps = NUM_STEPS
    if len(blocks) > 1:
        num_steps = min(NUM_STEPS, len(blocks))
    counts = torch.zeros(len(target.choices), 3, num_steps, num_steps, dtype=torch.float64)
    with torch.no_grad(), skeleton.head(), ExitStack() as stack:
        stack.enter_context(served_tables(skeleton, target.stream))
        for block in blocks:
            stack.enter_context(serving(block))
        for sequence in backbone.batches(target.stream, size=1).batches():
            row = sequence.first
            outputs = draft_steps(
                blocks,
                embedding,
                ids=sequence.ids.to(skeleton.device),
                hidden=block_input(skeleton, blocks[0], sequence),
                num_steps=num_steps,
            )
            drafts = []
            for step, output in enumerate(outputs):
                block = blocks[min(step, len(blocks) - 1)]
                head: Any = block.head or model.get_output_embeddings()
                # Of BF16 it takes five times as long.
                drafts.append(head(output).float().argmax(dim=-1).cpu())
            written = backbone.data.held_out_written
            counts[row] = server_counts(
                sequence.ids[0],
                target.choices[row],
                torch.cat(drafts),
                ends=ends,
                written=None if written is None else written[row],
            )
    accepted = Acceptance(backbone.ranks.sum(counts))
    if not accepted.num_slots:
        raise NothingCounts(
            skeleton.plan.recipe.name,
            "the held-out text must resemble what the model writes",
            got="not one token that is the model's own choice",
            cure="Raise calibration.held_out, or name a dataset in the model's chat format",
        )
    return accepted


def server_counts(
    ids_S: Tensor,
    choices_S: Tensor,
    drafts_KS: Tensor,
    *,
    ends: Collection[int],
    written: Tensor | None,
) -> Tensor:
    """What a server would have counted over one text.

    A server that drafts k tokens begins at one of the first k + 1 slots of a stretch, each as
    likely as another.

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
    drafts = drafts_KS.tolist()
    choices = choices_S.tolist()
    # Of slot i: whether token i + 1 is the target's choice. After the last slot there is no token.
    is_own_S = F.pad(ids_S[1:] == choices_S[:-1], (0, 1))
    # A server drafts nothing after an end, but a draft may run across one, and vLLM counts what it
    # does there.
    counts_S = ~torch.isin(ids_S, torch.tensor(sorted(ends), dtype=ids_S.dtype))
    if written is not None:
        counts_S &= written
    is_slot_S = is_own_S & F.pad(counts_S[1:], (0, 1))
    is_own = is_own_S.tolist()
    is_slot = is_slot_S.tolist()
    counts = torch.zeros(3, num_steps, num_steps, dtype=torch.float64)
    counts[0] = sum(is_slot)
    for k in range(1, num_steps + 1):
        reached = [0] * k
        accepted = [0] * k
        # Of k + 1 servers that each begin one slot later, how many draft at a slot.
        visits = [0] * length
        place = 0  # of the slot in its stretch, from 1 on
        for slot in range(length):
            place += 1
            if not is_slot[slot]:
                place = 0
            if 1 <= place <= k + 1:
                visits[slot] += 1
            following = slot + 1
            for step in range(k):
                reached[step] += visits[slot]
                # The step reads tokens up to `following`; its draft is for the target's choice
                # after that token.
                if following == length or drafts[step][slot] != choices[following]:
                    break
                accepted[step] += visits[slot]
                following += 1
                # The text goes on otherwise than the target: no server drafts what comes next.
                if not is_own[following - 1]:
                    break
            # The next draft is there, unless the text is left, or ends, in between.
            if following < length and all(is_slot[slot : following + 1]):
                visits[following] += visits[slot]
        counts[1:, k - 1, :k] = torch.tensor([reached, accepted], dtype=torch.float64) / (k + 1)
    return counts


def end_ids(plan: Plan) -> frozenset[int]:
    """Tokens after which a server stops."""
    assert plan.source.folder is not None
    holders = [plan.source.config, plan.view.text_config]
    path = plan.source.folder / "generation_config.json"
    if path.is_file():
        holders.append(read_object(path, path))
    ends = list[Any]()
    for holder in holders:
        value = holder.get("eos_token_id")
        ends += value if isinstance(value, list) else [value]
    return frozenset(number for number in ends if isinstance(number, int))
