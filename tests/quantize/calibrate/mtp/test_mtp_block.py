"""MTP blocks: which families have one, names on disk, and the same numbers as transformers computes.

What is compared with vLLM itself is in tests/vllm/test_draft_logits.py.
"""

import copy
import re
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from keepmtp.quantize.calibrate.model.binding import linear_experts
from keepmtp.quantize.calibrate.model.hooks import hooked
from keepmtp.quantize.calibrate.mtp.mtp_block import (
    MtpBlock,
    bind_block,
    build_block,
    draft_steps,
)
from keepmtp.recipes.errors import CheckpointError, RecipeError
from keepmtp.recipes.families import families, find_view
from releases import MODELS, source_layout, write_checkpoint
from torch import Tensor, nn
from transformers import AutoModel
from writing import filled, lively, plan_over

pytestmark = pytest.mark.usefixtures("in_f32")

RECIPES = {"qwen3.5-text": "qwen3.5-27b"}  # a release without a recipe of its own
IDS = torch.tensor([[5, 9, 33, 120, 7, 66, 41, 18, 29, 300, 12, 8]])


def view_of(model: str):
    config, _ = source_layout(model)
    return find_view(config, model)


RUN = [model for model in MODELS if view_of(model).family.draft]
# One release a family is enough for numbers.
ONCE = list({view_of(model).family.model_type: model for model in reversed(RUN)}.values())


@pytest.fixture(scope="module")
def block_of(tmp_path_factory) -> Callable[[str], MtpBlock]:
    """A release's block over noise, in float32."""
    made: dict[str, MtpBlock] = {}

    def block(model: str) -> MtpBlock:
        if model not in made:
            folder = lively(tmp_path_factory.mktemp("lively"), model)
            made[model] = filled(
                plan_over(folder, RECIPES.get(model, model), mtp="FP8_DYNAMIC"), dtype=torch.float32
            )
        return made[model]

    return block


# --- Which families -------------------------------------------------------------------------------


def test_each_family_has_a_draft_or_a_reason():
    for key, family in families().items():
        assert (family.draft is None) == bool(family.no_draft), key
        # Both norms have one shape, so a swap computes something.
        if family.draft is not None:
            assert re.search("hnorm|hidden", family.draft.hidden_norm), key
            assert not re.search("hnorm|hidden", family.draft.embedding_norm), key
    for model in MODELS:
        if model in RUN:
            continue
        view = view_of(model)
        with pytest.raises(RecipeError, match=r"Give `mtp` a word that needs no data") as told:
            build_block(view)
        assert view.family.no_draft in str(told.value)


