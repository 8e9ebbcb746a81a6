"""K-EXAONE: sliding and full attention with q/k norms, routed experts, one dense MTP layer under
`mtp.*`.

vLLM 0.32.0: model_executor/models/exaone_moe.py, exaone_moe_mtp.py. The draft is built as `mtp.*`
with the quantization config, `mtp.fc` included. The target's embedding and head are built with an
empty prefix: no entry of a quantization config can name them, which modelopt's dialect needs (it
quantizes a head that is not excluded).
"""

from ..family import Draft, Family, Layout, Loader, Renames, Row, Stem
from ._blocks import DEEPSEEK_MLP, EMBEDDING, GQA, NORM, NORMS, ROUTER, kept
from .qwen3_next import QWEN_MTP_TOP

FAMILY = Family(
    model_type="exaone_moe",
    layouts={
        "*": Layout(
            layers=Stem(disk="model.layers.{i}.", runtime="model.layers.{i}."),
            mtp=Stem(disk="mtp.layers.{i}.", runtime="mtp.layers.{i}."),
            top=(
                *kept("embedding", EMBEDDING, "model.embed_tokens"),
                *kept(
                    "head", "vLLM builds it with an empty prefix, which no list can name", "lm_head"
                ),
                *kept("norm", NORM, "model.norm"),
            ),
            mtp_top=QWEN_MTP_TOP,
            renames=Renames(),
        ),
    },
    block=(
        *GQA,
        *DEEPSEEK_MLP,
        Row(
            path="mlp.e_score_correction_bias",
            role="router",
            why_kept=ROUTER,
            loads_quantized=False,
        ),
        *NORMS,
    ),
    mtp_count_default=1,
    loader=Loader(unknown_name="ValueError", takes_kv_scales=True),
    modelopt_by_module=True,
    draft=Draft(
        model_type="exaone_moe",
        classes="ExaoneMoe",
        layers=({"mlp_layer_types": ["dense"]},),
        embedding_norm="mtp.pre_fc_norm_embedding",
        hidden_norm="mtp.pre_fc_norm_hidden",
        projections=("mtp.fc",),
        final_norm="mtp.norm",
        zeroes_first=False,
        chains_normed=True,
        proof="vllm",
    ),
    notes="MTP is mtp.*, dense; vLLM assumes one MTP layer when config.json names none",
)
