"""EXAONE 4.5: a dense vision-language model with sliding and full attention, MTP under `mtp.*`.

vLLM 0.32.0: model_executor/models/exaone4_5.py, exaone4_5_mtp.py, and exaone4.py for the layers:
norms follow attention and MLP, none comes before. The target is constructed as
`language_model.model.*`, the draft as `mtp.*`.
"""

from ..family import Draft, Family, Layout, Loader, Renames, Row, Stem
from ._blocks import EMBEDDING, GQA, HEAD, NORM, gated_mlp, kept
from .qwen3_next import QWEN_MTP_TOP

FAMILY = Family(
    model_type="exaone4_5",
    layouts={
        "*": Layout(
            layers=Stem(disk="model.language_model.layers.{i}.", runtime="language_model.model.layers.{i}."),
            mtp=Stem(disk="mtp.layers.{i}.", runtime="mtp.layers.{i}."),
            top=(
                Row(path="model.language_model.embed_tokens", role="embedding", why_kept=EMBEDDING,
                    runtime="language_model.model.embed_tokens", loads_quantized=False),
                Row(path="lm_head", role="head", runtime="language_model.lm_head", why_kept=HEAD, aliases=("lm_head",)),
                *kept("norm", NORM, "model.language_model.norm"),
            ),
            mtp_top=QWEN_MTP_TOP,
            opaque=(("model.visual.", "visual.", "vision"),),
            renames=Renames(prefixes=(
                ("model.language_model.", "language_model.model."), ("model.visual.", "visual."),
                ("lm_head.", "language_model.lm_head."), ("model.", "language_model.model."),
            )),
        ),
    },
    block=(
        *GQA,
        *gated_mlp("mlp", "dense_mlp"),
        *kept("norm", NORM, "post_attention_layernorm", "post_feedforward_layernorm"),
    ),
    mtp_count_default=1,
    loader=Loader(unknown_name="ValueError", takes_kv_scales=True),
    draft=Draft(
        model_type="exaone4", classes="Exaone4",
        embedding_norm="mtp.pre_fc_norm_embedding", hidden_norm="mtp.pre_fc_norm_hidden", projections=("mtp.fc",),
        final_norm="mtp.norm",
        zeroes_first=False, chains_normed=True, proof="vllm",
    ),
    notes="MTP is mtp.*, outside the language model; vLLM assumes one MTP layer when config.json " "names none",
)  # fmt: skip
