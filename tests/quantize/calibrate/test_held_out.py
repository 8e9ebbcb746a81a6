"""Figures without a server: on text the shipped models wrote, and against a server that is played
token by token.
"""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from drafts import changed
from keepmtp.quantize.calibrate.layers.backbone import Backbone
from keepmtp.quantize.calibrate.model.states import States
from keepmtp.quantize.calibrate.mtp.acceptance import Acceptance, acceptance, end_ids, server_counts
from keepmtp.quantize.calibrate.mtp.mtp_block import MtpBlock, bind_block, build_block
from keepmtp.quantize.calibrate.mtp.target import computed, divergence, sequences, target
from keepmtp.recipes.errors import RecipeError
from passes import END, ROOT, answered, plan_over, reading
from torch import Tensor
from transformers import AutoModelForCausalLM

MODELS = ("tiny-glm4-moe", "tiny-qwen3_5")


@pytest.fixture(scope="module", params=MODELS)
def shipped(request, tmp_path_factory) -> tuple[str, Backbone]:
    """A model's name, and its pass with its own answers as held-out text."""
    plan = plan_over(ROOT / "models" / request.param, f"{request.param}.nvfp4")
    return request.param, answered(plan, tmp_path_factory.mktemp("pass"), count=16)


def block_of(backbone: Backbone, **draft) -> MtpBlock:
    """The block of a pass's source; with other words in its family's `Draft`, a broken one."""
    plan = changed(backbone.skeleton.plan, **draft)
    block = build_block(plan.view)
    backbone.skeleton.fill(block, bind_block(block, plan))
    return block.requires_grad_(False)


def of_source(backbone: Backbone, block: MtpBlock) -> Acceptance:
    return acceptance(target(backbone, "source"), [block])


@pytest.mark.few(1)
def test_the_shipped_blocks_draft_as_their_training_said(shipped):
    """models/train/measure.py: another block, another loop over the slots, other problems. It
    counts every slot of an answer up to its end; so does a server that drafts one token, but for
    the slots it skips."""
    name, backbone = shipped
    found = of_source(backbone, block_of(backbone))
    trained = json.loads((ROOT / "models" / name / "training.json").read_text())["measured"][
        "accepted"
    ]
    assert found.by_position(1)[0] == pytest.approx(trained[0], abs=0.01)
    assert found.num_slots > 400
    # Behind the end of an answer, where this counts and training did not, drafts are mostly lost.
    assert trained[2] - 0.1 < found.by_position(3)[2] <= trained[2] + 0.02
    assert found.mean_accepted_length(3) > 3.7


def test_a_broken_block_is_seen(shipped):
    """The twins: token and hidden state swapped, and a projection of noise. Both load without a
    word.
    """
    _name, backbone = shipped
    swapped = of_source(backbone, block_of(backbone, hidden_first=True))
    noise = block_of(backbone)
    torch.nn.init.normal_(
        noise.projection.weight, std=0.02, generator=torch.Generator().manual_seed(0)
    )
    assert swapped.by_position(1)[0] < 0.5
    assert of_source(backbone, noise).by_position(1)[0] < 0.5


def test_prompts_are_not_drafted(shipped):
    """Counted as if the model had written them, they pull the figure down: nobody foresees a
    problem's numbers.
    """
    _name, backbone = shipped
    block = block_of(backbone)
    everything = of_source(reading(backbone, None), block).by_position(1)[0]
    assert everything < of_source(backbone, block).by_position(1)[0]
    with pytest.raises(
        RecipeError,
        match="the held-out text must resemble what the model writes; got not one token",
    ):
        of_source(reading(backbone, torch.zeros_like(backbone.data.held_out_written)), block)


def test_perplexity_and_choices_are_those_of_transformers_own_model(shipped):
    """The whole model at once, in float32: layer by layer in BF16, logits are off by their
    rounding.
    """
    name, backbone = shipped
    model = AutoModelForCausalLM.from_pretrained(ROOT / "models" / name, dtype=torch.float32).eval()
    ids = backbone.data.held_out_ids
    with torch.no_grad():
        logits = model(ids).logits
    likelihood = torch.nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()
    )
    found = target(backbone, "source")
    assert found.perplexity == pytest.approx(likelihood.exp().item(), rel=0.02)
    assert (found.choices == logits.argmax(dim=-1)).float().mean() > 0.97
    assert found.agreement == 1.0
    served = target(backbone, "served", reference=found)
    assert 0.5 < served.agreement < 1.0, "NVFP4 changes some choices"
    assert served.perplexity != found.perplexity


