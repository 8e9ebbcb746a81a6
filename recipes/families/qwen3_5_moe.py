"""Qwen3.5 with routed experts (35B-A3B ... 397B-A17B), mostly inside a vision-language model.

vLLM 0.32.0: model_executor/models/qwen3_5.py, qwen3_5_mtp.py. The backbone's experts come stacked
in 3-D tensors (`mlp.experts.gate_up_proj` [E, 2I, K]) or one by one; quantized ones are always
written one by one, which is what compressed-tensors' loaders expect.
"""

from dataclasses import replace

from ..family import Draft, Family
from ._blocks import GQA, NORMS
from .qwen3_5 import LINEAR_ATTENTION, LOADER, TEXT, VISION_LANGUAGE
from .qwen3_next import QWEN_MOE

TIME_SERIES = ("model.time_series.", "time_series.")
# Intern-S2-Preview: a Qwen3.5 with an encoder of time series, which vLLM does not build and whose
# tensors it drops.
INTERN_S2 = replace(
    VISION_LANGUAGE,
    opaque=(*VISION_LANGUAGE.opaque, *((prefix, prefix, "vision") for prefix in TIME_SERIES)),
    unread=TIME_SERIES,
)

FAMILY = Family(
    model_type="qwen3_5_moe",
    also=("qwen3_5_moe_text", "intern_s2_preview"),
    layouts={
        "Qwen3_5MoeForConditionalGeneration": VISION_LANGUAGE,
        "InternS2PreviewForConditionalGeneration": INTERN_S2,
        "*": TEXT,
    },
    block=(*GQA, *LINEAR_ATTENTION, *QWEN_MOE, *NORMS),
    mtp_count_keys=("mtp_num_hidden_layers", "num_nextn_predict_layers"),
    mtp_count_default=1,
    loader=LOADER,
    draft=Draft(
        model_type="qwen3_5_moe_text",
        classes="Qwen3_5Moe",
        rotary="Qwen3_5MoeTextRotaryEmbedding",
        position_axes=3,
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
    notes="MTP is mtp.*; BF16 experts of the draft must be in the ignore list one by one or by regex",
)
