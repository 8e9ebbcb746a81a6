"""MiniMax-M3: block-sparse attention with its indexer fused into qkv_proj, routed experts, MTP
under `model.mtp`.

vLLM 0.32.0: models/minimax_m3/nvidia/{model,mtp}.py. The draft is constructed as
`model.layers.{i}`, the target as `language_model.model.layers.{i}`: entries in the names on disk
(`language_model.model.mtp.*`) never match, and a pattern that is not anchored at the start hits
both. The loaders skip a tensor without a parameter in silence.

The release has no MTP block, although its config.json counts seven modules. A checkpoint of the
block alone (`minimax_m3_mtp`) has names without `language_model.` (nvidia/mtp.py:
_map_checkpoint_name).
"""

from dataclasses import replace

from ..family import Draft, Family, Layout, Loader, Renames, Row, Stem
from ._blocks import (
    EMBEDDING,
    GQA,
    HEAD,
    NORM,
    NORMS,
    ROUTER,
    fused,
    gated_mlp,
    kept,
    nested,
    routed_experts,
)

GLUE = (
    "joins embedding and hidden state for the whole draft: small, and everything passes through it"
)
INDEXER = (
    *fused(
        "self_attn.qkv_proj", "self_attn.index_q_proj", "self_attn.index_k_proj", role="attention"
    ),
    *kept("norm", NORM, "self_attn.index_q_norm", "self_attn.index_k_norm"),
)
# PerTensorScaleParameter (model_executor/parameter.py) knows only the shards q, k and v.
ATTENTION = tuple(
    replace(
        row,
        takes_tensor_scale=row.runtime != "self_attn.qkv_proj",
        in_every_layer=row not in INDEXER,
    )
    for row in (*GQA, *INDEXER)
)
EXPERTS = (
    *routed_experts("block_sparse_moe.experts", "w1", "w3", "w2", aliases=True),
    *gated_mlp("block_sparse_moe.shared_experts", "shared_experts"),
    *kept("router", ROUTER, "block_sparse_moe.gate", "block_sparse_moe.e_score_correction_bias"),
)

FAMILY = Family(
    model_type="minimax_m3_vl",
    layouts={
        "*": Layout(
            layers=Stem(disk="language_model.model.layers.{i}.", runtime="language_model.model.layers.{i}."),
            mtp=Stem(disk="language_model.model.mtp.layers.{i}.", runtime="model.layers.{i}."),
            top=(
                *kept("embedding", EMBEDDING, "language_model.model.embed_tokens"),
                *kept("head", HEAD, "language_model.lm_head", loads_quantized=True),
                *kept("norm", NORM, "language_model.model.norm"),
            ),
            opaque=(
                ("vision_tower.", "vision_tower.", "vision"),
                ("multi_modal_projector.", "vision_tower.multi_modal_projector.", "vision"),
                ("patch_merge_mlp.", "vision_tower.patch_merge_mlp.", "vision"),
            ),
            head="language_model.lm_head.weight",
            draft_head="lm_head",
            renames=Renames(
                substrings=((".mlp.fc1.", ".fc1."), (".mlp.fc2.", ".fc2.")),
                prefixes=(("multi_modal_projector.", "vision_tower.multi_modal_projector."),
                          ("patch_merge_mlp.", "vision_tower.patch_merge_mlp.")),
            ),
        ),
    },
    block=(*ATTENTION, *gated_mlp("mlp", "dense_mlp"), *EXPERTS, *NORMS),
    mtp_block=(
        *nested("transformer_layer.", (*ATTENTION, *EXPERTS, *NORMS)),
        Row(path="eh_proj", role="glue", why_kept=GLUE),
        *kept("norm", NORM, "enorm", "hnorm", "final_layernorm"),
    ),
    mtp_count_keys=("num_mtp_modules",),
    mtp_source_prefixes=(("model.mtp.", "language_model.model.mtp."),),
    mtp_count_default=1,
    loader=Loader(unknown_name="", refuses_missing_mtp=True, takes_kv_scales=True),
    draft=Draft(
        model_type="minimax_m3_vl_text", classes="MiniMaxM3VL", renames=(("", "transformer_layer."),),
        layers=({"layer_types": ["minimax_m3_sparse"], "mlp_layer_types": ["sparse"]},), final_norm="final_layernorm",
        zeroes_first=True, chains_normed=False, proof="source",
    ),
    no_fp8_cache="sparse attention, whose class has no parameters for them",
    notes="on disk language_model.model.mtp.layers.{i}, in vLLM model.layers.{i}; the target has " "language_model. there",
)  # fmt: skip
