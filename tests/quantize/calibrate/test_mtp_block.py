"""MTP blocks: which families have one, names on disk, and the same numbers as transformers and the
trainers compute.

What is compared with vLLM itself is in tests/vllm/test_draft_logits.py.
"""

import copy
import importlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from drafts import changed, filled, lively, plan_over, weights_of
from keepmtp.quantize.calibrate.model.experts import linear_experts
from keepmtp.quantize.calibrate.model.hooks import hooked
from keepmtp.quantize.calibrate.mtp.mtp_block import (
    MtpBlock,
    bind_block,
    build_block,
    draft_steps,
    step_mask,
)
from keepmtp.recipes.errors import CheckpointError, RecipeError
from keepmtp.recipes.families import families, find_view
from releases import MODELS, source_layout, write_checkpoint
from torch import Tensor, nn
from transformers import AutoModel, AutoModelForCausalLM
from transformers.modeling_layers import MtpModel

ROOT = Path(__file__).parents[3]
RECIPES = {"qwen3.5-text": "qwen3.5-27b"}  # a release without a recipe of its own
IDS = torch.tensor([[5, 9, 33, 120, 7, 66, 41, 18, 29, 300, 12, 8]])


def view_of(model: str):
    config, _ = source_layout(model, size="tiny")
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
    for view in (view_of(model) for model in MODELS if model not in RUN):
        with pytest.raises(RecipeError, match=r"Give `mtp` a word that needs no data") as told:
            build_block(view)
        assert view.family.no_draft in str(told.value)


@pytest.mark.parametrize("model", RUN)
def test_every_mtp_tensor_has_exactly_one_parameter(model, tmp_path):
    config, tensors = source_layout(model, size="tiny")
    # Experts stacked on disk are told apart where they are to be written one by one.
    plan = plan_over(
        write_checkpoint(tmp_path, config, tensors), RECIPES.get(model, model), mtp="FP8_DYNAMIC"
    )
    used, own_heads = set(), set()
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
    config, tensors = source_layout("glm-4.7", size="tiny")
    plan = plan_over(write_checkpoint(tmp_path, config, tensors), "glm-4.7")
    gone = "layers.3.self_attn.o_proj.weight"
    short = tuple(each for each in plan.tensors if not each.name.endswith(gone))
    match = r"every parameter.*layers\.0\.self_attn\.o_proj\.weight"
    with pytest.raises(CheckpointError, match=match):
        bind_block(build_block(plan.view), replace(plan, tensors=short))


# --- Against transformers' own drafting -----------------------------------------------------------


@pytest.mark.parametrize("model", ["deepseek-r1", "glm-4.7"])
def test_the_block_drafts_as_transformers_does(model, tmp_path, monkeypatch):
    """`generate(use_mtp=True)` drafts; the same inputs give the same logits in float32, up to the
    order of sums.

    transformers counts positions from the drafted token on, so it never stands at position 0;
    rotary embeddings see differences alone.
    """
    lively(tmp_path, model)
    target = AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, attn_implementation="eager"
    )
    # The class names the layers of the full-size release, which the tiny one has not got.
    target._keys_to_ignore_on_load_unexpected = [
        rf"(^|\.)layers\.{target.config.num_hidden_layers}\."
    ]
    first: dict[str, Any] = {}
    drafts = MtpModel.forward

    def noted(self, *args, **kwargs):
        given = {name: value.clone() for name, value in kwargs.items() if torch.is_tensor(value)}
        result = drafts(self, *args, **kwargs)
        first.update({**given, "logits": result[1][:, 0], **first})
        return result

    monkeypatch.setattr(MtpModel, "forward", noted)
    target.generate(IDS, use_mtp=True, max_new_tokens=4, do_sample=False)
    theirs = first["logits"]
    plan = plan_over(tmp_path, model)

    def ours(plan) -> Tensor:
        with torch.no_grad():
            output, _ = filled(plan, dtype=torch.float32)(
                target.get_input_embeddings()(first["input_ids"]),
                first["last_hidden_states"],
                first["position_ids"][0],
            )
            return target.lm_head(output)[:, -1]

    torch.testing.assert_close(ours(plan), theirs, rtol=1e-4, atol=1e-4)
    for wrong in ({"hidden_first": True}, {"embedding_norm": "hnorm", "hidden_norm": "enorm"}):
        assert (ours(changed(plan, **wrong)) - theirs).abs().max() > 0.1


