"""Step-3.5-Flash and Step-3.7-Flash: grouped-query attention with a gate per head, stacked experts,
three MTP layers.

vLLM 0.32.0: model_executor/models/step3p5.py, step3p7.py, step3p5_mtp.py. The draft constructs its
block with `.mtp_block.` in the prefix and reads config.json again, without the target's
fused-module mapping: an ignore list in shard names (`q_proj`) matches nothing there. Each MTP layer
has a trained head of its own (`transformer.shared_head.output`), which must stay. With
`layer_types` in config.json vLLM 0.32.0 cannot construct the
draft: Step3p5Config cuts the list to the decoder layers, and the index of the MTP layer is after
its end.
"""

from dataclasses import replace

from ..family import Draft, Family, Layout, Loader, Renames, Row, Stem
from ._blocks import (
    EH_PROJ_IS_NN_LINEAR,
    EMBEDDING,
    GQA,
    HEAD,
    NORM,
    NORMS,
    ROUTER,
    TOP,
    fused,
    gated_mlp,
    kept,
    routed_experts,
)  # fmt: skip

HEAD_GATE = "one row a head, scales that head's whole output"
OWN_HEAD = "a trained head of the draft's own; its logits decide acceptance"

ATTENTION = (*GQA, *kept("state", HEAD_GATE, "self_attn.g_proj", loads_quantized=True))
DENSE = gated_mlp("mlp", "dense_mlp")

FAMILY = Family(
    model_type="step3p5",
    also=("step3p7",),
    layouts={
        "Step3p7ForConditionalGeneration": Layout(
            layers=Stem(disk="model.layers.{i}.", runtime="language_model.model.layers.{i}."),
            mtp=None,
            mtp_runtime="model.layers.{i}.",
            draft_reads_afresh=True,
            top=(
                Row(path="model.embed_tokens", role="embedding", runtime="language_model.model.embed_tokens",
                    why_kept=EMBEDDING, loads_quantized=False),
                Row(path="lm_head", role="head", runtime="language_model.lm_head", why_kept=HEAD),
                *kept("norm", NORM, "model.norm"),
            ),
            opaque=(("vision_model.", "vision_model.", "vision"), ("vit_large_", "vit_large_", "vision")),
            renames=Renames(
                substrings=((".attn.in_proj_weight", ".attn.qkv_proj.weight"),
                            (".attn.in_proj_bias", ".attn.qkv_proj.bias"),
                            (".mlp.c_fc", ".mlp.fc1"), (".mlp.c_proj", ".mlp.fc2")),
                prefixes=(("model.vision_model.", "vision_model."),
                          ("model.vit_large_projector", "vit_large_projector"),
                          ("model.language_model", "language_model.model"), ("model.", "language_model.model."),
                          ("lm_head", "language_model.lm_head")),
            ),
        ),
        "*": Layout(
            layers=Stem(disk="model.layers.{i}.", runtime="model.layers.{i}."),
            mtp=None,
            top=TOP,
            renames=Renames(substrings=((".share_expert.", ".moe.share_expert."),)),
            draft_reads_afresh=True,
        ),
    },
    block=(
        *ATTENTION,
        *DENSE,
        *(
            Row(path=f"moe.{name}", role="experts", runtime="moe.experts", stacked=(name,),
                shares="" if name == "down_proj" else "moe.experts.w13")
            for name in ("gate_proj", "up_proj", "down_proj")
        ),
        *routed_experts("moe.experts"),
        *fused("moe.share_expert.gate_up_proj", "share_expert.gate_proj", "share_expert.up_proj",
               role="shared_experts"),
        Row(path="share_expert.down_proj", role="shared_experts", runtime="moe.share_expert.down_proj"),
        *kept("router", ROUTER, "moe.gate", "moe.router_bias"),
        *NORMS,
    ),
    mtp_block=(
        *kept("glue", EH_PROJ_IS_NN_LINEAR, "eh_proj"),
        *kept("norm", NORM, "enorm", "hnorm", "transformer.shared_head.norm"),
        Row(path="transformer.shared_head.output", role="head", runtime="shared_head.head", why_kept=OWN_HEAD,
            is_drafts_own=True),
        *(replace(row, runtime=f"mtp_block.{row.runtime or row.path}") for row in (*ATTENTION, *DENSE, *NORMS)),
    ),
    layer_types_count_mtp=True,
    loader=Loader(refuses_missing_mtp=True, draft_kv_names=""),
    draft=Draft(
        model_type="step3p5", classes="Step3p7", rope_types=("own",), final_norm="transformer.shared_head.norm",
        head="transformer.shared_head.output", zeroes_first=False, chains_normed=False, proof="source",
    ),
    norms_add_one=True,
    no_backbone="no class in transformers for Step-3.5 alone; llm-compressor makes no single linears of " "its experts",
    notes="MTP is model.layers.{num_hidden_layers} and on, each with a head of its own; vLLM " "0.32.0 raises IndexError",
)  # fmt: skip
