"""What a step reads of the weights, by the plan's bytes."""

import pytest
from good import planned
from heads import packed
from keepmtp.quantize.plan.step_reads import step_reads


def num_bytes(plan, part, *, head=False):
    """Bytes of a part that a token reads, experts apart."""
    total = 0
    for tensor in plan.tensors:
        is_read = tensor.part == part and tensor.role not in ("experts", "embedding", "vision")
        if is_read and (tensor.role == "head") == head:
            total += plan.num_bytes_of(tensor)
    return total


def test_layers_and_head_are_read_once_a_step_and_a_draft():
    """MiMo-7B has no experts: every byte of its layers counts."""
    plan = planned("mimo-7b", "FP8_DYNAMIC", "bf16")
    steps = step_reads(plan)
    backbone, block = num_bytes(plan, "backbone"), num_bytes(plan, "mtp")
    head = num_bytes(plan, "backbone", head=True)
    for drafts, step in enumerate(steps):
        assert (step.drafts, step.backbone) == (drafts, backbone)
        assert (step.mtp, step.heads) == (drafts * block, (1 + drafts) * head)
        assert step.total == step.backbone + step.mtp + step.heads
    assert len(steps) == 4


def test_of_experts_those_count_that_a_token_chooses():
    plan = planned("glm-4.7", "FP8_DYNAMIC", "bf16")
    every = planned("glm-4.7", "FP8_DYNAMIC", "bf16", num_experts_per_tok=10**6)
    experts = 0
    for tensor in plan.tensors:
        if tensor.part == "backbone" and tensor.role == "experts":
            experts += plan.num_bytes_of(tensor)
    chosen = plan.view.number("num_experts_per_tok")
    count = plan.view.number("n_routed_experts")
    shared = num_bytes(plan, "backbone")
    assert step_reads(every)[0].backbone == shared + experts
    assert step_reads(plan)[0].backbone == shared + experts * chosen // count


def test_a_packed_head_is_read_as_it_is_stored():
    plain = step_reads(planned("glm-4.7", "FP8_DYNAMIC", "bf16"))
    fp8 = step_reads(packed("glm-4.7", "head", "FP8_DYNAMIC"))
    for before, after in zip(plain, fp8, strict=True):
        assert before.heads / 2 < after.heads < before.heads * 0.52
        assert (before.backbone, before.mtp) == (after.backbone, after.mtp)


@pytest.mark.parametrize("model", ["ernie-4.5-21b", "step-3.5-flash", "mimo-v2-flash"])
def test_heads_of_other_kinds_are_read_too(model):
    """Tied to the embedding, of the draft's own, or with more blocks than one."""
    steps = step_reads(planned(model, "FP8_DYNAMIC", "bf16"))
    assert steps[0].heads > 0 and steps[3].heads == 4 * steps[0].heads
    assert steps[1].mtp * 3 == steps[3].mtp


def test_a_draft_of_its_own_has_no_step():
    assert step_reads(planned("gemma-4-26b-assistant", "FP8_DYNAMIC", "bf16")) == []
