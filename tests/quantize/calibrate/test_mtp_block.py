"""MTP blocks: which families have one, names on disk, and the same numbers as transformers and the
trainers compute.

What is compared with vLLM itself is in tests/vllm/test_draft_logits.py.
"""

import copy
import importlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from drafts import changed, filled, lively, plan_over, weights_of
from keepmtp.quantize.calibrate.model.experts import linear_experts
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
REFUSED = [model for model in MODELS if not view_of(model).family.draft]


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


@pytest.mark.parametrize("model", REFUSED)
def test_a_block_that_cannot_be_run_is_refused_with_a_way_on(model):
    with pytest.raises(RecipeError, match=r"Give `mtp` a word that needs no data") as told:
        build_block(view_of(model))
    assert view_of(model).family.no_draft in str(told.value)


@pytest.mark.parametrize("model", RUN)
def test_every_mtp_tensor_has_exactly_one_parameter(model, tmp_path):
    config, tensors = source_layout(model, size="tiny")
    # Experts stacked on disk are told apart where they are to be written one by one.
    plan = plan_over(
        write_checkpoint(tmp_path, config, tensors), RECIPES.get(model, model), mtp="FP8_DYNAMIC"
    )
    used: Counter[str] = Counter()
    num_blocks = plan.view.num_mtp_layers // plan.view.num_mtp_parts
    for index in range(num_blocks):
        block = build_block(plan.view, index)
        state = block.state_dict()
        for name, pieces in bind_block(block, plan).items():
            assert state[name].is_meta
            rows = 0
            for piece in pieces:
                shape = piece.tensor.shape if piece.expert is None else piece.tensor.shape[1:]
                rows += shape[0] // max(
                    1, len(piece.tensor.stacked) if piece.expert is not None else 1
                )
                assert shape[1:] == state[name].shape[1:], name
            assert rows == state[name].shape[0], name
            used.update({piece.tensor.name for piece in pieces})
    own_heads = {
        plan.view.mtp_stem(index) + plan.view.family.draft.head for index in range(num_blocks)
    }
    wanted = {
        tensor.name
        for tensor in plan.tensors
        if tensor.part == "mtp"
        and (tensor.role not in ("embedding", "head") or tensor.module in own_heads)
    }
    assert set(used) == wanted


def test_a_missing_tensor_is_named(tmp_path):
    config, tensors = source_layout("glm-4.7", size="tiny")
    plan = plan_over(write_checkpoint(tmp_path, config, tensors), "glm-4.7")
    short = [
        tensor
        for tensor in plan.tensors
        if not tensor.name.endswith("layers.3.self_attn.o_proj.weight")
    ]
    with pytest.raises(
        CheckpointError, match=r"every parameter.*layers\.0\.self_attn\.o_proj\.weight"
    ):
        bind_block(
            build_block(plan.view), type(plan)(plan.recipe, plan.source, plan.view, tuple(short))
        )


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
    calls: list[dict[str, Any]] = []
    drafts = MtpModel.forward

    def noted(self, *args, **kwargs):
        calls.append(
            {name: value.clone() for name, value in kwargs.items() if torch.is_tensor(value)}
        )
        calls[-1]["result"] = drafts(self, *args, **kwargs)
        return calls[-1]["result"]

    monkeypatch.setattr(MtpModel, "forward", noted)
    target.generate(IDS, use_mtp=True, max_new_tokens=4, do_sample=False)
    first = calls[0]
    theirs = first["result"][1][:, 0]
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
    assert (ours(changed(plan, hidden_first=True)) - theirs).abs().max() > 0.5
    assert (
        ours(changed(plan, embedding_norm="hnorm", hidden_norm="enorm")) - theirs
    ).abs().max() > 0.1


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
    handle = block.layers[0].register_forward_pre_hook(lambda _module, args: joined.append(args[0]))
    with torch.no_grad():
        ours, _ = block(embeds, hidden)
        handle.remove()
        # A model with streams starts with the same state in each.
        handle = block.layers[0].register_forward_pre_hook(
            lambda _module, args: (joined[0], *args[1:])
        )
        theirs = backbone(
            inputs_embeds=embeds if draft.streams else joined[0], use_cache=False
        ).last_hidden_state
        handle.remove()
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
    handles = [
        block.layers[0].register_forward_pre_hook(
            lambda _module, args: seen.update(joined=args[0])
        ),
        block.layers[0].register_forward_hook(
            lambda _module, _args, output: seen.update(streams=output)
        ),
    ]
    with torch.no_grad():
        output, chained = block(embeds, hidden)
    for handle in handles:
        handle.remove()

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
    binding = bind_block(build_block(plan.view), plan)
    names = {
        path: pieces[0].tensor.name
        for path, pieces in binding.items()
        if not path.startswith("layers.")
    }
    assert names == {
        "embedding_norm.weight": "mtp.0.enorm.weight",
        "hidden_norm.weight": "mtp.0.hnorm.weight",
        "embedding_projection.weight": "mtp.0.e_proj.weight",
        "hidden_projection.weight": "mtp.0.h_proj.weight",
        "collapse.hc_fn": "mtp.0.hc_head_fn",
        "collapse.hc_base": "mtp.0.hc_head_base",
        "collapse.hc_scale": "mtp.0.hc_head_scale",
        "final_norm.weight": "mtp.0.norm.weight",
    }


# --- The steps ------------------------------------------------------------------------------------


def test_the_mask_of_a_later_step():
    """Slot i of step 2 sees step 1 up to slot i, and of step 2 itself alone; a window counts
    positions.
    """
    steps = [torch.arange(4), torch.arange(4) + 1]
    wide, narrow = step_mask(steps, None).int(), step_mask(steps, 2).int()
    assert wide.tolist() == [
        [1, 0, 0, 0, 1, 0, 0, 0],
        [1, 1, 0, 0, 0, 1, 0, 0],
        [1, 1, 1, 0, 0, 0, 1, 0],
        [1, 1, 1, 1, 0, 0, 0, 1],
    ]
    assert narrow.tolist() == [
        [1, 0, 0, 0, 1, 0, 0, 0],
        [0, 1, 0, 0, 0, 1, 0, 0],
        [0, 0, 1, 0, 0, 0, 1, 0],
        [0, 0, 0, 1, 0, 0, 0, 1],
    ]
