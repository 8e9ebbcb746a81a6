"""What a server would accept of an MTP block's drafts, without a server.

In: a finished backbone pass with the hidden states of held-out text after its last layer, its own choices there
(`target.py`), and MTP blocks. Out: for a backbone with a block, the share of its drafts that a server at temperature 0
accepts, by position, and how many tokens a step yields.

Such a server drafts after text that the target wrote. So a slot counts only where the held-out text is what the target
would have written: token i+1 is the target's choice at slot i and does not end the text; for step k the same is true of
the k-1 tokens after it. There, teacher forcing is what the server does: step k reads the drafts before it, and where
they were accepted they are the text. A rejected draft ends a server's step, so position k is accepted only where all
positions before it are.

A server does not draft at every slot either: after n accepted drafts, its next one starts n + 1 slots on. Slots are
weighted by how often it drafts there, in stretches of text that the target would have written.

Easy to get wrong: a draft is compared with the choice of the same target, right or wrong, never with the text. And no
server drafts a prompt: counted as if the model had written it, it lowers every figure (`written`).

Source: vLLM 0.32.0 v1/spec_decode/metrics.py (accepted tokens by position over drafts), v1/core/sched/scheduler.py
(counted before a text is cut at its end); compared with real counters in tests/vllm/test_acceptance_without_server.py.
"""

from collections.abc import Collection, Sequence
from contextlib import ExitStack

import torch
import torch.nn.functional as F
from torch import Tensor

from ....checkpoints.json_file import read_object
from ....recipes.errors import RecipeError
from ...plan.plan import Plan
from ..layers.backbone import Backbone
from ..layers.forwards import serving
from ..model.skeleton import Batch
from ..model.states import Stream
from .accepted import Acceptance
from .draft_steps import draft_steps
from .mtp_block import MtpBlock
from .target import Target, decoder_output, sequences

NUM_STEPS = 3
"""Positions of a draft that are measured, where the model has a block for each."""


class NothingCounts(RecipeError):
    """The held-out text has no slot that counts for acceptance."""


def acceptance(
    backbone: Backbone, stream: Stream, blocks: Sequence[MtpBlock], target: Target, *, written: Tensor | None = None
) -> Acceptance:
    """What a server accepts of the drafts of `blocks` with one backbone.

    Args:
        backbone: a finished pass.
        stream: whose hidden states the blocks are given, `source` or `served`.
        blocks: filled, on the pass's device: one that takes every step, or one a step.
        target: of the same stream.
        written: [held_out, S] bool: tokens that a model writes, not its user; None where nothing says which they are.

    Raises:
        NothingCounts: the held-out text has no slot that counts.
    """
    skeleton = backbone.skeleton
    num_steps = NUM_STEPS if len(blocks) == 1 else min(NUM_STEPS, len(blocks))
    ends = end_ids(skeleton.plan)
    counts = torch.zeros(len(backbone.data.held_out_ids), 3, num_steps, num_steps, dtype=torch.float64)
    with torch.no_grad(), skeleton.head(), ExitStack() as stack:
        for block in blocks:
            stack.enter_context(serving(block))
        for row, sequence in sequences(backbone, stream):
            drafts_KS = _drafts(backbone, blocks, sequence, num_steps)
            own = None if written is None else written[row]
            counts[row] = server_counts(sequence.ids[0], target.choices[row], drafts_KS, ends=ends, written=own)
    counts = backbone.ranks.sum(counts)
    num_slots = int(counts[:, 0, 0, 0].sum())
    if not num_slots:
        raise NothingCounts(
            backbone.skeleton.plan.recipe.name,
            "the held-out text must resemble what the model writes",
            got="not one token that is the model's own choice",
            cure="Raise calibration.held_out, or name a dataset in the model's chat format",
        )
    return Acceptance(num_slots=num_slots, counts=counts[:, 1:])


def _drafts(backbone: Backbone, blocks: Sequence[MtpBlock], sequence: Batch, num_steps: int) -> Tensor:
    """[K, S] int64 on the CPU: the drafts of each step, at every slot of one sequence."""
    skeleton = backbone.skeleton
    target_head = skeleton.model.get_output_embeddings()
    assert target_head is not None
    outputs = draft_steps(
        blocks,
        skeleton.model.get_input_embeddings(),
        ids=sequence.ids.to(skeleton.device),
        hidden=block_input(backbone, blocks[0], sequence),
        num_steps=num_steps,
    )
    drafts = []
    for step, output in enumerate(outputs):
        head = blocks[min(step, len(blocks) - 1)].head or target_head
        drafts.append(head(output).float().argmax(dim=-1).cpu())  # of BF16 it takes five times as long
    return torch.cat(drafts)


