"""MTP blocks: which families have one, names on disk, and the same numbers as transformers and the trainers compute.

What is compared with vLLM itself is in tests/vllm/test_draft_logits.py.
"""

import copy
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import MODELS, source_layout, write_checkpoint
from drafts import changed, filled, lively, plan_over, weights_of
from keepmtp.quantize.llmcompressor_backend import linear_experts
from keepmtp.quantize.mtp_block import MtpBlock, bind_block, build_block, draft_steps, step_mask, step_targets
from keepmtp.recipes.errors import CheckpointError, RecipeError
from keepmtp.recipes.families import families, find_family
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModel, AutoModelForCausalLM
from transformers.modeling_layers import MtpModel

ROOT = Path(__file__).parent.parent
RECIPES = {"qwen3.5-text": "qwen3.5-27b"}  # a release without a recipe of its own
IDS = torch.tensor([[5, 9, 33, 120, 7, 66, 41, 18, 29, 300, 12, 8]])


def view_of(model: str):
    config, _ = source_layout(model, size="tiny")
    return find_family(config, model).view(config)


RUN = [model for model in MODELS if view_of(model).family.draft]
REFUSED = [model for model in MODELS if not view_of(model).family.draft]


# --- Which families ---------------------------------------------------------------------------------------------------


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
    plan = plan_over(write_checkpoint(tmp_path, config, tensors), RECIPES.get(model, model), mtp="FP8_DYNAMIC")
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
                rows += shape[0] // max(1, len(piece.tensor.stacked) if piece.expert is not None else 1)
                assert shape[1:] == state[name].shape[1:], name
            assert rows == state[name].shape[0], name
            used.update({piece.tensor.name for piece in pieces})
    own_heads = {plan.view.mtp_stem(index) + plan.view.family.draft.head for index in range(num_blocks)}
    wanted = {
        tensor.name for tensor in plan.tensors if tensor.part == "mtp"
        and (tensor.role not in ("embedding", "head") or tensor.module in own_heads)
    }  # fmt: skip
    assert set(used) == wanted


def test_a_missing_tensor_is_named(tmp_path):
    config, tensors = source_layout("glm-4.7", size="tiny")
    plan = plan_over(write_checkpoint(tmp_path, config, tensors), "glm-4.7")
    short = [tensor for tensor in plan.tensors if not tensor.name.endswith("layers.3.self_attn.o_proj.weight")]
    with pytest.raises(CheckpointError, match=r"every parameter.*layers\.0\.self_attn\.o_proj\.weight"):
        bind_block(build_block(plan.view), type(plan)(plan.recipe, plan.source, plan.view, tuple(short)))


# --- Against transformers' own drafting -------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["deepseek-r1", "glm-4.7"])
def test_the_block_drafts_as_transformers_does(model, tmp_path, monkeypatch):
    """`generate(use_mtp=True)` drafts; the same inputs give the same logits in float32, up to the order of sums.

    transformers counts positions from the drafted token on, so it never stands at position 0; rotary embeddings see
    differences alone.
    """
    lively(tmp_path, model)
    target = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="eager")
    # The class names the layers of the full-size release, which the tiny one has not got.
    target._keys_to_ignore_on_load_unexpected = [rf"(^|\.)layers\.{target.config.num_hidden_layers}\."]
    calls: list[dict[str, Any]] = []
    drafts = MtpModel.forward

    def noted(self, *args, **kwargs):
        calls.append({name: value.clone() for name, value in kwargs.items() if torch.is_tensor(value)})
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
                target.get_input_embeddings()(first["input_ids"]), first["last_hidden_states"], first["position_ids"][0]
            )
            return target.lm_head(output)[:, -1]

    torch.testing.assert_close(ours(plan), theirs, rtol=1e-4, atol=1e-4)
    assert (ours(changed(plan, hidden_first=True)) - theirs).abs().max() > 0.5
    assert (ours(changed(plan, final_norm="hnorm")) - theirs).abs().max() > 0.1


# --- Against the trainers of the shipped models -----------------------------------------------------------------------


@pytest.mark.parametrize("model", ["tiny-glm4-moe", "tiny-qwen3_5"])
def test_the_block_drafts_as_it_was_trained(model, monkeypatch):
    """models/train has its own MTP modules: all steps, all slots, in float32."""
    monkeypatch.syspath_prepend(ROOT / "models" / "train")
    import drafting

    teacher = pytest.importorskip(model.replace("-", "_").replace("glm4_moe", "glm4_moe"))
    folder = ROOT / "models" / model
    config = teacher.build_config()
    weights = {name: value.float() for name, value in weights_of(folder).items()}
    mtp = teacher.mtp_from_disk(weights, config)
    embedding = nn.Embedding.from_pretrained(weights["model.embed_tokens.weight"])
    hidden = torch.randn(1, IDS.shape[1], config.hidden_size, generator=torch.Generator().manual_seed(0))
    block = filled(plan_over(folder, model), dtype=torch.float32)
    with torch.no_grad():
        theirs = drafting.draft_hidden(mtp, embedding, ids_BT=IDS, hidden_BTH=hidden, num_steps=3)
        ours = draft_steps([block], embedding, ids=IDS, hidden=hidden, num_steps=3)
    for step, pair in enumerate(zip(ours, theirs, strict=True), start=1):
        torch.testing.assert_close(*pair, rtol=1e-4, atol=1e-4, msg=lambda text, step=step: f"step {step}: {text}")
    assert torch.equal(step_targets(IDS, 2), drafting.step_targets(IDS, 2))


