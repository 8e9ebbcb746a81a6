"""MiMo-V2-Flash: full and sliding attention with sinks, routed experts, three dense MTP layers
under `model.mtp`.

vLLM 0.32.0: model_executor/models/mimo_v2.py, mimo_v2_mtp.py. Both loaders skip a tensor without a
parameter in silence. vLLM builds `eh_proj` and the draft's `o_proj` without a quantization config:
if they are quantized, it does not load them and does not say so. It drafts with the first of the
three layers only; config.json counts none.

MiMo-V2 Pro, V2.5 and Omni (model_type mimo_v2) are not in this table. They store q, k and v as one
tensor with rows interleaved for four ranks, and vLLM puts those rows in order only for its own FP8
format.
"""

from ..family import Draft, Family, Layout, Loader, Row, Stem
from ._blocks import (
    EH_PROJ_IS_NN_LINEAR,
    GQA,
    NORM,
    NORMS,
    ROUTER,
    TOP,
    gated_mlp,
    kept,
    routed_experts,
)

O_PROJ = "vLLM builds the draft's o_proj without a quantization config"
SINK = Row(path="self_attn.attention_sink_bias", role="state", why_kept="one value a head", loads_quantized=False,
           in_every_layer=False)  # fmt: skip

FAMILY = Family(
    model_type="mimo_v2_flash",
    layouts={
        "*": Layout(
            layers=Stem(disk="model.layers.{i}.", runtime="model.layers.{i}."),
            mtp=Stem(disk="model.mtp.layers.{i}.", runtime="model.mtp.layers.{i}."),
            top=TOP,
        ),
    },
    block=(
        *GQA,
        SINK,
        *gated_mlp("mlp", "dense_mlp"),
        *routed_experts("mlp.experts"),
        *kept("router", ROUTER, "mlp.gate"),
        *NORMS,
    ),
    mtp_block=(
        Row(path="self_attn.o_proj", role="attention", why_kept=O_PROJ, loads_quantized=False),
        SINK,
        *kept("glue", EH_PROJ_IS_NN_LINEAR.replace("a plain nn.Linear, which", "a linear that"), "eh_proj"),
        *kept("norm", NORM, "enorm", "hnorm", "pre_mlp_layernorm", "final_layernorm"),
    ),
    mtp_lacks=("post_attention_layernorm",),
    mtp_count_default=3,
    loader=Loader(
        unknown_name="", num_layers_used=1, takes_kv_scales=True, draft_kv_names="",
        needs=("hybrid_layer_pattern", "layernorm_epsilon", "sliding_window_size", "swa_num_attention_heads",
               "swa_num_key_value_heads", "swa_head_dim"),
    ),
    draft=Draft(
        model_type="mimo_v2_flash", classes="MiMoV2Flash", rope_types=("own",),
        layers=({"layer_types": ["sliding_attention"], "mlp_layer_types": ["dense"]},),
        renames=(("post_attention_layernorm", "pre_mlp_layernorm"),), final_norm="final_layernorm",
        zeroes_first=False, chains_normed=True, proof="vllm",
    ),
    notes="MTP is model.mtp.layers.{i}; vLLM drafts with the first of three, whose o_proj and " "eh_proj stay BF16",
)  # fmt: skip