def server_counts(
    ids_S: Tensor, choices_S: Tensor, drafts_KS: Tensor, *, ends: Collection[int], written: Tensor | None
) -> Tensor:
    """What a server would have counted over one text.

    Args:
        ids_S: the text, int64.
        choices_S: the target's choice after each token.
        drafts_KS: of step k, slot i: the draft for token i + k + 1.
        ends: tokens that end a text; a server drafts nothing after them.
        written: [S] bool, tokens that count as the model's; None for all.

    Returns: [3, K, K] float64, by tokens drafted a step and by position: slots that count (in every entry), slots
        reached and slots accepted, weighted by how often a server that drafts so many drafts there.
    """
    num_steps, length = drafts_KS.shape
    is_own_S = F.pad(ids_S[1:] == choices_S[:-1], (0, 1))  # at slot i: token i + 1
    is_slot_S = _counting_slots(ids_S, is_own_S, ends, written)
    reached, accepted, open_S = [], [], is_slot_S
    for step, drafts_S in enumerate(drafts_KS):
        # The step reads tokens up to i + step + 1; its draft is for the target's choice after that token.
        reached.append(open_S)
        is_right_S = drafts_S[: length - step - 1] == choices_S[step + 1 :]
        accepted.append(open_S & F.pad(is_right_S, (0, step + 1)))
        open_S = accepted[-1] & F.pad(is_own_S[step + 1 :], (0, step + 1))
    reached_KS, accepted_KS = torch.stack(reached).double(), torch.stack(accepted).double()
    counts = torch.zeros(3, num_steps, num_steps, dtype=torch.float64)
    counts[0] = is_slot_S.sum()
    for k in range(1, num_steps + 1):
        visits_S = _visits(is_slot_S.tolist(), accepted_KS[:k].sum(dim=0).int().tolist(), k)
        counts[1, k - 1] = (reached_KS * visits_S).sum(dim=1)
        counts[2, k - 1] = (accepted_KS * visits_S).sum(dim=1)
    return counts


def _counting_slots(ids_S: Tensor, is_own_S: Tensor, ends: Collection[int], written: Tensor | None) -> Tensor:
    """[S] bool: slots where a server drafts: the next token is the target's choice, a model's, and no end.

    A server drafts nothing after an end, but a draft may run across one, and vLLM counts what it does there.
    """
    is_slot_S = is_own_S.clone()
    for end in ends:
        is_slot_S[:-1] &= ids_S[1:] != end
    if written is not None:
        is_slot_S[:-1] &= written[1:]
    return is_slot_S


def _visits(is_slot: Sequence[bool], num_accepted: Sequence[int], k: int) -> Tensor:
    """[S] float64: how often a server that drafts `k` tokens drafts at each slot.

    It begins at one of a stretch's first k + 1 slots, each as likely as another.

    Args:
        is_slot: whether a server drafts there.
        num_accepted: drafts that are accepted there.
    """
    visits, place = [0.0] * len(is_slot), 0
    for slot, counts in enumerate(is_slot):
        place = place + 1 if counts else 0
        visits[slot] += 1.0 if 1 <= place <= k + 1 else 0.0
        following = slot + num_accepted[slot] + 1
        # The text is left, or ends, where a slot between does not count.
        if counts and following < len(is_slot) and all(is_slot[slot : following + 1]):
            visits[following] += visits[slot]
    return torch.tensor(visits, dtype=torch.float64) / (k + 1)


def block_input(backbone: Backbone, block: MtpBlock, batch: Batch) -> Tensor:
    """The hidden states an MTP block reads for the tokens of a batch: after the final norm, or before it."""
    skeleton = backbone.skeleton
    if block.draft.reads_normed:
        hidden = decoder_output(skeleton, batch)
    else:
        assert batch.state is not None and batch.state[0] is not None
        hidden = batch.state[0].to(skeleton.device)
    # A foreign model may have computed it in inference mode, whose tensors nothing may be hooked to.
    return hidden.clone() if hidden.is_inference() else hidden


def end_ids(plan: Plan) -> frozenset[int]:
    """Tokens after which a server stops."""
    assert plan.source.folder is not None
    path = plan.source.folder / "generation_config.json"
    holders = [plan.source.config, plan.view.text_config, read_object(path, path) if path.is_file() else {}]
    found: set[int] = set()
    for holder in holders:
        value = holder.get("eos_token_id")
        found |= {each for each in (value if isinstance(value, list) else [value]) if isinstance(each, int)}
    return frozenset(found)
