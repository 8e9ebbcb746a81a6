"""Kimi-K3: delta attention and gated latent attention, experts in a latent space, one inlined MTP
layer.

vLLM 0.32.0: models/kimi_k3/nvidia/{model,mla,kda,mtp}.py. moonshotai/Kimi-K3 itself has no MTP
layer. The draft is constructed as `model.layers.{N}`, the target as
`language_model.model.layers.{i}`: entries with the names on disk do not reach the draft. Its loader
skips a tensor without a parameter in silence, but needs a tensor of each MTP layer. g_proj is in
two fused modules: in_proj_qkvgfab in delta attention, fused_qkv_a_g_proj in latent attention.
"""

from ..family import Family, Layout, Loader, Renames, Row, Stem
from ._blocks import (
    EMBEDDING,
    HEAD,
    NORM,
    NORMS,
    ROUTER,
    fused,
    gated_mlp,
    kept,
    plain,
    routed_experts,
)

GATES = "narrow; decides the delta net's decay"
RESIDUAL = "one row; vLLM builds it without a quantization config"
EH_PROJ = "vLLM builds eh_proj without a quantization config"
KDA = fused(
    "self_attn.in_proj_qkvgfab", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.g_proj",
    "self_attn.f_a_proj", "self_attn.b_proj", role="linear_attention",
)  # fmt: skip

FAMILY = Family(
    model_type="kimi_k3",
    layouts={
        "*": Layout(
            layers=Stem(disk="language_model.model.layers.{i}.", runtime="language_model.model.layers.{i}."),
            mtp=None,
            mtp_runtime="model.layers.{i}.",
            top=(
                *kept("embedding", EMBEDDING, "language_model.model.embed_tokens"),
                *kept("head", HEAD, "language_model.lm_head", loads_quantized=True),
                *kept("norm", NORM, "language_model.model.norm", "language_model.model.output_attn_res_norm"),
                *kept("state", RESIDUAL, "language_model.model.output_attn_res_proj"),
            ),
            opaque=(
                ("vision_tower.", "vision_tower.", "vision"),
                ("mm_projector.proj.0", "mm_projector.linear_1", "vision"),
                ("mm_projector.proj.2", "mm_projector.linear_2", "vision"),
                ("mm_projector.", "mm_projector.", "vision"),
            ),
            head="language_model.lm_head.weight",
            renames=Renames(
                prefixes=(("language_model.layers.", "language_model.model.layers."),
                          ("mm_projector.proj.0", "mm_projector.linear_1"),
                          ("mm_projector.proj.2", "mm_projector.linear_2")),
            ),
        ),
    },
    block=(
        *fused("self_attn.fused_qkv_a_g_proj", "self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa",
               "self_attn.g_proj", role="attention"),
        *plain("attention", "self_attn.q_b_proj", "self_attn.kv_b_proj", "self_attn.o_proj"),
        *kept("norm", NORM, "self_attn.q_a_layernorm", "self_attn.kv_a_layernorm"),
        *gated_mlp("mlp", "dense_mlp"),
        *routed_experts("block_sparse_moe.experts", "w1", "w3", "w2", aliases=True),
        *plain("shared_experts", "block_sparse_moe.routed_expert_down_proj", "block_sparse_moe.routed_expert_up_proj"),
        Row(path="block_sparse_moe.routed_expert_norm", role="norm", why_kept=NORM, loads_quantized=False,
            in_every_layer=False),
        *gated_mlp("block_sparse_moe.shared_experts", "shared_experts"),
        *kept("router", ROUTER, "block_sparse_moe.gate"),
        *kept("norm", NORM, "self_attention_res_norm", "mlp_res_norm"),
        *kept("state", RESIDUAL, "self_attention_res_proj", "mlp_res_proj"),
        *NORMS,
    ),
    linear_block=(
        *KDA,
        *kept("state", GATES, "self_attn.f_b_proj", loads_quantized=True),
        *kept("state", "small, sets the recurrence", "self_attn.A_log", "self_attn.dt_bias",
              *(f"self_attn.{name}_conv1d" for name in "qkv")),
        *kept("norm", NORM, "self_attn.o_norm"),
        *plain("linear_attention", "self_attn.o_proj"),
    ),
    mtp_block=(
        *kept("glue", EH_PROJ, "eh_proj"),
        *kept("norm", NORM, "enorm", "hnorm", "shared_head.norm"),
        *kept("embedding", EMBEDDING, "embed_tokens"),
        Row(path="shared_head.head", role="head", runtime="head", why_kept=HEAD),
    ),
    mtp_lacks=("self_attention_res_norm", "self_attention_res_proj", "mlp_res_norm", "mlp_res_proj"),
    # model_executor/models/config.py, KimiK3ForConditionalGenerationConfig
    rerouted_format="mxfp4-pack-quantized",
    loader=Loader(unknown_name="", refuses_missing_mtp=True, takes_kv_scales=True),
    no_draft="transformers has no class for Kimi-K3's layers",
    no_backbone="transformers has no class for Kimi-K3's layers",
    notes="MTP is language_model.model.layers.{N} on disk, model.layers.{N} in vLLM; the release " "itself has none",
)  # fmt: skip
