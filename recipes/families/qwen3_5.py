"""Qwen3.5, dense: gated delta nets and gated attention, MTP under `mtp.*`, often inside a
vision-language model.

vLLM 0.32.0: model_executor/models/qwen3_5.py, qwen3_5_mtp.py. Text-only checkpoints have
`model.layers`, the vision-language ones `model.language_model.layers`, which vLLM constructs as
`language_model.model.layers`; the draft is `mtp.*` in both. Splitting `in_proj_qkv`/`in_proj_z` in
the ignore list while vLLM asks for `in_proj_qkvz` gave garbage in silence (vllm #40252).
"""

from ..family import Draft, Family, Layout, Loader, Renames, Row, Stem
from ._blocks import EMBEDDING, GQA, HEAD, NORM, NORMS, TOP, fused, gated_mlp, kept, plain
from .qwen3_next import GATES, GDN_STATE, QWEN_MTP_TOP

MTP = Stem(disk="mtp.layers.{i}.", runtime="mtp.layers.{i}.")
LOADER = Loader(unknown_name="ValueError", takes_kv_scales=True)
TEXT = Layout(
    layers=Stem(disk="model.layers.{i}.", runtime="model.layers.{i}."),
    mtp=MTP,
    top=TOP,
    mtp_top=QWEN_MTP_TOP,
    draft_head="lm_head",
    renames=Renames(prefixes=(("model.language_model.", "model."),)),
)
VISION_LANGUAGE = Layout(
    layers=Stem(disk="model.language_model.layers.{i}.", runtime="language_model.model.layers.{i}."),
    mtp=MTP,
    top=(
        Row(path="model.language_model.embed_tokens", role="embedding", runtime="language_model.model.embed_tokens",
            why_kept=EMBEDDING, loads_quantized=False),
        Row(path="lm_head", role="head", runtime="language_model.lm_head", why_kept=HEAD, aliases=("lm_head",)),
        *kept("norm", NORM, "model.language_model.norm"),
    ),
    mtp_top=QWEN_MTP_TOP,
    opaque=(("model.visual.", "visual.", "vision"),),
    draft_head="lm_head",
    renames=Renames(prefixes=(
        ("model.visual.", "visual."), ("lm_head.", "language_model.lm_head."),
        ("model.language_model.", "language_model.model."),
    )),
)  # fmt: skip
LINEAR_ATTENTION = (
    *fused(
        "linear_attn.in_proj_qkvz",
        "linear_attn.in_proj_qkv",
        "linear_attn.in_proj_z",
        role="linear_attention",
    ),
    *plain("linear_attention", "linear_attn.out_proj"),
    *(
        Row(
            path=f"linear_attn.{name}",
            role="state",
            runtime="linear_attn.in_proj_ba",
            why_kept=GATES,
        )
        for name in ("in_proj_a", "in_proj_b")
    ),
    *GDN_STATE,
)

FAMILY = Family(
    model_type="qwen3_5",
    also=("qwen3_5_text",),
    layouts={"Qwen3_5ForConditionalGeneration": VISION_LANGUAGE, "*": TEXT},
    block=(*GQA, *LINEAR_ATTENTION, *gated_mlp("mlp", "dense_mlp"), *NORMS),
    mtp_count_keys=("mtp_num_hidden_layers", "num_nextn_predict_layers"),
    mtp_count_default=1,
    loader=LOADER,
    draft=Draft(
        model_type="qwen3_5_text",
        classes="Qwen3_5",
        rotary="Qwen3_5TextRotaryEmbedding",
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
    notes="MTP is mtp.*, outside the language model also in vision-language checkpoints",
)