# --- Against the trainers of the shipped models ---------------------------------------------------


@pytest.mark.parametrize("model", ["tiny-glm4-moe", "tiny-qwen3_5"])
def test_the_block_drafts_as_it_was_trained(model, monkeypatch):
    """models/train has its own MTP modules: all steps, all slots, in float32."""
    monkeypatch.syspath_prepend(ROOT / "models" / "train")
    import drafting

    teacher = importlib.import_module(model.replace("-", "_"))
    folder = ROOT / "models" / model
    config = teacher.build_config()
    config._attn_implementation = "sdpa"  # as the target class sets it, for the masks of bools
    weights = {name: value.float() for name, value in weights_of(folder).items()}
    mtp = teacher.mtp_from_disk(weights, config)
    embedding = nn.Embedding.from_pretrained(weights["model.embed_tokens.weight"])
    hidden = torch.randn(
        1, IDS.shape[1], config.hidden_size, generator=torch.Generator().manual_seed(0)
    )
    block = filled(plan_over(folder, model), dtype=torch.float32)
    with torch.no_grad():
        theirs = drafting.draft_hidden(mtp, embedding, ids_BT=IDS, hidden_BTH=hidden, num_steps=3)
        ours = draft_steps([block], embedding, ids=IDS, hidden=hidden, num_steps=3)
    for step, pair in enumerate(zip(ours, theirs, strict=True), start=1):
        torch.testing.assert_close(
            *pair, rtol=1e-4, atol=1e-4, msg=lambda text, step=step: f"step {step}: {text}"
        )


# --- Against transformers' own model around the decoder layer -------------------------------------

# Not where the backbone's layers have hyper-connections and the MTP layer has none, nor Step-3.5,
# whose language model transformers does not name.
STANDING = [
    model
    for model in ONCE
    if (draft := view_of(model).family.draft).proof == "source"
    and not draft.plain_residual
    and draft.model_type != "step3p5"
]


