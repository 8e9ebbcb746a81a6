"""Qwen3-Next: gated delta nets and gated attention, routed experts, MTP under `mtp.*`.

vLLM 0.32.0: model_executor/models/qwen3_next.py, qwen3_next_mtp.py. `mtp.fc` is quantizable under
compressed-tensors, and its BF16 form must be in the ignore list (`mtp.layers.0*` does not cover
it); it costs 2 * hidden^2 elements and carries the whole hidden state, so the table keeps it.
"""

from ..family import Draft, Family, Layout, Loader, Renames, Row, Stem
from ._blocks import EMBEDDING, GQA, NORM, NORMS, ROUTER, gated_mlp, kept, plain, routed_experts

FC = "joins embedding and hidden state for the whole draft: small, and everything passes through it"
GATES = "too narrow to gain from quantization; decides the delta net's decay"
GDN_STATE = (
    *kept(
        "state",
        "small, sets the recurrence",
        "linear_attn.conv1d",
        "linear_attn.A_log",
        "linear_attn.dt_bias",
    ),
    *kept("norm", NORM, "linear_attn.norm"),
)
QWEN_MOE = (
    *routed_experts("mlp.experts"),
    Row(
        path="mlp.experts.gate_up_proj",
        role="experts",
        runtime="mlp.experts",
        stacked=("gate_proj", "up_proj"),
    ),
    Row(
        path="mlp.experts.down_proj", role="experts", runtime="mlp.experts", stacked=("down_proj",)
    ),
    *gated_mlp("mlp.shared_expert", "shared_experts"),
    *kept("router", ROUTER, "mlp.gate", "mlp.shared_expert_gate"),
)
QWEN_MTP_TOP = (
    *kept("glue", FC, "mtp.fc", loads_quantized=True),
    *kept("norm", NORM, "mtp.norm", "mtp.pre_fc_norm_hidden", "mtp.pre_fc_norm_embedding"),
)

FAMILY = Family(
    model_type="qwen3_next",
    layouts={
        "*": Layout(
            layers=Stem(disk="model.layers.{i}.", runtime="model.layers.{i}."),
            mtp=Stem(disk="mtp.layers.{i}.", runtime="mtp.layers.{i}."),
            top=(
                *kept("embedding", EMBEDDING, "model.embed_tokens"),
                *kept("head", "vLLM builds it without a quantization config", "lm_head"),
                *kept("norm", NORM, "model.norm"),
            ),
            mtp_top=QWEN_MTP_TOP,
            renames=Renames(),
        ),
    },
    block=(
        *GQA,
        *plain("linear_attention", "linear_attn.in_proj_qkvz", "linear_attn.out_proj"),
        *kept("state", GATES, "linear_attn.in_proj_ba", loads_quantized=True),
        *GDN_STATE,
        *gated_mlp("mlp", "dense_mlp"),
        *QWEN_MOE,
        *NORMS,
    ),
    mtp_count_keys=("mtp_num_hidden_layers", "num_nextn_predict_layers"),
    mtp_count_default=1,
    loader=Loader(unknown_name="ValueError", takes_kv_scales=True),
    draft=Draft(
        model_type="qwen3_next",
        classes="Qwen3Next",
        layers=({"layer_types": ["full_attention"]},),
        embedding_norm="mtp.pre_fc_norm_embedding",
        hidden_norm="mtp.pre_fc_norm_hidden",
        projections=("mtp.fc",),
        final_norm="mtp.norm",
        zeroes_first=False,
        chains_normed=True,
        proof="vllm",
    ),
    norms_add_one=True,
    notes="MTP is mtp.*; vLLM assumes one MTP layer when config.json names none",
)
