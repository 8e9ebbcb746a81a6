"""Hy4: gated latent attention, hyper-connections, experts stacked on disk, MTP under
`model.mtp_layers.{i}`.

vLLM 0.32.0: models/hy_v4/nvidia/{model,attention,moe,mtp}.py. The draft is constructed as
`model.layers.{num_hidden_layers + i}`; compressed-tensors' `ignore` is not translated from the
names on disk (only `ignored_layers` and `exclude_modules` are). Its loader warns of an unknown
tensor and of a parameter without one, and goes on. The draft's head has the prefix of the target's,
`lm_head`.
"""

from ..family import Draft, Family, Layout, Loader, Renames, Row, Stem
from ._blocks import (
    EH_PROJ_IS_NN_LINEAR,
    INDEXER,
    MLA,
    NORM,
    NORMS,
    ROUTER,
    TOP,
    gated_mlp,
    kept,
    plain,
    routed_experts,
)  # fmt: skip

HYPER_CONNECTION = "float32 parameters of the hyper-connections"
HEADS = ("fn", "base", "scale")
CONNECTIONS = tuple(
    f"hc_{part}_layer.hc_pre.hc_{name}" for part in ("attn", "mlp") for name in HEADS
)

FAMILY = Family(
    model_type="hy_v4",
    layouts={
        "*": Layout(
            layers=Stem(disk="model.layers.{i}.", runtime="model.layers.{i}."),
            mtp=Stem(disk="model.mtp_layers.{i}.", runtime="model.layers.{n}."),
            top=(*TOP, *kept("state", HYPER_CONNECTION, *(f"model.hc_head.hc_head_{name}" for name in HEADS))),
            draft_head="lm_head",
            renames=Renames(),
        ),
    },
    block=(
        *MLA,
        *INDEXER,
        *plain("attention", "self_attn.linear_gate"),
        *kept("state", "one value a head", "self_attn.learnable_sink_param"),
        *gated_mlp("mlp", "dense_mlp"),
        *routed_experts("mlp.experts"),
        Row(path="mlp.experts.gate_up_proj", role="experts", runtime="mlp.experts", stacked=("gate_proj", "up_proj")),
        Row(path="mlp.experts.down_proj", role="experts", runtime="mlp.experts", stacked=("down_proj",)),
        *gated_mlp("mlp.shared_experts", "shared_experts"),
        *kept("router", ROUTER, "mlp.gate"),
        *kept("state", HYPER_CONNECTION, *CONNECTIONS),
        *NORMS,
    ),
    mtp_block=(
        *kept("glue", EH_PROJ_IS_NN_LINEAR, "eh_proj"),
        *kept("norm", NORM, "enorm", "hnorm", "final_layernorm"),
    ),
    mtp_lacks=CONNECTIONS,
    loader=Loader(unknown_name="", takes_kv_scales=True),
    draft=Draft(
        model_type="hy_v4", classes="HYV4", plain_residual=True, final_norm="final_layernorm",
        layers=({"layer_types": ["deepseek_sparse_attention"], "mlp_layer_types": ["sparse"],
                 "indexer_types": ["full"]},), zeroes_first=False, chains_normed=True,
        can_keep_choice=True, proof="source",
    ),
    notes="on disk model.mtp_layers.{i}, in vLLM model.layers.{num_hidden_layers + i}; a missing " "block is a warning",
)  # fmt: skip