# --- Against transformers' own model around the decoder layer ---------------------------------------------------------

# Where the backbone's layers are others than the MTP layer's, transformers has no model with the latter.
STANDING = [m for m in RUN if view_of(m).family.draft.proof == "source" and not view_of(m).family.draft.plain_residual]


@pytest.mark.parametrize("model", STANDING)
def test_the_layer_computes_as_it_would_in_a_backbone(model, tmp_path):
    """A backbone that consists of the MTP layer alone, run by transformers' own forward: rotary embedding, mask, calls."""
    plan = plan_over(lively(tmp_path, model), RECIPES.get(model, model), mtp="FP8_DYNAMIC")
    block = filled(plan, dtype=torch.float32)
    draft, config = block.draft, copy.deepcopy(block.config)
    config.num_hidden_layers = len(draft.layers)
    for key in draft.layers[0]:
        setattr(config, key, [value for part in draft.layers for value in part[key]]
                if isinstance(draft.layers[0][key], list) else draft.layers[0][key])  # fmt: skip
    if model.startswith("step"):
        config.layer_types, config.mlp_layer_types = [block.kind], ["dense"]
    backbone = AutoModel.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    linear_experts(backbone)
    backbone.layers.load_state_dict(block.layers.state_dict(), assign=True)
    outside = {"norm": block.final_norm or nn.Identity(), "hc_head": block.collapse, "hyper_connection_mixer": block.collapse}
    for name, module in outside.items():
        if hasattr(backbone, name):
            setattr(backbone, name, module)
    if hasattr(backbone, "norm_f"):
        backbone.norm_f = block.final_norm
    embeds, hidden = _inputs(block)
    joined: list[Tensor] = []
    block.layers[0].register_forward_pre_hook(lambda _module, args: joined.append(args[0]))
    with torch.no_grad():
        ours, _ = block(embeds, hidden)
        if draft.streams:  # the model would start with the same state in each stream
            backbone.layers[0].register_forward_pre_hook(lambda _module, args: (joined[0], *args[1:]))
        theirs = backbone(
            **{"inputs_embeds": embeds if draft.streams else joined[0], "use_cache": False},
            **({"input_ids": None} if not draft.streams else {}),
        ).last_hidden_state
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("model", RUN)
def test_no_slot_sees_what_comes_later(model, tmp_path):
    """Over two steps, and everything is real and finite."""
    plan = plan_over(lively(tmp_path, model), RECIPES.get(model, model), mtp="FP8_DYNAMIC")
    block = filled(plan, dtype=torch.float32)
    assert not [name for name, value in (*block.named_parameters(), *block.named_buffers()) if value.is_meta]
    table = torch.randn(512, block.config.hidden_size, generator=torch.Generator().manual_seed(1))
    _, hidden = _inputs(block)
    later_ids, later_hidden = IDS.clone(), hidden.clone()
    later_ids[:, 9:] += 1
    later_hidden[:, 7:] += 1.0
    with torch.no_grad():
        runs = [
            draft_steps([block], nn.Embedding.from_pretrained(table), ids=ids, hidden=states, num_steps=2)
            for ids, states in ((IDS, hidden), (later_ids, later_hidden))
        ]
    for step, (one, other) in enumerate(zip(*runs, strict=True), start=1):
        assert one.isfinite().all()
        untouched = 9 - step if step == 2 else 7
        torch.testing.assert_close(one[:, : min(7, untouched)], other[:, : min(7, untouched)], rtol=1e-5, atol=1e-5)
        assert not torch.allclose(one[:, 8], other[:, 8])


def _inputs(block: MtpBlock) -> tuple[Tensor, Tensor]:
    noise = torch.Generator().manual_seed(0)
    size, length = block.config.hidden_size, IDS.shape[1]
    streams = getattr(block.config, block.draft.streams) if block.draft.streams else 1
    hidden = torch.randn(1, length, streams, size, generator=noise)
    embeds = torch.randn(1, length, size, generator=noise)
    if block.draft.joint_norm:
        return embeds, hidden.flatten(2)
    return embeds, hidden if block.draft.streams else hidden[:, :, 0]


# --- The steps --------------------------------------------------------------------------------------------------------


def test_the_mask_of_a_later_step():
    """Slot i of step 2 sees step 1 up to slot i, and of step 2 itself alone; a window counts positions."""
    steps = [torch.arange(4), torch.arange(4) + 1]
    wide, narrow = step_mask(steps, None).int(), step_mask(steps, 2).int()
    assert wide.tolist() == [[1, 0, 0, 0, 1, 0, 0, 0], [1, 1, 0, 0, 0, 1, 0, 0],
                             [1, 1, 1, 0, 0, 0, 1, 0], [1, 1, 1, 1, 0, 0, 0, 1]]  # fmt: skip
    assert narrow.tolist() == [[1, 0, 0, 0, 1, 0, 0, 0], [0, 1, 0, 0, 0, 1, 0, 0],
                               [0, 0, 1, 0, 0, 0, 1, 0], [0, 0, 0, 1, 0, 0, 0, 1]]  # fmt: skip
