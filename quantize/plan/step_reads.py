"""What a server reads of a checkpoint's weights for one token: by a plan's bytes, before a byte is
written.

In: a plan. Out: a `StepReads` for each number of drafts. The target reads its layers and its head
once; each draft runs one MTP layer, and a head again. Of routed experts those count that one token
chooses. Cache, activations and the rows of tables, which are looked up, are left out.

Easy to get wrong: a batch of tokens chooses more experts than one token does, so with drafts the
target reads between this and all of its experts.
"""

from collections import Counter
from collections.abc import Collection

from ...recipes.family import Part
from ...recipes.frozen import frozen
from .plan import Plan
from .tensor_plan import TensorPlan

MOST_DRAFTS = 3
# What is looked up, or never run for text.
_NOT_READ = ("embedding", "table", "vision")
_CHOSEN = ("num_experts_per_tok", "moe_topk", "moe_top_k")


@frozen
class StepReads:
    """Bytes of weights that one step reads.

    Attributes:
        drafts: tokens that are drafted in the step.
        backbone: of the target, its head apart.
        mtp: of the MTP layers that draft, their heads apart.
        heads: of the target's head, and of the head of each draft.
    """

    drafts: int
    backbone: int
    mtp: int
    heads: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.backbone + self.mtp + self.heads


def step_reads(plan: Plan) -> list[StepReads]:
    """For no draft to MOST_DRAFTS; without a backbone or an MTP block, nothing."""
    if not plan.view.num_layers or not plan.mtp or plan.is_draft_alone:
        return []
    head = _num_bytes(plan, "backbone", {None}, of_head=True)
    if not head:  # tied: the rows of the embedding are the head
        for tensor in plan.tensors:
            if tensor.role == "embedding" and tensor.part == "backbone" and tensor.layer is None:
                head = plan.num_bytes_of(tensor)
    every = {tensor.layer for tensor in plan.tensors}
    backbone = _num_bytes(plan, "backbone", every)
    reads = [StepReads(drafts=0, backbone=backbone, mtp=0, heads=head)]
    for step in range(MOST_DRAFTS):
        last = reads[-1]
        layers = _drafting(plan, step)
        own_head = _num_bytes(plan, "mtp", layers, of_head=True)
        made = StepReads(
            drafts=step + 1,
            backbone=backbone,
            mtp=last.mtp + _num_bytes(plan, "mtp", layers),
            heads=last.heads + (own_head or head),
        )
        reads.append(made)
    return reads


def _drafting(plan: Plan, step: int) -> set[int | None]:
    """Indices on disk of the layers that a draft step runs, and None for what is outside layers."""
    view = plan.view
    parts = view.num_mtp_parts
    turn = 0
    if view.family.drafts_by_turns:
        turn = step % (view.num_mtp_layers // parts)
    first = view.first_mtp_index + turn * parts
    return {None, *range(first, first + parts)}


def _num_bytes(
    plan: Plan, part: Part, layers: Collection[int | None], *, of_head: bool = False
) -> int:
    """Bytes that one token reads of these layers: of their heads, or of all else."""
    shared = 0
    experts = Counter[int | None]()
    counts = dict[int | None, set[int]]()
    tensors = plan.tensors
    if part == "mtp":
        tensors = plan.mtp
    for tensor in tensors:
        if tensor.part != part or tensor.layer not in layers or tensor.role in _NOT_READ:
            continue
        is_head = tensor.role == "head"
        if part == "mtp" and is_head and not tensor.place.row.is_drafts_own:
            continue  # a copy of the target's, which takes its place
        if is_head != of_head:
            continue
        if tensor.role == "experts":
            experts[tensor.layer] += plan.num_bytes_of(tensor)
            counts.setdefault(tensor.layer, set()).update(_experts_in(tensor))
        else:
            shared += plan.num_bytes_of(tensor)
    chosen = plan.view.number(*_CHOSEN)
    for layer, num_bytes in experts.items():
        there = max(1, len(counts[layer]))
        shared += num_bytes * min(chosen or there, there) // there
    return shared


def _experts_in(tensor: TensorPlan) -> range:
    """The routed experts that a tensor holds: one, or all of a stack."""
    if tensor.stacked:
        return range(tensor.shape[0])
    expert = tensor.place.expert or 0
    return range(expert, expert + 1)
