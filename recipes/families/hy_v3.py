"""Hy3 (HunYuan V3): grouped-query attention, routed experts, one inlined MTP layer without copies.

vLLM 0.32.0: model_executor/models/hy_v3.py, hy_v3_mtp.py. The draft's head is built with an empty
prefix and filled from `lm_head`: under modelopt no entry can exclude it. `embed_tokens` and
`shared_head` of the MTP layer are skipped.
"""

from ..family import Draft, Family, Loader, Row
from ._blocks import (
    EH_PROJ_IS_NN_LINEAR,
    GQA,
    INLINED,
    NORM,
    NORMS,
    ROUTER,
    gated_mlp,
    kept,
    routed_experts,
)

FAMILY = Family(
    model_type="hy_v3",
    layouts=INLINED,
    block=(
        *GQA,
        *gated_mlp("mlp", "dense_mlp"),
        *routed_experts("mlp.experts"),
        *gated_mlp("mlp.shared_mlp", "shared_experts"),
        Row(
            path="mlp.router.gate",
            role="router",
            runtime="mlp.gate",
            why_kept=ROUTER,
            loads_quantized=False,
        ),
        Row(path="mlp.expert_bias", role="router", why_kept=ROUTER, loads_quantized=False),
        *NORMS,
    ),
    mtp_block=(
        *kept("glue", EH_PROJ_IS_NN_LINEAR, "eh_proj"),
        *kept("norm", NORM, "enorm", "hnorm", "final_layernorm"),
    ),
    loader=Loader(
        takes_kv_scales=True,
        needs=("expert_hidden_dim", "route_norm"),
        missing_count="AttributeError",
    ),
    modelopt_by_module=True,
    draft=Draft(
        model_type="hy_v3",
        classes="HYV3",
        layers=({"mlp_layer_types": ["sparse"]},),
        final_norm="final_layernorm",
        zeroes_first=True,
        chains_normed=True,
        proof="vllm",
    ),
    notes="MTP is model.layers.{num_hidden_layers}; a missing block is silent, embedding and head "
    "are the target's",
)