@pytest.mark.parametrize("model", RUN)
def test_every_mtp_tensor_has_exactly_one_parameter(model, tmp_path):
    config, tensors = source_layout(model)
    # Experts stacked on disk are told apart where they are to be written one by one.
    plan = plan_over(
        write_checkpoint(tmp_path, config, tensors), RECIPES.get(model, model), mtp="FP8_DYNAMIC"
    )
    used = set()
    own_heads = set()
    for index in range(plan.view.num_mtp_layers // plan.view.num_mtp_parts):
        block = build_block(plan.view, index)
        own_heads.add(plan.view.mtp_stem(index) + block.draft.head)
        for pieces in bind_block(block, plan).values():
            used |= {piece.tensor.name for piece in pieces}
    for tensor in plan.tensors:
        if tensor.part == "mtp":
            is_copy = tensor.role in ("embedding", "head") and tensor.module not in own_heads
            assert (tensor.name in used) is not is_copy, tensor.name


def test_a_missing_tensor_is_named(tmp_path):
    config, tensors = source_layout("glm-4.7")
    plan = plan_over(write_checkpoint(tmp_path, config, tensors), "glm-4.7")
    gone = "layers.3.self_attn.o_proj.weight"
    short = tuple(each for each in plan.tensors if not each.name.endswith(gone))
    match = r"every parameter.*layers\.0\.self_attn\.o_proj\.weight"
    with pytest.raises(CheckpointError, match=match):
        bind_block(build_block(plan.view), replace(plan, tensors=short))


# --- Against transformers' own model around the decoder layer -------------------------------------


# Not where the backbone's layers have hyper-connections and the MTP layer has none, nor Step-3.5,
# whose language model transformers does not name.
def stands_alone(model: str) -> bool:
    draft = view_of(model).family.draft
    if draft.plain_residual or draft.model_type == "step3p5":
        return False
    return draft.proof == "source"


STANDING = [model for model in ONCE if stands_alone(model)]


@pytest.mark.parametrize("model", STANDING)
def test_the_layer_computes_as_it_would_in_a_backbone(model, block_of):
    """A backbone that is the MTP layer alone, run by transformers' own forward: rotary embedding,
    mask, arguments.
    """
    block = block_of(model)
    draft = block.draft
    config = copy.deepcopy(block.config)
    config.num_hidden_layers = len(draft.layers)
    for key, value in draft.layers[0].items():
        if value:  # a list, with an entry for each layer of its part
            value = []
            for part in draft.layers:
                value += part[key]
        setattr(config, key, value)
    if not any(".experts." in name for name in block.state_dict()):
        config._experts_implementation_internal = None  # such classes refuse to be told
    backbone = AutoModel.from_config(
        config, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    linear_experts(backbone)
    backbone.layers = block.layers
    for name in ("norm", "norm_f", "hc_head", "hyper_connection_mixer"):
        if hasattr(backbone, name):
            ours = block.collapse
            if name.startswith("norm"):
                ours = block.final_norm or nn.Identity()
            setattr(backbone, name, ours)
    embeds, hidden = _inputs(block)
    joined: list[Tensor] = []
    first = block.layers[0]

    def keep(_module: nn.Module, args: tuple) -> None:
        joined.append(args[0])

    def hand_in(_module: nn.Module, args: tuple) -> tuple:
        # A model with streams would start with the same state in each.
        return joined[0], *args[1:]

    with torch.no_grad():
        with hooked([first.register_forward_pre_hook(keep)]):
            ours, _ = block(embeds, hidden)
        start = joined[0]
        if draft.streams:
            start = embeds
        with hooked([first.register_forward_pre_hook(hand_in)]):
            theirs = backbone(inputs_embeds=start, use_cache=False).last_hidden_state
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.few(7)
@pytest.mark.parametrize("model", ONCE)
def test_no_slot_sees_what_comes_later(model, block_of):
    """Over two steps; and everything is real and finite."""
    block = block_of(model)
    for name, value in (*block.named_parameters(), *block.named_buffers()):
        assert not value.is_meta, name
    table = torch.randn(512, block.config.hidden_size, generator=torch.Generator().manual_seed(1))
    _, hidden = _inputs(block)
    later_ids = IDS.clone()
    later_hidden = hidden.clone()
    later_ids[:, 9:] += 1
    later_hidden[:, 7:] += 1.0
    with torch.no_grad():
        embedding = nn.Embedding.from_pretrained(table)
        steps = draft_steps([block], embedding, ids=IDS, hidden=hidden, num_steps=2)
        later = draft_steps([block], embedding, ids=later_ids, hidden=later_hidden, num_steps=2)
    for one, other in zip(steps, later, strict=True):
        assert one.isfinite().all()
        # Slot 6 of step 2 is fed token 8, the last that is the same.
        torch.testing.assert_close(one[:, :7], other[:, :7], rtol=1e-5, atol=1e-5)
        assert not torch.allclose(one[:, 7], other[:, 7])


def _inputs(block: MtpBlock) -> tuple[Tensor, Tensor]:
    noise = torch.Generator().manual_seed(0)
    size = block.config.hidden_size
    length = IDS.shape[1]
    streams = 1
    if block.draft.streams:
        streams = getattr(block.config, block.draft.streams)
    hidden = torch.randn(1, length, streams, size, generator=noise)
    embeds = torch.randn(1, length, size, generator=noise)
    if block.draft.joint_norm:
        return embeds, hidden.flatten(2)
    if block.draft.streams:
        return embeds, hidden
    return embeds, hidden[:, :, 0]
