"""Ling and Ring 2.5 and 2.6: lightning attention with a latent-attention layer in each group, one
inlined MTP layer.

vLLM 0.32.0: model_executor/models/bailing_moe_linear.py, bailing_moe_mtp.py. On disk the mixer is
`attention`, in vLLM `self_attn`, its last projection `dense` in lightning layers and `o_proj` in
latent ones. The draft's head is built as `model.layers.{N}.shared_head.head`. Both loaders skip
unknown names in silence: a tensor in the wrong name leaves random weights. Ling 3 has the same
model_type: bailing_hybrid_v3.py.
"""

from ..family import Family, Layout, Loader, Row, Stem
from ._blocks import (
    EH_PROJ_IS_NN_LINEAR,
    EMBEDDING,
    HEAD,
    NORM,
    NORMS,
    ROUTER,
    gated_mlp,
    kept,
    routed_experts,
)  # fmt: skip

# q_proj is not fused where the model has no q_lora_rank.
LATENT = (
    *(Row(path=f"attention.{name}", role="attention", runtime="self_attn.fused_qkv_a_proj",
          shares="self_attn.fused_qkv_a_proj") for name in ("q_a_proj", "kv_a_proj_with_mqa")),
    *(Row(path=f"attention.{name}", role="attention", runtime=f"self_attn.{name}")
      for name in ("q_proj", "q_b_proj", "kv_b_proj")),
    *kept("norm", NORM, "attention.q_a_layernorm", "attention.kv_a_layernorm"),
)  # fmt: skip
MLP = (
    *gated_mlp("mlp", "dense_mlp"),
    *routed_experts("mlp.experts"),
    *gated_mlp("mlp.shared_experts", "shared_experts"),
    *kept("router", ROUTER, "mlp.gate", "mlp.gate.expert_bias"),
)
LAYOUT_TOP = (
    Row(path="model.word_embeddings", role="embedding", why_kept=EMBEDDING, loads_quantized=False),
    *kept("head", HEAD, "lm_head", loads_quantized=True),
    *kept("norm", NORM, "model.norm"),
)
LAYERS = Stem(disk="model.layers.{i}.", runtime="model.layers.{i}.")

FAMILY = Family(
    model_type="bailing_hybrid",
    layouts={"*": Layout(layers=LAYERS, mtp=None, top=LAYOUT_TOP)},
    block=(
        *LATENT,
        Row(path="attention.dense", role="attention", runtime="self_attn.o_proj"),
        *MLP,
        *NORMS,
    ),
    linear_block=(
        *(Row(path=f"attention.{name}", role="linear_attention", runtime=f"self_attn.{name}")
          for name in ("query_key_value", "g_proj", "dense")),
        *kept("norm", NORM, "attention.query_layernorm", "attention.key_layernorm", "attention.g_norm"),
    ),
    mtp_block=(
        *kept("glue", EH_PROJ_IS_NN_LINEAR, "eh_proj"),
        *kept("norm", NORM, "enorm", "hnorm", "final_layernorm"),
        Row(path="shared_head.head", role="head", why_kept=HEAD),
    ),
    loader=Loader(
        unknown_name="", refuses_missing_mtp=True, takes_kv_scales=True, missing_count="AttributeError"
    ),
    no_draft="transformers has no class for Ling 2.5's layers",
    notes="MTP is model.layers.{num_hidden_layers}; attention.* on disk is self_attn.* in vLLM",
)  # fmt: skip