def test_divergence_is_that_of_all_predictions_from_the_released_models(shipped):
    """In float64 over all logits at once, which the pass never holds; and a release does not
    diverge from itself.
    """
    _name, backbone = shipped
    own = target(backbone, "served", reference=target(backbone, "source"))
    with torch.no_grad(), backbone.skeleton.head():
        sides = [
            torch.cat(
                [computed(backbone.skeleton, backbone.skeleton.model, each).logits for each in rows]
            )
            for rows in (sequences(backbone, "source"), sequences(backbone, "served"))
        ]
    wanted, found = (side.double().log_softmax(dim=-1) for side in sides)
    by_row = (wanted.exp() * (wanted - found)).sum(dim=(1, 2)).tolist()
    assert own.divergences.tolist() == pytest.approx(by_row, rel=1e-4)
    assert own.divergence == pytest.approx(sum(by_row) / wanted[..., 0].numel(), rel=1e-4)
    assert own.divergence > 0
    assert divergence(sides[0][0], sides[0][0]) == 0
    assert target(backbone, "source").divergence == 0


def test_a_target_is_computed_once(shipped, tmp_path):
    """A resumed run finds it in the folder; the states it was computed from may be gone."""
    _name, backbone = shipped
    copy = Path(shutil.copytree(backbone.folder, tmp_path / "copy"))
    first = target(backbone, "source")
    moved = replace(backbone, folder=copy, states=States(copy / "states", backbone.ranks))
    again = target(moved, "source")
    assert again.perplexity == first.perplexity and (copy / "figures").is_dir()
    shutil.rmtree(copy / "states")
    assert torch.equal(target(moved, "source").choices, first.choices)
    assert end_ids(backbone.skeleton.plan) == {END}


# --- the count ------------------------------------------------------------------------------------


def played(
    ids: list[int], choices: list[int], drafts: list[list[int]], k: int, written: list[bool]
) -> Tensor:
    """A server, played: from each of the first k + 1 slots of a stretch on, [2, k] slots reached
    and accepted.

    It stands at a slot, has just written the token behind it, and drafts k more; the target checks
    them one by one.
    """
    reached, accepted = [0] * k, [0] * k
    length = len(ids)

    def stands(slot: int) -> bool:
        return (
            slot + 1 < length
            and choices[slot] == ids[slot + 1]
            and ids[slot + 1] != END
            and written[slot + 1]
        )

    starts, place = [], 0
    for slot in range(length):
        place = place + 1 if stands(slot) else 0
        starts += [slot] if 1 <= place <= k + 1 else []
    for start in starts:
        slot = start
        while slot < length and stands(slot):
            says, kept = [*ids[: slot + 2]], 0
            for position in range(k):
                if says != ids[: len(says)] or len(says) > length:
                    kept = length  # the server goes on with another text than this one
                    break
                reached[position] += 1
                verdict = choices[len(says) - 1]
                if drafts[position][slot] != verdict:
                    break
                accepted[position] += 1
                kept += 1
                says.append(verdict)
            if not all(stands(s) for s in range(slot, min(slot + kept + 2, length))):
                break
            slot += kept + 1
    return torch.tensor([reached, accepted], dtype=torch.float64) / (k + 1)


@pytest.mark.parametrize("seed", range(6))
def test_the_count_is_that_of_a_server_played_token_by_token(seed):
    """Random texts, choices and drafts over five tokens, one of which ends a text, so that
    everything happens.
    """
    draw = torch.Generator().manual_seed(seed)
    length = 400
    choices = torch.randint(0, 5, (length,), generator=draw)
    ids = torch.randint(0, 5, (length,), generator=draw)
    follows = torch.rand(length, generator=draw) < 0.85
    ids[1:] = torch.where(follows[1:], choices[:-1], ids[1:])
    ends = ids == END
    drafts = torch.stack([choices.roll(-step) for step in (1, 2, 3)])
    is_wrong = torch.rand(3, length, generator=draw) < torch.tensor([0.2, 0.3, 0.4])[:, None]
    drafts = torch.where(is_wrong, torch.randint(0, 5, (3, length), generator=draw), drafts)
    written = torch.rand(length, generator=draw) < 0.97
    counts = server_counts(ids, choices, drafts, ends={END}, written=written)
    assert ends.any() and not written.all()
    for k in (1, 2, 3):
        expected = played(ids.tolist(), choices.tolist(), drafts.tolist(), k, written.tolist())
        torch.testing.assert_close(counts[1:, k - 1, :k], expected)