@pytest.mark.parametrize("model", STANDING)
def test_the_layer_computes_as_it_would_in_a_backbone(model, block_of):
    """A backbone that is the MTP layer alone, run by transformers' own forward: rotary embedding,
    mask, arguments.
    """
    block = block_of(model)
    draft, config = block.draft, copy.deepcopy(block.config)
    config.num_hidden_layers = len(draft.layers)
    for key, value in draft.layers[0].items():
        setattr(
            config, key, [entry for part in draft.layers for entry in part[key]] if value else value
        )
    if not any(".experts." in name for name in block.state_dict()):
        config._experts_implementation_internal = None  # such classes refuse to be told
    backbone: Any = AutoModel.from_config(
        config, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    linear_experts(backbone)
    backbone.layers = block.layers
    for name in ("norm", "norm_f", "hc_head", "hyper_connection_mixer"):
        if hasattr(backbone, name):
            ours = block.final_norm or nn.Identity() if name.startswith("norm") else block.collapse
            setattr(backbone, name, ours)
    embeds, hidden = _inputs(block)
    joined: list[Tensor] = []
    first = block.layers[0]
    with torch.no_grad():
        with hooked([first.register_forward_pre_hook(lambda _, args: joined.append(args[0]))]):
            ours, _ = block(embeds, hidden)
        start = embeds if draft.streams else joined[0]
        # A model with streams starts with the same state in each.
        given = first.register_forward_pre_hook(lambda _, args: (joined[0], *args[1:]))
        with hooked([given]):
            theirs = backbone(inputs_embeds=start, use_cache=False).last_hidden_state
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.few(7)
@pytest.mark.parametrize("model", ONCE)
def test_no_slot_sees_what_comes_later(model, block_of):
    """Over two steps; and everything is real and finite."""
    block = block_of(model)
    assert not [
        name for name, value in (*block.named_parameters(), *block.named_buffers()) if value.is_meta
    ]
    table = torch.randn(512, block.config.hidden_size, generator=torch.Generator().manual_seed(1))
    _, hidden = _inputs(block)
    later_ids, later_hidden = IDS.clone(), hidden.clone()
    later_ids[:, 9:] += 1
    later_hidden[:, 7:] += 1.0
    with torch.no_grad():
        runs = [
            draft_steps(
                [block], nn.Embedding.from_pretrained(table), ids=ids, hidden=states, num_steps=2
            )
            for ids, states in ((IDS, hidden), (later_ids, later_hidden))
        ]
    for one, other in zip(*runs, strict=True):
        assert one.isfinite().all()
        # Slot 6 of step 2 is fed token 8, the last that is the same.
        torch.testing.assert_close(one[:, :7], other[:, :7], rtol=1e-5, atol=1e-5)
        assert not torch.allclose(one[:, 7], other[:, 7])


def _inputs(block: MtpBlock) -> tuple[Tensor, Tensor]:
    noise = torch.Generator().manual_seed(0)
    size, length = block.config.hidden_size, IDS.shape[1]
    streams = getattr(block.config, block.draft.streams) if block.draft.streams else 1
    hidden = torch.randn(1, length, streams, size, generator=noise)
    embeds = torch.randn(1, length, size, generator=noise)
    if block.draft.joint_norm:
        return embeds, hidden.flatten(2)
    return embeds, hidden if block.draft.streams else hidden[:, :, 0]


def test_residual_streams_are_joined_and_collapsed_as_in_vllm(block_of):
    """DeepSeek-V4, by the formulas of vLLM 0.32.0's models/deepseek_v4/nvidia/mtp.py, whose kernels
    need a GPU.
    """
    block = block_of("dsv4-flash")
    embeds, hidden = _inputs(block)
    seen: dict[str, Tensor] = {}

    def look(_layer, args, output):
        seen.update(joined=args[0], streams=output)

    with torch.no_grad(), hooked([block.layers[0].register_forward_hook(look)]):
        output, chained = block(embeds, hidden)

    def rms(value: Tensor) -> Tensor:
        return value * torch.rsqrt(
            value.square().mean(-1, keepdim=True) + block.config.rms_norm_eps
        )

    embeds[:, 0] = 0.0
    tokens = F.linear(rms(embeds) * block.embedding_norm.weight, block.embedding_projection.weight)
    joined = F.linear(
        rms(hidden) * block.hidden_norm.weight, block.hidden_projection.weight
    ) + tokens.unsqueeze(-2)
    torch.testing.assert_close(seen["joined"], joined, rtol=1e-4, atol=1e-4)
    mixes = F.linear(rms(seen["streams"].flatten(2)), block.collapse.hc_fn)
    weights = (
        torch.sigmoid(mixes * block.collapse.hc_scale + block.collapse.hc_base)
        + block.config.hc_eps
    )
    collapsed = (weights.unsqueeze(-1) * seen["streams"]).sum(dim=2)
    torch.testing.assert_close(
        output, rms(collapsed) * block.final_norm.weight, rtol=1e-4, atol=1e-4
    )
    assert torch.equal(chained, seen["streams"])


def test_the_two_projections_are_told_apart(tmp_path):
    config, tensors = source_layout("dsv4-flash", size="tiny")
    plan = plan_over(write_checkpoint(tmp_path, config, tensors), "dsv4-flash")
    names = {}
    for path, pieces in bind_block(build_block(plan.view), plan).items():
        if not path.startswith("layers."):
            names[path] = pieces[0].tensor.name.removeprefix("mtp.0.")
    assert names == {
        "embedding_norm.weight": "enorm.weight",
        "hidden_norm.weight": "hnorm.weight",
        "embedding_projection.weight": "e_proj.weight",
        "hidden_projection.weight": "h_proj.weight",
        "collapse.hc_fn": "hc_head_fn",
        "collapse.hc_base": "hc_head_base",
        "collapse.hc_scale": "hc_head_scale",
        "final_norm.weight": "norm.weight",
    }


# --- The steps ------------------------------------------------------------------------------------


def test_the_mask_of_a_later_step():
    """Slot i of step 2 sees step 1 up to slot i, and of step 2 itself alone; a window counts
    positions.
    """
    steps = [torch.arange(4), torch.arange(4) + 1]
    causal = torch.ones(4, 4).tril().bool()
    wide = torch.cat([causal, torch.eye(4).bool()], dim=1)
    assert torch.equal(step_mask(steps, None), wide)
    narrow = torch.cat([torch.eye(4).bool()] * 2, dim=1)
    assert torch.equal(step_mask(steps, 2), narrow)
