"""GLM-5.3-Flash: delta attention and sparse latent attention, hyper-connections, one inlined MTP
layer without copies.

vLLM 0.32.0: models/glm5next/common/{model,kda,attention,mtp}.py. Attention of both kinds is built
without a quantization config in target and draft (FP8 blocks of some latent projections are
dequantized on load), so it stays BF16; MLPs and experts take packed weights. The draft is
constructed as `model.layers.{N}`, the target as `language_model.model.layers.{i}`: entries with the
names on disk do not reach the draft.
"""

from dataclasses import replace

from ..family import Family, Layout, Loader, Renames, Stem
from ._blocks import (
    DEEPSEEK_MLP,
    EH_PROJ_IS_NN_LINEAR,
    EMBEDDING,
    HEAD,
    INDEXER,
    MLA,
    NORM,
    NORMS,
    kept,
)

ATTENTION = "vLLM builds the attention of this family without a quantization config"
HYPER_CONNECTION = "float32 parameters of the hyper-connections"
CONNECTIONS = tuple(
    f"hc_{part}_{name}" for part in ("attn", "ffn") for name in ("fn", "base", "scale")
)

FAMILY = Family(
    model_type="glm5_next",
    layouts={
        "*": Layout(
            layers=Stem(disk="model.language_model.layers.{i}.", runtime="language_model.model.layers.{i}."),
            mtp=None,
            mtp_runtime="model.layers.{i}.",
            top=(
                *kept("embedding", EMBEDDING, "model.language_model.embed_tokens"),
                *(replace(row, runtime="language_model.lm_head")
                  for row in kept("head", HEAD, "lm_head", loads_quantized=True)),
                *kept("norm", NORM, "model.language_model.norm"),
            ),
            opaque=(("model.visual.", "visual.", "vision"),),
            renames=Renames(prefixes=(("lm_head.", "language_model.lm_head."),
                                      ("model.language_model.", "language_model.model."),
                                      ("model.visual.", "visual."))),
        ),
    },
    block=(
        *(replace(row, why_kept=row.why_kept or ATTENTION, loads_quantized=False) for row in (*MLA, *INDEXER)),
        *kept("state", "pools the indexer's keys", "self_attn.indexer.index_kpool_compress_ape",
              "self_attn.indexer.index_kpool_compress_gate"),
        *DEEPSEEK_MLP,
        *kept("state", HYPER_CONNECTION, *CONNECTIONS),
        *NORMS,
    ),
    linear_block=(
        *kept("linear_attention", ATTENTION,
              *(f"self_attn.{name}_proj" for name in ("q", "k", "v", "b", "f_a", "f_b", "g_a", "g_b", "o"))),
        *kept("state", "small, sets the recurrence", "self_attn.A_log", "self_attn.dt_bias",
              *(f"self_attn.{name}_conv1d" for name in "qkv")),
        *kept("norm", NORM, "self_attn.o_norm"),
    ),
    mtp_block=(
        *kept("glue", EH_PROJ_IS_NN_LINEAR, "eh_proj"),
        *kept("norm", NORM, "enorm", "hnorm", "shared_head.norm"),
    ),
    mtp_lacks=CONNECTIONS,
    loader=Loader(refuses_missing_mtp=True, takes_kv_scales=True, missing_count="AttributeError",
                  needs=("mhc", "mla_use_nope", "indexer_rope_interleave")),
    no_draft="transformers' layer makes its own mask, which cannot say what a later draft step sees",
    notes="MTP is model.language_model.layers.{N} on disk, model.layers.{N} in vLLM; attention " "stays BF16",
)  # fmt: skip
